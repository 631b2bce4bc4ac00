"""Adapters in PEFT's files against PEFT: the same logits with random factors, the same tensors after a round trip."""

import importlib
import pkgutil
import random
import warnings

import families
import peft
import pytest
import torch
import transformers
from families.cases import redraw
from safetensors.torch import load_file
from torch import nn

import phasor

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

BUILDERS = {}
for module in pkgutil.iter_modules(families.__path__):
    BUILDERS |= getattr(importlib.import_module(f"families.{module.name}"), "CASES", {})
# Nomic's files name their modules as code of their own has them; mamba's are multiplied in a kernel; of
# those of Nemotron-H, PEFT leaves out one. Each expert of Switch is a module. Whisper and Moonshine read features.
# Transformers does not compute the slopes that a file of MPT may state.
WITHOUT = (
    "mpt/other slopes",
    "nomic_bert",
    "switch_transformers",
    "whisper",
    "moonshine",
    "mamba",
    "bamba",
    "granitemoehybrid",
    "falcon_h1",
    "zamba",
)
NAMES = [name for name in BUILDERS if not name.startswith(WITHOUT) and "both heads" not in name]
ALWAYS = ["llama", "qwen3", "gpt2", "phi3", "mixtral", "gpt_oss", "t5", "bert", "deepseek_v3", "codegen", "bart"]


class Pair:
    """A model of transformers in a folder, and one of PEFT on it with random factors in another."""

    def __init__(self, name, folder, **options):
        warnings.simplefilter("ignore")
        self.case = BUILDERS[name](random.Random(f"{name} 0"))
        self.base, self.adapter = folder / "base", folder / "adapter"
        torch.manual_seed(1)
        theirs = self.case.cls(self.case.config).eval()
        redraw(theirs, self.case.buffers)
        with torch.no_grad():
            self.case.touch(theirs)
        theirs.save_pretrained(self.base)
        theirs.name_or_path = str(self.base)
        self.modules = dict(theirs.named_modules())
        given = {"r": 4, "lora_alpha": 9, "target_modules": self.linear_names(), **options}
        if parameters := self.experts():
            given.setdefault("target_parameters", parameters)
        self.theirs = peft.get_peft_model(theirs, peft.LoraConfig(**given)).eval()
        for key, weight in self.theirs.named_parameters():
            if "lora_" in key and "magnitude" not in key:
                nn.init.normal_(weight, std=0.1)
            elif "magnitude" in key or "modules_to_save" in key:
                weight.data.mul_(torch.rand_like(weight) + 0.5)
        self.theirs.save_pretrained(self.adapter)

    def linear_names(self):
        """The last words of linear modules but for heads, which may be tied."""
        kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
        names = {key.rpartition(".")[2] for key, module in self.modules.items() if isinstance(module, kinds)}
        left_out = {"gate", "router", "shared_expert_gate", "indexer", "wq_b", "wk", "weights_proj", "regression"}
        left_out |= {"pos_key_proj", "pos_query_proj"}  # of positions, whose weights are read
        left_out |= {"out_proj"} if self.case.config.model_type == "nemotron_h" else set()
        left_out |= {"hunyuan_v1_moe": {"wg"}, "gemma4_text": {"proj"}}.get(
            self.case.config.model_type, set()
        )  # routers
        return sorted(names - left_out - {"lm_head", "head", "decoder", "pooler"})

    def experts(self):
        held = (module for key, module in self.modules.items() if key.endswith("experts"))
        module = next(held, None)
        names = [] if module is None else [n for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
        return [f"experts.{name}" for name in names]

    def draw_tokens(self, model):
        """Random ones; a classifier of an encoder-decoder reads the state of the end of a text."""
        tokens = torch.randint(self.case.lowest, model.config.vocab_size - 5, (2, 9))
        if model.config.shape == "encoder-decoder" and not model.config.has_logits:
            tokens[:, -1] = self.case.config.eos_token_id
        return tokens

    def logits(self, model, tokens):
        more = {"decoder_input_ids": tokens.flip(0)} if model.config.is_encoder_decoder else {}
        out = model(input_ids=tokens, **more)
        return next(out[key] for key in ("logits", "prediction_logits", "last_hidden_state") if key in out)

    def check(self, folder=None):
        """Ours with the adapter computes what theirs does, and is not the base."""
        ours = phasor.load(self.base, adapter=folder or self.adapter)
        tokens = self.draw_tokens(ours)
        given = (tokens, tokens.flip(0)) if ours.config.shape == "encoder-decoder" else (tokens,)
        with torch.no_grad():
            expected, plain, y = self.logits(self.theirs, tokens), phasor.load(self.base)(*given), ours(*given)
        # Rounding of float32, where updates make logits several times as large.
        torch.testing.assert_close(y, expected, atol=1e-4 * float(1 + expected.abs().max()), rtol=0)
        assert float((y - plain).abs().max()) > 1e-3
        return ours


def tensors(folder):
    return load_file(folder / "adapter_model.safetensors")


def check_round_trip(pair, model, out):
    """What is saved again is what PEFT wrote, tensor by tensor; and PEFT reads it."""
    phasor.save(model, out, format="peft")
    before, after = tensors(pair.adapter), tensors(out)
    kept = {key: x for key, x in before.items() if ".base_layer.weight" not in key or "lora" in key}
    assert after.keys() >= kept.keys()
    assert all(torch.equal(kept[key], after[key]) for key in kept)
    model.adapters["default"].peft = None  # then the configuration is written from what the adapter is
    phasor.save(model, out, format="peft")
    again = peft.PeftModel.from_pretrained(base_of(pair), out).eval()
    assert not set(after) ^ set(tensors(out))
    return again


def base_of(pair):
    return pair.case.cls.from_pretrained(pair.base).eval()


def check_family(name, tmp_path, **options):
    pair = Pair(name, tmp_path, **options)
    model = pair.check()
    again = check_round_trip(pair, model, tmp_path / "again")
    tokens = pair.draw_tokens(model)
    with torch.no_grad():
        torch.testing.assert_close(pair.logits(again, tokens), pair.logits(pair.theirs, tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", ALWAYS)
def test_families_compute_what_peft_does_and_write_its_tensors(name, tmp_path):
    check_family(name, tmp_path)


def test_experts_that_are_modules_of_their_own_are_refused_in_a_sentence(tmp_path):
    case = BUILDERS["switch_transformers"](random.Random(1))
    theirs = case.cls(case.config)
    with torch.no_grad():
        case.touch(theirs)
    theirs.save_pretrained(tmp_path / "base")
    model = phasor.load(tmp_path / "base")
    phasor.add_adapter(model, phasor.LoRAConfig(rank=2, targets=("experts",)))
    with pytest.raises(ValueError, match="each of which is a module in switch_transformers"):
        phasor.save(model, tmp_path / "adapter", format="peft")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALWAYS])
def test_all_other_families_do_too(name, tmp_path):
    check_family(name, tmp_path)


def test_an_adapter_of_a_model_from_no_folder_of_theirs(tmp_path):
    """The names are those of the family that the base is saved as."""
    sizes = {"dim": 48, "num_heads": 3, "num_layers": 2, "hidden_dim": 63, "vocab_size": 59}
    phasor.save(phasor.Transformer(phasor.preset("llama-2", **sizes)), tmp_path / "own")
    phasor.save(phasor.load(tmp_path / "own"), tmp_path / "base", format="hf")
    model = phasor.load(tmp_path / "own")
    phasor.add_adapter(model, phasor.LoRAConfig(rank=4, targets=("attention", "feedforward", "head")))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora." in name:
                weight.normal_(std=0.1)
    phasor.save(model, tmp_path / "adapter", format="peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = torch.randint(0, 59, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(model.double()(tokens), theirs(tokens).logits, rtol=0, atol=1e-6)

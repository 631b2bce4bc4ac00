"""Quantized folders: every weight is the one that its stored tensors stand for, in every format and every family."""

import importlib
import json
import pkgutil
import random
import re
import warnings

import families
import pytest
import torch
import transformers
from families.cases import redraw
from quantized_packers import BLOCKS, CASES, fp8
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import phasor
from phasor.checkpoints.load import read_config
from phasor.cli import main
from phasor.models.families import names

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
EXPERTS |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 1}
CONFIGS = {
    "qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "deepseek_v3": transformers.DeepseekV3Config(**SIZES, **LATENT, **EXPERTS, num_key_value_heads=4),
}
BUILDERS = {}
for module in pkgutil.iter_modules(families.__path__):
    BUILDERS |= getattr(importlib.import_module(f"families.{module.name}"), "CASES", {})
# What the formats leave as it is: tables, heads and routers.
PLAIN = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")


@pytest.fixture(scope="session")
def models():
    torch.manual_seed(0)
    return {name: transformers.AutoModelForCausalLM.from_config(config) for name, config in CONFIGS.items()}


def write(folder, tensors, config=None):
    """Tensors into the folder of a model, and a quantization_config beside its fields."""
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


def quantize(model, case, folder):
    """Write a model twice, quantized and as the weights that this stands for."""
    rng = random.Random(0)
    for name in ("quantized", "plain"):
        model.to(case.dtype).save_pretrained(folder / name)
    model.float()
    stored, plain = {}, load_file(folder / "plain" / "model.safetensors")
    for name, tensor in sorted(plain.items()):
        if tensor.dim() != 2 or name.endswith(PLAIN):
            stored[name] = tensor
            continue
        packed = case.pack(rng, *tensor.shape)
        stored |= {name.removesuffix("weight") + end: part for end, part in packed.stored.items()}
        plain[name] = packed.weight.to(case.dtype)
    write(folder / "plain", plain)
    write(folder / "quantized", stored, case.config)
    return stored, plain


def load(folder, **options):
    with pytest.warns(UserWarning, match="dequantized as they are read, and the model is saved without"):
        return phasor.load(folder, **options)


def refuses(folder, message):
    """A folder is refused in one sentence that names it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            phasor.load(folder)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.sample(9)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_a_quantized_folder_is_what_it_stands_for(name, family, models, tmp_path):
    case = CASES[name]
    _, plain = quantize(models[family], case, tmp_path)
    ours, expected = load(tmp_path / "quantized"), phasor.load(tmp_path / "plain").state_dict()
    assert {weight.dtype for weight in ours.parameters()} == {case.dtype}
    assert all(torch.equal(weight, expected[name]) for name, weight in ours.state_dict().items())
    phasor.save(ours, tmp_path / "back", format="hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert sorted(back) == sorted(plain)
    assert all(torch.equal(back[name], plain[name]) for name in plain)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert read_config(tmp_path / "quantized") == read_config(tmp_path / "plain")


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", names())
def test_every_family_reads_quantized_folders(name, tmp_path):
    """Every matrix but tables in float8, with a scale per block of three rows and five columns."""
    case = BUILDERS[name](random.Random(name))
    model = case.cls(case.config)
    redraw(model, case.buffers)
    for folder in ("quantized", "plain"):
        model.save_pretrained(tmp_path / folder)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    stored = dict(plain)
    matrices = [name for name, tensor in plain.items() if tensor.dim() == 2 and name.endswith(".weight")]
    for tensor in [name for name in matrices if "embed" not in name]:
        rows, columns = plain[tensor].shape
        scale = torch.rand(-(-rows // 3), -(-columns // 5), generator=torch.Generator().manual_seed(rows)) + 0.5
        spread = torch.stack([torch.stack([scale[i // 3, j // 5] for j in range(columns)]) for i in range(rows)])
        stored[tensor] = plain[tensor].to(torch.float8_e4m3fn)
        stored[f"{tensor}_scale_inv"] = scale
        plain[tensor] = stored[tensor].float() * spread
    write(tmp_path / "plain", plain)
    write(tmp_path / "quantized", stored, {"quant_method": "fp8", "weight_block_size": [3, 5]})
    ours, expected = load(tmp_path / "quantized").state_dict(), phasor.load(tmp_path / "plain").state_dict()
    assert len(stored) > len(plain)
    assert all(torch.equal(ours[weight], expected[weight]) for weight in expected)


@torch.no_grad()
def test_fp8_is_what_transformers_dequantizes(models, tmp_path):
    """Weights and logits; blocks that divide every matrix, since transformers takes no others."""
    case = CASES["fp8 by blocks"]._replace(config=BLOCKS | {"weight_block_size": [8, 16]}, pack=fp8(8, 16))
    stored, plain = quantize(models["qwen3"], case, tmp_path)
    theirs = Fp8Dequantize(None)
    scaled = [name for name in stored if f"{name}_scale_inv" in stored]
    assert len(scaled) == 14
    for name in scaled:
        found = theirs._dequantize_one(stored[name], stored[f"{name}_scale_inv"], output_dtype=torch.bfloat16)
        assert torch.equal(found, plain[name])
    ours = load(tmp_path / "quantized", dtype=torch.float32)
    weights = ours.state_dict()["decoder.blocks.0.feedforward.down.weight"]
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(weights, theirs._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32))


@torch.no_grad()
def test_a_saved_model_computes_in_transformers_what_it_does_here(models, tmp_path):
    quantize(models["deepseek_v3"], CASES["fp8 by blocks"], tmp_path)
    ours = load(tmp_path / "quantized", dtype=torch.float32)
    phasor.save(ours, tmp_path / "back", format="hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    tokens = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens).logits
    assert (ours(tokens) - expected).abs().max() < 2e-5 * expected.std().clamp(min=1)
    assert expected.std() > 0.1


@pytest.mark.filterwarnings("ignore:.*dequantized as they are read")
def test_a_check_says_which_package_transformers_lacks(models, tmp_path, monkeypatch, capsys):
    quantize(models["qwen3"], CASES["fp8 by blocks"], tmp_path)

    def lack(*args, **options):
        raise ImportError("Loading an FP8 quantized model requires accelerate")

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lack)
    source = str(tmp_path / "quantized")
    assert main(["convert", source, str(tmp_path / "ours"), "--check"]) == 2
    said = capsys.readouterr().err
    assert "requires accelerate" in said
    assert "--format hf" in said
    assert main(["convert", source, str(tmp_path / "theirs"), "--format", "hf", "--check"]) == 0


def test_a_bias_of_zeros_beside_a_weight_without_one_says_nothing(models, tmp_path):
    stored, _ = quantize(models["qwen3"], CASES["gptq"], tmp_path)
    bias = "model.layers.0.self_attn.q_proj.bias"
    write(tmp_path / "quantized", stored | {bias: torch.zeros(32, dtype=torch.float16)})
    ours, expected = load(tmp_path / "quantized").state_dict(), phasor.load(tmp_path / "plain").state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    write(tmp_path / "quantized", stored | {bias: torch.ones(32, dtype=torch.float16)})
    with pytest.raises(ValueError, match=r"q_proj\.bias is not the model's"):
        phasor.load(tmp_path / "quantized")


Q = "model.layers.0.self_attn.q_proj."
BAD = {
    "a scale is missing": ("fp8 by blocks", "weight_scale_inv", None, "is stored as F8_E4M3 and has no scales"),
    "the weight is missing": ("fp8 by blocks", "weight", None, "q_proj.weight is missing"),
    "the weight is of another dtype": ("fp8 by blocks", "weight", lambda x: x.half(), "is stored as F16, not F8_E4M3"),
    "scales do not fit": ("fp8 by blocks", "weight_scale_inv", lambda x: x[:1], "which fits no blocks of [32, 32]"),
    "scales are not finite": ("fp8 by blocks", "weight_scale_inv", lambda x: x / 0, "has scales that are not finite"),
    "no shape": ("pack-quantized", "weight_shape", None, "q_proj.weight_shape is missing"),
    "another shape": ("pack-quantized", "weight_shape", lambda x: x * 9, "which holds no [288, 288] in 4 or 8 bits"),
    "a negative shape": ("pack-quantized", "weight_shape", lambda x: -x, "which holds no [-32, -32] in 4 or 8 bits"),
    "zero points do not fit": (
        "pack-quantized with zero points",
        "weight_zero_point",
        lambda x: x[:, :1],
        "weight_zero_point has the shape [4, 1], not [4, 2]",
    ),
    "no zero points": ("gptq", "qzeros", None, "q_proj.qzeros is missing"),
    "an unknown group": ("gptq", "g_idx", lambda x: x + 1, "counts groups outside of 0 to 1"),
    "a negative group": ("gptq", "g_idx", lambda x: x - 1, "counts groups outside of 0 to 1"),
    "scales of another size": ("awq", "scales", lambda x: x[:, :8], "q_proj.scales has the shape [2, 8], not [2, 32]"),
    "groups of no size": ("awq", "scales", lambda x: x[:0], "q_proj.qzeros has the shape [2, 4], not [0, 4]"),
    "packed otherwise": ("awq", "qweight", lambda x: x.flatten(), "which is not that of a matrix"),
    "too few bytes": ("nf4", "weight", lambda x: x[1:], "has 511 bytes, which hold no [32, 32] in 4 bits"),
    "no state": ("nf4", "weight.quant_state.bitsandbytes__nf4", None, "bitsandbytes__nf4 is missing"),
    "no JSON": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda x: x[1:], "holds no JSON with a matrix's shape"),
    "no table": ("nf4 with nested scales", "weight.nested_quant_map", None, "weight.nested_quant_map is missing"),
    "too few blocks": ("nf4", "weight.absmax", lambda x: x[1:], "weight.absmax has the shape [15], not [16]"),
    "columns of tiles": ("int8 of bitsandbytes", "weight_format", lambda x: x + 1, "rows are not one after another"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_a_sentence(name, models, tmp_path):
    case, end, change, message = BAD[name]
    stored, _ = quantize(models["qwen3"], CASES[case], tmp_path)
    stored[Q + end] = None if change is None else change(stored[Q + end])
    write(tmp_path / "quantized", {name: tensor for name, tensor in stored.items() if tensor is not None})
    refuses(tmp_path / "quantized", message)


def test_a_weight_that_is_stored_twice_is_refused(models, tmp_path):
    stored, plain = quantize(models["qwen3"], CASES["gptq"], tmp_path)
    write(tmp_path / "quantized", stored | {Q + "weight": plain[Q + "weight"]})
    with pytest.raises(ValueError, match=r"q_proj\.weight is stored twice, quantized and unquantized"):
        phasor.load(tmp_path / "quantized")


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "gptq",
            {"quant_method": "hqq"},
            "'hqq'; known: fp8, compressed-tensors, gptq, awq, bitsandbytes",
        ),
        ("gptq", {"quant_method": None}, "quant_method null"),
        ("gptq", {"bits": 3}, "gptq quantization_config.bits = 3; it must be 4, 8, 2"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'; it must be 'gptq', 'gptq_v2'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format = true"),
        ("awq", {"version": "gemv"}, "awq quantization_config.version = 'gemv'; it must be 'gemm', 'GEMM'"),
        ("awq", {"bits": 8}, "awq quantization_config.bits = 8; it must be 4"),
        ("fp8 by blocks", {"expert_dtype": "fp4"}, "expert_dtype = 'fp4'; it must be 'fp8'"),
        ("fp8 by blocks", {"weight_block_size": [16, 0]}, "weight_block_size must be two positive integers"),
        ("fp8 by blocks", {"weight_block_size": [16, 1 << 30]}, "which fits no blocks"),
        ("int-quantized", {"format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized'; it must be"),
        ("int-quantized", {"transform_config": {"u": 1}}, "transform_config; it must be empty"),
        ("int-quantized", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format = 'sparse"),
        ("int-quantized", {"config_groups": {"a": {"weights": {"num_bits": 3}}}}, "weights.num_bits = 3; it must be"),
        ("int-quantized", {"config_groups": 7}, "config_groups must be an object, not 7"),
        ("int-quantized", {"quant_method": "gptq", "bits": 4, "format": None}, "says gptq, but no tensor is named"),
    ],
)
def test_what_is_not_known_is_refused_by_name(case, change, message, models, tmp_path):
    quantize(models["qwen3"], CASES[case], tmp_path)
    config = {**CASES[case].config, **change}
    file = tmp_path / "quantized" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    refuses(tmp_path / "quantized", message)

"""Training adapters: the losses are PEFT's, the base stays as it is, and what is refused is refused in a sentence."""

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import phasor
from phasor.adapters import is_adapter_weight
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.training import train
from phasor.training.progress import TrainingProgress
from phasor.training.trained import match_names
from phasor.training.trainer import Trainer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
T5_SIZES = {
    "vocab_size": 97,
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 80,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=12)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5_SIZES, decoder_start_token_id=0)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT)),
}
TASKS = {"t5": "translation", "bert": "mlm"}
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"],
    "t5": ["q", "k", "v", "o", "wi", "wo"],
    "bert": ["query", "key", "value"],
}
STEPS, LR, DECAY = 20, 5e-3, 0.1


def batch(step, name):
    """Tokens, what they predict, and the source of a pair."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets, source = torch.randint(5, 97, (3, 4, 11), generator=generator)
    return tokens, targets, source if name == "t5" else None


def their_losses(name, base, options, folder):
    """Losses of PEFT's model under torch's AdamW with clipped gradients; the adapter as it begins is in `folder`."""
    torch.manual_seed(0)
    model = type(MODELS[name]()).from_pretrained(base)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[name], **options)
    model = peft.get_peft_model(model, config).train()
    model.save_pretrained(folder, save_embedding_layers=False)
    trained = {n: w for n, w in model.named_parameters() if w.requires_grad}
    groups = [[w for n, w in trained.items() if ("magnitude" not in n) is decayed] for decayed in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": g, "weight_decay": d} for g, d in zip(groups, (DECAY, 0.0), strict=True) if g],
        lr=LR,
        betas=(0.9, 0.95),
    )
    losses = []
    for step in range(STEPS):
        tokens, targets, source = batch(step, name)
        given = {"input_ids": tokens} if source is None else {"input_ids": source, "decoder_input_ids": tokens}
        logits = model(**given).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def our_losses(name, base, folder):
    """The same in phasor's trainer, from the files of PEFT."""
    model = phasor.load(base, adapter=folder)
    model.config = model.config.replace(dropout={})
    for key, weight in model.named_parameters():
        weight.requires_grad_(is_adapter_weight(key))
    recipe = Recipe.from_dict(
        {
            "task": TASKS.get(name, "lm"),
            "train": {"device": "cpu", "steps": STEPS},
            "optimizer": {"lr": LR, "weight_decay": DECAY},
            "schedule": {"kind": "constant", "warmup": 0},
        }
    )
    trainer, losses = Trainer(model, recipe, STEPS), []
    for step in range(STEPS):
        tokens, targets, source = batch(step, name)
        real = None if source is None else torch.ones_like(source, dtype=torch.bool)
        given = Batch(
            tokens=tokens, targets=targets, weights=torch.ones(targets.shape), source=source, source_attention_mask=real
        )
        losses.append(trainer.train_step(step, [given], given.count).result().loss)
    return losses


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in MODELS),
        ("llama", {"use_dora": True}),
        ("qwen3", {"use_rslora": True}),
        ("bert", {"use_dora": True}),
    ],
)
def test_twenty_steps_have_the_losses_of_peft(name, options, tmp_path):
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    MODELS[name]().save_pretrained(tmp_path / "base")
    before = {file.name: file.read_bytes() for file in (tmp_path / "base").iterdir()}
    expected = their_losses(name, tmp_path / "base", options, tmp_path / "peft")
    found = our_losses(name, tmp_path / "base", tmp_path / "peft")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert expected[-1] != pytest.approx(expected[0], abs=1e-3)
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "base").iterdir()}


class Silence(TrainingProgress):
    def on_message(self, message):
        pass


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base with its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "notes.txt").write_text("The cat sat on the mat. " * 60)
    run = fields(folder, "from scratch", lora=None, init_from=None, model={"preset": "llama-2", **SMALL})
    run["data"]["tokenizer"] = "bytes"
    train(Recipe.from_dict(run), progress=Silence())
    phasor.save(phasor.load(folder / "from scratch"), folder / "base", format="hf")
    return folder


SMALL = {"dim": 24, "num_heads": 2, "hidden_dim": 40, "num_layers": 2}


def fields(folder, out, **more):
    given = {
        "init_from": str(folder / "base"),
        "lora": {"rank": 2},
        "data": {"train": str(folder / "notes.txt"), "valid": str(folder / "notes.txt"), "sequence_length": 32},
        "train": {"steps": 4, "device": "cpu", "batch_tokens": 64},
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "constant", "warmup": 0},
        "save": {"every": 2, "best": False},
        "out": str(folder / out),
    }
    return {name: value for name, value in (given | more).items() if value is not None}


def run(folder, out, *, resume=False, **more):
    return train(Recipe.from_dict(fields(folder, out, **more)), resume, Silence())


def logits(model):
    with torch.no_grad():
        return model(torch.arange(70, 90)[None])


def test_a_run_leaves_an_adapter_that_loads_evaluates_merges_and_becomes_one_of_peft(place):
    run(place, "plain", lora={"rank": 2, "modules_to_save": ["decoder.norm.weight"]})
    folder = place / "plain"
    assert {"adapter.json", "adapter.safetensors"} <= {file.name for file in (folder / "model").iterdir()}
    saved = load_file(folder / "checkpoints/step-00000004/model.safetensors")
    assert all(".lora.default." in name or name == "decoder.norm.weight" for name in saved)
    optimizer = load_file(folder / "checkpoints/step-00000004/optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in optimizer} == {n for n in saved if not n.endswith(".rows")}
    model, base = phasor.load(folder), phasor.load(place / "base")
    assert not torch.allclose(logits(model), logits(base), atol=1e-3)
    with phasor.disable_adapters(model):
        assert torch.equal(logits(model), logits(base))
    assert torch.equal(logits(phasor.load(place / "base", adapter=folder)), logits(model))
    assert torch.equal(logits(phasor.load(folder / "checkpoints/step-00000004")), logits(model))
    assert phasor.evaluate(folder, device="cpu")["loss"] > 0
    phasor.merge(place / "base", folder, place / "merged")
    torch.testing.assert_close(logits(phasor.load(place / "merged")), logits(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place / "merged")
    torch.testing.assert_close(theirs(torch.arange(70, 90)[None]).logits.detach(), logits(model), atol=1e-4, rtol=0)
    phasor.convert(folder, place / "peft")
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(place / "base"), place / "peft"
    )
    torch.testing.assert_close(theirs(torch.arange(70, 90)[None]).logits.detach(), logits(model), atol=1e-4, rtol=0)
    phasor.convert(place / "peft", place / "ours again")
    assert torch.equal(logits(phasor.load(place / "ours again")), logits(model))


def test_several_adapters_are_added_up_by_weight_and_switched(place):
    for name, lr in (("a", 1e-2), ("b", 3e-2)):
        run(place, name, optimizer={"lr": lr}, train={"steps": 2, "device": "cpu", "batch_tokens": 64})
    model = phasor.load(place / "base", adapter={"one": place / "a", "two": (place / "b", 0.5)})
    both = logits(model)
    phasor.set_adapters(model, "one")
    assert torch.equal(logits(model), logits(phasor.load(place / "a")))
    phasor.set_adapters(model, {"one": 1.0, "two": 0.5})
    assert torch.equal(logits(model), both)
    merged = place / "both merged"
    for weight in (math.nan, -math.inf):
        with pytest.raises(ValueError, match="must be a folder, or a folder and a finite weight"):
            phasor.merge(place / "base", {"one": (place / "a", weight)}, merged)
    phasor.merge(place / "base", {"one": place / "a", "two": (place / "b", 0.5)}, merged)
    torch.testing.assert_close(logits(phasor.load(merged)), both)
    with pytest.raises(ValueError, match="has the adapters one, two: say which to save"):
        phasor.save(model, place / "nowhere")
    phasor.save(model, place / "second", adapter="two")
    assert torch.equal(logits(phasor.load(place / "second")), logits(phasor.load(place / "b")))


def test_a_killed_run_resumes_to_the_same_bits(place):
    recipe = fields(place, "straight", lora={"rank": 2, "kind": "dora", "dropout": 0.2})
    train(Recipe.from_dict(recipe), progress=Silence())
    killed = place / "killed.json"
    killed.write_text(json.dumps(recipe | {"out": str(place / "killed")}))
    code = (
        "import os, sys, json; from phasor.config.recipe import Recipe; from phasor.training import loop, train\n"
        "step = loop.TrainingLoop.train_step\n"
        "def die(self, batches):\n"
        "    step(self, batches)\n"
        "    if self.step == 3: os.kill(os.getpid(), 9)\n"
        "loop.TrainingLoop.train_step = die\n"
        "train(Recipe.from_dict(json.load(open(sys.argv[1]))))"
    )
    done = subprocess.run([sys.executable, "-c", code, killed], env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=200)
    assert done.returncode == -9
    train(Recipe.from_dict(recipe | {"out": str(place / "killed")}), True, Silence())
    one, two = (load_file(place / name / "model/adapter.safetensors") for name in ("straight", "killed"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_base_that_changed_is_refused_by_its_hash(place):
    copy = place / "changed"
    phasor.save(phasor.load(place / "base"), copy, format="hf")
    more = {"init_from": str(copy), "train": {"steps": 4, "device": "cpu", "batch_tokens": 64}}
    run(place, "on changed", **more | {"train": more["train"] | {"steps": 2}})
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    (copy / "phasor_manifest.json").unlink()
    for call in (
        lambda: run(place, "on changed", resume=True, **more),
        lambda: phasor.load(place / "on changed"),
        lambda: phasor.load(copy, adapter=place / "on changed"),
    ):
        with pytest.raises(ValueError, match=r"is not the one that .* on: the SHA-256 of its weights is \w{12}"):
            call()
    assert phasor.load(copy, adapter=place / "on changed", verify=False).adapters


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lora_alpha", "16", "lora_alpha or alpha_pattern must be a finite number, not '16'"),
        ("lora_alpha", math.inf, "lora_alpha or alpha_pattern must be a finite number, not inf"),
        ("alpha_pattern", {"(": 3}, "a name in alpha_pattern is not a regular expression"),
        ("alpha_pattern", [3], r"alpha_pattern must be an object, not \[3\]"),
        ("lora_dropout", "x", "lora_dropout must be a finite number, not 'x'"),
        ("lora_dropout", 1.5, r"lora_dropout must be in \[0, 1\), not 1.5"),
    ],
)
def test_numbers_of_a_peft_folder_that_no_adapter_has_are_refused(place, field, value, message, tmp_path):
    base, folder = phasor.load(place / "base"), tmp_path / "theirs"
    phasor.add_adapter(base, phasor.LoRAConfig(rank=2))
    phasor.save(base, folder, format="peft")
    (folder / "phasor_manifest.json").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=f"adapter_config.json: {message}"):
        phasor.load(place / "base", adapter=folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rank", -1, r"adapter\.json does not describe an adapter: PartConfig\.rank must be an integer of at least 1"),
        ("rows", 0, r"adapter\.json does not describe an adapter: PartConfig\.rows must be an integer of at least 1"),
        ("alpha", 1e308, "is not finite"),
        ("dropout", 7, r"adapter\.json does not describe an adapter: dropout must be in \[0, 1\), not 7"),
    ],
)
def test_numbers_of_a_folder_that_no_adapter_has_are_refused_and_nothing_is_merged(place, field, value, message):
    base, merged = phasor.load(place / "base"), place / f"merged with {field}"
    adapter = phasor.add_adapter(base, phasor.LoRAConfig(rank=2))
    for name, weight in base.named_parameters():
        if name.endswith(".B"):
            torch.nn.init.ones_(weight)
    folder = place / f"another {field}"
    phasor.save(base, folder)
    file = folder / "adapter.json"
    given = json.loads(file.read_text())
    part = next(iter(given["layers"][next(iter(adapter.layers))].values()))
    (given if field == "dropout" else part)[field] = value
    file.write_text(json.dumps(given))
    (folder / "phasor_manifest.json").unlink()
    with pytest.raises(ValueError, match=message):
        phasor.merge(place / "base", folder, merged)
    assert not merged.exists()


def test_recomputed_activations_give_the_same_bits(place):
    for name, recomputed in (("kept", False), ("recomputed", True)):
        options = {"steps": 3, "device": "cpu", "batch_tokens": 64, "activation_checkpointing": recomputed}
        run(place, name, lora={"rank": 2, "kind": "dora", "targets": ["attention", "head"]}, train=options)
    kept, recomputed = (load_file(place / name / "model/adapter.safetensors") for name in ("kept", "recomputed"))
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_patterns_freeze_weights(place):
    recipe = fields(place, "frozen", lora=None)
    recipe["train"]["freeze"] = ["tokens.*", "*.attention.*"]
    recipe["train"]["ema_decay"] = 0.5
    train(Recipe.from_dict(recipe), progress=Silence())
    before, after = phasor.load(place / "base").state_dict(), phasor.load(place / "frozen").state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("tokens.") or ".attention." in name}
    optimizer = load_file(place / "frozen/checkpoints/step-00000004/optimizer.safetensors")
    assert not {name.rpartition("/")[0] for name in optimizer} & same


def test_what_cannot_be_trained_is_refused_in_a_sentence(place):
    with pytest.raises(ValueError, match=r"trains an adapter of a model that is there: name it in Recipe\.init_from"):
        Recipe.from_dict({"lora": {}})
    with pytest.raises(ValueError, match=r"'token\.weight' matches no weight; the nearest names are tokens\.weight"):
        run(place, "unmatched", train={"steps": 2, "device": "cpu", "batch_tokens": 64, "freeze": ["token.weight"]})
    with pytest.raises(ValueError, match="freeze leaves nothing to train"):
        run(place, "nothing", train={"steps": 2, "device": "cpu", "batch_tokens": 64, "freeze": ["*"]})
    run(place, "first")
    with pytest.raises(ValueError, match="is an adapter: merge it into its base first"):
        run(place, "second run", init_from=str(place / "first"))
    with pytest.raises(ValueError, match=r"cannot be resumed with another recipe: lora\.rank was 2 and is 4"):
        run(place, "first", resume=True, lora={"rank": 4})
    assert not Path(place / "unmatched").exists()


def test_names_are_matched_by_shell_patterns():
    model = phasor.Transformer(phasor.preset("gpt-2", **SMALL, vocab_size=40))
    assert match_names(model, ["tokens.weight", "decoder.norm.*"], "here") == {
        *("tokens.weight", "decoder.norm.weight", "decoder.norm.bias")
    }


def test_a_head_for_another_task_is_trained_whole_and_saved_with_the_adapter(place):
    lines = [{"text": f"the {word} sat", "label": label} for word, label in (("cat", "animal"), ("mat", "thing")) * 12]
    (place / "labels.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {"train": str(place / "labels.jsonl"), "valid": str(place / "labels.jsonl"), "sequence_length": 32}
    run(place, "labels", task="classify", data=data, train={"steps": 3, "device": "cpu", "batch_tokens": 256})
    model = phasor.load(place / "labels")
    assert "head.score.weight" in model.adapters["default"].whole
    assert model.config.head.labels == ("animal", "thing")
    assert logits(model).shape[-1] == 2
    phasor.merge(place / "base", place / "labels", place / "labels merged")
    torch.testing.assert_close(logits(phasor.load(place / "labels merged")), logits(model))

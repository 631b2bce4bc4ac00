"""Preferences: losses as TRL computes them, and a reference whose log-probabilities are computed once."""

import copy
import json
import shutil
from types import SimpleNamespace

import chat_folders
import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

import phasor
from phasor.checkpoints.tensors import fingerprint_weights
from phasor.config.preference import PreferenceConfig
from phasor.config.recipe import Recipe
from phasor.data.batches import Batches
from phasor.data.store import prepare
from phasor.evaluation import evaluate
from phasor.nn.log_probs import token_log_probs
from phasor.training import train
from phasor.training.objectives.preference_losses import LOSSES
from phasor.training.objectives.reply_log_probs import reply_log_probs


class RecordedDPO(DPOTrainer):
    """Keeps the loss of every step."""

    def compute_loss(self, *args, **options):
        loss = super().compute_loss(*args, **options)
        self.losses = [*getattr(self, "losses", []), (loss[0] if isinstance(loss, tuple) else loss).item()]
        return loss


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "loss", "smoothing"),
    [
        ("llama", "sigmoid", 0.0),
        pytest.param("qwen3", "sigmoid", 0.0, marks=pytest.mark.slow),
        pytest.param("llama", "robust", 0.1, marks=pytest.mark.slow),
        ("qwen3", "ipo", 0.0),
        pytest.param("llama", "sigmoid_norm", 0.0, marks=pytest.mark.slow),
    ],
)
def test_losses_of_20_steps_equal_trl(family, loss, smoothing, tmp_path):
    theirs, tokenizer = chat_folders.write_model(family, tmp_path / "model")
    rows = [row for row in chat_folders.preference_rows(200) if len(row["prompt"]) == 3][:64]
    file, valid = tmp_path / "rows.jsonl", tmp_path / "valid.jsonl"
    chat_folders.write_rows(file, rows[:60])
    chat_folders.write_rows(valid, rows[60:])
    preference = {"loss": loss, "beta": 0.2, "label_smoothing": smoothing}
    # A row of 2 x 110 tokens holds one of these pairs, and a batch three rows.
    data = {"train": str(file), "valid": str(valid), "sequence_length": 110}
    recipe, lines = chat_folders.run(
        tmp_path / "run", task="preference", init_from=str(tmp_path / "model"), data=data, preference=preference,
        train={"steps": 20, "batch_tokens": 520}, optimizer={"lr": 1e-3},
    )  # fmt: skip
    batches = Batches(prepare(recipe, tmp_path / "data").train, recipe)
    steps = (divmod(step, batches.per_epoch) for step in range(20))
    order = [members.tolist() for place in steps for members in batches.source.examples(*place)]
    assert [len(members) for members in order] == 60 * [1]
    # The rows in the order of our batches, found by their tokens, which TRL makes anew of their messages.
    by_tokens = {
        tuple(tokenizer.apply_chat_template([*row["prompt"], *row["chosen"]], return_dict=False)): row for row in rows
    }
    given = [by_tokens[tuple(batches.source.store[member][0].tolist())] for (member,) in order]
    config = DPOConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=3, max_steps=20, learning_rate=1e-3,
        lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0, max_grad_norm=0.0, beta=0.2, loss_type=[loss],
        label_smoothing=smoothing, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        train_sampling_strategy="sequential", save_strategy="no", disable_tqdm=True, logging_steps=1, max_length=None,
        pad_to_multiple_of=1,
    )  # fmt: skip
    trainer = RecordedDPO(
        model=theirs,
        ref_model=copy.deepcopy(theirs),
        args=config,
        train_dataset=datasets.Dataset.from_list(given),
        processing_class=tokenizer,
    )
    trainer.train()
    assert len(trainer.losses) == 20
    for step, (line, expected) in enumerate(zip(lines, trainer.losses, strict=True)):
        assert abs(line["loss"] - expected) < 1e-5, step
    assert abs(lines[0]["loss"] - lines[-1]["loss"]) > 1e-2
    theirs = [log for log in trainer.state.log_history if "rewards/accuracies" in log]
    for line, log in zip(lines, theirs, strict=True):
        # TRL sums log-probabilities also where it averages them for the loss, and leaves out a loss of averages.
        if loss in ("sigmoid", "robust"):
            assert abs(line["reward_accuracy"] - log["rewards/accuracies"]) < 1e-6
            assert abs(line["reward_margin"] - log["rewards/margins"]) < 1e-4


def log_probs(seed=0):
    """Log-probabilities of nine pairs of replies."""
    draw = torch.Generator().manual_seed(seed)
    return (-5 * torch.rand(2, 9, generator=draw, dtype=torch.float64)).unbind()


def test_losses_without_a_reference_equal_those_of_trl():
    chosen, rejected = log_probs()
    config = PreferenceConfig(loss="simpo", beta=2.0, margin=1.3, label_smoothing=0.1)
    fields = {"alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.3, "label_smoothing": 0.1, "loss_type": "simpo"}
    them = SimpleNamespace(**fields, accelerator=SimpleNamespace(device="cpu"))
    theirs = CPOTrainer.cpo_loss(them, chosen, rejected)[0]
    assert (LOSSES["simpo"](config, chosen, rejected) - theirs).abs().max() < 1e-14
    # TRL adds the cross-entropy, -c here, elsewhere, and computes this in float32.
    config = PreferenceConfig(loss="orpo", beta=0.3)
    them = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    theirs = -chosen - ORPOTrainer.odds_ratio_loss(them, chosen, rejected)[0]
    assert (LOSSES["orpo"](config, chosen, rejected) - theirs).abs().max() < 1e-5


def test_conservative_dpo_is_the_formula_of_its_paper():
    chosen, rejected = log_probs()
    config = PreferenceConfig(beta=0.4, label_smoothing=0.2)
    right = torch.sigmoid(0.4 * (chosen - rejected))  # the probability that the label is right
    expected = -0.8 * right.log() - 0.2 * (1 - right).log()
    assert (LOSSES["sigmoid"](config, chosen, rejected) - expected).abs().max() < 1e-14
    hinge = PreferenceConfig(loss="hinge", beta=0.4)
    assert torch.equal(LOSSES["hinge"](hinge, chosen, rejected), (1 - 0.4 * (chosen - rejected)).clamp(min=0))


def test_log_probabilities_in_chunks_equal_those_at_once(monkeypatch):
    torch.manual_seed(0)
    model = phasor.Transformer(phasor.ModelConfig(vocab_size=37, dim=16, num_layers=1, num_heads=2)).double()
    tokens, targets = torch.randint(0, 37, (2, 3, 11)).unbind()
    expected = torch.log_softmax(model(tokens), -1).gather(-1, targets[..., None])[..., 0]
    expected.square().sum().backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    for rows in (4, 1000):
        monkeypatch.setattr("phasor.nn.log_probs.LOGITS_AT_ONCE", rows * 37)
        model.zero_grad()
        found = token_log_probs(model.head, model(tokens, head=False), model.tokens.table, targets)
        assert (found - expected).abs().max() < 1e-13
        found.square().sum().backward()
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            assert (weight.grad - gradient).abs().max() < 1e-12


def small(tmp_path, **fields):
    """A run of a few steps on short pairs, from a tiny Llama."""
    if not (tmp_path / "model").exists():
        chat_folders.write_model("llama", tmp_path / "model")
    file = chat_folders.write_rows(tmp_path / "rows.jsonl", chat_folders.preference_rows(30))
    given = {
        "task": "preference",
        "init_from": str(tmp_path / "model"),
        "data": {"train": file, "sequence_length": 110},
    }
    given |= {"train": {"steps": 4, "batch_tokens": 300}, "save": {"every": 2, "best": False}}
    return given | fields


def test_packed_pairs_have_the_log_probabilities_of_separate_replies(tmp_path):
    fields = small(tmp_path)
    recipe = chat_folders.recipe(tmp_path / "run", **fields | {"train": {"batch_tokens": 600}})
    prepared = prepare(recipe, tmp_path / "data")
    batches = Batches(prepared.train, recipe, special=prepared.special)
    model = phasor.load(tmp_path / "model").double()
    batch = batches[0]
    assert batches.source.most > 2
    sums, lengths = reply_log_probs(model, batch)
    for row, members in enumerate(batches.source.examples(0, 0)):
        for number, member in enumerate(members):
            sides = prepared.train[int(member)]
            for side in (0, 1):
                ids, trained = (torch.from_numpy(x.astype(np.int64)) for x in sides[2 * side : 2 * side + 2])
                losses = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
                expected = -losses[trained[1:] > 0].sum()
                assert abs(sums[row, 2 * number + side] - expected).item() < 1e-10
                assert lengths[row, 2 * number + side] == trained.sum()


def test_the_reference_is_computed_once_and_kept(tmp_path, monkeypatch):
    _, lines = chat_folders.run(tmp_path / "run", **small(tmp_path))
    assert abs(lines[0]["loss"] - np.log(2)) < 1e-6  # before the first step the model is the reference
    assert lines[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
    description = json.loads((tmp_path / "run" / "reference" / "reference.json").read_text())
    assert description["source"] == fingerprint_weights(tmp_path / "model")
    stored = load_file(tmp_path / "run" / "reference" / "log_probs.safetensors")
    assert {name: values.shape[1] for name, values in stored.items()} == {"train": 2, "valid": 2}
    metrics = evaluate(tmp_path / "run", device="cpu")
    assert {"reward_accuracy", "reward_margin", "loss", "pairs"} <= metrics.keys()
    # A run that is resumed reads them and no model: with its folder gone it goes on.
    shutil.rmtree(tmp_path / "model")
    monkeypatch.setattr("phasor.training.objectives.reference.log_probs_of", None)
    fields = small(tmp_path, train={"steps": 6, "batch_tokens": 300}) if (tmp_path / "model").exists() else None
    assert fields is None
    made = json.loads((tmp_path / "run" / "recipe.json").read_text())
    made["train"]["steps"] = 6
    assert train(Recipe.from_dict(made), resume=True).step == 6


def test_another_reference_is_refused_when_a_run_is_resumed(tmp_path):
    made, _ = chat_folders.run(tmp_path / "run", **small(tmp_path))
    shutil.rmtree(tmp_path / "model")
    chat_folders.write_model("llama", tmp_path / "model", seed=1)
    longer = made.replace(train=made.train.replace(steps=6))
    with pytest.raises(ValueError, match=r"is no longer the reference that .* began with, by the hash of its weights"):
        train(longer, resume=True)


def test_a_damaged_reference_is_computed_again_from_the_model_of_the_beginning(tmp_path):
    made, _ = chat_folders.run(tmp_path / "run", **small(tmp_path))
    file = tmp_path / "run" / "reference" / "log_probs.safetensors"
    before = load_file(file)
    file.write_bytes(file.read_bytes()[:-1])
    train(made.replace(train=made.train.replace(steps=6)), resume=True)
    after = load_file(file)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_reference_of_its_own_folder(tmp_path):
    fields = small(tmp_path)
    chat_folders.write_model("llama", tmp_path / "other", seed=1)
    _, lines = chat_folders.run(tmp_path / "run", **fields, preference={"reference": str(tmp_path / "other")})
    assert abs(lines[0]["loss"] - np.log(2)) > 1e-3
    assert json.loads((tmp_path / "run" / "reference" / "reference.json").read_text())["source"] == fingerprint_weights(
        tmp_path / "other"
    )


def test_a_run_without_a_reference_stores_none(tmp_path):
    for loss in ("simpo", "orpo"):
        chat_folders.run(tmp_path / loss, **small(tmp_path), preference={"loss": loss})
        assert not (tmp_path / loss / "reference").exists()
        assert evaluate(tmp_path / loss, device="cpu")["pairs"] > 0


def test_gradients_of_two_batches_are_those_of_one(tmp_path):
    fields = small(tmp_path, train={"steps": 1, "batch_tokens": 600})
    chat_folders.run(tmp_path / "one", **fields)
    parts = fields | {"train": {"steps": 1, "batch_tokens": 300, "gradient_accumulation_steps": 2}}
    _, lines = chat_folders.run(tmp_path / "two", **parts)
    assert abs(lines[0]["loss"] - np.log(2)) < 1e-6


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"label_smoothing": 0.6}, r"PreferenceConfig.label_smoothing must be in \[0, 0.5\), not 0.6"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing is for sigmoid, .* not for the loss 'ipo'"),
        ({"loss": "orpo", "reference": "there"}, "the loss 'orpo' has no reference"),
        ({"beta": 0.0}, "beta must be"),
        ({"loss": "dpo"}, "loss"),
    ],
)
def test_wrong_options_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        PreferenceConfig.from_dict(fields)

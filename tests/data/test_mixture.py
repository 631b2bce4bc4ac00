"""Mixtures: exact shares, every source whole, batches that are a function of the step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from phasor import SaveConfig, load, train
from phasor.config.recipe import DataConfig, Recipe, TrainConfig
from phasor.data.batches import Batches
from phasor.data.mixture import MOST_REPEATS, describe_mixture, mix, repeat_examples
from phasor.data.store import prepare
from phasor.training.progress import TrainingProgress

LETTERS = {"a.jsonl": ("a", 40, 30), "b.txt": ("b", 1, 2000), "c": ("c", 25, 11)}


@pytest.fixture
def sources(tmp_path):
    """Sources of one letter each: a file of JSON lines, a text, and a folder of shards."""
    for name, (letter, count, size) in LETTERS.items():
        rows = [f"{letter * (size - 6)}{i:04d}" for i in range(count)]
        if name.endswith("jsonl"):
            (tmp_path / name).write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        elif name.endswith("txt"):
            (tmp_path / name).write_text("\n".join(f"{letter * 94}{i:04d}" for i in range(20)) + "\n")
        else:
            (tmp_path / name).mkdir()
            for shard in range(5):
                lines = "".join(json.dumps({"text": row}) + "\n" for row in rows[shard::5])
                (tmp_path / name / f"{shard}.jsonl").write_text(lines)
    return tmp_path


def recipe(sources, weights, task="lm", **data):
    mixture = [{"path": str(sources / name), "weight": weight} for name, weight in weights.items()]
    fields = {"tokenizer": "bytes", "sequence_length": 32, "validation_fraction": 0.05, **data}
    return Recipe(task=task, data=DataConfig(mixture=mixture, **fields), train=TrainConfig(batch_tokens=320, steps=3))


def mixed(sources, weights, tmp_path, **data):
    wanted = recipe(sources, weights, **data)
    prepared = prepare(wanted, tmp_path / "data")
    return *mix(prepared.train, prepared.train.lengths[:, 0], prepared.train.sources, wanted.data.mixture), prepared


def test_tokens_are_shared_by_weight(sources, tmp_path):
    """The share of every source is that of its weight, up to an example; the one that binds comes once and whole."""
    weights = {"a.jsonl": 3, "b.txt": 1, "c": 2.5}
    store, shares, prepared = mixed(sources, weights, tmp_path)
    total, longest = sum(share.epoch_tokens for share in shares), int(store.lengths.max())
    assert total == int(store.lengths.sum())
    for share, weight in zip(shares, weights.values(), strict=True):
        assert abs(share.epoch_tokens - total * weight / 6.5) <= longest
    assert min(share.epoch_examples / share.examples for share in shares) == 1
    letters = [chr(int(store[i][0][1]) - 5) for i in range(len(store))]
    assert [letters.count(letter) for letter in "abc"] == [share.epoch_examples for share in shares]
    assert sum(share.examples for share in shares) == len(prepared.train)
    assert sum(share.tokens for share in shares) == int(prepared.train.lengths.sum())


def test_an_epoch_has_every_example_as_often_as_it_should(sources, tmp_path):
    wanted = recipe(sources, {"a.jsonl": 4, "c": 1})
    prepared = prepare(wanted, tmp_path / "data")
    store, shares = mix(prepared.train, prepared.train.lengths[:, 0], prepared.train.sources, wanted.data.mixture)
    batches = Batches(store, wanted, special=prepared.special, training=True)
    for epoch in range(2):
        seen = np.zeros(300, np.int64)
        for step in range(batches.per_epoch):
            batch = batches[epoch * batches.per_epoch + step]
            seen += np.bincount(batch.targets[batch.weights > 0].numpy(), minlength=300)
        expected = np.zeros(300, np.int64)
        for i in range(len(store)):
            expected += np.bincount(store[i][0][1:], minlength=300)
        assert seen.tolist() == expected.tolist()
    counts = np.bincount(np.searchsorted(store.every, store.ends[0]), minlength=len(prepared.train))
    for share, own in zip(shares, np.split(counts, [shares[0].examples]), strict=True):
        least = share.epoch_examples // share.examples
        assert least >= 1
        assert set(own) <= {least, least + 1}


def test_batches_depend_on_the_step_alone(sources, tmp_path):
    """And neither on what was read before, nor on the process that opens the data."""
    weights = {"a.jsonl": 1, "b.txt": 2, "c": 3}

    def open_batches():
        store, _, prepared = mixed(sources, weights, tmp_path)
        return Batches(store, recipe(sources, weights), special=prepared.special, training=True)

    first, second = open_batches(), open_batches()
    for step in (7, 0, first.per_epoch + 3, 7):
        assert torch.equal(first[step].tokens, second[step].tokens)


def test_weights_need_no_new_tokens(sources, tmp_path):
    one = prepare(recipe(sources, {"a.jsonl": 1, "c": 1}), tmp_path / "data")
    file = tmp_path / "data" / "train.0.tokens"
    before = file.stat().st_ino
    assert prepare(recipe(sources, {"a.jsonl": 1, "c": 9}), tmp_path / "data").fingerprint == one.fingerprint
    assert file.stat().st_ino == before
    assert prepare(recipe(sources, {"c": 1, "a.jsonl": 1}), tmp_path / "data").fingerprint != one.fingerprint


def test_one_source_is_that_source(sources, tmp_path):
    whole = prepare(recipe(sources, {"a.jsonl": 7}), tmp_path / "mixture")
    alone = recipe(sources, {}).data.replace(train=str(sources / "a.jsonl"))
    assert whole.fingerprint == prepare(Recipe(data=alone), tmp_path / "alone").fingerprint


@pytest.mark.parametrize(("count", "repeats"), [(1, 1.0), (7, 1.0), (7, 2.5), (100, 3.999), (3, 1.1)])
def test_repeats_are_even(count, repeats):
    found = np.bincount(repeat_examples(count, repeats, "a"), minlength=count)
    assert found.max() - found.min() <= 1
    assert abs(found.sum() - count * repeats) <= 0.5


class StoppedError(Exception):
    pass


class Messages(TrainingProgress):
    """What a run says before its first step; it is stopped after some steps."""

    def __init__(self, stop=None):
        self.said, self.before_steps, self.stop = [], None, stop

    def on_message(self, message):
        self.said.append(message)

    def on_start(self, summary):
        self.before_steps = list(self.said)

    def on_step(self, report):
        if report.step == self.stop:
            raise StoppedError


def test_a_run_says_what_it_mixes_and_resumes(sources, tmp_path):
    """The counts of tokens stand before the first step, and a run in two parts is the run in one."""
    chosen = recipe(sources, {"a.jsonl": 1, "c": 2}).replace(model={"dim": 16, "num_heads": 2, "num_layers": 1})
    chosen = chosen.replace(train=chosen.train.replace(steps=6, log_every=1), save=SaveConfig(every=2))
    whole, parts = Messages(), tmp_path / "parts"
    train(chosen.replace(out=str(tmp_path / "whole")), progress=whole)
    assert sum(" times in an epoch, " in line for line in whole.before_steps) == 2
    with pytest.raises(StoppedError):
        train(chosen.replace(out=str(parts)), progress=Messages(stop=5))
    train(chosen.replace(out=str(parts)), resume=True)
    expected, found = (load(folder).state_dict() for folder in (tmp_path / "whole", parts))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_report_has_tokens_and_shares(sources, tmp_path):
    _, shares, _ = mixed(sources, {"a.jsonl": 1, "c": 3}, tmp_path)
    first, second = describe_mixture(shares)
    assert first.startswith(f"{sources / 'a.jsonl'}: {shares[0].examples} examples, {shares[0].tokens:,} tokens; 1.00 ")
    percent = float(second.rpartition("epoch, ")[2].partition(" ")[0])
    assert abs(percent - 75) < 1


def test_texts_of_validation_are_no_source(sources, tmp_path):
    (sources / "valid.jsonl").write_text(json.dumps({"text": "held out"}) + "\n")
    weights = {"a.jsonl": 1, "c": 3}
    _, shares, prepared = mixed(sources, weights, tmp_path, valid=str(sources / "valid.jsonl"))
    assert [Path(share.path).name for share in shares] == list(weights)
    assert (sum(share.examples for share in shares), len(prepared.valid)) == (len(prepared.train), 1)


@pytest.mark.parametrize(
    ("task", "empty"), [("chat", {"completion": ""}), ("preference", {"chosen": "", "rejected": "no"})]
)
def test_what_is_left_out_is_counted_in_all_sources(task, empty, tmp_path):
    good = {"completion": "4"} if task == "chat" else {"chosen": "4", "rejected": "5"}
    for name in ("one", "two", "valid"):
        rows = ({"prompt": f"{name} {i}?"} | (good if i else empty) for i in range(9))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"valid": str(tmp_path / "valid.jsonl"), "if_empty": "skip", "chat_template": "plain"}
    wanted = recipe(tmp_path, {"one.jsonl": 1, "two.jsonl": 1}, task, **data)
    [said] = prepare(wanted, tmp_path / "data").left_out
    assert said.startswith("3 ")


def test_mistakes_are_said(sources, tmp_path):
    for fields, message in (
        ({"mixture": [{"path": "a"}], "train": "b"}, "mixture takes the place of DataConfig.train"),
        ({"mixture": [{"path": "a"}, {"path": "a"}]}, "names a twice: give it a weight"),
        ({"mixture": [{"path": "a", "weight": 0}]}, "weight must be"),
        ({"mixture": [{"path": ""}]}, "path must not be empty"),
        ({"mixture": [{"path": "a"}], "format": "python"}, "generates its own data"),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(**fields)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        prepare(recipe(sources, {"a.jsonl": 1, "nowhere": 1}), tmp_path / "data")
    (sources / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"nothing of .*empty.txt is left to train on"):
        mixed(sources, {"a.jsonl": 1, "empty.txt": 1}, tmp_path)
    with pytest.raises(ValueError, match=r"its weight asks for each of them .* times in an epoch, more than 1,000"):
        mixed(sources, {"a.jsonl": 1, "c": 2 * MOST_REPEATS}, tmp_path)


def test_positions_by_digits_count_in_the_whole_number(tmp_path):
    """Coupled positions look at whole documents, of which a mixture has some twice."""
    for name, numbers in (("a.txt", range(100, 130)), ("b.txt", range(1000, 1010))):
        Path(tmp_path, name).write_text("".join(f"{n}+{n}={2 * n}\n" for n in numbers))
    wanted = recipe(tmp_path, {"a.txt": 1, "b.txt": 3}, document="line", positions="coupled", sequence_length=8)
    prepared = prepare(wanted, tmp_path / "data")
    store, _ = mix(prepared.train, prepared.train.lengths[:, 0], prepared.train.sources, wanted.data.mixture)
    options = {"special": prepared.special, "tokenizer": prepared.tokenizer}
    batches = Batches(store, wanted, shuffled=False, **options)
    alone = Batches(prepared.train, wanted, shuffled=False, **options)
    assert torch.equal(batches[0].positions[0], alone[0].positions[0])
    assert batches[batches.per_epoch - 1].positions is not None

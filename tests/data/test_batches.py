"""Batches: every example once an epoch, a pure function of the step, the same for any number of processes."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import phasor
from phasor.config.recipe import DataConfig, Recipe, TrainConfig
from phasor.data.batches import Batch, Batches
from phasor.data.order import Permutation, epoch_order, token_bounds
from phasor.data.token_files import TokenStore, TokenWriter

VOCABULARY = 50


def write_store(folder, examples):
    """A store of some examples, each a tuple of lists."""
    with TokenWriter(folder, "train", sides=len(examples[0]), vocab_size=VOCABULARY) as writer:
        for example in examples:
            writer.add(tuple(np.array(side) for side in example), 0)
    return TokenStore(folder, "train", writer.describe())


def documents(count, seed=0):
    """Documents of awkward lengths, from nothing between their ends to several rows."""
    draw = np.random.default_rng(seed)
    return [([1, *draw.integers(5, VOCABULARY, draw.integers(0, 40)).tolist(), 2],) for _ in range(count)]


def pairs(count, seed=0):
    draw = np.random.default_rng(seed)

    def side(first):
        return [*first, *draw.integers(5, VOCABULARY, draw.integers(1, 20)).tolist(), 2]

    return [(side([]), side([1])) for _ in range(count)]


def recipe(task="lm", length=13, batch_tokens=60, **fields):
    data = DataConfig(train="x", sequence_length=length, **fields)
    return Recipe(task=task, data=data, train=TrainConfig(batch_tokens=batch_tokens))


def make_batches(folder, task="lm", count=23, **fields):
    examples = pairs(count) if task == "translation" else documents(count)
    batches = Batches(write_store(folder, examples), recipe(task, **fields), seed=3, vocab_size=VOCABULARY)
    return batches, examples


def epoch(batches, number):
    return [batches[step] for step in range(number * batches.per_epoch, (number + 1) * batches.per_epoch)]


def same(a, b):
    names = ("tokens", "targets", "weights", "document_ids", "source", "source_attention_mask")
    values = [(getattr(a, name), getattr(b, name)) for name in names]
    return all(x is y is None or torch.equal(x, y) for x, y in values)


@given(st.integers(0, 3000), st.integers(0, 2**40))
def test_a_permutation_has_every_number_once(count, seed):
    order = Permutation(count, seed)
    whole = order.all()
    assert np.array_equal(np.sort(whole), np.arange(count))
    assert [order[i] for i in range(min(count, 9))] == whole[:9].tolist()


@given(st.integers(1, 2**40), st.integers(0, 9), st.data())
def test_a_permutation_of_any_size_tells_numbers_apart(count, seed, data):
    order = Permutation(count, seed)
    indices = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=30, unique=True))
    places = order.at(np.array(indices))
    assert len(set(places.tolist())) == len(indices)
    assert 0 <= places.min() <= places.max() < count


def test_permutations_differ_and_are_even():
    assert epoch_order(100, 0, 0).all().tolist() != epoch_order(100, 0, 1).all().tolist()
    assert epoch_order(100, 0, 0).all().tolist() != epoch_order(100, 1, 0).all().tolist()
    counts = Counter(tuple(Permutation(4, seed).all().tolist()) for seed in range(24 * 200))
    # 200 expected of each of the 24 orders: five standard deviations are 5 * sqrt(200).
    assert len(counts) == 24
    assert max(abs(count - 200) for count in counts.values()) < 71
    with pytest.raises(IndexError):
        Permutation(4, 0)[4]
    with pytest.raises(ValueError, match="at least 0"):
        Permutation(-1, 0)


@pytest.mark.parametrize("task", ["lm", "mlm", "translation"])
def test_a_batch_is_a_function_of_its_step(tmp_path, task):
    batches, examples = make_batches(tmp_path, task)
    again = Batches(write_store(tmp_path, examples), recipe(task), seed=3, vocab_size=VOCABULARY)
    steps = list(range(3 * batches.per_epoch))
    before = [batches[step] for step in steps]
    for step in np.random.default_rng(0).permutation(steps).tolist():
        assert same(again[step], before[step])
    other = Batches(write_store(tmp_path, examples), recipe(task), seed=4, vocab_size=VOCABULARY)
    assert not all(same(other[step], before[step]) for step in steps)
    assert not same(before[0], before[batches.per_epoch])
    with pytest.raises(IndexError):
        batches[-1]


@pytest.mark.parametrize("count", [1, 2, 23, 150])
@pytest.mark.parametrize("length", [1, 7, 13])
def test_every_token_is_predicted_once_an_epoch_from_those_before_it(tmp_path, count, length):
    examples = documents(count, seed=count)
    batches = Batches(write_store(tmp_path, examples), recipe(length=length, batch_tokens=3 * length), seed=1)
    transitions = Counter((a, b) for (ids,) in examples for a, b in itertools.pairwise(ids))
    for number in range(3):
        rows = epoch(batches, number)
        found = Counter()
        for batch in rows:
            real = batch.weights > 0
            found.update(zip(batch.tokens[real].tolist(), batch.targets[real].tolist(), strict=True))
            assert batch.tokens.shape == rows[0].tokens.shape
            assert (batch.tokens[~real] == 0).all()
        assert found == transitions
        assert max(b.count for b in rows) - min(b.count for b in rows) <= 2 * length  # no batch of a few rows


def test_rows_are_cut_from_documents_end_to_end_and_shuffled(tmp_path):
    batches, examples = make_batches(tmp_path)
    for number in range(2):
        order = epoch_order(len(examples), 3, number).all()
        stream = [t for i in order for t in examples[i][0][:-1]]
        length = batches[0].tokens.shape[1]
        cut = [stream[i : i + length] for i in range(0, len(stream), length)]
        rows = [row[w > 0].tolist() for b in epoch(batches, number) for row, w in zip(b.tokens, b.weights, strict=True)]
        rows = [row for row in rows if row]
        assert sorted(rows) == sorted(cut)
        assert rows != cut


@pytest.mark.parametrize("task", ["lm", "mlm"])
def test_packing_never_mixes_documents(tmp_path, task):
    """Within a run of one id there is one document: it begins with bos nowhere but at its start."""
    examples = [([1, *[10 + i] * (3 + 5 * i), 2],) for i in range(9)]  # every document repeats its own token
    batches = Batches(write_store(tmp_path, examples), recipe(task), seed=0, vocab_size=VOCABULARY)
    for batch in epoch(batches, 0):
        documents = batch.document_ids
        assert (documents[:, 0] == 0).all()
        assert (documents[:, 1:] >= documents[:, :-1]).all()
        whole = batch.tokens if task == "lm" else batch.targets
        for row in range(len(whole)):
            for number in documents[row].unique():
                inside = whole[row][documents[row] == number].tolist()
                assert len(set(inside) - {1, 2}) <= 1
                assert 1 not in inside[1:]
                assert (0 in inside) == (set(inside) == {0})


def test_a_model_reads_packed_rows_as_documents_alone(tmp_path):
    batches, _ = make_batches(tmp_path)
    config = phasor.preset("llama-2", dim=16, num_heads=2, num_layers=2, vocab_size=VOCABULARY)
    model = phasor.Transformer(config).double().eval()
    batch = batches[1]
    with torch.no_grad():
        packed = model(batch.tokens, document_ids=batch.document_ids)
        for row in range(len(batch.tokens)):
            for number in batch.document_ids[row].unique():
                where = batch.document_ids[row] == number
                alone = model(batch.tokens[row][where][None])
                # float64 in two arrangements
                torch.testing.assert_close(packed[row][where], alone[0], atol=1e-12, rtol=1e-12)


def test_masked_rows_ask_for_what_was_there(tmp_path):
    batches, examples = make_batches(tmp_path, "mlm", count=600, length=64, batch_tokens=2048)
    asked = masked = kept = free = 0
    for batch in epoch(batches, 0):
        where = batch.weights > 0
        assert torch.equal(batch.tokens[~where], batch.targets[~where])
        assert (batch.targets[where] > 4).all()
        assert not torch.isin(batch.tokens[where], torch.tensor([0, 1, 2])).any()
        asked += int(where.sum())
        free += int((batch.targets > 4).sum())
        masked += int((batch.tokens[where] == 4).sum())
        kept += int((batch.tokens[where] == batch.targets[where]).sum())
    everything = Counter(t for b in epoch(batches, 0) for t in b.targets.flatten().tolist() if t)
    assert everything == Counter(t for (ids,) in examples for t in ids)
    # About 11,000 free tokens and 1,700 asked for: five standard deviations each.
    assert abs(asked / free - 0.15) < 5 * (0.15 * 0.85 / free) ** 0.5
    assert abs(masked / asked - 0.8) < 5 * (0.8 * 0.2 / asked) ** 0.5 + 0.1 / VOCABULARY
    assert abs(kept / asked - 0.1) < 5 * (0.1 * 0.9 / asked) ** 0.5 + 0.1 * 4 / VOCABULARY
    assert not same(batches[0], batches[batches.per_epoch])


def test_a_short_masked_batch_asks_for_something(tmp_path):
    batches = Batches(write_store(tmp_path, [([1, 9, 2],)]), recipe("mlm"), vocab_size=VOCABULARY)
    assert [batches[step].count for step in range(20)] == [1.0] * 20


@pytest.mark.parametrize("count", [1, 23, 300])
def test_every_pair_is_seen_once_an_epoch(tmp_path, count):
    batches, examples = make_batches(tmp_path, "translation", count=count)
    expected = Counter((tuple(s), tuple(t)) for s, t in examples)
    for number in range(3):
        found = Counter()
        for batch in epoch(batches, number):
            assert batch.source.shape[0] == batch.tokens.shape[0]
            assert max(batch.source.numel(), batch.tokens.numel()) <= 60
            assert (batch.source[~batch.source_attention_mask] == 0).all()
            for row in range(len(batch.tokens)):
                real = batch.weights[row] > 0
                tokens, targets = batch.tokens[row][real].tolist(), batch.targets[row][real].tolist()
                assert tokens[1:] == targets[:-1]
                source = batch.source[row][batch.source_attention_mask[row]].tolist()
                found[tuple(source), (tokens[0], *targets)] += 1
        assert found == expected


def test_pairs_of_about_the_same_length_stand_together(tmp_path):
    batches, _ = make_batches(tmp_path, "translation", count=2000, batch_tokens=400)
    rows = epoch(batches, 0)
    real = sum(b.count + int(b.source_attention_mask.sum()) for b in rows)
    space = sum(b.tokens.numel() + b.source.numel() for b in rows)
    assert real / space > 0.7  # lengths of both sides are independent here; in the order of the file it is 0.5
    widths = [b.tokens.shape[1] for b in rows]
    assert widths != sorted(widths)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(40, 200))
def test_bounds_leave_room_for_padding_and_waste_none(sizes, most):
    sizes = np.sort(np.array(sizes))
    bounds = token_bounds(sizes, most)
    assert (bounds[0], bounds[-1]) == (0, len(sizes))
    for start, end in itertools.pairwise(bounds):
        assert (end - start) * sizes[end - 1] <= most
        assert end == len(sizes) or (end + 1 - start) * sizes[end] > most


@pytest.mark.parametrize("task", ["lm", "mlm", "translation"])
@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_processes_share_one_batch(tmp_path, task, parts):
    batches, _ = make_batches(tmp_path, task)
    for step in range(batches.per_epoch):
        whole = batches[step]
        shares = [batches[step].share(index, parts) for index in range(parts)]
        assert len({share.tokens.shape for share in shares}) == 1
        assert sum(share.count for share in shares) == whole.count
        for row in range(len(whole.tokens)):
            share = shares[row % parts]
            for name in ("tokens", "targets", "weights"):
                assert torch.equal(getattr(share, name)[row // parts], getattr(whole, name)[row])
    with pytest.raises(ValueError, match="one of 0 to"):
        whole.share(parts, parts)


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_workers_change_nothing_and_end_with_their_reader(tmp_path, task):
    batches, _ = make_batches(tmp_path, task)
    ahead = Batches(batches.source.store, recipe(task, workers=3), seed=3)
    end = 2 * batches.per_epoch + 1
    assert all(same(a, b) for a, b in zip(batches.stream(1, end), ahead.stream(1, end), strict=True))
    stream = ahead.stream(0, 10**9)
    assert same(next(stream), batches[0])
    stream.close()
    assert list(ahead.stream(5, 5)) == []


def test_without_shuffling_the_order_is_the_stores(tmp_path):
    examples = documents(9)
    batches = Batches(write_store(tmp_path, examples), recipe(), shuffled=False)
    stream = [t for b in epoch(batches, 4) for t in b.tokens[b.weights > 0].tolist()]
    assert stream == [t for (ids,) in examples for t in ids[:-1]]


def test_what_cannot_be_batched_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a single token"):
        Batches(write_store(tmp_path, [([1],)]), recipe())
    with pytest.raises(ValueError, match="masking needs"):
        Batches(write_store(tmp_path, documents(3)), recipe("mlm"))


def test_a_batch_moves_whole():
    ones = torch.ones(2, 3)
    moved = Batch(tokens=ones.long(), targets=ones.long(), weights=ones).to("meta")
    assert moved.tokens.device.type == "meta"
    assert moved.document_ids is None


@pytest.mark.parametrize("task", ["lm", "mlm"])
def test_rows_are_no_longer_than_all_tokens_together(tmp_path, task):
    examples = documents(3)
    batches = Batches(write_store(tmp_path, examples), recipe(task, 1 << 40, 1 << 40), vocab_size=VOCABULARY)
    wanted = sum(len(tokens) - (task == "lm") for (tokens,) in examples)
    assert batches.per_epoch == 1
    assert batches[0].tokens.shape == (1, wanted)

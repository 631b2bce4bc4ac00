"""Rows of whole examples: every example once an epoch, none cut, and what is trained where it was."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phasor.config.recipe import DataConfig, Recipe, TrainConfig
from phasor.data.packed import PackedRows, pack
from phasor.data.token_files import TokenStore, TokenWriter
from phasor.data.tokenizers import SpecialIds


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.integers(40, 90))
def test_packing_has_every_item_once_and_no_row_too_full(sizes, capacity):
    sizes = np.sort(np.array(sizes))[::-1]
    items, starts, ends = pack(sizes, capacity)
    assert sorted(items.tolist()) == list(range(len(sizes)))
    rows = [sizes[items[a:b]].sum() for a, b in itertools.pairwise(starts)]
    assert rows == ends.tolist()
    assert max(rows) <= capacity
    # Best fit decreasing needs at most 11/9 of the fewest rows and one more (Johnson 1974); the fewest hold all items.
    assert len(rows) <= 11 / 9 * max(1, -(-sizes.sum() // capacity)) * 1.5 + 1


def make_rows(folder, documents=1, count=37, shuffled=True):
    """A store of examples with documents of awkward lengths, of which the last tokens are trained, and its rows."""
    draw = np.random.default_rng(0)
    examples = []
    for _ in range(count):
        sides = []
        for _ in range(documents):
            ids = draw.integers(5, 99, draw.integers(2, 30))
            sides += [ids, (np.arange(len(ids)) >= draw.integers(1, len(ids))).astype(int)]
        examples.append(tuple(sides))
    with TokenWriter(folder, "train", sides=2 * documents, vocab_size=99) as writer:
        for example in examples:
            writer.add(example, 0)
    recipe = Recipe(data=DataConfig(train="x", sequence_length=31), train=TrainConfig(batch_tokens=100))
    store = TokenStore(folder, "train", writer.describe())
    return PackedRows(store, recipe, 3, SpecialIds(), shuffled, documents), examples


def read_documents(rows, batch):
    """Every document of a batch as its tokens, targets and weights, by row and id."""
    found = {}
    for row in range(len(batch.tokens)):
        for number in batch.document_ids[row].unique().tolist():
            if number < rows.most:
                here = batch.document_ids[row] == number
                found[row, number] = [
                    tuple(x[row][here].int().tolist()) for x in (batch.tokens, batch.targets, batch.weights)
                ]
    return found


@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_has_every_example_whole_and_once(documents, epoch, tmp_path):
    rows, examples = make_rows(tmp_path, documents)
    expected = Counter(
        tuple(
            side
            for i in range(documents)
            for side in (tuple(e[2 * i][:-1]), tuple(e[2 * i][1:]), tuple(e[2 * i + 1][1:]))
        )
        for e in examples
    )
    found = Counter()
    for index in range(rows.per_epoch):
        batch = rows.make_batch(epoch, index)
        read = read_documents(rows, batch)
        for row, number in read:
            if number % documents == 0:
                found[tuple(side for i in range(documents) for side in read[row, number + i])] += 1
        outside = batch.document_ids == rows.most
        assert batch.weights[outside].sum() == 0
        assert (batch.tokens[outside] == 0).all()
        if epoch == 0:
            assert batch.tokens.shape == rows.make_batch(0, 0).tokens.shape
    assert found == expected


def test_rows_are_a_function_of_their_number_and_differ_between_epochs(tmp_path):
    rows, _ = make_rows(tmp_path)
    again, _ = make_rows(tmp_path)
    assert torch.equal(rows.make_batch(1, 0).tokens, again.make_batch(1, 0).tokens)
    assert not torch.equal(rows.make_batch(1, 0).tokens, rows.make_batch(0, 0).tokens)

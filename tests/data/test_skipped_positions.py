"""Skipped positions (PoSE): increasing within a document, from 0, below the length, and a function of the step."""

import numpy as np
import pytest
import torch
from test_batches import documents, recipe, write_store

import phasor
from phasor.config.recipe import Recipe
from phasor.data.batches import Batches
from phasor.data.positions import skipped_positions
from phasor.training.build import check_config

RANGE = 64


def make_batches(folder, **options):
    store = write_store(folder, documents(23))
    return Batches(store, recipe(positions="skipped", positions_to=RANGE), seed=3, vocab_size=50, **options)


def test_positions_increase_in_two_parts_from_zero():
    draw = np.random.default_rng(0)
    ids = np.cumsum(draw.random((200, 40)) < 0.1, axis=1)
    positions = skipped_positions(ids, 1000, [0, 1])
    reached = 0
    for row, own in zip(positions, ids, strict=True):
        for document in np.unique(own):
            inside = row[own == document]
            assert inside[0] == 0
            steps = np.diff(inside)
            assert (steps >= 1).all()
            assert (steps > 1).sum() <= 1
            reached = max(reached, inside[-1])
    assert 900 < reached < 1000


def test_the_whole_range_is_reached_and_not_passed():
    last = np.array([skipped_positions(np.zeros((1, 4)), 8, [0, step])[0, -1] for step in range(200)])
    assert set(last) == {3, 4, 5, 6, 7}


def test_batches_skip_positions_by_their_step_alone(tmp_path):
    skipping, ordinary = make_batches(tmp_path, training=True), make_batches(tmp_path)
    for step in (5, 0, 7, 5):
        batch, plain = skipping[step], ordinary[step]
        assert torch.equal(batch.positions, make_batches(tmp_path, training=True)[step].positions)
        assert torch.equal(batch.tokens, plain.tokens)
        assert (batch.length, plain.length, plain.positions) == (RANGE, None, None)
        assert batch.positions.shape == batch.tokens.shape
        assert int(batch.positions.max()) < RANGE
    assert not torch.equal(skipping[0].positions, skipping[skipping.per_epoch].positions)
    share = skipping[0].to("cpu").share(1, 2)
    assert torch.equal(share.positions[0], skipping[0].positions[1])
    assert share.length == RANGE


def test_the_longest_sequence_is_that_of_a_row_or_of_a_document(tmp_path):
    """Tokens attend within their document, so that a longer row of short ones is no longer text."""
    store = write_store(tmp_path, [([1, *range(5, 5 + n), 2],) for n in (3, 20, 11)])
    assert [Batches(store, recipe(length=n, batch_tokens=99)).longest for n in (7, 21, 40)] == [7, 21, 21]


@pytest.mark.parametrize("extension", [None, "longrope"])
def test_the_loss_of_a_batch_is_that_of_its_positions(tmp_path, extension):
    """By a model of transformers, which takes positions too, and chooses the factors of LongRoPE by the highest."""
    import transformers

    torch.manual_seed(0)
    batch = make_batches(tmp_path, training=True)[0]
    whole = batch.positions.clone()
    whole[:, 0], whole[:, -1] = 0, RANGE - 1  # so that both choose by the same length
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if extension:
        rope |= {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
        rope["original_max_position_embeddings"] = 16
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=50, max_position_embeddings=RANGE, rope_parameters=rope, attn_implementation="eager", **sizes
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = phasor.load(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(batch.tokens, position_ids=whole).logits
        assert torch.allclose(ours(batch.tokens, positions=whole, length=batch.length), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"data": {"sequence_length": 64, "positions": "skipped", "positions_to": 64}},
            "must be greater than DataConfig.sequence_length",
        ),
        ({"data": {"sequence_length": 64, "positions": "skipped", "positions_to": 0}}, "positions_to"),
        (
            {"data": {"positions": "skipped", "positions_to": 512}, "task": "translation"},
            "not for the task 'translation'",
        ),
    ],
)
def test_ranges_that_cannot_be(fields, sentence):
    fields["data"]["positions"] = "skipped"
    with pytest.raises(ValueError, match=sentence):
        Recipe.from_dict(fields)


def test_a_learned_table_has_no_positions_beyond_its_end():
    config = phasor.preset("gpt-2", dim=32, num_heads=2, num_layers=1, vocab_size=50, max_length=64)
    with pytest.raises(ValueError, match=r"data\.positions_to is 65, and this model allows 64 positions"):
        check_config(config, recipe(positions="skipped", positions_to=65), 50)

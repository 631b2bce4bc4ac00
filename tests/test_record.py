"""Intermediate results that a `Record` keeps: hidden states, attention weights, router logits, pooled output."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from schemes import SCHEMES, VIEWS, build, relative_change, tiny, tokens
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from phasor import Record, balancing_loss

EVERYTHING = ("hidden", "attention", "cross_attention", "router")
PADDING = torch.arange(12) >= torch.tensor([[0], [5]])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [3] * 9 + [4] * 3])
GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "attention_mask": {"attention_mask": PADDING},
    "document_ids": {"document_ids": DOCUMENTS},
    "prefix_length": {"prefix_length": 3},
}
EXPERTS = {"activation": "swiglu", "experts": {"num_experts": 4, "top_k": 2}}


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", ["decoder", "encoder", "encoder-decoder"])
def test_recording_changes_nothing(name, shape):
    model, ids = build(tiny(name, shape=shape, feedforward=EXPERTS)).double(), tokens(2, 12)
    inputs = (ids, ids[:, :9]) if shape == "encoder-decoder" else (ids,)
    record = Record(*EVERYTHING)
    recorded, plain = model(*inputs, record=record, attention_mask=PADDING), model(*inputs, attention_mask=PADDING)
    if shape != "encoder-decoder":  # what stands at padding means nothing
        recorded, plain = recorded[PADDING], plain[PADDING]
    assert relative_change(recorded, plain) < 1e-12  # float64: the plain form of attention adds in another order


def test_hidden_states_are_the_stream_before_every_block_and_the_result():
    model, ids, record = build(tiny("rotary", num_layers=3)), tokens(2, 12), Record("hidden")
    logits = model(ids, record=record)
    assert len(record.hidden) == 4
    assert torch.equal(record.hidden[0], model.tokens.weight[ids])
    assert torch.equal(record.hidden[-1] @ model.tokens.weight.T, logits)
    assert record.attention is record.router is record.cross_attention is None


@pytest.mark.parametrize("what", GIVEN)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", ["decoder", "encoder"])
def test_attention_weights_add_up_to_1_over_what_is_seen(shape, view, what):
    given = {} if shape == "encoder" and what == "prefix_length" else GIVEN[what]
    model, record = build(tiny("alibi", shape=shape, attention=VIEWS[view])), Record("attention")
    model(tokens(2, 12), **given, record=record)
    assert [weights.shape for weights in record.attention] == [(2, 4, 12, 12)] * 2
    seen = torch.tensor(
        [[[sees(row, i, j, shape, view, **given) for j in range(12)] for i in range(12)] for row in (0, 1)]
    )
    real = given.get("attention_mask", torch.ones(2, 12, dtype=torch.bool))
    for weights in record.attention:
        sums = weights.sum(-1).movedim(1, -1)[real]
        torch.testing.assert_close(sums, torch.ones_like(sums))
        for_real_queries = weights.movedim(1, -1)[real]
        assert torch.equal((for_real_queries > 0).all(-1), seen[real])


def sees(row: int, i: int, j: int, shape: str, view: str, **given: Any) -> bool:
    """Whether query i sees key j, said as plainly as possible."""
    own = [k for k in range(12) if "document_ids" not in given or DOCUMENTS[row, k] == DOCUMENTS[row, i]]
    own = [k for k in own if "attention_mask" not in given or PADDING[row, k]]
    if j not in own:
        return False
    rank = own.index(j)
    if rank < given.get("prefix_length", 0):
        return True
    near = view == "whole" or abs(i - j) < 4 or (view == "sinks" and rank < 2)
    return near and (shape == "encoder" or j <= i)


def test_learned_sinks_take_their_share():
    model, ids = build(tiny("rotary", num_layers=1, attention={"sink_logits": True})).double(), tokens(2, 12)
    odds = []
    for raised in (0.0, 1.0):
        with torch.no_grad():
            model.decoder.blocks[0].attention.sinks += raised
        record = Record("attention")
        model(ids, record=record)
        share = record.attention[0].sum(-1)
        assert (share > 0).all()
        assert (share < 1).all()
        odds.append(share / (1 - share))
    torch.testing.assert_close(odds[0] / odds[1], torch.full_like(odds[0], math.e))


def test_an_encoder_decoder_records_both_sides():
    model, record = (
        build(tiny("t5", shape="encoder-decoder", num_encoder_layers=3, feedforward=EXPERTS)),
        Record(*EVERYTHING),
    )
    model(tokens(2, 12), tokens(2, 9), attention_mask=PADDING, record=record)
    assert [w.shape for w in record.attention] == [(2, 4, 9, 9)] * 2
    assert [w.shape for w in record.cross_attention] == [(2, 4, 9, 12)] * 2
    assert [w.shape for w in record.encoder.attention] == [(2, 4, 12, 12)] * 3
    assert [len(r.hidden) for r in (record, record.encoder)] == [3, 4]
    assert [r.shape for r in record.router] == [(2, 9, 4)] * 2
    assert [r.shape for r in record.encoder.router] == [(2, 12, 4)] * 3
    for weights in record.cross_attention:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
        assert torch.equal((weights > 0).all(2), PADDING[:, None].expand(2, 4, 12))


def test_router_logits_choose_the_experts_of_a_token():
    model, ids, record = build(tiny("rotary", num_layers=1, feedforward=EXPERTS)), tokens(2, 12), Record("router")
    model(ids, record=record)
    experts = model.decoder.blocks[0].feedforward.down.data
    whole = experts.clone()
    complete = model(ids)
    for expert in range(4):
        experts.copy_(whole)
        experts[expert] = 0.0
        changed = (model(ids) != complete).any(-1)
        assert torch.equal(changed, (record.router[0].topk(2).indices == expert).any(-1))


class TestPooling:
    def test_the_first_real_token(self):
        model, record = build(tiny("learned", shape="encoder", head={"kind": "none", "pooler": "first"})), Record()
        hidden = model(tokens(2, 12), attention_mask=PADDING, record=record)
        first = torch.stack((hidden[0, 0], hidden[1, 5]))
        dense = model.pooler.dense
        torch.testing.assert_close(record.pooled, torch.tanh(first @ dense.weight.T + dense.bias))

    def test_the_mean_of_the_real_tokens(self):
        config = tiny("rotary", shape="encoder", head={"kind": "pooled", "pooler": "mean"})
        model, ids, record = build(config), tokens(2, 12), Record("hidden")
        pooled = model(ids, attention_mask=PADDING, record=record)
        expected = torch.stack((record.hidden[-1][0].mean(0), record.hidden[-1][1, 5:].mean(0)))
        torch.testing.assert_close(pooled, expected)

    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize(("pooler", "of"), [("cls", lambda h: h[0]), ("max", lambda h: h.max(0).values)])
    def test_other_ways_and_a_length_of_one(self, pooler, of, normalize):
        head = {"kind": "pooled", "pooler": pooler, "normalize": normalize}
        model, ids, record = build(tiny("rotary", shape="encoder", head=head)), tokens(2, 12), Record("hidden")
        pooled = model(ids, attention_mask=PADDING, record=record)
        expected = torch.stack((of(record.hidden[-1][0]), of(record.hidden[-1][1, 5:])))
        scale = expected.square().sum(-1, keepdim=True).sqrt() if normalize else 1.0
        torch.testing.assert_close(pooled, expected / scale)
        without = model(ids[:1])
        torch.testing.assert_close(without, pooled[:1])

    def test_a_mean_over_many_tokens_in_a_narrow_type(self):
        pooler = build(tiny("rotary", shape="encoder", head={"kind": "pooled", "pooler": "mean"})).pooler
        hidden = torch.ones(1, 515, 32, dtype=torch.bfloat16)  # 515 is not a number of this type
        assert torch.equal(pooler(hidden, torch.ones(1, 515, dtype=torch.bool)), hidden[:, 0])


class TestBalancing:
    @pytest.mark.parametrize("attention_mask", [None, PADDING], ids=["whole", "padded"])
    @pytest.mark.parametrize("top_k", [1, 2, 3])
    def test_it_is_the_loss_of_mixtral(self, top_k, attention_mask):
        logits = torch.randn(2, 12, 5)
        expected = load_balancing_loss_func(
            (logits.flatten(0, 1),), 5, top_k, None if attention_mask is None else attention_mask.long()
        )
        torch.testing.assert_close(balancing_loss([logits], top_k, attention_mask), expected)

    def test_the_mean_over_several_layers(self):
        one, other = torch.randn(2, 1, 12, 5)
        expected = (balancing_loss([one], 2) + balancing_loss([other], 2)) / 2
        torch.testing.assert_close(balancing_loss([one, other], 2), expected)

    def test_it_teaches_the_router(self):
        model, record = build(tiny("rotary", feedforward=EXPERTS)), Record("router")
        model(tokens(2, 12), record=record)
        loss = balancing_loss(record.router, top_k=2)
        loss.backward()
        assert loss > 2  # it is top_k for an even spread
        for block in model.decoder.blocks:
            assert block.feedforward.router.weight.grad.any()

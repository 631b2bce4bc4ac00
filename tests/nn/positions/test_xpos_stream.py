"""xPos under a window: a stream through a cache may be of any length, though float32 spans few positions at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device import ON_GPU
from schemes import build, tiny, tokens
from torch import Tensor

import phasor
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.positions.xpos.module import XPos

WINDOW = 8
VIEWS = {
    "window": phasor.SoftmaxAttentionConfig(window=WINDOW),
    "sinks": phasor.SoftmaxAttentionConfig(window=WINDOW, sink_tokens=2),
    "capped sinks": phasor.SoftmaxAttentionConfig(window=WINDOW, sink_tokens=2, cap_sinks=True),
}


def xpos(view: str = "window", **fields: Any) -> phasor.Transformer:
    """A model whose decay is so fast that float32 spans 64 positions."""
    return build(tiny(phasor.XPosConfig(decay=1.0, **fields), attention=VIEWS[view]))


def feed(model: phasor.Transformer, ids: Tensor, chunk: int, start: int = 0, max_length: int = WINDOW) -> Tensor:
    cache, at = model.new_cache(1, max_length), torch.arange(start, start + ids.shape[1])
    with torch.no_grad():
        parts = zip(ids.split(chunk, dim=1), at.split(chunk), strict=True)
        return torch.cat([model(x, positions=p if start else None, cache=cache) for x, p in parts], dim=1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("fields", [{}, {"pairing": "adjacent", "rotary_dim": 4}], ids=["half", "adjacent"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_stream_past_the_span_equals_the_formula_in_float64(
    view: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64 spans 500 positions of the formula itself, whose queries and keys are scaled from the first token on."""
    model, ids = xpos(view, **fields), tokens(1, 300)
    double = xpos(view, **fields).double()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(XPos, "_check_span", lambda *_: None)
        expected = double(ids)
    for chunk in (5, 50):
        torch.testing.assert_close(feed(model, ids, chunk).double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(feed(model, ids[:, :100], 1).double(), expected[:, :100], rtol=1e-4, atol=1e-4)


def test_a_stream_far_from_zero_is_that_at_zero() -> None:
    model, ids = xpos("sinks"), tokens(1, 120)
    torch.testing.assert_close(feed(model, ids, 30, start=2**36), feed(model, ids, 30), rtol=1e-4, atol=1e-4)


def test_static_steps_go_on_past_the_span() -> None:
    model, ids = xpos(), tokens(1, 100)
    cache = model.new_cache(1, WINDOW)
    with torch.no_grad():
        model(ids[:, :50], cache=cache)
        static = StaticKVCache(cache)
        found = torch.cat([model(ids[:, i : i + 1], cache=static) for i in range(50, 100)], dim=1)
    torch.testing.assert_close(found, feed(model, ids, 20)[:, 50:], rtol=1e-4, atol=1e-4)


def test_what_one_call_cannot_span_is_refused() -> None:
    model, ids = xpos(), tokens(1, 100)
    cache = model.new_cache(1, WINDOW)
    model(ids[:, :1], cache=cache)
    with pytest.raises(ValueError, match=r"this call and its window span 68: give a cache fewer tokens at a time"):
        model(ids[:, 1:62], cache=cache)
    with pytest.raises(ValueError, match="xPos spans at most 64 positions of one sequence"):
        model(ids)
    if ON_GPU:
        return  # the positions of earlier calls are on the GPU, which is not waited for
    wide = build(tiny(phasor.XPosConfig(decay=1.0), attention=phasor.SoftmaxAttentionConfig(window=33)))
    with pytest.raises(ValueError, match="xPos spans at most 64 positions of one sequence"):
        feed(wide, ids, 10, max_length=33)


@pytest.mark.parametrize("view", VIEWS)
def test_a_first_call_spans_what_a_call_without_a_cache_does(view: str) -> None:
    """Nothing comes before it, so that its window takes no separate span."""
    model, ids = xpos(view), tokens(1, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, cache=model.new_cache(1, 64)), model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("capped", [(False, True), (True, False)])
def test_layers_that_differ_in_the_cap_of_their_sinks_only(capped: tuple[bool, bool]) -> None:
    """They share the mask of a first call, and not the factors of their keys."""
    first, second = (phasor.SoftmaxAttentionConfig(window=4, sink_tokens=2, cap_sinks=x) for x in capped)
    config = tiny("xpos", attention=first, layers=({}, {"attention": second}))
    model, ids = build(config).double(), tokens(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, cache=model.new_cache(1, 20)), model(ids))


def test_float16_reaches_the_end_of_its_span() -> None:
    """Scores of queries and keys of size 10 over all of 4,096 positions, against the paper's formula in float64."""
    count, width = 4096, 8
    draw = torch.Generator().manual_seed(0)
    q, k = (10 * torch.randn(1, 1, count, width, generator=draw, dtype=torch.float64) for _ in range(2))
    q, k = q.half(), k.half()
    positions = torch.arange(count)
    ours = torch.stack(phasor.Rotary(phasor.XPosConfig(), head_dim=width).rotate(q, k, positions)).double()
    assert ours.isfinite().all()
    angle = positions[:, None] * 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    u, v = torch.stack((q, k)).double()[:, 0, 0].chunk(2, dim=-1)
    turned = torch.polar(torch.ones_like(angle), angle) * torch.complex(u, v)
    zeta = (torch.arange(4, dtype=torch.float64) / 4 + 0.4) / 1.4
    early, late = positions[:, None] * 1.0, positions[None] * 1.0
    for i in range(0, count, 511):
        decay = zeta ** ((early[i:] - late[0, i]) / 512)
        expected = (decay * turned[0, i:] * turned[1, i].conj()).real.sum(-1)
        found = ours[0, 0, 0, i:] @ ours[1, 0, 0, i]
        # Each of 8 products of size 100 has two factors rounded to 11 bits.
        assert (found - expected).abs().max() < 8 * 500 * 2 * 2**-11


def test_a_float16_stream_uses_all_of_its_span() -> None:
    """A window of half the span, and calls of the other half; keys of size 10."""
    attention = phasor.SoftmaxAttentionConfig(window=32)
    model, ids = build(tiny(phasor.XPosConfig(decay=8.0), attention=attention, num_layers=1)), tokens(1, 165)
    with torch.no_grad():
        model.get_parameter("decoder.blocks.0.attention.qkv.weight").mul_(10)
    expected = feed(model, ids, 33, max_length=32)
    found = feed(model.half(), ids, 33, max_length=32)
    # Scores of some hundreds have eleven bits, an error of a tenth, and weights are off by as much, relatively.
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()

"""Chunks of several windows through a cache: keys are in order, so that attention takes only what a window shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device import ON_GPU
from schemes import build, tiny, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import phasor
from phasor.kv_cache.slots import SlotLayout
from phasor.kv_cache.static import StaticKVCache
from phasor.ops import dispatch
from phasor.ops.attention import ATTENTION, attention, attention_ref, blocks

WINDOW, COUNT = 8, 200
VIEWS = {
    "window": phasor.SoftmaxAttentionConfig(window=WINDOW),
    "sinks": phasor.SoftmaxAttentionConfig(window=WINDOW, sink_tokens=3),
    "capped sinks": phasor.SoftmaxAttentionConfig(window=WINDOW, sink_tokens=3, cap_sinks=True),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 16)


def feed(model: phasor.Transformer, ids: Tensor, chunk: int, **options: int) -> Tensor:
    """Logits of tokens fed in chunks through an endless cache."""
    cache = model.new_cache(len(ids), WINDOW, **options)
    with torch.no_grad():
        return torch.cat([model(x, cache=cache) for x in ids.split(chunk, dim=1)], dim=1)


def full(model: phasor.Transformer, ids: Tensor, **args: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, **args)


@pytest.mark.sample(12)
@pytest.mark.skipif(ON_GPU, reason="a GPU takes the interval kernel, which has no blocks of queries with masks")
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["rotary", "alibi", "t5"])
def test_no_block_takes_keys_that_its_window_hides(
    scheme: str, view: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the chunk, the keys of a block are its queries' own, those of a window before them, and the sinks."""
    model, ids = build(tiny(scheme, attention=VIEWS[view], num_kv_heads=kv_heads)), tokens(2, COUNT)
    expected = full(model, ids)
    seen: list[int] = []
    slice_block = blocks.slice_block

    def record(*args: object) -> tuple[Tensor, ...]:
        q, k, *rest = slice_block(*args)
        seen.append(k.shape[1])
        return q, k, *rest

    monkeypatch.setattr(blocks, "slice_block", record)
    for chunk in (WINDOW, 16 * WINDOW + 1):
        assert torch.allclose(feed(model, ids, chunk), expected, atol=1e-4)
        assert seen
        assert max(seen) <= 16 + WINDOW - 1 + VIEWS[view].sink_tokens
        seen.clear()


@pytest.mark.skipif(not dispatch.TRITON_INSTALLED, reason="Triton is not installed")
@pytest.mark.parametrize(("scheme", "view"), [("rotary", None), ("alibi", "sinks"), ("t5", "sinks")])
def test_a_chunk_after_a_cache_takes_the_interval_kernel(
    scheme: str, view: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window or without one; backends says so."""
    config = tiny(scheme, attention=phasor.SoftmaxAttentionConfig() if view is None else VIEWS[view], num_layers=1)
    paths = phasor.backends(config, device="cuda", length=24).ops
    kernel = "Triton kernel over key intervals"
    assert next(one.path for one in paths if one.op == "attention after a cache") == kernel
    model, ids, calls = build(config), tokens(1, 40), []
    cache = model.new_cache(1, 40)
    monkeypatch.setattr("phasor.nn.attention.base.attention", lambda *args: calls.append(args) or attention(*args))
    pieces = [model(x, cache=cache).detach() for x in ids.split(24, dim=1)]
    with torch.no_grad(), dispatch.force_path("triton"):
        assert ATTENTION.explain(*calls[1])[0] == kernel
        assert torch.allclose(attention(*calls[1]), attention_ref(*calls[1])[0], atol=1e-5)
    assert torch.allclose(torch.cat(pieces, dim=1), full(model, ids), atol=1e-4)


@pytest.mark.sample(10)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("chunk", [1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 50])
def test_a_cache_of_one_window_is_endless(view: str, chunk: int) -> None:
    model, ids = build(tiny("rotary", attention=VIEWS[view])), tokens(1, 60)
    assert model.new_cache(1, WINDOW).endless
    assert not model.new_cache(1, WINDOW - 1).endless
    assert torch.allclose(feed(model, ids, chunk), full(model, ids), atol=1e-4)


@pytest.mark.parametrize("view", VIEWS)
def test_a_chunk_after_tokens_were_undone(view: str) -> None:
    """Slots hold newer tokens that were undone, where the chunk's window does not reach."""
    model, ids = build(tiny("t5", attention=VIEWS[view])), tokens(1, 60)
    cache = model.new_cache(1, WINDOW, spare=5)
    with torch.no_grad():
        model(ids[:, :25], cache=cache)
        model(tokens(1, 5, seed=9), cache=cache)
        cache.crop(5)
        found = model(ids[:, 25:], cache=cache)
    assert torch.allclose(found, full(model, ids)[:, 25:], atol=1e-4)


def test_a_window_of_one_keeps_no_token_before_those_that_can_be_undone() -> None:
    """The position of the last token that stays is read from its slot, which must still hold it."""
    model, ids = build(tiny("rotary", attention=phasor.SoftmaxAttentionConfig(window=1))), tokens(2, 12)
    attention_mask = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    cache = model.new_cache(2, 1, spare=2)
    with torch.no_grad():
        model(ids[:, :6], attention_mask=attention_mask, cache=cache)
        with pytest.raises(ValueError, match="in row 0 at most 2 tokens can be undone, not 3"):
            cache.crop(3)
        cache.crop(2)
        assert cache.next_positions.tolist() == [4, 2]


def test_chunks_of_documents_under_a_window() -> None:
    model, ids = build(tiny("alibi", attention=VIEWS["window"])), tokens(1, 60)
    document_ids = torch.arange(60)[None] // 13
    cache = model.new_cache(1, WINDOW)
    with torch.no_grad():
        parts = zip(ids.split(25, dim=1), document_ids.split(25, dim=1), strict=True)
        found = torch.cat([model(x, document_ids=d, cache=cache) for x, d in parts], dim=1)
    assert torch.allclose(found, full(model, ids, document_ids=document_ids), atol=1e-4)


@pytest.mark.parametrize("layout", [SlotLayout(0, 4, 4), SlotLayout(2, 4, 4), SlotLayout(2, 7, 4), SlotLayout(1, 1, 1)])
def test_slots_in_order_hold_what_the_next_token_sees(layout: SlotLayout) -> None:
    assert layout.window is not None
    for held in range(30):
        index = layout.token_index(torch.tensor([held]), layout.slots)[0]
        found = [int(t) for slots in layout.in_order(held) for t in index[slots]]
        visible = [t for t in range(held) if t < layout.sinks or held - t < layout.window]
        assert found == visible


@pytest.mark.parametrize("view", VIEWS)
def test_a_chunk_reads_no_value_on_the_host(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor writes one to the device, so that on a GPU the host runs ahead of it."""
    monkeypatch.setattr("phasor.nn.checks.can_check_values", lambda x: False)
    synchronizing = {"aten._local_scalar_dense", "aten.nonzero", "aten.lift_fresh"}
    model, ids = build(tiny("rotary", attention=VIEWS[view])), tokens(2, 40)
    cache, called = model.new_cache(2, WINDOW), set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(func.overloadpacket._qualified_op_name.replace("::", "."))
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        model(ids[:, :20], cache=cache)
        with Record():
            model(ids[:, 20:], cache=cache, head=False)
    assert "aten.copy_" in called
    assert not called & synchronizing


def test_static_steps_from_an_empty_cache_begin_where_it_does() -> None:
    """The distance to sinks is capped from the first position on, which may be any."""
    model, ids = build(tiny("rotary", attention=VIEWS["capped sinks"])), tokens(1, 30)
    cache, other = model.new_cache(1, WINDOW), model.new_cache(1, WINDOW)
    cache.next_positions = other.next_positions = 1000
    static = StaticKVCache(other)
    with torch.no_grad():
        found = torch.cat([model(ids[:, i : i + 1], cache=static) for i in range(30)], dim=1)
        assert torch.allclose(found, model(ids, cache=cache), atol=1e-4)

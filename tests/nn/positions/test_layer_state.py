"""A scheme with state for every token that follows the layer's input, defined here: nothing in phasor knows of it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import pytest
import torch
from device import DEVICE
from schemes import build, tiny, tokens
from torch import Tensor, nn

import phasor
from phasor.config import PositionConfig
from phasor.config.cached import CachedTensor
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.attention.base import AttentionContext
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, layers_with

SAME = 1e-12  # float64, relative to logits of order 1


class Marked(NamedTuple):
    """The marks of queries `[B, T]`, and of all keys `[B, S, 1]`."""

    queries: Tensor
    keys: Tensor


@pytest.fixture(autouse=True)
def scheme():
    """Keys are scaled by a mark that their layer computed from its input, the output by the query's own mark."""

    class MarkConfig(PositionConfig, kind="mark"):
        """Every token keeps a mark of its layer's input, and how many tokens came before it."""

        acts_on: ClassVar[tuple[str, ...]] = ("keys",)
        shift_invariant: ClassVar[bool] = True
        follows_input: ClassVar[bool] = True

        def cached_per_token(self, model):
            return {"mark": CachedTensor((1,), "float64"), "count": CachedTensor((), "int32")}

    class Mark(Position, config=MarkConfig):
        @classmethod
        def build(cls, config, model, side):
            module = super().build(config, model, side)
            module.weight = nn.ParameterList(torch.randn(model.dim) for _ in range(layers_with(config, model, side)))
            return module

        def layer_weights(self, layer: int) -> tuple[Tensor]:
            return (self.weight[layer],)

        def for_layer(self, x: Tensor, prepared: None, weights: tuple[Tensor], step: LayerStep) -> Marked:
            own = torch.tanh(x @ weights[0]).double()  # [B, T]
            before = step.last("count")
            count = step.cumsum(torch.ones_like(own, dtype=torch.int32)).to(torch.int32)
            count = count if before is None else count + before[:, None]
            marks, counts = step.update(mark=own[..., None], count=count)
            assert counts.dtype == torch.int32
            return Marked(own, marks + 0.01 * counts[..., None])

        def on_attention(self, q, k, mask, score_mod, prepared):
            return q, (k * (1 + prepared.keys[..., None])).to(k.dtype), score_mod

        def on_output(self, y, prepared):
            return (y * (1 + prepared.queries[..., None, None])).to(y.dtype)

    yield MarkConfig()
    del PositionConfig.kinds["mark"], Position.modules_by_config[MarkConfig]


def mark_model(scheme, **changes) -> phasor.Transformer:
    return build(tiny(scheme, **changes)).double()


def expected_attention(attention: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """The attention of a layer as its equation, for an input `[B, T, dim]` without a cache."""
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    projected = (x @ attention.qkv.weight.T).view(*x.shape[:2], kv_heads, heads // kv_heads + 2, dim)
    q, k, v = projected[..., :-2, :].flatten(2, 3), projected[..., -2, :], projected[..., -1, :]
    mark = torch.tanh(x @ weight)
    k = k * (1 + mark + 0.01 * torch.arange(1, x.shape[1] + 1))[..., None, None]
    k, v = (y.repeat_interleave(heads // kv_heads, dim=2) for y in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * dim**-0.5
    weights = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf")).softmax(-1)
    y = torch.einsum("bhqk,bkhd->bqhd", weights, v) * (1 + mark)[..., None, None]
    return y.flatten(2) @ attention.out.weight.T


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=SAME * float(expected.abs().max()))


@torch.no_grad()
def test_the_hooks_are_given_the_input_the_layer_and_all_keys(scheme):
    model, seen = mark_model(scheme, num_layers=3, layers=({}, {"position": "none"})), []
    layers = [model.decoder.blocks[index].attention for index in (0, 2)]  # those with the scheme
    for attention in layers:
        attention.register_forward_hook(lambda _, args, kwargs, y: seen.append((args[0], y)), with_kwargs=True)
    model(tokens(2, 9))
    for attention, weight, (x, y) in zip(layers, model.decoder.positions[0].weight, seen, strict=True):
        close(y, expected_attention(attention, weight, x))


@pytest.mark.parametrize("view", [{}, {"window": 4}, {"window": 4, "sink_tokens": 2}], ids=["whole", "window", "sinks"])
@torch.no_grad()
def test_state_goes_through_caches_files_reorder_and_crop(scheme, view, tmp_path):
    model, ids = mark_model(scheme, attention=view), tokens(2, 24)
    whole = model(ids)
    cache, parts, first = model.new_cache(2, 24, spare=4), [], 0
    for size in (5, 1, 9, 1, 4):
        parts.append(model(ids[:, first : first + size], cache=cache))
        first += size
    close(torch.cat(parts, dim=1), whole[:, :20])
    kept = cache.layers[0]
    assert list(kept) == ["keys", "values", "mark", "count"]
    assert kept["mark"].dtype == torch.float64
    assert kept["count"].dtype == torch.int32
    assert cache.nbytes == sum(x.nbytes for layer in cache.layers for x in layer.values())
    narrow = cache.to(dtype=torch.bfloat16).layers[0]
    assert (narrow["keys"].dtype, narrow["mark"].dtype) == (torch.bfloat16, torch.float64)

    cache.crop([3, 2])
    rest = torch.cat((ids[:1, 17:19], ids[1:, 18:20]))
    found = model(rest, cache=cache)
    close(found[0], whole[0, 17:19])
    close(found[1], whole[1, 18:20])

    copied = cache.copy()
    cache.reorder([1, 1])
    cache.save(tmp_path / "cache.safetensors")
    loaded = phasor.KVCache.load(tmp_path / "cache.safetensors", DEVICE)
    close(model(ids[1:, 20:22].expand(2, -1), cache=loaded), whole[1:, 20:22].expand(2, -1, -1))
    close(
        model(torch.stack((ids[0, 19:21], ids[1, 20:22])), cache=copied),
        torch.stack((whole[0, 19:21], whole[1, 20:22])),
    )

    copied.crop([0, 1])  # rows of one search hold as many tokens as each other
    static = StaticKVCache(copied)
    static.reorder(torch.tensor([1, 0]), 2)
    close(model(ids[[1, 0], 21:22], cache=static), whole[[1, 0], 21:22])


@torch.no_grad()
def test_generation_with_beams(scheme):
    model, ids = mark_model(scheme), tokens(2, 9).tolist()
    for prompt, new in zip(ids, phasor.generate(model, ids, max_new_tokens=6), strict=True):
        assert model(torch.tensor([prompt + new]))[0, 8:-1].argmax(-1).tolist() == new
    together = phasor.generate(model, ids, max_new_tokens=4, num_beams=3)
    assert together == [phasor.generate(model, prompt, max_new_tokens=4, num_beams=3) for prompt in ids]


def test_two_parts_of_a_layer_cannot_keep_the_same_name(scheme, monkeypatch):
    monkeypatch.setattr(type(scheme), "cached_per_token", lambda self, model: {"keys": CachedTensor((1,))})
    with pytest.raises(ValueError, match="two parts of a layer keep 'keys' for each token"):
        tiny(scheme)


def test_the_context_of_attention_stays_small():
    """What a scheme needs goes through its hooks; a field here is one that every kind of attention has to know."""
    assert [field.name for field in dataclasses.fields(AttentionContext)] == [
        "mask",
        "position",
        "step",
        "prepared",
        "position_weights",
        "positions",
        "capped_sinks",
        "weights",
    ]

"""The kernels of a decoding step against float64: projections, activations, attention over the cache, argmax."""

from __future__ import annotations

import math

import pytest
import torch
from decode_kernels import ROUNDING, bfloat16_in_the_interpreter, drawn, rms_norm  # noqa: F401
from device import DEVICE
from schemes import relative_change

import phasor
from phasor.generation import fused_step
from phasor.nn.positions.phase import cos_sin_of
from phasor.ops.decode import decode_attention, gemv, lm_head_argmax
from phasor.ops.decode.tiles import Tiles, tiles_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "tiles"),
    [
        (1, 48, 37, Tiles(4, 32, 1)),
        (1, 64, 8, tiles_of(1, 4096, 2048)),
        (1, 64, 8, tiles_of(1, 2048, 2048)),
        (1, 64, 8, tiles_of(1, 2048, 8192)),
        (3, 80, 37, Tiles(16, 32, 1, 2)),
        (16, 40, 16, tiles_of(16, 2048, 2048)),
    ],
)
def test_projections(rows, inputs, outputs, tiles, dtype):
    x, weight, bias = drawn(rows, inputs, dtype=dtype), drawn(outputs, inputs, dtype=dtype), drawn(outputs, dtype=dtype)
    scale, residual = drawn(inputs, dtype=dtype), drawn(rows, outputs, dtype=dtype)
    wide = [t.double() for t in (x, weight, bias, scale, residual)]
    norm = gemv.Norm(scale, 1.0, 1e-3)
    made = rms_norm(wide[0], wide[3], 1.0, 1e-3) @ wide[1].mT + wide[2]

    plain = gemv.project(x, weight, torch.empty(rows, outputs, dtype=dtype), tiles=tiles)
    assert relative_change(plain.double(), wide[0] @ wide[1].mT) < ROUNDING[dtype]
    out = residual.clone()
    gemv.project(x, weight, out, norm=norm, bias=bias, residual=out, multiplier=0.5, tiles=tiles)
    assert relative_change(out.double(), wide[4] + 0.5 * made) < ROUNDING[dtype]

    logits, best = torch.empty(rows, outputs, dtype=dtype), torch.full((rows,), lm_head_argmax.LOWEST)
    lm_head_argmax.vote(x, weight, logits, best, norm=norm, bias=bias, multiplier=0.5, tiles=tiles)
    assert relative_change(logits.double(), 0.5 * made) < ROUNDING[dtype]
    chosen, history, turn = torch.zeros(rows, dtype=torch.int64), torch.zeros(3, rows).long(), torch.tensor([7])
    counts, places = torch.arange(rows), torch.arange(rows) + 2**40
    lm_head_argmax.finish(best, chosen, history, turn, counts, places)
    assert chosen.tolist() == logits.argmax(-1).tolist() == history[7 % 3].tolist()
    assert turn.tolist() == [8]
    assert counts.tolist() == list(range(1, rows + 1))
    assert places.tolist() == [n + 2**40 for n in counts.tolist()]
    assert set(best.tolist()) == {lm_head_argmax.LOWEST}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", fused_step.ACTIVATIONS)
def test_activations(name, rows):
    config = phasor.FeedForwardConfig(activation=name, bias=True)
    width, hidden = 24, 21
    outputs = hidden * (2 if config.gated else 1)
    x, weight, bias, scale = drawn(rows, width), drawn(outputs, width), drawn(outputs), drawn(width)
    normed = rms_norm(x.double(), scale.double(), 0.0, 1e-5)
    made = normed @ weight.double().mT + bias.double()
    expected = phasor.nn.feed_forward.activate(made, config.activation)
    tiles, norm = Tiles(8, 16, 1), gemv.Norm(scale, 0.0, 1e-5)
    given = {"gated": config.gated, "norm": norm, "bias": bias, "tiles": tiles}
    kind = fused_step.ACTIVATIONS[name]
    found = gemv.feed(x, weight, torch.empty(rows, hidden), kind, **given)
    assert relative_change(found.double(), expected) < ROUNDING[torch.float32]
    alone = gemv.gate(made.float(), torch.empty(rows, hidden), kind, gated=config.gated)
    assert relative_change(alone.double(), expected) < ROUNDING[torch.float32]


def test_of_equal_logits_the_first_wins_and_the_lowest_can_win():
    x, weight = torch.ones(1, 4), torch.tensor([-3.0, -1.0, -2.0, -1.0, -1.0])[:, None].expand(5, 4).contiguous()
    logits, best, chosen = torch.empty(1, 5), torch.full((1,), lm_head_argmax.LOWEST), torch.zeros(1, dtype=torch.int64)
    where = torch.zeros(2, 1).long(), torch.zeros(1).long(), torch.zeros(1).long(), torch.zeros(1).long()
    for outputs in (4, 1):
        lm_head_argmax.vote(x, weight, logits, best, tiles=Tiles(outputs, 16, 1))
        lm_head_argmax.finish(best, chosen, *where)
        assert chosen.tolist() == [1]


def attention_in_float64(
    qkv, keys, values, counts, positions, shared, scale, inc, factor, width, adjacent, norms, sinks
):
    """Row by row and head by head; the cache gets the entry, and what is seen are the slots that hold a token."""
    rows, slots, groups, dim = keys.shape
    out = torch.empty(rows, groups, shared, dim, dtype=torch.float64)
    for row in range(rows):
        made = qkv[row].view(groups, shared + 2, dim).double()
        asked, key, value = made[:, :shared], made[:, shared : shared + 1], made[:, -1]
        if norms is not None:
            asked = rms_norm(
                asked, norms.queries.double().expand(groups * shared, dim).view_as(asked), norms.offset, norms.eps
            )
            key = rms_norm(key, norms.keys.double().expand(groups, dim)[:, None], norms.offset, norms.eps)
        if width:
            cos, sin = (factor * t for t in cos_sin_of(positions[row], inc, torch.float64))
            pairing = "adjacent" if adjacent else "half"
            asked, key = (phasor.ops.rope.rope.rotate_pairs_ref(t, cos, sin, pairing) for t in (asked, key))
        count = int(counts[row])
        slot = count if count < sinks else sinks + (count - sinks) % (slots - sinks)
        keys[row, slot], values[row, slot] = key[:, 0], value
        held = min(count + 1, slots)
        for group in range(groups):
            k, v = keys[row, :held, group], values[row, :held, group]
            out[row, group] = (scale * asked[group] @ k.mT).softmax(-1) @ v
    return out.view(rows, -1)


CASES = {
    # rows' tokens, slots, groups, heads a group, width of a head, rotated, adjacent, norm weights, sinks
    "one token": ([0], 32, 1, 1, 8, 8, False, None, 0),
    "no rotation": ([5, 31, 0], 32, 2, 3, 12, 0, False, None, 0),
    "half": ([17, 3], 40, 2, 4, 16, 16, False, None, 0),
    "adjacent": ([39], 40, 1, 2, 16, 16, True, None, 0),
    "partial": ([9, 40], 41, 2, 2, 20, 6, False, None, 0),
    "partial adjacent": ([9], 41, 2, 1, 20, 6, True, None, 0),
    "norm": ([21, 5], 32, 2, 2, 16, 16, False, "head", 0),
    "norm by head": ([21], 32, 2, 3, 16, 8, True, "heads", 0),
    "ring": ([3, 17, 18, 40], 18, 1, 2, 8, 8, False, None, 0),
    "ring and sinks": ([1, 20, 23, 100], 21, 2, 2, 8, 8, False, None, 3),
    "several blocks a program": ([47, 48, 100], 50, 2, 2, 8, 8, False, None, 2),
}


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_attention(case, splits):
    held, slots, groups, shared, dim, width, adjacent, normed, sinks = CASES[case]
    rows = len(held)
    counts, positions = torch.tensor(held), torch.tensor(held) + 2**36 * torch.arange(rows)
    qkv = drawn(rows, groups * (shared + 2) * dim)
    keys, values = drawn(rows, slots, groups, dim), drawn(rows, slots, groups, dim)
    empty = torch.arange(slots)[None] >= counts[:, None]
    keys[empty], values[empty] = math.nan, math.nan  # what holds no token is not read
    inc = torch.randint(-(2**62), 2**62, (width // 2,))
    norms = None
    if normed is not None:
        shapes = ((dim,), (dim,)) if normed == "head" else ((groups * shared, dim), (groups, dim))
        norms = decode_attention.HeadNorm(*(drawn(*shape) for shape in shapes), 1.0, 1e-3)
    wide = keys.double(), values.double()
    expected = attention_in_float64(qkv, *wide, counts, positions, shared, 0.3, inc, 0.9, width, adjacent, norms, sinks)
    desk = decode_attention.Desk(rows, groups, shared, dim, DEVICE)
    desk.splits = min(desk.splits, splits)
    turning = decode_attention.Turning(inc, 0.9, width, adjacent) if width else None
    given = {"scale": 0.3, "turning": turning, "norm": norms, "sinks": sinks}
    given["reading"] = decode_attention.Reading(16 if splits == 1 else 8, 1, 1)
    found = decode_attention.attend(
        qkv, keys, values, counts, positions, torch.empty(rows, groups * shared * dim), desk, **given
    )
    assert relative_change(found.double(), expected) < 2e-6
    assert int(desk.arrived.abs().sum()) == 0
    for cache, truth in zip((keys, values), wide, strict=True):
        torch.testing.assert_close(cache.double(), truth, atol=2e-6, rtol=0, equal_nan=True)


@pytest.mark.cpu_only("a compiled kernel cannot call back into the test")
@pytest.mark.parametrize("splits", [1, 3])
def test_what_the_kernel_before_writes_is_read_after_it_ends(splits, monkeypatch):
    """Until then the projection is not there, and neither the cache nor the result is touched."""
    qkv, keys, values = drawn(1, 4 * 8), drawn(1, 24, 1, 8), drawn(1, 24, 1, 8)
    counts, inc = torch.tensor([20]), torch.randint(-(2**62), 2**62, (4,))
    wide = keys.double(), values.double()
    expected = attention_in_float64(qkv, *wide, counts, counts, 2, 0.3, inc, 1.0, 8, False, None, 0)
    late, out = torch.full_like(qkv, math.nan), torch.full((1, 16), math.nan)
    before, waits = (keys.clone(), values.clone()), []

    def pdl_wait(pdl):
        if not waits:
            assert out.isnan().all()
            assert torch.equal(keys, before[0])
            assert torch.equal(values, before[1])
        waits.append(pdl)
        late.copy_(qkv)

    monkeypatch.setattr(decode_attention, "pdl_wait", pdl_wait)
    desk = decode_attention.Desk(1, 1, 2, 8, DEVICE)
    desk.splits = splits
    given = {"scale": 0.3, "turning": decode_attention.Turning(inc, 1.0, 8, False)}
    given["reading"] = decode_attention.Reading(8, 1, 1)
    decode_attention.attend(late, keys, values, counts, counts, out, desk, **given)
    assert len(waits) == splits
    assert relative_change(out.double(), expected) < 2e-6


def test_phases_at_positions_up_to_2_to_the_36():
    """Queries of one pair of features `(1, 0)`: the scores with keys that are unit vectors are cosine and sine."""
    inc = torch.randint(-(2**63), 2**63 - 1, (8,))
    positions = torch.randint(0, 2**36, (40,))
    qkv = torch.zeros(40, 3, 16)
    qkv[:, 1, :8] = 1.0  # the key that goes into the cache
    keys, values = torch.zeros(40, 4, 1, 16), torch.zeros(40, 4, 1, 16)
    desk = decode_attention.Desk(40, 1, 1, 16, DEVICE)
    turning, reading = decode_attention.Turning(inc, 1.0, 16, False), decode_attention.Reading(16, 1, 1)
    given = torch.zeros(40).long(), positions, torch.empty(40, 16), desk
    decode_attention.attend(qkv.flatten(1), keys, values, *given, scale=1.0, turning=turning, reading=reading)
    truth = torch.cat(cos_sin_of(positions[:, None], inc, torch.float64), dim=-1)
    assert (keys[:, 0, 0].double() - truth).abs().max() < 2e-7

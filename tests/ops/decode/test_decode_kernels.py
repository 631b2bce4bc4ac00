"""The kernels of a decoding step against float64: projections, activations, attention over the cache, argmax."""

from __future__ import annotations

import math

import pytest
import torch
from decode_kernels import ROUNDING, bfloat16_in_the_interpreter, randn, rms_norm  # noqa: F401
from device import DEVICE, ON_GPU
from schemes import relative_change

import phasor
from phasor.nn.positions.phase import cos_sin_of
from phasor.ops.decode import (
    ACTIVATIONS,
    NormArgs,
    QKNormArgs,
    RotaryArgs,
    Tiles,
    activate_ref,
    advance_step_ref,
    choose_tiles,
    decode_attention,
    decode_attention_ref,
    embed_tokens_ref,
    embedding,
    gemv,
    lm_head_argmax,
    lm_head_argmax_ref,
    project_activate_ref,
    project_ref,
    small_gemm_ref,
    split_k_gemm,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "tiles"),
    [
        (1, 48, 37, Tiles(4, 32, 1)),
        (1, 64, 8, choose_tiles(1, 2048, 1024)),
        (1, 64, 8, choose_tiles(1, 32000, 1024)),
        (1, 64, 8, choose_tiles(1, 4096, 2048)),
        (1, 64, 8, choose_tiles(1, 2048, 2048)),
        (1, 64, 8, choose_tiles(1, 2048, 8192)),
        (3, 80, 37, Tiles(16, 32, 1, 2)),
        (16, 40, 16, choose_tiles(16, 2048, 2048)),
    ],
)
def test_projections(rows, inputs, outputs, tiles, dtype):
    x, weight, bias = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype), randn(outputs, dtype=dtype)
    norm_weight, residual = randn(inputs, dtype=dtype), randn(rows, outputs, dtype=dtype)
    wide = [t.double() for t in (x, weight, bias, norm_weight, residual)]
    norm, wide_norm = NormArgs(norm_weight, 1.0, 1e-3), NormArgs(wide[3], 1.0, 1e-3)
    exact = rms_norm(wide[0], wide[3], 1.0, 1e-3) @ wide[1].mT + wide[2]
    assert relative_change(small_gemm_ref(*wide[:2], wide_norm) + wide[2], exact) < 1e-13

    plain = gemv.project(x, weight, torch.empty(rows, outputs, dtype=dtype), tiles=tiles)
    assert relative_change(plain.double(), wide[0] @ wide[1].mT) < ROUNDING[dtype]
    assert relative_change(plain.double(), project_ref(*wide[:2])) < ROUNDING[dtype]
    out = residual.clone()
    gemv.project(x, weight, out, norm=norm, bias=bias, residual=out, multiplier=0.5, tiles=tiles)
    assert relative_change(out.double(), wide[4] + 0.5 * exact) < ROUNDING[dtype]
    reference = project_ref(*wide[:2], norm=wide_norm, bias=wide[2], residual=wide[4], multiplier=0.5)
    assert relative_change(reference, wide[4] + 0.5 * exact) < 1e-13
    assert relative_change(out.double(), reference) < ROUNDING[dtype]

    logits, argmax = torch.empty(rows, outputs, dtype=dtype), torch.full((rows,), lm_head_argmax.EMPTY_ARGMAX)
    lm_head_argmax.lm_head_argmax(x, weight, logits, argmax, norm=norm, bias=bias, multiplier=0.5, tiles=tiles)
    assert relative_change(logits.double(), 0.5 * exact) < ROUNDING[dtype]
    reference, _ = lm_head_argmax_ref(*wide[:2], norm=wide_norm, bias=wide[2], multiplier=0.5)
    assert relative_change(reference, 0.5 * exact) < 1e-13
    assert relative_change(logits.double(), reference) < ROUNDING[dtype]
    tokens, history, step = torch.zeros(rows, dtype=torch.int64), torch.zeros(3, rows).long(), torch.tensor([7])
    lengths, positions = torch.arange(rows), torch.arange(rows) + 2**40
    lm_head_argmax.advance_step(argmax, tokens, history, step, lengths, positions)
    assert tokens.tolist() == logits.argmax(-1).tolist() == history[7 % 3].tolist()
    assert step.tolist() == [8]
    assert lengths.tolist() == list(range(1, rows + 1))
    assert positions.tolist() == [n + 2**40 for n in lengths.tolist()]
    assert set(argmax.tolist()) == {lm_head_argmax.EMPTY_ARGMAX}
    buffers = torch.zeros(rows).long(), torch.zeros(3, rows).long(), torch.tensor([7]), torch.arange(rows)
    advance_step_ref(logits.argmax(-1), *buffers, torch.arange(rows) + 2**40)
    assert all(torch.equal(a, b) for a, b in zip(buffers, (tokens, history, step, lengths), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(("rows", "dim"), [(1, 300), (3, 16)])
def test_embedding(rows, dim, scale, dtype):
    table, tokens = randn(7, dim, dtype=dtype), torch.tensor([6, 0, 3])[:rows]
    found = embedding.embed_tokens(tokens, table, torch.empty(rows, dim, dtype=dtype), scale=scale)
    assert torch.equal(found, torch.nn.functional.embedding(tokens, table) * scale)
    assert torch.equal(found, embed_tokens_ref(tokens, table, scale))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, rows):
    config = phasor.FeedForwardConfig(activation=name, bias=True)
    width, hidden = 24, 21
    outputs = hidden * (2 if config.gated else 1)
    x, weight, bias, norm_weight = randn(rows, width), randn(outputs, width), randn(outputs), randn(width)
    wide = [t.double() for t in (x, weight, bias, norm_weight)]
    projected = rms_norm(wide[0], wide[3], 0.0, 1e-5) @ wide[1].mT + wide[2]
    expected = phasor.nn.feed_forward.activate(projected, config.activation)
    tiles, norm = Tiles(8, 16, 1), NormArgs(norm_weight, 0.0, 1e-5)
    given = {"glu": config.gated, "norm": norm, "bias": bias, "tiles": tiles}
    kind = ACTIVATIONS[name]
    found = gemv.project_activate(x, weight, torch.empty(rows, hidden), kind, **given)
    assert relative_change(found.double(), expected) < ROUNDING[torch.float32]
    alone = gemv.activate(projected.float(), torch.empty(rows, hidden), kind, glu=config.gated)
    assert relative_change(alone.double(), expected) < ROUNDING[torch.float32]
    wide_norm = NormArgs(wide[3], 0.0, 1e-5)
    reference = project_activate_ref(*wide[:2], kind, glu=config.gated, norm=wide_norm, bias=wide[2])
    assert relative_change(reference, expected) < 1e-13
    assert relative_change(activate_ref(projected, kind, glu=config.gated), expected) < 1e-13
    assert relative_change(found.double(), reference) < ROUNDING[torch.float32]


def test_argmax_takes_the_first_of_equal_logits():
    x, weight = torch.ones(1, 4), torch.tensor([-3.0, -1.0, -2.0, -1.0, -1.0])[:, None].expand(5, 4).contiguous()
    logits, argmax = torch.empty(1, 5), torch.full((1,), lm_head_argmax.EMPTY_ARGMAX)
    tokens, history = torch.zeros(1, dtype=torch.int64), torch.zeros(2, 1).long()
    buffers = history, torch.zeros(1).long(), torch.zeros(1).long(), torch.zeros(1).long()
    for outputs in (4, 1):
        lm_head_argmax.lm_head_argmax(x, weight, logits, argmax, tiles=Tiles(outputs, 16, 1))
        lm_head_argmax.advance_step(argmax, tokens, *buffers)
        assert tokens.tolist() == [1]
    assert lm_head_argmax_ref(x, weight)[1].tolist() == [1]


def attention_in_float64(
    qkv,
    keys,
    values,
    lengths,
    positions,
    shared,
    scale,
    inc,
    factor,
    width,
    adjacent,
    norms,
    sinks,
    sink_logits=None,
    bias=None,
):
    """Row by row and head by head; the new key and value are written, and the slots that hold a token are visible."""
    rows, slots, groups, dim = keys.shape
    out = torch.empty(rows, groups, shared, dim, dtype=torch.float64)
    for row in range(rows):
        heads = qkv[row].view(groups, shared + 2, dim).double()
        q, key, value = heads[:, :shared], heads[:, shared : shared + 1], heads[:, -1]
        if norms is not None:
            q = rms_norm(q, norms.q_weight.double().expand(groups * shared, dim).view_as(q), norms.offset, norms.eps)
            key = rms_norm(key, norms.k_weight.double().expand(groups, dim)[:, None], norms.offset, norms.eps)
        if width:
            cos, sin = (factor * t for t in cos_sin_of(positions[row], inc, torch.float64))
            pairing = "adjacent" if adjacent else "half"
            q, key = (phasor.ops.rope.rotate_pairs_ref(t, cos, sin, pairing) for t in (q, key))
        length = int(lengths[row])
        slot = length if length < sinks else sinks + (length - sinks) % (slots - sinks)
        keys[row, slot], values[row, slot] = key[:, 0], value
        held = min(length + 1, slots)
        for group in range(groups):
            k, v = keys[row, :held, group], values[row, :held, group]
            scores = scale * q[group] @ k.mT
            if bias is not None:
                scores = scores + bias.double()[min(row, len(bias) - 1)].view(groups, shared, slots)[group, :, :held]
            if sink_logits is not None:
                own = sink_logits.double().view(groups, shared, 1)[group]
                scores = torch.cat((scores, own), dim=-1)
            out[row, group] = scores.softmax(-1)[:, :held] @ v
    return out.view(rows, -1)


CASES = {
    # tokens of each row, slots, kv heads, queries per kv head, head dim, rotary dim, adjacent, norm weights, sinks
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
    "several tiles per program": ([47, 48, 100], 50, 2, 2, 8, 8, False, None, 2),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize(("splits", "has_sink_logits"), [(1, False), (5, False), (5, True)])
@pytest.mark.parametrize("case", CASES)
def test_attention(case, splits, has_sink_logits):
    check_attention(case, splits, has_sink_logits)


@pytest.mark.sample(6)
@pytest.mark.parametrize("rows", ["one bias for all", "a bias for each"])
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("case", ["no rotation", "ring and sinks", "several tiles per program"])
def test_attention_with_a_bias(case, splits, rows):
    held, slots, groups, shared, *_ = CASES[case]
    bias = 3 * randn(1 if rows == "one bias for all" else len(held), groups * shared, slots)
    check_attention(case, splits, has_sink_logits=True, bias=bias)


def check_attention(case, splits, has_sink_logits, bias=None):
    held, slots, groups, shared, dim, width, adjacent, norm_kind, sinks = CASES[case]
    rows = len(held)
    lengths, positions = torch.tensor(held), torch.tensor(held) + 2**36 * torch.arange(rows)
    qkv = randn(rows, groups * (shared + 2) * dim)
    keys, values = randn(rows, slots, groups, dim), randn(rows, slots, groups, dim)
    empty = torch.arange(slots)[None] >= lengths[:, None]
    keys[empty], values[empty] = math.nan, math.nan  # slots without a token are not read
    inc = torch.randint(-(2**62), 2**62, (width // 2,))
    norms = None
    if norm_kind is not None:
        shapes = ((dim,), (dim,)) if norm_kind == "head" else ((groups * shared, dim), (groups, dim))
        norms = QKNormArgs(*(randn(*shape) for shape in shapes), 1.0, 1e-3)
    sink_logits = randn(groups * shared) if has_sink_logits else None
    wide, before = (keys.double(), values.double()), (keys.clone(), values.clone())
    expected = attention_in_float64(
        qkv, *wide, lengths, positions, shared, 0.3, inc, 0.9, width, adjacent, norms, sinks, sink_logits, bias
    )
    workspace = decode_attention.SplitKWorkspace(rows, groups, shared, dim, DEVICE)
    workspace.splits = min(workspace.splits, splits)
    rope = RotaryArgs(inc, 0.9, width, adjacent) if width else None
    given = {"scale": 0.3, "rope": rope, "qk_norm": norms, "sink_tokens": sinks, "sink_logits": sink_logits}
    given["bias"] = bias
    # A compiled tl.dot takes at least 16.
    given["tiles"] = decode_attention.KVTiles(
        16 if splits == 1 or ON_GPU else 8, 1, 1
    )  # compiled products take 16 at least
    found = decode_attention.decode_attention(
        qkv, keys, values, lengths, positions, torch.empty(rows, groups * shared * dim), workspace, **given
    )
    assert relative_change(found.double(), expected) < 2e-6
    caches = before[0].double(), before[1].double()
    wide_norms = norms and QKNormArgs(norms.q_weight.double(), norms.k_weight.double(), norms.offset, norms.eps)
    given = {"scale": 0.3, "rope": rope, "qk_norm": wide_norms, "sink_tokens": sinks, "sink_logits": sink_logits}
    given["bias"] = bias
    reference = decode_attention_ref(qkv.double(), *caches, lengths, positions, **given)
    assert relative_change(reference, expected) < 1e-12
    assert relative_change(found.double(), reference) < 2e-6
    for cache, expected in zip(caches, wide, strict=True):
        torch.testing.assert_close(cache, expected, atol=1e-12, rtol=0, equal_nan=True)
    for cache, expected in zip((keys, values), wide, strict=True):
        torch.testing.assert_close(cache.double(), expected, atol=2e-6, rtol=0, equal_nan=True)


PAGED = {
    # tokens of each row, page size, pages of a row, kv heads, queries per kv head, head dim, window, sinks
    "one page": ([0, 3, 7], 8, 1, 1, 2, 8, None, 0),
    "some pages": ([0, 1, 4, 17, 39], 4, 10, 2, 3, 12, None, 0),
    "pages of 3": ([5, 29], 3, 10, 1, 2, 8, None, 0),
    "window": ([0, 3, 4, 5, 11, 12, 40, 1003], 4, 4, 2, 2, 8, 5, 0),
    "window of one": ([0, 9], 4, 3, 1, 2, 8, 1, 0),
    "window and sinks": ([0, 4, 5, 6, 8, 9, 27, 28, 1003], 4, 6, 2, 2, 8, 7, 5),
    "a page of sinks": ([2, 9, 50], 2, 5, 1, 1, 8, 4, 2),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("rows", ["no bias", "one bias for all", "a bias for each"])
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("case", PAGED)
def test_attention_over_pages(case, splits, rows):
    """Only pages of visible tokens are read, in any order; a row without pages sees its own token and keeps nothing."""
    held, size, width, groups, shared, dim, window, sinks = PAGED[case]
    held, first = [*held, 0], -(-sinks // size)
    count, num_slots, heads = len(held), width * size, groups * shared
    bias = None if rows == "no bias" else 3 * randn(1 if rows == "one bias for all" else count, heads, num_slots)
    qkv, sink_logits = randn(count, groups * (shared + 2) * dim), randn(heads)
    inc = torch.randint(-(2**62), 2**62, (dim // 2,))
    pages = 1 + torch.randperm(count * width).view(count, width).int()
    pages[-1] = 0
    keys, values = (torch.full((1 + count * width, size, groups, dim), math.nan) for _ in range(2))
    expected, positions = torch.empty(count, groups, shared, dim, dtype=torch.float64), torch.tensor(held) + 2**36
    written = []
    for row, length in enumerate(held):
        heads_of_row = qkv[row].view(groups, shared + 2, dim).double()
        cos, sin = cos_sin_of(positions[row], inc, torch.float64)
        q, new, value = heads_of_row[:, :shared], heads_of_row[:, shared], heads_of_row[:, -1]
        q, new = (phasor.ops.rope.rotate_pairs_ref(t, cos, sin, "half") for t in (q, new))
        own_keys, own_values, slots = [], [], []
        for token in range(length + 1):
            if window is not None and token >= sinks and length - token >= window:
                continue
            block = token // size if token // size < first else first + (token // size - first) % (width - first)
            slots.append(block * size + token % size)
            own = (new, value) if token == length else (randn(groups, dim), randn(groups, dim))
            if token == length:
                written.append((int(pages[row, block]), token % size, own))
            else:
                keys[pages[row, block], token % size], values[pages[row, block], token % size] = own
            own_keys.append(own[0].double())
            own_values.append(own[1].double())
        k, v = torch.stack(own_keys, dim=1), torch.stack(own_values, dim=1)  # [K, tokens, D]
        scores = 0.3 * q @ k.mT
        if bias is not None:
            scores += bias.double()[min(row, len(bias) - 1)].view(groups, shared, num_slots)[:, :, slots]
        scores = torch.cat((scores, sink_logits.double().view(groups, shared, 1)), dim=-1)
        expected[row] = scores.softmax(-1)[..., :-1] @ v
    expected = expected.view(count, -1)
    after = [x.double() for x in (keys, values)]
    for page, offset, own in written:
        if page:
            after[0][page, offset], after[1][page, offset] = own
    workspace = decode_attention.SplitKWorkspace(count, groups, shared, dim, DEVICE)
    workspace.splits = min(workspace.splits, splits)
    given = {"scale": 0.3, "rope": RotaryArgs(inc, 1.0, dim, False), "sink_logits": sink_logits, "bias": bias}
    given |= {"sink_tokens": sinks, "pages": pages, "window": window}
    wide = keys.double(), values.double()
    lengths, out = torch.tensor(held), torch.empty(count, heads * dim)
    reference = decode_attention_ref(qkv.double(), *wide, lengths, positions, **given)
    assert relative_change(reference, expected) < 1e-12
    tiles = decode_attention.KVTiles(16 if splits == 1 or ON_GPU else 8, 1, 1)  # compiled products take 16 at least
    found = decode_attention.decode_attention(
        qkv, keys, values, lengths, positions, out, workspace, tiles=tiles, **given
    )
    assert relative_change(found.double(), expected) < 2e-6
    for found_cache, reference_cache, exact in zip((keys, values), wide, after, strict=True):
        torch.testing.assert_close(reference_cache, exact, atol=1e-12, rtol=0, equal_nan=True)
        torch.testing.assert_close(found_cache.double(), exact, atol=2e-6, rtol=0, equal_nan=True)


@pytest.mark.cpu_only("a compiled kernel cannot call back into the test")
@pytest.mark.parametrize("splits", [1, 3])
def test_inputs_are_read_only_after_pdl_wait(splits, monkeypatch):
    """Before it, the projection is not there yet, and neither the cache nor the output may be written."""
    qkv, keys, values = randn(1, 4 * 8), randn(1, 24, 1, 8), randn(1, 24, 1, 8)
    lengths, inc = torch.tensor([20]), torch.randint(-(2**62), 2**62, (4,))
    wide = keys.double(), values.double()
    expected = attention_in_float64(qkv, *wide, lengths, lengths, 2, 0.3, inc, 1.0, 8, False, None, 0)
    late, out = torch.full_like(qkv, math.nan), torch.full((1, 16), math.nan)
    before, waits = (keys.clone(), values.clone()), []

    def pdl_wait(pdl):
        if not waits:
            assert out.isnan().all()
            assert torch.equal(keys, before[0])
            assert torch.equal(values, before[1])
        waits.append(pdl)
        late.copy_(qkv)

    monkeypatch.setattr(decode_attention, "pdl_wait_alone", pdl_wait)
    workspace = decode_attention.SplitKWorkspace(1, 1, 2, 8, DEVICE)
    workspace.splits = splits
    given = {"scale": 0.3, "rope": RotaryArgs(inc, 1.0, 8, False)}
    given["tiles"] = decode_attention.KVTiles(8, 1, 1)
    decode_attention.decode_attention(late, keys, values, lengths, lengths, out, workspace, **given)
    assert len(waits) == splits
    assert relative_change(out.double(), expected) < 2e-6


def test_phases_are_exact_up_to_position_2_to_the_36():
    """Queries of one pair of features `(1, 0)`: the scores with keys that are unit vectors are cosine and sine."""
    inc = torch.randint(-(2**63), 2**63 - 1, (8,))
    positions = torch.randint(0, 2**36, (40,))
    qkv = torch.zeros(40, 3, 16)
    qkv[:, 1, :8] = 1.0  # the key that goes into the cache
    keys, values = torch.zeros(40, 4, 1, 16), torch.zeros(40, 4, 1, 16)
    workspace = decode_attention.SplitKWorkspace(40, 1, 1, 16, DEVICE)
    rope, tiles = RotaryArgs(inc, 1.0, 16, False), decode_attention.KVTiles(16, 1, 1)
    given = torch.zeros(40).long(), positions, torch.empty(40, 16), workspace
    decode_attention.decode_attention(qkv.flatten(1), keys, values, *given, scale=1.0, rope=rope, tiles=tiles)
    expected = torch.cat(cos_sin_of(positions[:, None], inc, torch.float64), dim=-1)
    assert (keys[:, 0, 0].double() - expected).abs().max() < 2e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(2, 128, 37), (3, 512, 70), (16, 768, 96), (9, 2048, 64), (5, 384, 20)]
)
def test_split_k_gemm(rows, inputs, outputs, dtype):
    x, weight = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype)
    bias, residual = randn(outputs, dtype=dtype), randn(rows, outputs, dtype=dtype)
    sums, exact = split_k_gemm.SplitKSums(rows, DEVICE), x.double() @ weight.double().mT
    assert split_k_gemm.split_k_gemm_why_not(x, weight) is None

    def multiply(given=weight, width=outputs, out=None, **options):
        out = torch.empty(rows, width, dtype=dtype) if out is None else out
        return split_k_gemm.split_k_gemm(x, given, out, sums, **options).double()

    assert relative_change(multiply(), exact) < ROUNDING[dtype]
    found = multiply(out=residual.clone(), bias=bias, residual=residual, multiplier=0.5)
    assert relative_change(found, residual.double() + 0.5 * (exact + bias.double())) < ROUNDING[dtype]
    active = activate_ref(exact + bias.double(), "relu2", glu=False)
    assert relative_change(multiply(bias=bias, activation="relu2"), active) < ROUNDING[dtype]
    both, biases = randn(2 * outputs, inputs, dtype=dtype), randn(2 * outputs, dtype=dtype)
    gated = activate_ref(x.double() @ both.double().mT + biases.double(), "silu", glu=True)
    assert relative_change(multiply(both, bias=biases, activation="silu", glu=True), gated) < 2 * ROUNDING[dtype]
    assert not sums.arrived.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 40), (7, 256)])
def test_norm_of_rows(rows, width, dtype):
    x, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    found = gemv.normalize(x, NormArgs(weight, 1.0, 1e-3))
    assert relative_change(found.double(), rms_norm(x.double(), weight.double(), 1.0, 1e-3)) < ROUNDING[dtype]

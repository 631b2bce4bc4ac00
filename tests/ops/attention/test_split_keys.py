"""Attention of one query per row over split keys: the Triton kernel under the interpreter against float64."""

import pytest
import torch
from decode_kernels import ROUNDING, bfloat16_in_the_interpreter  # noqa: F401
from device import DEVICE

from phasor.ops import dispatch
from phasor.ops.attention import ATTENTION, DistanceBias, Mask, ScoreMod, attention

kernel = pytest.importorskip("phasor.ops.attention.split_keys_kernel")
ROWS, SLOTS = 3, 75
COUNTS = torch.tensor([74, 0, 37], device=DEVICE)
# Heads, key/value heads, features of keys and of values; and whether values are a part of the keys.
SHAPES = {
    "groups": ((6, 2, 20, 20), False),
    "latent": ((5, 1, 22, 16), True),
    "latent, odd widths": ((19, 1, 23, 17), True),
    "wide values": ((4, 4, 8, 24), False),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of sixteen heads and keys, so that there are several."""
    tiles = kernel.SplitKeysTiles(16, 16, 4, 1)
    monkeypatch.setattr(kernel, "choose_split_keys_tiles", lambda *sizes, **kind: tiles)


def inputs(shape, shared, dtype):
    heads, kv_heads, key_dim, value_dim = shape
    q = torch.randn(ROWS, 1, heads, key_dim).to(dtype)
    k = torch.randn(ROWS, SLOTS, kv_heads, key_dim).to(dtype)
    v = k[..., key_dim - value_dim :] if shared else torch.randn(ROWS, SLOTS, kv_heads, value_dim).to(dtype)
    return q, k, v


def softmax_attention(q, k, v, visible, scale, bias=0.0, softcap=None, sinks=None):
    """The formula in float64, for what rows see `[B or 1, S]`."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = (scores + bias).masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    return torch.einsum("bhts,bshe->bthe", scores.softmax(-1)[..., : k.shape[1]], v)


def run(*args):
    with dispatch.force_path("triton"), torch.no_grad():
        assert ATTENTION.explain(*args)[0] == "Triton kernel over split keys"
        return attention(*args)


@pytest.mark.sample(8)
@pytest.mark.parametrize("target", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_a_static_cache_is_read_up_to_its_length(name, dtype, target, monkeypatch):
    monkeypatch.setattr(kernel, "TARGET_PROGRAMS", target)
    q, k, v = inputs(*SHAPES[name], dtype)
    visible = torch.arange(SLOTS) <= COUNTS[:, None]
    expected = softmax_attention(q, k, v, visible, 0.3)
    k[~visible] = float("nan")  # no slot behind the last token is read
    v[~visible] = float("nan")
    y = run(q, k, v, Mask(causal=True, query_index=COUNTS[:, None]), ScoreMod(scale=0.3))
    assert y.dtype == dtype
    assert y.shape == expected.shape
    # Of a sum of weights 1 over values near 1.
    assert (y.double() - expected).abs().max() <= 3 * ROUNDING[dtype]


@pytest.mark.parametrize("shared", [False, True])
def test_masks_biases_softcaps_and_sinks(shared):
    q, k, v = inputs((6, 1, 24, 16), shared, torch.float32)
    sinks, slopes = torch.randn(6), torch.rand(6)
    held = (torch.arange(SLOTS)[None] + COUNTS[:, None]) % SLOTS + 10  # a ring, whose slots are out of order
    mask = Mask(causal=True, window=20, sink_tokens=2, query_index=held.amax(1)[:, None], key_index=held)
    distance = mask.query_index - held
    how = ScoreMod(
        scale=0.3,
        softcap=2.0,
        sink_logits=sinks,
        bias=DistanceBias(slopes=slopes),
        query_positions=mask.query_index,
        key_positions=held,
    )
    bias = -slopes.double()[None, :, None, None] * distance[:, None, None].abs()
    expected = softmax_attention(q, k, v, (distance < 20) & (distance >= 0), 0.3, bias, 2.0, sinks)
    assert (run(q, k, v, mask, how).double() - expected).abs().max() <= 1e-5  # float32, of values near 1


def test_a_row_that_sees_no_key_is_zero():
    q, k, v = inputs((4, 2, 16, 16), False, torch.float32)
    real = torch.rand(ROWS, SLOTS) > 0.5
    real[1] = False
    y = run(q, k, v, Mask(key_mask=real, aligned=False), ScoreMod(scale=1.0))
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    expected = softmax_attention(q, k, v, real, 1.0)
    assert (y.double() - expected)[[0, 2]].abs().max() <= 1e-5


def test_a_plain_query_is_left_to_sdpa_where_it_splits_keys():
    how = Mask(causal=True, offset=SLOTS - 1), ScoreMod(scale=1.0)
    with dispatch.force_path("triton"), torch.no_grad():
        assert ATTENTION.explain(*inputs((4, 2, 16, 16), False, torch.bfloat16), *how)[0] == "SDPA in one call"
        wide = inputs((4, 1, 264, 256), True, torch.bfloat16)
        assert ATTENTION.explain(*wide, *how)[0] == "Triton kernel over split keys"

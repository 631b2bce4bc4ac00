"""Sparse attention: patterns against FlexAttention and transformers' Llama 4, values and gradients against float64."""

from __future__ import annotations

import pytest
import torch
from device import DEVICE, ON_GPU
from references import SINGLE, normal, plain_attention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from phasor.ops.attention import Mask, ScoreMod, blocks
from phasor.ops.sparse_attention import (
    SPARSE_ATTENTION,
    Dilated,
    KeyBlocks,
    TopBlocks,
    sparse_attention,
    sparse_attention_ref,
)

TOKENS, HEADS, KV_HEADS, DIM = 70, 4, 2, 16
SCALE = DIM**-0.5


def dilated(dilation, segment):
    return lambda i, j: ((i - j) % dilation == 0) & (i // segment == j // segment)


def strided(block, local, stride, first):
    def visible(i, j):
        a, b = i // block, j // block
        return ((a - b).abs() < local) | ((a - b) % stride == 0) | (a < first) | (b < first)

    return visible


# A pattern with its window, and independently of it which keys a query sees, by index.
PATTERNS = {
    "chunked": (Dilated(segment=16), None, dilated(1, 16)),
    "chunked, padded": (Dilated(segment=64), None, dilated(1, 64)),
    "chunked with a window": (Dilated(segment=16), 9, dilated(1, 16)),
    "dilated": (Dilated(4), None, dilated(4, TOKENS)),
    "dilated in segments": (Dilated(4, 24), None, dilated(4, 24)),
    "dilated sliding window": (Dilated(3), 10, dilated(3, TOKENS)),
    "strided": (KeyBlocks(8, 2, 3), None, strided(8, 2, 3, 0)),
    "strided, own block": (KeyBlocks(4, 1, 3), None, strided(4, 1, 3, 0)),
    "strided with a window": (KeyBlocks(4, 1, 3), 9, strided(4, 1, 3, 0)),
    "strided and global": (KeyBlocks(8, 1, 4, 2), None, strided(8, 1, 4, 2)),
    "local and global": (KeyBlocks(16, 2, None, 1), None, strided(16, 2, 10**6, 1)),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of sixteen queries, so that a few dozen tokens are several."""
    monkeypatch.setattr(blocks, "BLOCK", 16)
    monkeypatch.setattr(blocks, "MIN_BLOCK", 16)


def qkv(dtype=torch.float32, tokens=TOKENS):
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [normal(2, tokens, h, DIM, seed=i, dtype=dtype).requires_grad_() for i, h in enumerate(heads)]


def rule(window, causal, visible):
    """The mask function of a pattern under a causal mask and a window, as FlexAttention takes it."""

    def mask_mod(b, h, i, j):
        near = (i - j).abs() < (window or TOKENS)
        return visible(i, j) & near & (j <= i if causal else near)

    return mask_mod


@pytest.mark.sample(14)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_equals_flex_attention_and_float64(name, causal):
    pattern, window, visible = PATTERNS[name]
    mask, score_mod = Mask(causal=causal, window=window, pattern=pattern), ScoreMod(scale=SCALE)
    inputs, exact = qkv(), qkv(torch.float64)
    ours = sparse_attention(*inputs, mask, score_mod)
    q, k, v = (x.detach().transpose(1, 2) for x in inputs)
    mask_mod = rule(window, causal, visible)
    flex_mask = create_block_mask(mask_mod, None, None, TOKENS, TOKENS, device=DEVICE)
    theirs = flex_attention(q, k, v, block_mask=flex_mask, scale=SCALE, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(ours.detach(), theirs, atol=1e-5, rtol=1e-5)
    index = torch.arange(TOKENS)
    dense = mask_mod(0, 0, index[:, None], index)
    expected = plain_attention(*exact, dense, SCALE)
    direction = normal(*expected.shape, seed=9)
    grads = torch.autograd.grad(ours, inputs, direction.float())
    for got, right in zip(grads, torch.autograd.grad(expected, exact, direction), strict=True):
        torch.testing.assert_close(got.double(), right, atol=SINGLE, rtol=SINGLE)
    weights = sparse_attention_ref(*inputs, mask, score_mod)[1]
    assert torch.equal(weights[1, 2] > 0, dense)


def plain_selection(q, k, block, top_k):
    """The blocks of highest score, query by query; `[B, H, Tq, Tk]`."""
    rows, tokens, heads = q.shape[:3]
    visible = torch.zeros(rows, heads, tokens, tokens, dtype=torch.bool)
    for row in range(rows):
        for head in range(heads):
            keys = k[row, :, head // (heads // k.shape[2])]
            for i in range(tokens):
                own = i // block
                scores = [float(q[row, i, head] @ keys[b * block : (b + 1) * block].mean(0)) for b in range(own)]
                best = sorted(range(own), key=lambda b: -scores[b])[: top_k - 1]
                for b in (*best, own):
                    visible[row, head, i, b * block : min((b + 1) * block, i + 1)] = True
    return visible


@pytest.mark.parametrize(("block", "top_k"), [(8, 3), (16, 1)])
def test_top_blocks_equal_a_selection_query_by_query_in_float64(block, top_k):
    mask, score_mod = Mask(causal=True, pattern=TopBlocks(block, top_k)), ScoreMod(scale=SCALE)
    inputs, exact = qkv(), qkv(torch.float64)
    visible = plain_selection(exact[0].detach(), exact[1].detach(), block, top_k)
    ours, weights = sparse_attention(*inputs, mask, score_mod), sparse_attention_ref(*inputs, mask, score_mod)[1]
    assert torch.equal(weights > 0, visible)
    share = HEADS // KV_HEADS
    q, k, v = exact
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(share, 2)) * SCALE
    odds = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    expected = torch.einsum("bhts,bshd->bthd", odds, v.repeat_interleave(share, 2))
    torch.testing.assert_close(ours.double(), expected, atol=SINGLE, rtol=SINGLE)
    direction = normal(*expected.shape, seed=9)
    grads = torch.autograd.grad(ours, inputs, direction.float())
    for got, right in zip(grads, torch.autograd.grad(expected, exact, direction), strict=True):
        torch.testing.assert_close(got.double(), right, atol=SINGLE, rtol=SINGLE)


@pytest.mark.skipif(ON_GPU, reason="its masks are made on the CPU")
def test_chunked_attention_equals_llama_4_of_transformers():
    """With padding on the left too, from which its chunks are counted."""
    pytest.importorskip("transformers")
    from transformers import Llama4TextConfig
    from transformers.masking_utils import create_chunked_causal_mask
    from transformers.models.llama4.modeling_llama4 import eager_attention_forward

    inputs = [x.detach() for x in qkv()]
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[1, :13] = False
    config = Llama4TextConfig(attention_chunk_size=16, attn_implementation="eager")
    embeds = inputs[0].flatten(2)
    their_mask = create_chunked_causal_mask(config, embeds, real.long(), None, torch.arange(TOKENS)[None])
    module = torch.nn.Module().eval()
    module.num_key_value_groups = HEADS // KV_HEADS
    theirs = eager_attention_forward(module, *(x.transpose(1, 2) for x in inputs), their_mask, SCALE)[0]
    mask = Mask(causal=True, key_mask=real, order=real.cumsum(1) - real.long(), pattern=Dilated(segment=16))
    ours = sparse_attention(*inputs, mask, ScoreMod(scale=SCALE))
    torch.testing.assert_close(ours[real], theirs[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*PATTERNS, "top-k"])
def test_soft_cap_sink_logits_and_bias_go_with_a_pattern(name):
    pattern, window = (TopBlocks(8, 3), None) if name == "top-k" else PATTERNS[name][:2]
    positions = torch.arange(TOKENS)[None]
    score_mod = ScoreMod(
        scale=SCALE,
        softcap=2.0,
        sink_logits=normal(HEADS, seed=5, dtype=torch.float32),
        bias=lambda a, b: -0.1 * (a[:, :, None] - b[:, None, :]).abs()[:, None].float(),
        query_positions=positions,
        key_positions=positions,
    )
    mask = Mask(causal=True, window=window, pattern=pattern)
    inputs = [x.detach() for x in qkv()]
    ours = sparse_attention(*inputs, mask, score_mod)
    torch.testing.assert_close(ours, sparse_attention_ref(*inputs, mask, score_mod)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "offset"), [(72, 0), (70, 0), (106, 13)])
def test_blocks_a_stride_apart_are_rows_of_plain_attention(queries, offset, causal):
    keys = queries + offset
    mask, score_mod = Mask(causal=causal, offset=offset, pattern=KeyBlocks(4, 1, 3)), ScoreMod(scale=SCALE)
    inputs, exact = qkv(tokens=keys), qkv(torch.float64, keys)
    inputs[0], exact[0] = (x[0].detach()[:, offset:].requires_grad_() for x in (inputs, exact))
    assert SPARSE_ATTENTION.explain(*inputs, mask, score_mod)[0].endswith("on rows of tokens that see each other")
    index = torch.arange(keys)
    dense = rule(keys, causal, strided(4, 1, 3, 0))(0, 0, index[offset:, None], index)
    ours, expected = sparse_attention(*inputs, mask, score_mod), plain_attention(*exact, dense, SCALE)
    torch.testing.assert_close(ours.double(), expected, atol=SINGLE, rtol=SINGLE)
    direction = normal(*expected.shape, seed=9)
    grads = torch.autograd.grad(ours, inputs, direction.float())
    for got, right in zip(grads, torch.autograd.grad(expected, exact, direction), strict=True):
        torch.testing.assert_close(got.double(), right, atol=SINGLE, rtol=SINGLE)


def test_blocks_a_stride_apart_are_not_rows_that_are_mostly_padding():
    x = torch.zeros(1, 13, 2, 4)
    mask = Mask(causal=True, pattern=KeyBlocks(4, 1, 3))
    reason = SPARSE_ATTENTION.explain(x, x, x, mask, ScoreMod(scale=1.0))[1]["rows of tokens that see each other"]
    assert reason == "rows of whole blocks would be padded by more than one in 8 tokens"


@pytest.mark.skipif(ON_GPU, reason="a GPU takes the kernel over lists of key blocks")
def test_strided_attention_reads_the_blocks_it_shows_alone(monkeypatch):
    seen = []
    slice_block = blocks.slice_block

    def record(*args):
        q, k, *rest = slice_block(*args)
        seen.append(k.shape[1])
        return q, k, *rest

    monkeypatch.setattr(blocks, "slice_block", record)
    inputs = [x.detach() for x in qkv(tokens=320)]
    sparse_attention(*inputs, Mask(causal=True, pattern=KeyBlocks(16, 2, 8, 1)), ScoreMod(scale=SCALE))
    assert len(seen) == 20
    assert max(seen) == 16 * (2 + 2 + 1)


def test_the_table_says_why():
    x = torch.zeros(1, 8, 2, 4)
    name, reasons = SPARSE_ATTENTION.explain(x, x, x, Mask(causal=True, pattern=KeyBlocks(4)), ScoreMod(scale=1.0))
    assert "not tokens that see each other alone" in reasons["rows of tokens that see each other"]
    assert name == "SDPA in blocks of queries"

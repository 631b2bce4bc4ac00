"""The beginning of a decoding step: the tokens' rows of the embedding table."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.pdl import pdl_start_next

BLOCK = 256  # features that a program copies


@triton.jit
def embed_tokens_kernel(tokens_ptr, table_ptr, scale, out_ptr, K, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr):
    """`out[i] = scale * table[tokens[i]]`."""
    pdl_start_next(USE_PDL)
    row, offs_k = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    token, mask = tl.load(tokens_ptr + row), offs_k < K
    x = tl.load(table_ptr + token * K + offs_k, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + row * K + offs_k, x.to(out_ptr.dtype.element_ty), mask=mask)


def embed_tokens(tokens: Tensor, table: Tensor, out: Tensor, *, scale: float = 1.0, pdl: bool = False) -> Tensor:
    """`scale * table[tokens]` of tokens `[rows]` and a table `[vocab, dim]`, written to `out`.

    With `pdl` the next kernel may start at once. This one starts when all kernels before it have ended: the step that
    it begins changes what the last one reads.
    """
    rows, dim = out.shape
    embed_tokens_kernel[(triton.cdiv(dim, BLOCK), rows)](
        tokens, table, scale, out, dim, BLOCK_K=BLOCK, USE_PDL=pdl, num_warps=1
    )
    return out

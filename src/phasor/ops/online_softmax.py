"""One step of the online softmax: the part that every attention kernel shares."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def online_softmax(scores, v, acc, l_i, m_i, MAY_BE_EMPTY: tl.constexpr):
    """Add a tile of scores `[BLOCK_M, BLOCK_N]`, to base 2, and its values `[BLOCK_N, BLOCK_D]` to a running softmax.

    `m_i` is the maximum of a row's scores so far, `l_i` the sum of its weights and `acc` their weighted sum of values,
    both relative to `m_i`. MAY_BE_EMPTY where a row may not have seen any key yet, so that its maximum is -inf.
    """
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    m_finite = m_new
    if MAY_BE_EMPTY:
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - m_finite[:, None])
    alpha = tl.exp2(m_i - m_finite)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, l_i, m_new

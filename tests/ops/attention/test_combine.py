"""Attention to two sets of keys together: the kernels against torch in float64, and against attention to all keys."""

import math

import pytest
import torch
from device import DEVICE
from references import SINGLE, normal

from phasor.ops.attention.combine import combine, combine_ref

pytest.importorskip("triton")


def parts(rows, tokens, heads, head_dim, seed):
    out = normal(rows, tokens, heads, head_dim, seed=seed)
    lse = 4 * normal(rows, heads, tokens, seed=seed + 1)
    lse[:, :, ::5] = float("inf")  # queries that see no key of this set
    return out * (lse.mT[..., None] != float("inf")), lse


@pytest.mark.parametrize("shape", [(1, 73, 2, 16), (2, 23, 3, 40), (1, 6, 1, 128)])
def test_kernels_equal_float64(shape):
    inputs = [*parts(*shape, seed=1), *parts(*shape, seed=3)]
    inputs[3][:, :, :3] = float("inf")  # the first query sees none of either
    found = []
    for dtype, function in ((torch.float32, combine), (torch.float64, combine_ref)):
        own = [x.to(DEVICE, dtype).requires_grad_() for x in inputs]
        out, lse = function(*own)
        seen = lse.isfinite()
        total = (out * normal(*out.shape, seed=8).to(out)).sum() + (
            lse[seen] * normal(*lse.shape, seed=9).to(lse)[seen]
        ).sum()
        found.append([out, lse, *torch.autograd.grad(total, own)])
    for ours, exact in zip(*found, strict=True):  # torch has no gradient of a sum of nothing: it is zero
        torch.testing.assert_close(ours.double(), exact.nan_to_num(posinf=float("inf")), rtol=SINGLE, atol=SINGLE)


def test_both_sets_are_all_keys():
    q, k, v = (normal(1, n, 2, 8, seed=n).to(DEVICE) for n in (5, 12, 12))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)

    def attend(keys):
        own = scores[..., keys]
        return torch.einsum("bhqk,bkhd->bqhd", own.softmax(-1), v[:, keys]), own.logsumexp(-1) / math.log(2.0)

    for function, dtype, tolerance in ((combine_ref, torch.float64, 1e-12), (combine, torch.float32, SINGLE)):
        whole = attend(slice(None))
        found = function(*(x.to(dtype) for x in (*attend(slice(0, 7)), *attend(slice(7, None)))))
        for a, b in zip(found, whole, strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)

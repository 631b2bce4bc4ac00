"""Random weights of experts, for tests of their kernels."""

from __future__ import annotations

import torch
from decode_kernels import randn

from phasor.ops.decode import ExpertsArgs


def draw(count, dim, hidden, top_k, activation, *, bias=False, normalize=True, dtype=torch.float32):
    glu = activation in ("silu", "gelu", "swiglu-clamped")
    width = hidden * 2 if glu else hidden
    biases = (randn(count, width, dtype=dtype), randn(count, dim, dtype=dtype)) if bias else (None, None)
    up, down = randn(count, dim, width, dtype=dtype), randn(count, hidden, dim, dtype=dtype)
    limits = (0.7, 1.7) if activation == "swiglu-clamped" else ()
    return ExpertsArgs(up, down, *biases, activation, glu, top_k, normalize, *limits)


def in_float64(args: ExpertsArgs) -> ExpertsArgs:
    return args._replace(**{n: None if (t := getattr(args, n)) is None else t.double() for n in args._fields[:4]})

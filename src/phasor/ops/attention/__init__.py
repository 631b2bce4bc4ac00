"""Attention: one public function, its reference, and the description of masks and scores. Nothing imports Triton."""

from __future__ import annotations

from phasor.ops.attention.attention import ATTENTION, attention
from phasor.ops.attention.bias import Bias, DistanceBias, SumBias, TokenBias
from phasor.ops.attention.count_bias import CountBias
from phasor.ops.attention.fire_bias import FIREBias
from phasor.ops.attention.mask import SEES_ALL, Mask, dense_mask
from phasor.ops.attention.prepare import prepare_mask
from phasor.ops.attention.reference import attention_ref
from phasor.ops.attention.relative import DistanceRows, ProductBias, RelativeValues
from phasor.ops.attention.score_mod import ScoreMod, ScorePiece, SinkQueries, Span
from phasor.ops.attention.sdpa import takes_narrow_values

__all__ = [
    "ATTENTION",
    "SEES_ALL",
    "Bias",
    "CountBias",
    "DistanceBias",
    "DistanceRows",
    "FIREBias",
    "Mask",
    "ProductBias",
    "RelativeValues",
    "ScoreMod",
    "ScorePiece",
    "SinkQueries",
    "Span",
    "SumBias",
    "TokenBias",
    "attention",
    "attention_ref",
    "dense_mask",
    "prepare_mask",
    "takes_narrow_values",
]

"""Sparse attention: one public function, its reference and the patterns. Nothing imports Triton."""

from __future__ import annotations

from phasor.ops.attention.mask import Pattern
from phasor.ops.sparse_attention.fold import prepare_sparse_mask
from phasor.ops.sparse_attention.patterns import Dilated, KeyBlocks, TopBlocks
from phasor.ops.sparse_attention.reference import sparse_attention_ref
from phasor.ops.sparse_attention.sparse_attention import SPARSE_ATTENTION, sparse_attention

__all__ = [
    "SPARSE_ATTENTION",
    "Dilated",
    "KeyBlocks",
    "Pattern",
    "TopBlocks",
    "prepare_sparse_mask",
    "sparse_attention",
    "sparse_attention_ref",
]

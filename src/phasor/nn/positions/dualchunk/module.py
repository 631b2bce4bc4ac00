"""Dual chunk attention: keys have positions within their chunk, and queries others for each chunk they look at."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from phasor.nn.positions.dualchunk.config import DualChunkConfig
from phasor.nn.positions.rotary.module import Prepared
from phasor.nn.positions.rotary.pieces import PiecewiseRotary
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import ScorePiece, Span


class DualChunk(PiecewiseRotary, config=DualChunkConfig):
    """With chunks of `s` tokens and a trained length `c`, keys are at `n mod s`, and queries at `m mod s` in their own
    chunk, at `min(m mod s + s, c - 1)` for the chunk before it, and at `c - 1` for all earlier ones.

    For keys ahead it is the same in the mirror. This is the paper; its code, ChunkLlama, has `c` in place of `c - 1`,
    a distance that training did not show.
    """

    config: DualChunkConfig

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Prepared:
        return super().prepare(replace(seq, positions=seq.positions % self.config.chunk_length), like)

    def pieces(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, causal: bool) -> tuple[ScorePiece, ...]:
        size, last = self.config.chunk_length, self.config.trained_length - 1
        own = queries % size
        found = [ScorePiece(q, k, Span(None if causal else 0, 0, size))]
        for sign in (1,) if causal else (1, -1):
            inside = own if sign == 1 else size - 1 - own  # in the mirror
            next_chunk, others = (inside + size).clamp(max=last), inside * 0 + last
            for at, span in ((next_chunk, Span(1, 1, size)), (others, Span(2, None, size))):
                position, span = (at, span) if sign == 1 else (size - 1 - at, span.mirror())
                found.append(ScorePiece(self.rotate_by(q, position - own), k, span))
        return tuple(found)

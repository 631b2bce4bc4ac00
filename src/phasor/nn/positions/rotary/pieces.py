"""Rotary positions whose distances have several pieces: queries and keys are rotated again for the far ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phasor.nn.checks import can_check_values
from phasor.nn.positions.rotary.config import PiecewiseRotaryConfig
from phasor.nn.positions.rotary.module import Prepared, Rotary, headwise
from phasor.ops.attention import Mask, ScoreMod, ScorePiece
from phasor.ops.constants import constant
from phasor.ops.rope import RopeArgs, rope_kernel, rope_kernel_why_not, rotate_pairs


def counts_up(positions: Tensor) -> bool:
    """Whether positions `[B or 1, T]` are known never to decrease, without waiting for a GPU."""
    return can_check_values(positions) and bool((positions.diff(dim=-1) >= 0).all())


class PiecewiseRotary(Rotary):
    """Rotations add up, so that what is rotated by one position is brought to another by their difference.

    That is how the keys of a cache, rotated once and for all, serve every piece. Subclasses override `pieces`.
    """

    config: PiecewiseRotaryConfig

    def on_attention(
        self, q: Tensor, k: Tensor, mask: Mask, score_mod: ScoreMod, prepared: Prepared
    ) -> tuple[Tensor, Tensor, ScoreMod]:
        queries, keys = score_mod.query_positions, score_mod.key_positions
        assert queries is not None
        assert keys is not None
        behind = mask.causal and mask.prefix_length is None and (score_mod.counted or counts_up(keys))
        near, *pieces = self.pieces(q, k, queries, keys, behind)
        return q, k, replace(score_mod, near=near.span, pieces=tuple(pieces))

    def pieces(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, causal: bool) -> tuple[ScorePiece, ...]:
        """Near pairs with the queries and keys that are given, and others with others, made of those.

        `queries` and `keys` are their positions, `[B or 1, T]`. Where not `causal`, queries may see keys ahead, as in a
        decoder whose earlier tokens have later positions.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement pieces")

    def rotate_by(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated heads `[B, T, H, D]`, rotated further by positions `[B or 1, T]` of either sign."""
        if rope_kernel_why_not(positions, x) is None:
            args = self.rotary_args(None, x.device)
            factor = constant((1.0,), x.device, torch.float32)
            return rope_kernel(x, x[:, :, :0], RopeArgs(positions, args.increments, factor), self.config.pairing)[0]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = (headwise(part) for part in self._cos_sin(positions, None, dtype))
        return rotate_pairs(x, cos, sin, self.config.pairing)

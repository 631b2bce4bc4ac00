"""xPos: rotary positions whose queries shrink and whose keys grow with the position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.nn.checks import can_check_values
from phasor.nn.positions.rotary.module import Angles, Rotary, headwise
from phasor.nn.positions.xpos.config import XPosConfig
from phasor.nn.sequence import SequenceInfo


class XPos(Rotary, config=XPosConfig):
    """Cosines and sines of queries times `zeta^((m - c) / decay)`, those of keys over it.

    The reference `c` is the first position of the row or document. A layer with a window caches keys without the decay,
    which each call applies from its own first position on, so that a stream of any length stays in range.
    """

    config: XPosConfig

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        return "xPos scales queries and keys differently"

    def angles(self, cos: Tensor, sin: Tensor, seq: SequenceInfo, like: Tensor) -> Angles:
        if seq.window is not None:
            older = 0 if seq.first is None else seq.window - 1  # in a first call there are none
            self._check_span(seq.rows.shape[-1] + older, like)
            self._check_span(seq.rows - seq.rows[:, :1], like, seq.order is None)
            both = headwise(cos), headwise(sin)
            return Angles(both, both)
        since = seq.positions - seq.origin()
        self._check_span(since, like, seq.order is None)
        scale = self._scale(since, cos.dtype)
        query = headwise(cos * scale), headwise(sin * scale)
        return Angles(query, (headwise(cos / scale), headwise(sin / scale)))

    def decays_in(self, window: int, like: Tensor) -> bool:
        return window <= self._span(like) // 2

    def decay(self, since: Tensor, like: Tensor) -> Tensor:
        # What comes long after the reference is hidden from all queries, and has to stay finite.
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        scale = self._scale(since.clamp(min=-self._span(like)), dtype)
        pairs = (scale, scale) if self.config.pairing == "half" else (scale[..., None], scale[..., None])
        both = torch.cat(pairs, dim=-1).flatten(2)
        return headwise(F.pad(both, (0, self.head_dim - self.rotary_dim), value=1.0))

    def _scale(self, since: Tensor, dtype: torch.dtype) -> Tensor:
        """`zeta_i^(since / decay)` for each pair of features, `[..., pairs]`."""
        pairs = self.rotary_dim // 2
        zeta = (torch.arange(pairs, device=since.device, dtype=torch.float64) / pairs + 0.4) / 1.4
        return torch.exp2(torch.log2(zeta) * (since[..., None].to(torch.float64) / self.config.decay)).to(dtype)

    def _span(self, like: Tensor) -> int:
        """How far from the reference positions may be; float16 reaches 2^16 where float32 reaches 2^127."""
        return self.config.max_positions // (8 if like.dtype == torch.float16 else 1)

    def _check_span(self, since: int | Tensor, like: Tensor, is_one_sequence: bool = False) -> None:
        """Refuse positions too far from the reference; of values on a GPU only their number is known here."""
        span, name = self._span(like), str(like.dtype).removeprefix("torch.")
        if isinstance(since, int):
            if since > span:
                raise ValueError(
                    f"xPos spans at most {span} positions in {name}, and this call and its window span {since}: "
                    "give a cache fewer tokens at a time"
                )
        elif (is_one_sequence and since.shape[-1] > span) or (
            can_check_values(since) and since.numel() and since.abs().max() >= span
        ):
            raise ValueError(f"xPos spans at most {span} positions of one sequence: beyond it {name} overflows")

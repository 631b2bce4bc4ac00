"""xPos: rotary positions whose queries shrink and whose keys grow with the position."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.nn.checks import can_check_values
from phasor.nn.positions.rotary.module import Angles, Decay, Prepared, Rotary, headwise
from phasor.nn.positions.xpos.config import XPosConfig
from phasor.nn.sequence import KeyInfo, SequenceInfo
from phasor.ops.attention import Mask, ScoreMod, SinkQueries
from phasor.ops.dispatch import compute_dtype
from phasor.ops.rope import PhaseArgs, RopeArgs

FLOAT16_SPANS = 8  # make one span of float32


class XPos(Rotary, config=XPosConfig):
    """Cosines and sines of queries times `zeta^((m - c) / decay)`, those of keys over it.

    The reference `c` is half the span of float16 after the first position of the row or document, so that factors of
    queries and keys are at most the root of what they differ by. A layer with a window caches keys without the decay,
    which each call applies around the middle of its own positions, so that a stream of any length stays in range.
    """

    config: XPosConfig
    depends_on_window = True

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        if seq.positions.shape[-1] == 1:
            return "one token takes few operations"
        if self._decays_after_cache(seq, like):
            return "a cache holds keys without the decay"
        return super().why_not(seq, like)

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Prepared:
        prepared = super().prepare(seq, like)
        if not isinstance(prepared, RopeArgs):
            return prepared
        scale, factor = self._scale_of(seq, like, torch.float64), prepared.factor.double()
        scales = (x.float().expand(-1, seq.positions.shape[-1], -1) for x in (factor * scale, factor / scale))
        phases = seq.rows[:, :, None, None] * prepared.increments
        return PhaseArgs(phases, None, *scales)

    def angles(self, cos: Tensor, sin: Tensor, seq: SequenceInfo, like: Tensor) -> Angles:
        if self._decays_after_cache(seq, like):
            assert seq.cached_window is not None
            older = 0 if seq.first is None else seq.cached_window - 1  # in a first call there are none
            self._check_span(seq.rows.shape[-1] + older, like)
            self._check_span(seq.rows - seq.rows[:, :1], like, seq.order is None)
            both = headwise(cos), headwise(sin)
            return Angles(both, both)
        scale = self._scale_of(seq, like, cos.dtype)
        query = headwise(cos * scale), headwise(sin * scale)
        return Angles(query, (headwise(cos / scale), headwise(sin / scale)))

    def on_key(self, k: Tensor, prepared: Prepared) -> Tensor:
        if isinstance(prepared, PhaseArgs):
            prepared = prepared._replace(q_scale=prepared.k_scale)
        return super().on_key(k, prepared)

    def prepare_keys(self, prepared: Angles, keys: KeyInfo, like: Tensor) -> Angles:
        """With the factors of queries and keys around the middle of the call, which sink tokens have another of."""
        if not self._decays_after_cache(keys.seq, like):
            return prepared
        queries, sink_queries, of_sinks = keys.seq.rows, keys.sink_query_positions, None
        reference = self._middle(queries, keys.seq)
        of_queries = self._decay(queries - reference, like)
        if sink_queries is not None:
            of_sinks = self._decay(sink_queries - self._middle(sink_queries, keys.seq), like)
            index = torch.arange(keys.positions.shape[1], device=like.device)
            reference = torch.where(keys.mask.is_sink(index), self._middle(sink_queries, keys.seq), reference)
        return prepared._replace(decay=Decay(of_queries, self._decay(reference - keys.positions, like), of_sinks))

    def on_attention(
        self, q: Tensor, k: Tensor, mask: Mask, score_mod: ScoreMod, prepared: Prepared
    ) -> tuple[Tensor, Tensor, ScoreMod]:
        decay = prepared.decay if isinstance(prepared, Angles) else None
        if decay is None:
            return q, k, score_mod
        sinks = score_mod.sink_queries
        if sinks is not None and decay.sink_query is not None:
            queries = (sinks.queries * decay.sink_query).to(q.dtype)
            score_mod = replace(score_mod, sink_queries=SinkQueries(queries, sinks.positions))
        return (q * decay.query).to(q.dtype), (k * decay.key).to(k.dtype), score_mod

    def max_cached_positions(self, window: int | None, like: Tensor) -> int | None:
        return None if window is not None and self._spans(window, like) else self.config.max_positions

    def _decays_after_cache(self, seq: SequenceInfo, like: Tensor) -> bool:
        """Whether a cache holds keys without the decay, which each call applies to all of them."""
        window = seq.cached_window
        return window is not None and seq.document_ids is None and self._spans(window, like)

    def _spans(self, window: int, like: Tensor) -> bool:
        """Whether a call of some tokens and its window stay in the range of floats."""
        return window <= self._span(like) // 2

    def _middle(self, queries: Tensor, seq: SequenceInfo) -> Tensor:
        """The position `[B, 1]` in the middle of queries and of the window before them."""
        assert seq.cached_window is not None
        return (queries[:, :1] + queries[:, -1:] - seq.cached_window) // 2

    def _decay(self, since: Tensor, like: Tensor) -> Tensor:
        """Factors `[B or 1, T, 1, D]` of queries `since` positions after a reference; keys have the inverse."""
        # What comes long after the reference is hidden from all queries, and has to stay finite.
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        least = -self._span(like.new_empty(0, dtype=compute_dtype(like))) * 3 // 4
        scale = self._scale(since.clamp(min=least), dtype)
        pairs = (scale, scale) if self.config.pairing == "half" else (scale[..., None], scale[..., None])
        both = torch.cat(pairs, dim=-1).flatten(2)
        return headwise(F.pad(both, (0, self.head_dim - self.rotary_dim), value=1.0))

    def _scale_of(self, seq: SequenceInfo, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The factors of the queries of a call, `[..., T, pairs]`."""
        since = seq.positions - seq.origin()
        self._check_span(since, like, seq.order is None)
        return self._scale(since - self.config.max_positions // (2 * FLOAT16_SPANS), dtype)

    def _scale(self, since: Tensor, dtype: torch.dtype) -> Tensor:
        """`zeta_i^(since / decay)` for each pair of features, `[..., pairs]`."""
        pairs = self.rotary_dim // 2
        zeta = (torch.arange(pairs, device=since.device, dtype=torch.float64) / pairs + 0.4) / 1.4
        return torch.exp2(torch.log2(zeta) * (since[..., None].to(torch.float64) / self.config.decay)).to(dtype)

    def _span(self, like: Tensor) -> int:
        """How far from the reference positions may be; float16 reaches 2^16 where float32 reaches 2^127."""
        return self.config.max_positions // (FLOAT16_SPANS if like.dtype == torch.float16 else 1)

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

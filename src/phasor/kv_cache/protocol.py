"""The KV-cache protocol: all that a decoder needs of a cache, whichever one it is given.

A call with a cache is `sequence_info` (positions of the new tokens), `begin` (what each layer attends to), in every
layer `LayerStep.update` (store the new keys and values), and `commit` (count the new tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from phasor.config import ModelConfig
from phasor.nn.positions.sums import Steps, Sums
from phasor.nn.sequence import SequenceArgs, SequenceInfo
from phasor.ops.attention import Mask


@dataclass
class EncoderOutput:
    """An encoder's hidden states `[B, S, dim]` with what a decoder's cross-attention needs to know of them."""

    hidden: Tensor
    attention_mask: Tensor | None = None
    document_ids: Tensor | None = None


class LayerStep(Protocol):
    """One layer in one call: its mask and key positions, and where its new keys and values go."""

    mask: Mask
    key_positions: Tensor

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values `[B, T, K, D]` of this call and return all that it attends to."""
        ...

    def sum_steps(self, steps: Steps) -> tuple[Sums, Sums]:
        """Add what the tokens of this call add to running sums; the sums up to them, and up to all keys."""
        ...


class KVCacheProtocol(Protocol):
    """A cache as the decoder uses it; `KVCache` is the dynamic one, `StaticKVCache` the one for compiled steps."""

    config: ModelConfig
    memory: EncoderOutput | None  # of an encoder-decoder, from the first call on
    cross_kv: list[tuple[Tensor, Tensor]]  # keys and values of cross-attention, one pair per layer

    def sequence_info(self, tokens: Tensor, args: SequenceArgs) -> SequenceInfo:
        """Positions and lengths of the next tokens `[B, T]`; by default they follow those in the cache."""
        ...

    def begin(self, seq: SequenceInfo, mask: Mask) -> Sequence[LayerStep]:
        """Start a call: a step per layer. `mask` is the mask among the tokens of the call itself."""
        ...

    def commit(self) -> None:
        """Count the tokens of the call that `begin` started."""
        ...

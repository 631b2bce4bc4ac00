"""The KV-cache protocol: all that a decoder needs of a cache, whichever one it is given.

A call with a cache is `sequence_info` (positions of the new tokens), `begin` (what each layer attends to), in every
layer `LayerStep.update` (store what the layer keeps for the new tokens), and `commit` (count the new tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from phasor.config import ModelConfig
from phasor.nn.layer_step import LayerStep
from phasor.nn.sequence import SequenceArgs, SequenceInfo
from phasor.ops.attention import Mask


@dataclass
class EncoderOutput:
    """An encoder's hidden states `[B, S, dim]` with what a decoder's cross-attention needs to know of them."""

    hidden: Tensor
    attention_mask: Tensor | None = None
    document_ids: Tensor | None = None


class KVCacheProtocol(Protocol):
    """A cache as the decoder uses it; `KVCache` is the dynamic one, `StaticKVCache` the one for compiled steps."""

    config: ModelConfig
    memory: EncoderOutput | None  # of an encoder-decoder, from the first call on
    cross: list[dict[str, Tensor]]  # what cross-attention computed from the encoder's output, by layer and name

    def sequence_info(self, tokens: Tensor, args: SequenceArgs) -> SequenceInfo:
        """Positions and lengths of the next tokens `[B, T]`; by default they follow those in the cache."""
        ...

    def begin(self, seq: SequenceInfo, mask: Mask) -> Sequence[LayerStep]:
        """Start a call: a step per layer. `mask` is the mask among the tokens of the call itself."""
        ...

    def commit(self) -> None:
        """Count the tokens of the call that `begin` started."""
        ...

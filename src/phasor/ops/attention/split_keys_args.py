"""The arguments of attention of one query per row over split keys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SplitKeysArgs(NamedTuple):
    """Queries `[B, H, D]`, keys `[B, S, K, D]` and values `[B, S, K, E]`, and what decides over their scores.

    `visible` `[B or 1, S]` hides keys, and so does `last` `[B or 1]`: all behind that index, which are not read.
    `bias` `[B or 1, H or 1, S]` is added to the scores. A `softcap` of 0 is none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor | None
    bias: Tensor | None
    last: Tensor | None
    sink_logits: Tensor | None
    scale: float
    softcap: float

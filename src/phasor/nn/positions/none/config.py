"""The configuration of a model without positions."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.positions import PositionConfig


class NoPositionConfig(PositionConfig, kind="none"):
    """No positions at all (NoPE); a causal mask is the only order there is."""

    shift_invariant: ClassVar[bool] = True

"""No positions: every hook returns what it is given."""

from __future__ import annotations

from phasor.nn.positions.base import Position
from phasor.nn.positions.none.config import NoPositionConfig


class NoPosition(Position, config=NoPositionConfig):
    """The hooks of the base class, none of which does anything."""

"""Model folders in and out: phasor's own, and those of other families."""

from phasor.checkpoints.conversion import convert, load, save
from phasor.checkpoints.exact import exact_rotary

__all__ = ["convert", "exact_rotary", "load", "save"]

"""Model folders in and out: phasor's own, and those of other families."""

from phasor.checkpoints.conversion import convert, load, save

__all__ = ["convert", "load", "save"]

"""Model folders in and out: phasor's own, and those of other families."""

from phasor.checkpoints.convert import load, save

__all__ = ["load", "save"]

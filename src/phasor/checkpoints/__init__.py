"""Model folders in and out."""

from phasor.checkpoints.native import load, save

__all__ = ["load", "save"]

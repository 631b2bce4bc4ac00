"""Features as magnitudes with phases: their cosines and sines, in one kernel each way."""

from phasor.ops.polar.polar import polar_features, polar_why_not
from phasor.ops.polar.reference import PolarArgs, polar_features_ref

__all__ = ["PolarArgs", "polar_features", "polar_features_ref", "polar_why_not"]

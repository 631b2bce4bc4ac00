"""Running sums over tokens, and angles as the integers that they add up without an error."""

from phasor.ops.running_sums.angles import fixed_angles
from phasor.ops.running_sums.cumsum import cumsum_tokens

__all__ = ["cumsum_tokens", "fixed_angles"]

"""Polar coordinate positions: features are magnitudes, and positions alone their phases (PoPE)."""

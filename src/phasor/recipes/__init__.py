"""Recipes that ship with phasor, by name."""

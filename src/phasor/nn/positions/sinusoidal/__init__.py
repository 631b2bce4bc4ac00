"""Sinusoidal positions on the input."""

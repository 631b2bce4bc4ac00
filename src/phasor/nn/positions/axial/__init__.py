"""Axial rotary positions over a grid of two axes."""

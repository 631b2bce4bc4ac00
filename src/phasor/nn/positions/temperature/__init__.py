"""Attention temperature by length: queries are scaled by their position."""

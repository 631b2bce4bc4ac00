"""Learned vectors of the clipped distance, added to keys and values (Shaw et al., 2018)."""

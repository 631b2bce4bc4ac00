"""Contextual positions: gates of the query count the keys, and the count has a learned vector (CoPE)."""

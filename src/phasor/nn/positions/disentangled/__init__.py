"""Disentangled attention: content to position and position to content, by buckets of the distance (DeBERTa)."""

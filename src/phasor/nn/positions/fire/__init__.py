"""FIRE: a small network of the relative distance on the scores."""

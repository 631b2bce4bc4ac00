"""KERPLE: learned logarithmic or power-law penalties on the scores."""

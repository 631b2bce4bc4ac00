"""A bias by distance that every query mixes from learned profiles (Inkling)."""

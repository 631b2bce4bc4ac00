"""No positions (NoPE)."""

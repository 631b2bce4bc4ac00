"""Rotary positions (RoPE) on queries and keys, and the scalings that extend them."""

"""Multiplicative GRAPE: rotary positions whose frequencies every layer learns."""

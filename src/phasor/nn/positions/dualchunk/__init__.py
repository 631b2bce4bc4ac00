"""Dual chunk attention: rotary positions within chunks of the trained length."""

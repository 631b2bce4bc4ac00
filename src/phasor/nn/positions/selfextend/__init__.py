"""Self-Extend and ReRoPE: rotary positions whose far distances are grouped."""

"""xPos: rotary positions with an exponential decay."""

"""Accumulated rotary: angles that are running sums of steps computed from the input."""

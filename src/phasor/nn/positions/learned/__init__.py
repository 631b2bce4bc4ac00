"""Learned absolute positions on the input."""

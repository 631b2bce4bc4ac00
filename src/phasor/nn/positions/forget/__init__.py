"""Forget gates: a bias that is the sum of what the tokens between query and key let pass."""

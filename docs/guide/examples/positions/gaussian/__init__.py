"""A Gaussian around every query, on the scores."""

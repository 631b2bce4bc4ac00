"""Transformer-XL: queries and a bias multiplied with projected sinusoids of the distance."""

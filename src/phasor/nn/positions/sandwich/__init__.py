"""Sandwich: inner products of sinusoids on the scores."""

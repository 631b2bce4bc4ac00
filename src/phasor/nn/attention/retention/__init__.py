"""Retention: a state of constant size, which decays by the same factor at every token."""

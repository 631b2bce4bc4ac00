"""Corpora and batches: texts from files, tokens on disk, and batches that are functions of their number."""

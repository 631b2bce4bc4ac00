"""Kinds of attention: one folder each, named after its kind, with its `config.py` (no torch) and its `module.py`."""

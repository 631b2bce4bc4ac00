"""Softmax attention: multi-head, grouped-query and multi-query."""

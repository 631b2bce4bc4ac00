"""Gated delta attention: a state of constant size, corrected by every token."""

"""Mamba-2: a state of constant size, which decays by as much as each token says."""

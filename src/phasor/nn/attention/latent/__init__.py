"""Multi-head latent attention (MLA): keys and values of all heads from one small vector per token."""

"""No attention: a layer whose only sub-layer is its feed-forward network."""

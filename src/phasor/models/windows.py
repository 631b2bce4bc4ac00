"""Configurations whose layers attend to a window of tokens (no torch)."""

from __future__ import annotations

from phasor.config import AttentionConfig, ModelConfig


def window_config(config: ModelConfig, window: int | None, sinks: int | None = None) -> ModelConfig:
    """The configuration with a window in every layer, where one is given, and with sink tokens.

    Layers that keep a state need none. Sink tokens are added to the layers that are given a window; without a window,
    to those that have one.

    >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=2, num_heads=1, position="rotary")
    >>> window_config(config, 128, 4).attention.window, window_config(config, 128, 4).attention.cap_sinks
    (128, True)
    """
    if window is None and sinks is None:
        return config
    own = [config.layer(i).attention for i in range(config.num_layers)]
    if window is None and all(attention.window is None for attention in own):
        raise ValueError("sinks are tokens that stay visible behind a window, and this model has none: give window too")
    if all(attention.keeps_state for attention in own):
        raise ValueError("a window is for layers that keep keys, and those of this model keep a state")
    by_distance = all(p.axes == 1 and not p.follows_input for p in config.layer_positions())
    capped = "input" not in config.position.acts_on and by_distance

    def narrow(attention: AttentionConfig) -> AttentionConfig:
        size = attention.window if window is None else window
        narrow_enough = window is not None and attention.window is not None and attention.window <= window
        if size is None or narrow_enough or attention.keeps_state:
            return attention
        count = attention.sink_tokens if sinks is None else sinks
        cap = capped if sinks is not None else attention.cap_sinks
        return attention.with_window(size, count, cap and count > 0)

    layers = tuple(
        layer if layer.attention is None else layer.replace(attention=narrow(layer.attention))
        for layer in config.layers
    )
    return config.replace(attention=narrow(config.attention), layers=layers)

"""`Generated`: what a request has produced, or a piece of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Generated:
    """One continuation: its new tokens, their log-probabilities (after penalties), and its text if there is any.

    Of an `Engine` it may be a piece of one: that of the request's continuation `index`, with the `finish_reason`
    where it is the last, "stop" or "length". `top_log_probabilities` are of the likeliest tokens in the place of each.

    >>> from phasor import Transformer, generate, preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> new = generate(model, [1, 2, 3], max_new_tokens=5, details=True)
    >>> len(new.tokens), len(new.log_probabilities), new.text
    (5, 5, None)
    """

    tokens: list[int]
    log_probabilities: list[float]
    text: str | None = None
    score: float | None = None
    index: int = 0
    finish_reason: str | None = None
    top_log_probabilities: list[dict[int, float]] = field(default_factory=list)

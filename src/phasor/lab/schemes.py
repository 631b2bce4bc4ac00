"""The registered position schemes as the page shows them: names, texts, where they act, and their fields."""

from __future__ import annotations

import functools
from typing import Any

from phasor.config import ModelConfig, PositionConfig
from phasor.config.schema import names
from phasor.nn.positions.texts import read_texts

TABLE_LENGTH = 1024  # positions of a scheme that takes their number from the model
PLACES = ("input", "queries", "keys", "values", "scores")


def describe_schemes() -> list[dict[str, Any]]:
    """All schemes with their defaults, those together that act in the same places, from the input to the scores.

    >>> [scheme["kind"] for scheme in describe_schemes()][:4]
    ['counting', 'learned', 'normalized', 'sinusoidal']
    """
    schemes = [describe_scheme(cls) for cls in PositionConfig.kinds.values()]
    return sorted(schemes, key=lambda scheme: (place_order(scheme["acts_on"]), scheme["kind"]))


def describe_scheme(cls: type[PositionConfig]) -> dict[str, Any]:
    """A scheme: what it says about itself, the names of its fields, and its texts by language."""
    scheme, model = cls(), plain_model(8, 1)
    return {
        "kind": scheme.kind,
        "acts_on": list(scheme.acts_on),
        "axes": scheme.axes,
        "shift_invariant": scheme.shift_invariant,
        "depends_on_length": scheme.depends_on_length,
        "learned": bool(scheme.weight_shapes(model) or scheme.layer_weight_shapes(model)),
        "fields": names(cls),
        "texts": read_texts(cls),
    }


def place_order(acts_on: list[str]) -> list[int]:
    """A key to sort schemes by where they act; those that act nowhere come last."""
    return [PLACES.index(place) for place in acts_on] or [len(PLACES)]


@functools.lru_cache(maxsize=64)
def plain_model(dim: int, heads: int, max_length: int = TABLE_LENGTH) -> ModelConfig:
    """The model that schemes are built for: what they take of it are its sizes."""
    return ModelConfig(
        vocab_size=1,
        dim=dim,
        head_dim=dim,
        num_layers=1,
        num_heads=heads,
        max_length=max_length,
        position=PositionConfig.from_dict({"kind": "none"}),
    )

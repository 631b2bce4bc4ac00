"""The models that are compared over lengths: one checkpoint with several extensions of its positions, or a window."""

from __future__ import annotations

from typing import NamedTuple

from phasor.config import Extension, ModelConfig
from phasor.config.schema import did_you_mean, quote
from phasor.models.extensions import DROP, check_extendable, extend_config, methods, original_length, trained_length
from phasor.models.windows import window_config

OWN, NONE, WINDOW, SINKS = "own", "none", "window", "sinks"
SINK_TOKENS = 4  # as in StreamingLLM
BASELINE = WINDOW
LARGEST, PER_LENGTH = "largest", "per-length"


class Variant(NamedTuple):
    """A configuration of the model at one length, and the factor of its extension, where it has one of ours.

    Dynamic extensions have none: their factor follows the length of the text.
    """

    config: ModelConfig
    factor: float | None = None


def variant_names() -> dict[str, str]:
    """The names of models to compare, with what each is.

    >>> list(variant_names())[:4]
    ['own', 'none', 'window', 'sinks']
    """
    given = {
        OWN: "the model as it was saved",
        NONE: "without an extension",
        WINDOW: "as saved, with a sliding attention window of the trained length",
        SINKS: f"as saved, with a window of the trained length and the first {SINK_TOKENS} tokens always visible, at "
        "distances within the window (StreamingLLM)",
    }
    known = {name: first_line(Extension.kinds[name]) for name in methods() if name in Extension.kinds}
    return given | known | {DROP: "no positions in the layers that rotated them"}


def first_line(cls: type[Extension]) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0].rstrip(".")


def check_variants(names: list[str]) -> None:
    known = variant_names()
    for name in names:
        if name not in known:
            raise ValueError(f"unknown extension {quote(name)}{did_you_mean(name, known)}; known: {', '.join(known)}")


def make_variant(config: ModelConfig, name: str, reach: int) -> Variant:
    """The configuration under a name; an extension is for a length of `reach` tokens.

    An extension to the trained length or less leaves the positions as they are, and a window those layers that keep a
    state.

    >>> from phasor import preset
    >>> make_variant(preset("llama-2"), "window", 8192).config.attention.window
    4096
    >>> make_variant(preset("llama-2"), "yarn", 8192).factor, make_variant(preset("llama-2"), "yarn", 2048).factor
    (2.0, 1.0)
    """
    keys = any(not config.layer(index).attention.keeps_state for index in range(config.num_layers))
    if name == OWN or (name == NONE and not config.extendable_position().extendable) or (name == WINDOW and not keys):
        return Variant(config)
    if name in (WINDOW, SINKS):
        sinks = SINK_TOKENS if name == SINKS else 0
        return Variant(window_config(config, trained_length(config) - sinks, sinks))
    if name == NONE:
        return Variant(config.with_extension(None))
    check_extendable(config)
    if name == DROP:
        return Variant(extend_config(config, name, reach))
    original = original_length(config)
    if not Extension.kinds[name].has_end:
        return Variant(extend_config(config, name, max(reach, original)))
    if reach <= original:
        return Variant(config.with_extension(None), 1.0)
    return Variant(extend_config(config, name, reach), reach / original)

"""What `tokenizers` raises as sentences, and tokenizers that would never finish."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from phasor.config.schema import shorten

MOST_GROWTH = 1000  # times that normalizing, adding special tokens or decoding may lengthen a text
TOKENIZER_BYTES = 1 << 29


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Turn what `tokenizers` raises into a ValueError: its plain exceptions, and the panics of its Rust code.

    >>> from tokenizers import Tokenizer, models
    >>> with tokenizer_errors("the prompt cannot be encoded"):
    ...     Tokenizer(models.WordLevel({}, unk_token="?")).encode("a")
    Traceback (most recent call last):
    ValueError: the prompt cannot be encoded: WordLevel error: Missing [UNK] token from the vocabulary
    """
    try:
        yield
    except (ValueError, OSError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {shorten(' '.join(str(error).split()), 300)}") from None


def check_growth(tokenizer: Tokenizer, where: str) -> None:
    """Refuse a tokenizer whose parts lengthen a text without measure, which would take all time and memory."""
    for name in ("normalizer", "post_processor", "decoder"):
        part = getattr(tokenizer, name)
        factor = 1.0 if part is None else growth(json.loads(part.__getstate__()))
        if factor > MOST_GROWTH:
            raise ValueError(f"{where}: its {name} makes a text up to {factor:.0e} times as long")


def growth(part: Any) -> float:
    """How many times as long a normalizer, a post-processor or a decoder may make a text.

    >>> growth({"type": "Replace", "pattern": {"String": "ab"}, "content": "abcd"})
    2.0
    """
    if not isinstance(part, dict):
        return 1.0
    factor = 1.0
    inner = [part.get(name) for name in ("normalizers", "processors", "decoders")]
    for one in (one for parts in inner if isinstance(parts, list) for one in parts):
        factor = min(factor * growth(one), 1e300)
    templates = [part[name] for name in ("single", "pair") if isinstance(part.get(name), list)]
    if part.get("type") in ("BertProcessing", "RobertaProcessing"):
        templates = [["cls", "sequence", "sep"]]
    factor = min(factor * max([1, *map(len, templates)]), 1e300)
    if part.get("type") == "Prepend" and isinstance(part.get("prepend"), str):
        factor = min(factor * (1 + len(part["prepend"])), 1e300)
    if part.get("type") == "Replace" and isinstance(part.get("content"), str):
        pattern = part.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else pattern
        # A regular expression may match between any two characters, and an empty text does.
        own = len(part["content"]) / len(text) if isinstance(text, str) and text else 1 + len(part["content"])
        factor = min(factor * max(own, 1.0), 1e300)
    return factor

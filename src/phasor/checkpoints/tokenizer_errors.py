"""What `tokenizers` raises as sentences, and tokenizers that would never finish."""

from __future__ import annotations

import base64
import json
import math
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tokenizers import Tokenizer

from phasor.config.schema import shorten

MOST_GROWTH = 1000  # times that encoding or decoding may lengthen a text
MOST_PADDING = 1 << 20
TOKENIZER_BYTES = 1 << 29
GROWTH = {  # of parts that write letters of two bytes, a first letter, spaces around letters, or both ends
    "ByteLevel": 2.0,
    "Metaspace": 2.0,
    "BertNormalizer": 3.0,
    "BertProcessing": 3.0,
    "RobertaProcessing": 3.0,
}
INNER = ("normalizers", "pretokenizers", "processors", "decoders")  # what the sequences of each kind of part hold
HOLDS_STDERR = threading.Lock()


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Turn what `tokenizers` raises into a ValueError: its plain exceptions, and the panics of its Rust code.

    What Rust itself writes about a panic is not printed.

    >>> from tokenizers import Tokenizer, models
    >>> with tokenizer_errors("the prompt cannot be encoded"):
    ...     Tokenizer(models.WordLevel({}, unk_token="?")).encode("a")
    Traceback (most recent call last):
    ValueError: the prompt cannot be encoded: WordLevel error: Missing [UNK] token from the vocabulary
    """
    with hold_stderr() as held:
        try:
            yield
        except (ValueError, OSError, MemoryError):
            raise
        except BaseException as error:
            panic = type(error).__name__ == "PanicException"
            if not isinstance(error, Exception) and not panic:
                raise
            if panic and held is not None:
                os.truncate(held, 0)
            raise ValueError(f"{what}: {shorten(' '.join(str(error).split()), 300)}") from None


@contextmanager
def hold_stderr() -> Iterator[int | None]:
    """Keep what any language writes to stderr in a file, whose descriptor is given, and write it when this ends.

    Where another thread does so already, or there is no stderr, nothing is kept and None is given.
    """
    with ExitStack() as stack:
        held = None
        if HOLDS_STDERR.acquire(blocking=False):
            stack.callback(HOLDS_STDERR.release)
            with suppress(OSError):
                file = stack.enter_context(tempfile.TemporaryFile("a+b"))
                stderr = os.dup(2)
                stack.callback(os.close, stderr)
                stack.callback(lambda: (file.seek(0), os.write(2, file.read())))
                stack.callback(os.dup2, stderr, 2)
                held = os.dup2(file.fileno(), 2)
        yield held


def check_growth(tokenizer: Tokenizer, where: str) -> None:
    """Refuse a tokenizer whose parts lengthen a text without measure, which would take all time and memory."""
    parts = {
        name: 1.0 if part is None else growth(json.loads(part.__getstate__()))
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")
        for part in [getattr(tokenizer, name)]
    }
    limit = tokenizer.truncation
    if limit is not None:  # parts of a text that is cut overlap
        parts["truncation"] = limit["max_length"] / max(1, limit["max_length"] - limit["stride"])
    encoding = {name: factor for name, factor in parts.items() if name != "decoder" and factor > 1}
    for factors in (encoding, {"decoder": parts["decoder"]}):
        if (factor := min(math.prod(factors.values()), 1e300)) > MOST_GROWTH:
            raise ValueError(f"{where}: a text becomes up to {factor:.0e} times as long by its {' and '.join(factors)}")
    padding = tokenizer.padding or {}
    for name in ("length", "pad_to_multiple_of"):
        if (padding.get(name) or 0) > MOST_PADDING:
            raise ValueError(f"{where}: its padding fills texts up to {padding[name]:,} tokens, over {MOST_PADDING:,}")


def growth(part: Any) -> float:
    """How many times as long a part of a tokenizer, or the parts in it one after another, may make a text.

    >>> growth({"type": "Replace", "pattern": {"String": "ab"}, "content": "abcd"})
    2.0
    """
    if not isinstance(part, dict):
        return 1.0
    inner = [one for name in INNER if isinstance(part.get(name), list) for one in part[name]]
    factor = math.prod(map(growth, inner)) * float(max(1, own_growth(part)))
    return min(factor, 1e300)


def own_growth(part: dict[str, Any]) -> float:
    """How many times as long a part that is no sequence may make a text."""
    match part:
        case {
            "type": "TemplateProcessing",
            "single": list(single),
            "pair": list(pair),
            "special_tokens": dict(special),
        }:
            return max(sum(tokens_of(piece, special) for piece in pieces) for pieces in (single, pair))
        case {"type": "Prepend", "prepend": str(text)}:
            return 1 + len(text)
        case {"type": "Replace", "pattern": pattern, "content": str(content)}:
            return replacement_growth(pattern.get("String") if isinstance(pattern, dict) else pattern, content)
        case {"type": "BPEDecoder", "suffix": pattern} | {"type": "CTC", "word_delimiter_token": pattern}:
            return replacement_growth(pattern, " ")
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            table = base64.b64decode(charsmap)  # the size of a tree, the tree, and texts that each end with a zero
            texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
            return max(len(text.decode(errors="replace")) for text in texts)
    return GROWTH.get(str(part.get("type")), 1.0)


def replacement_growth(pattern: object, content: str) -> float:
    """Growth by a replacement: a regular expression may match between any two characters, and an empty text does."""
    return len(content) / len(pattern) if isinstance(pattern, str) and pattern else 1 + len(content)


def tokens_of(piece: dict[str, Any], special: dict[str, Any]) -> int:
    """How many tokens a piece of a template adds; a text counts as one."""
    name = piece.get("SpecialToken", {}).get("id")
    return len(special[name]["ids"]) if name in special else 1

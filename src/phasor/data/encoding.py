"""Encoding texts into arrays of tokens, many at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from phasor.checkpoints.chat_template import ChatTemplate
from phasor.checkpoints.folder import SOURCE_TOKENIZER, TOKENIZER, read_tokenizer
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.run_checkpoint import tokenizer_folder
from phasor.checkpoints.tokenizer_errors import tokenizer_errors
from phasor.config.recipe import Recipe
from phasor.data.dates import Split
from phasor.data.split import Example
from phasor.data.tokenizers import (
    SPECIALS,
    SpecialIds,
    byte_tokenizer,
    find_tokenizer,
    is_bytes,
    load_tokenizer,
    train_tokenizer,
)

if TYPE_CHECKING:
    from phasor.data.examples.base import Examples

Tokens = NDArray[np.uint32]
T = TypeVar("T")
Report = Callable[[int], None]
GROUP = 1 << 20  # characters that are encoded at a time
PIECE = 1 << 16  # characters after which a long document is cut at a line, since a tokenizer reads texts whole
NEW = ("bytes", "bpe", "unigram")  # tokenizers that are made, and not read from a folder
SAMPLE = 1000  # characters that are read for each token of a new vocabulary


class Tokenizers(NamedTuple):
    """The tokenizer of what a model writes, that of an encoder-decoder's source, and their special tokens.

    Conversations also have a chat template.
    """

    target: Tokenizer
    source: Tokenizer
    special: SpecialIds
    template: ChatTemplate | None = None


def given_tokenizer(recipe: Recipe) -> Path | None:
    """The folder a recipe takes its tokenizer from; None where it learns one, or reads bytes.

    Weights that are loaded belong to the tokenizer they were trained with: another one has to be asked for.
    """
    name, start = recipe.data.tokenizer, recipe.init_from
    if name != "auto" and name not in NEW:
        return find_tokenizer(name)
    if start is None or recipe.data.replace_tokenizer:
        return None
    folder = tokenizer_folder(resolve_folder(start, files="tokenizer"))
    own = read_tokenizer(folder)
    if name == "auto":
        if own is None:
            raise ValueError(
                f"{start} has no {TOKENIZER}, and its weights belong to a tokenizer: give the folder that has it as "
                "data.tokenizer, or set data.replace_tokenizer to train with a new one"
            )
        return folder
    if own is None or not (name == "bytes" and is_bytes(own)):
        raise ValueError(
            f"the weights of {start} belong to its own tokenizer, and data.tokenizer is {name!r}: leave it out, or set "
            "data.replace_tokenizer to train with a new one"
        )
    return None


def tokenizers_for(kind: Examples, texts: Callable[[], Iterable[Example]], characters: int) -> Tokenizers:
    """The tokenizers of examples: loaded, or learned from part of the texts, which have `characters` characters."""
    data = kind.recipe.data
    folder = given_tokenizer(kind.recipe)
    if folder is not None:
        tokenizer, special = load_tokenizer(folder)
        own = read_tokenizer(folder, SOURCE_TOKENIZER) if kind.has_source else None
        source = tokenizer if own is None else own
        for each in (tokenizer, source):
            each.no_truncation()
            each.no_padding()
        if kind.needs_mask and special.mask is None:
            raise ValueError(f"the tokenizer of {folder} has no mask token, and masking needs one")
        return kind.adapt(Tokenizers(tokenizer, source, special), folder)
    if data.tokenizer == "bytes":
        tokenizer = byte_tokenizer(kind.ends)
        return kind.adapt(Tokenizers(tokenizer, tokenizer, SpecialIds()), None)
    share = SAMPLE * data.vocab_size / max(1, characters)
    if "share_vocabulary" not in kind.unrelated and not data.share_vocabulary:
        source, target = (
            train_tokenizer(sample_texts((e[side : side + 1] for e in texts()), share), data, kind.ends)
            for side in (0, 1)
        )
        return Tokenizers(target, source, SpecialIds())
    tokenizer = train_tokenizer(sample_texts(map(kind.texts, texts()), share), data, kind.ends)
    return kind.adapt(Tokenizers(tokenizer, tokenizer, SpecialIds()), None)


def sample_texts(examples: Iterable[Example], share: float) -> Iterator[str]:
    """About this share of the texts, taken evenly from all of them, long ones in pieces."""
    number = 0
    for example in examples:
        for text in example:
            for piece in pieces(text):
                number += 1
                digest = hashlib.blake2b(b"%d" % number, digest_size=4).digest()
                if int.from_bytes(digest, "big") < share * 2**32:
                    yield piece


def pieces(text: str) -> list[str]:
    """A text cut before lines, into pieces that are not much longer than they need be.

    >>> pieces("short"), [len(piece) for piece in pieces("x\\n" * 50_000)]
    (['short'], [65536, 34464])
    """
    cut, start = [], 0
    while len(text) - start > PIECE:
        end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        cut.append(text[start:end])
        start = end
    return [*cut, text[start:]]


def encode_examples(
    examples: Iterable[tuple[Split, Example]],
    tokenizers: Tokenizers,
    kind: Examples,
    report: Report = lambda characters: None,
) -> Iterator[tuple[Split, Example, tuple[Tokens, ...]]]:
    """Every example with its tokens, an array for each side; `report` is told of characters that are encoded."""
    for group in group_by_size(examples, lambda one: sum(map(len, one[1]))):
        encoded = kind.encode([example for _, example in group], tokenizers, report)
        for (split, example), tokens in zip(group, encoded, strict=True):
            yield split, example, tokens


def group_by_size(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Items in lists of a good size to encode at once.

    >>> [len(group) for group in group_by_size(["x" * GROUP, "short", "texts"], len)]
    [1, 2]
    """
    group, total = [], 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= GROUP:
            yield group
            group, total = [], 0
    if group:
        yield group


def encode_texts(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    ends: bool,
    special: SpecialIds,
    report: Report = lambda characters: None,
) -> list[Tokens]:
    """The tokens of each text, with the ends its tokenizer gives it or without.

    A long text is encoded a part at a time, so that Ctrl-C is not kept waiting; `report` is told of each.
    """
    texts = list(texts)
    if is_bytes(tokenizer):
        report(sum(map(len, texts)))
        raw = [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + len(SPECIALS) for text in texts]
        return [np.append(ids, np.uint32(special.eos)) for ids in raw] if ends else raw
    tokenizer.encode_special_tokens = True  # the name of one, in a text, is text
    cut = [[text] if ends else pieces(text) for text in texts]
    ids: list[Tokens] = []
    for group in group_by_size((piece for one in cut for piece in one), len):
        with tokenizer_errors("the tokenizer cannot encode the data"):
            encodings = tokenizer.encode_batch_fast(group, add_special_tokens=ends)
        ids += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        report(sum(map(len, group)))
    found = iter(ids)
    return [np.concatenate([next(found) for _ in one]) for one in cut]


def add_ends(first: list[int], ids: Tokens, eos: int) -> Tokens:
    """Tokens with something before them, and `eos` behind them if it is not there yet."""
    last = [] if len(ids) and ids[-1] == eos else [eos]
    return np.concatenate([np.array(first, np.uint32), ids, np.array(last, np.uint32)])

"""Texts to token ids: all of a text and nothing else, without truncation and padding, which a tokenizer may ask for."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from phasor.checkpoints.folder import remove_limits
from phasor.checkpoints.sentencepiece import OUTSIDE, resolve_unknown
from phasor.checkpoints.tokenizer_errors import tokenizer_errors


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text, with the special tokens that its tokenizer adds.

    >>> from tokenizers import models, pre_tokenizers
    >>> tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer.enable_truncation(2)
    >>> tokenizer.enable_padding(length=4)
    >>> encode_prompts(tokenizer, ["a b a b b", "b"]), len(tokenizer.encode("a b a b b").ids)
    ([[0, 1, 0, 1, 1], [1]], 4)
    """
    tokenizer = without_limits(tokenizer)
    for text in texts:
        check_text(text)
    with tokenizer_errors("the tokenizer cannot encode the prompt"):
        if tokenizer.token_to_id(OUTSIDE) is None:
            return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
        encodings = tokenizer.encode_batch(list(texts))
    return [resolve_unknown(tokenizer, encoding.ids, encoding.tokens) for encoding in encodings]


def without_limits(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that neither truncates nor pads: the same one, or a copy where it does."""
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    return remove_limits(Tokenizer.from_str(tokenizer.to_str()))


def check_text(text: str, what: str = "the prompt") -> None:
    """Refuse half a character (a lone surrogate), which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what}: character {error.start} is half a character") from None

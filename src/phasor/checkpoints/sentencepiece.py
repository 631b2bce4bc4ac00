"""Tokenizers of folders that have SentencePiece files only, such as those of Marian and M2M-100.

The file is a protocol buffer. It is read here, without executing anything, into a tokenizer of the `tokenizers` library
with the same pieces, normalization and segmentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from phasor.checkpoints.protobuf import read_fields
from phasor.config.text_files import open_regular

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
UNREACHABLE = "\uffff"  # no text has this character, so that what begins with it is never found in one
OUTSIDE = f"{UNREACHABLE}outside"  # from the id of this token on, pieces are not in the model's vocabulary


@dataclass
class SentencePieceModel:
    """What a SentencePiece file says."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, kind
    kind: int = UNIGRAM
    byte_fallback: bool = False
    charsmap: bytes = b""
    adds_prefix: bool = True
    removes_spaces: bool = True

    @property
    def unknown(self) -> int:
        return next(i for i, (_, _, kind) in enumerate(self.pieces) if kind == UNKNOWN)


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Read a SentencePiece file; what phasor cannot do as SentencePiece does it is refused."""
    model = SentencePieceModel()
    with open_regular(file, str(file)) as stream:
        content = stream.read()
    try:
        for number, value in read_fields(content):
            if number == 1:
                model.pieces.append(read_piece(value))
            elif number == 2:
                trainer = dict(read_fields(as_bytes(value)))
                model.kind = int(trainer.get(3, UNIGRAM))
                model.byte_fallback = bool(trainer.get(35, False))
                if trainer.get(24, False):
                    raise ValueError("its pieces end with spaces instead of beginning with them")
            elif number == 3:
                normalizer = dict(read_fields(as_bytes(value)))
                model.charsmap = as_bytes(normalizer.get(2, b""))
                model.adds_prefix = bool(normalizer.get(3, True))
                model.removes_spaces = bool(normalizer.get(4, True))
                if not normalizer.get(5, True):
                    raise ValueError("it does not write spaces as ▁")
        if model.kind not in (UNIGRAM, BPE):
            raise ValueError("it is neither a unigram nor a BPE model")
        if not any(kind == UNKNOWN for _, _, kind in model.pieces):
            raise ValueError("it has no unknown token")
    except ValueError as error:
        raise ValueError(f"{file} is not a SentencePiece model that phasor reads: {error}") from None
    return model


def as_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a message is missing where one should be")
    return value


def read_piece(value: Any) -> tuple[str, float, int]:
    fields = dict(read_fields(as_bytes(value)))
    text = as_bytes(fields.get(1, b"")).decode("utf-8")
    return text, float(fields.get(2, 0.0)), int(fields.get(3, NORMAL))


def build_tokenizer(
    model: SentencePieceModel,
    vocabulary: dict[str, int] | None = None,
    size: int = 0,
    *,
    special: list[str] | None = None,
    readable: bool = False,
    first_only: bool = False,
) -> Tokenizer:
    """A tokenizer that segments texts as SentencePiece does.

    The ids are those of `vocabulary`, where one is given. Pieces that it lacks come after `size` ids and the token
    `OUTSIDE`: a text is segmented with them, and `resolve_unknown` makes them the unknown token. Tokens that only the
    vocabulary has are decoded where the tokenizer is `readable`, and are found in no text where it is not, but for
    `special` ones. With `first_only`, a space is put before the beginning of a text alone, and not behind special
    tokens too.
    """
    if model.kind == BPE:
        if vocabulary is not None:
            raise ValueError("a vocabulary beside a BPE model of SentencePiece")
        ids = {text: i for i, (text, _, _) in enumerate(model.pieces)}
        unknown = model.pieces[model.unknown][0]
        tokenizer = Tokenizer(
            models.BPE(ids, merges(model), unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
        )
    else:
        pieces = unigram_pieces(model, vocabulary, size, None if readable else set(special or ()))
        unknown_text = model.pieces[model.unknown][0]
        unknown_id = model.unknown if vocabulary is None else vocabulary[unknown_text]
        tokenizer = Tokenizer(models.Unigram(pieces, unknown_id, model.byte_fallback))
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.removes_spaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.adds_prefix and not first_only:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if model.adds_prefix and first_only:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if model.adds_prefix else []
    bytes_first = [decoders.ByteFallback()] if model.byte_fallback else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), *bytes_first, decoders.Fuse(), *strip])
    control = [text for text, _, kind in model.pieces if kind in (CONTROL, UNKNOWN)]
    defined = [text for text, _, kind in model.pieces if kind == USER_DEFINED]
    for tokens, is_special in ((control + (special or []), True), (defined, False)):
        known = [text for text in tokens if vocabulary is None or text in vocabulary]
        add_tokens(tokenizer, known, special=is_special)
    return tokenizer


def unigram_pieces(
    model: SentencePieceModel, vocabulary: dict[str, int] | None, size: int, named: set[str] | None
) -> list[tuple[str, float]]:
    """Pieces and scores by id. What no text is segmented into has the lowest score, and is hidden unless `named`."""
    scores = {text: score for text, score, kind in model.pieces if kind not in (CONTROL, UNKNOWN, UNUSED)}
    lowest = min(scores.values(), default=0.0)
    if vocabulary is None:
        return [(text, scores.get(text, lowest)) for text, _, _ in model.pieces]
    control = {text for text, _, kind in model.pieces if kind in (CONTROL, UNKNOWN)}
    names = {i: text for text, i in vocabulary.items()}
    pieces = []
    for i in range(max(size, len(vocabulary))):
        text = names.get(i, f"{UNREACHABLE}{i}")
        hidden = named is not None and text not in scores and text not in control | named
        pieces.append((hidden_name(text) if hidden else text, scores.get(text, lowest)))
    outside = [(text, score) for text, score in scores.items() if text not in vocabulary]
    return [*pieces, (OUTSIDE, lowest), *outside]


def hidden_name(text: str) -> str:
    """The name of a token that no text is segmented into."""
    return text if text.startswith(UNREACHABLE) else f"{UNREACHABLE}{text}"


def resolve_unknown(tokenizer: Tokenizer, ids: list[int], tokens: list[str]) -> list[int]:
    """The ids of a text in the model's vocabulary, where the tokenizer was built for one.

    As in `transformers`, a piece that the vocabulary lacks is unknown, and what SentencePiece does not know is looked
    up in the vocabulary as a whole.
    """
    outside, unknown = tokenizer.token_to_id(OUTSIDE), tokenizer.token_to_id("<unk>")
    if outside is None or unknown is None:
        return ids
    found: list[int] = []
    for i, token in zip(ids, tokens, strict=True):
        other = tokenizer.token_to_id(hidden_name(token)) if i == unknown else None
        found.append(unknown if i >= outside else i if other is None else other)
    return found


def merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """The merges of a BPE model: every way to join two pieces to a third, the best score first."""
    normal = {text: score for text, score, kind in model.pieces if kind == NORMAL}
    ids = {text: i for i, (text, _, _) in enumerate(model.pieces)}
    found = []
    for text, score in normal.items():
        pairs = [(text[:i], text[i:]) for i in range(1, len(text))]
        known = [(left, right) for left, right in pairs if left in normal and right in normal]
        found += [(-score, ids[text], ids[left], ids[right], (left, right)) for left, right in known]
    return [pair for *_, pair in sorted(found)]


def add_tokens(tokenizer: Tokenizer, tokens: list[str], special: bool) -> None:
    """Tokens that are found in a text before it is normalized."""
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in tokens])


def add_ends(tokenizer: Tokenizer, first: str | None, last: str | None) -> Tokenizer:
    """Have every text begin and end with these tokens."""
    ends = [token for token in (first, last) if token is not None]
    single = [token for token in (first, "$A", last) if token is not None]
    tokens = [(token, tokenizer.token_to_id(token)) for token in ends]
    if any(i is None for _, i in tokens):
        raise ValueError(f"its vocabulary has no {' and '.join(token for token, i in tokens if i is None)}")
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    return tokenizer

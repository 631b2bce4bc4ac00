"""Texts as the models of folders read them: tokens, attention by layer and head, and the tokens that are likely."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from phasor.lab.endpoints import MAX_TOKENS, FieldError
from phasor.lab.folders import Folder

if TYPE_CHECKING:
    from torch import Tensor

    from phasor.transformer import Transformer

AttentionKind = Literal["causal", "bidirectional", "cross"]
KEPT_ELEMENTS = 1 << 24  # attention weights of a text that are kept at once; of larger texts one layer is
ALL = ("all", -1)
MAX_TARGET_TOKENS = 64  # of a target that the model generates itself
SPACES = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})  # as the page shows tokens of nothing else
V = TypeVar("V")


class LastUsed(Generic[V]):
    """A few values that are expensive to make, by key; the one that was not used for longest is dropped.

    >>> cache = LastUsed(1)
    >>> cache.get("a", lambda: 1), cache.get("a", lambda: 2), cache.get("b", lambda: 3), cache.get("a", lambda: 4)
    (1, 1, 3, 4)
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made where there is none."""
        if key not in self.values:
            while len(self.values) >= self.most:
                self.values.popitem(last=False)
            self.values[key] = make()
        self.values.move_to_end(key)
        return self.values[key]

    def clear(self) -> None:
        self.values.clear()


@dataclass(frozen=True)
class Reading:
    """What a model made of a text: its tokens, hidden states `[T, dim]`, and attention weights by kind and layer.

    Weights are `[H, T, S]`, and None for layers that were not asked for.
    """

    model: Transformer
    tokens: list[int]
    source: list[int]
    hidden: Tensor
    attention: dict[str, list[Tensor | None]]

    def likely_tokens(self, index: int, most: int) -> list[dict[str, Any]]:
        """The likeliest tokens after the one at an index, or in its place where the model fills gaps."""
        import torch

        from phasor.nn.norm import at_least_float32

        if self.model.head is None or not self.model.config.has_logits:
            return []
        with torch.no_grad():
            logits = self.model.head(self.hidden[None, index, None], self.model.tokens.table)[0, 0]
            found = at_least_float32(logits).softmax(-1).topk(min(most, logits.shape[-1]))
        tokens = found.indices.tolist()
        return [
            {"token": text, "id": token, "probability": probability}
            for text, token, probability in zip(
                distinct_texts(self.model.tokenizer, tokens), tokens, found.values.tolist(), strict=True
            )
        ]


MODELS: LastUsed[Transformer] = LastUsed(1)
TARGETS: LastUsed[list[int]] = LastUsed(16)
READINGS: LastUsed[Reading] = LastUsed(4)


def attention_layers(model: Transformer) -> dict[str, int]:
    """The kinds of attention that a model has, with the number of layers of each."""
    encoder, decoder = (model.config.depth(side) for side in ("encoder", "decoder"))
    if model.config.shape == "encoder-decoder":
        return {"cross": decoder, "causal": decoder, "bidirectional": encoder}
    return {"causal": decoder} if model.config.shape == "decoder" else {"bidirectional": encoder}


def load_model(folder: Folder) -> Transformer:
    """The model of a folder, on the CPU in the dtype of its file; kept until another folder or other weights."""
    if not folder.is_model:
        raise FieldError("folder", f"{folder.name} holds no model")
    return MODELS.get(weights_key(folder), lambda: read_model(folder))


def read_model(folder: Folder) -> Transformer:
    """Load the model of a folder in which nothing that is read is a link out of it."""
    from phasor.checkpoints.load import load

    try:
        check_model_links(folder)
        READINGS.clear()  # they hold the model before
        return load(folder.path)
    except (ValueError, OSError) as error:
        raise FieldError("folder", folder.error_text(error)) from error


def check_model_links(folder: Folder) -> None:
    """Refuse a model of which a file is a link out of its folder."""
    parts = ["."]
    if folder.is_run:
        parts = ["model"] if os.path.lexists(folder.path / "model") else ["checkpoints", "data", "tokenizer"]
    for part in parts:
        if os.path.lexists(folder.path / part):
            folder.check_links(folder.path / part)


def weights_key(folder: Folder) -> tuple[Hashable, ...]:
    """What differs where the weights of a folder are others than before, without reading them."""
    names = ("config.json", "model.safetensors", "model/config.json", "checkpoints")
    return (folder.path, *(write_time(folder.path / name) for name in names))


def write_time(path: Path) -> int:
    """When a file was written, in nanoseconds; 0 where there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def read(folder: Folder, text: str, source: str = "", kept: tuple[str, int] | None = None) -> Reading:
    """A text as the model of a folder reads it; the last few are kept for further requests.

    An encoder-decoder reads a source, and a target that may be empty: then it is what the model writes. Where all
    attention weights would be too many, `kept` says of which kind and layer they are needed.
    """
    model, key = load_model(folder), weights_key(folder)
    if model.front_end is not None:
        raise FieldError("folder", "the source of this model are features, and no text")
    if model.config.shape == "encoder-decoder":
        source_ids = encode(model.source_tokenizer or model.tokenizer, source, "source")
        ids = TARGETS.get((key, source, text), lambda: read_target(model, source_ids, text))
    else:
        source_ids, ids = [], encode(model.tokenizer, text, "text")
    elements = sum(attention_layers(model).values()) * model.config.num_heads * max(len(ids), len(source_ids)) ** 2
    wanted = ALL if elements <= KEPT_ELEMENTS else kept
    return READINGS.get((key, tuple(ids), tuple(source_ids), wanted), lambda: forward(model, ids, source_ids, wanted))


def forward(model: Transformer, ids: list[int], source: list[int], wanted: tuple[str, int] | None) -> Reading:
    """Run a model on tokens and keep attention weights: all of them, those of one kind and layer, or none."""
    import torch

    from phasor.nn.record import Record

    found: dict[str, list[Any]] = {kind: KeptLayers(kind, wanted) for kind in attention_layers(model)}
    record, tokens = Record(), torch.tensor([ids])
    try:
        with torch.no_grad():
            if model.decoder is None:
                record.attention = found["bidirectional"]
                hidden = model.encode(tokens, record=record).hidden
            else:
                memory = None
                if source:
                    of_source = Record()
                    of_source.attention, record.cross_attention = found["bidirectional"], found["cross"]
                    memory = model.encode(torch.tensor([source]), record=of_source)
                record.attention = found["causal"]
                hidden = model.decode(tokens, memory, record=record)
    except ValueError as error:
        raise FieldError("text", str(error)) from error
    return Reading(model, ids, source, hidden[0], found)


class KeptLayers(list[Any]):
    """A list for attention weights of a kind, one entry `[H, T, S]` per layer; None for those that are not wanted."""

    def __init__(self, kind: str, wanted: tuple[str, int] | None) -> None:
        super().__init__()
        self.kind, self.wanted = kind, wanted

    def append(self, weights: Tensor) -> None:
        super().append(weights[0].float() if self.wanted in (ALL, (self.kind, len(self))) else None)


def read_target(model: Transformer, source: list[int], text: str) -> list[int]:
    """The target of an encoder-decoder with its start: a text, or where that is empty what the model writes."""
    from phasor.config.generation import GenerationConfig
    from phasor.generation import generate

    start = model.special.start
    if start is None:
        raise FieldError("folder", "this encoder-decoder does not say which token its decoder starts with")
    if text.strip():
        return [start, *encode(model.tokenizer, text, "text", special=False)]
    return [start, *generate(model, source, GenerationConfig(max_new_tokens=MAX_TARGET_TOKENS))]


def encode(tokenizer: Any, text: str, field: str, special: bool = True) -> list[int]:
    """The tokens of a text, at most 512; for a model without a tokenizer the text is token ids with spaces between."""
    from phasor.generation.encode import check_text, encode_prompts

    if tokenizer is None:
        words = text.split()
        if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
            raise FieldError(field, "this model has no tokenizer: give token ids with spaces between, as in 5 17 2")
        ids = [int(word) for word in words]
    else:
        try:
            check_text(text, "this text")
            ids = encode_prompts(tokenizer, [text])[0] if special else encode_plain(tokenizer, text)
        except ValueError as error:
            raise FieldError(field, str(error)) from error
    if not 0 < len(ids) <= MAX_TOKENS:
        what = "no token: write a few words" if not ids else f"{len(ids):,} tokens, and at most {MAX_TOKENS} are read"
        raise FieldError(field, f"this text has {what}")
    return ids


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text without special ones: the beginning of a target."""
    from phasor.checkpoints.tokenizer_errors import tokenizer_errors

    with tokenizer_errors("the tokenizer cannot encode this text"):
        return list(tokenizer.encode(text, add_special_tokens=False).ids)


def distinct_texts(tokenizer: Any, tokens: list[int]) -> list[str]:
    """The texts of tokens; those that look alike are as they are in the vocabulary.

    >>> distinct_texts(None, [17, 3])
    ['17', '3']
    """
    texts = [token_text(tokenizer, token) for token in tokens]
    looks = [text.strip() for text in texts]
    return [
        tokenizer.id_to_token(token) if looks.count(look) > 1 else text
        for text, look, token in zip(texts, looks, tokens, strict=True)
    ]


def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token as the page shows it: decoded where it is whole characters, else as it is in the vocabulary.

    >>> token_text(None, 17)
    '17'
    """
    if tokenizer is None:
        return str(token)
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    if text and not text.strip():
        return text.translate(SPACES)
    return text if text and "\ufffd" not in text else tokenizer.id_to_token(token) or str(token)

"""The view "order": two sentences of the same words with and without positions, and texts as a model reads them.

The ticket needs no checkpoint: a small model with random weights in float64 reads both sentences. Without positions
and without a causal mask a Transformer sees a bag of words, so that what it makes of <cls> is the same.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from phasor.config import PositionConfig
from phasor.config.schema import unknown
from phasor.lab.endpoints import MAX_ELEMENTS, MAX_TOKENS, FieldError, LabRequest, Matrix, bounded_field, register
from phasor.lab.folders import Folder, Folders
from phasor.lab.texts import (
    AttentionKind,
    Reading,
    attention_layers,
    check_model_links,
    load_model,
    read,
    token_text,
)

if TYPE_CHECKING:
    from phasor.transformer import Transformer

MAX_WORDS = 16
DIM, VOCABULARY = 32, 2 * MAX_WORDS + 1
CLS = "<cls>"
SAME = 1e-12  # relative distance of vectors below which they differ by rounding alone


class TicketRequest(LabRequest):
    """Two sentences, words with spaces between them, and the model that reads them."""

    first: str = bounded_field("从 北京 到 上海 的 火车票", 1, 400)
    second: str = bounded_field("从 上海 到 北京 的 火车票", 1, 400)
    position: str = "none"
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    num_layers: int = bounded_field(2, 1, 4)
    num_heads: Literal[1, 2, 4] = 2
    seed: int = bounded_field(0, 0, 9999)

    def check(self) -> None:
        super().check()
        if self.position not in word_schemes():
            error = unknown("position scheme of words", self.position, word_schemes(), PositionConfig.former_kinds)
            raise FieldError("position", str(error))


class ModelsRequest(LabRequest):
    """Which models there are to read a text with."""


class TextRequest(LabRequest):
    """A text for the model of a folder; for an encoder-decoder `source`, and `text` the target or nothing.

    `index` is the token whose continuation is asked for, the last one by default.
    """

    folder: int = bounded_field(0, 0)
    text: str = bounded_field("", maximum=32 * MAX_TOKENS)
    source: str = bounded_field("", maximum=32 * MAX_TOKENS)
    index: int | None = bounded_field(None, 0, MAX_TOKENS - 1)
    most: int = bounded_field(10, 1, 50)


class AttentionRequest(LabRequest):
    """The attention weights of a text by a kind of attention; without `layer` or `head`, of all layers or heads."""

    folder: int = bounded_field(0, 0)
    text: str = bounded_field("", maximum=32 * MAX_TOKENS)
    source: str = bounded_field("", maximum=32 * MAX_TOKENS)
    kind: AttentionKind = "causal"
    layer: int | None = bounded_field(None, 0)
    head: int | None = bounded_field(None, 0)


def word_schemes() -> list[str]:
    """The position schemes in which a word has one position: all but those of grids and videos.

    >>> "rotary" in word_schemes(), "axial" in word_schemes()
    (True, False)
    """
    return [kind for kind, cls in PositionConfig.kinds.items() if cls().axes == 1]


@lru_cache(maxsize=16)
def ticket_model(position: str, attention: str, num_layers: int, num_heads: int, seed: int) -> Transformer:
    """A small model with random weights of a seed, in float64."""
    from phasor.config import FanInInitConfig, ModelConfig
    from phasor.lab.seeding import use_seed
    from phasor.transformer import Transformer

    config = ModelConfig(
        vocab_size=VOCABULARY,
        dim=DIM,
        num_layers=num_layers,
        num_heads=num_heads,
        max_length=MAX_WORDS + 1,
        shape="decoder" if attention == "causal" else "encoder",
        position=PositionConfig.from_dict({"kind": position}),
        init=FanInInitConfig(),
    )
    with use_seed(seed):
        return Transformer(config).double().eval()


def compare_sentences(request: TicketRequest) -> dict[str, Any]:
    """What a model with random weights makes of two sentences: vectors, how far each word's moved, attention."""
    import torch

    from phasor.nn.record import Record

    sentences = [split_words(request.first, "first"), split_words(request.second, "second")]
    words = sorted({word for sentence in sentences for word in sentence})  # a word's vector does not depend on order
    model = ticket_model(request.position, request.attention, request.num_layers, request.num_heads, request.seed)
    hidden, attention = [], []
    for sentence in sentences:
        record = Record("attention")
        tokens = torch.tensor([[0, *(1 + words.index(word) for word in sentence)]])
        with torch.no_grad():
            hidden.append(model(tokens, record=record, head=False)[0])
        attention.append([weights[0].tolist() for weights in record.attention or []])
    tokens_of = [[CLS, *sentence] for sentence in sentences]
    places = [number_words(tokens) for tokens in tokens_of]
    moved = [
        distance(hidden[0][index], hidden[1][places[1].index(word)]) if word in places[1] else None
        for index, word in enumerate(places[0])
    ]
    index = -1 if request.attention == "causal" else 0  # the token that has seen all others
    return {
        "tokens": tokens_of,
        "same_words": Counter(sentences[0]) == Counter(sentences[1]),
        "moved": moved,
        "summary": {
            "tokens": [tokens[index] for tokens in tokens_of],
            "vectors": [vectors[index].tolist() for vectors in hidden],
            "distance": distance(hidden[0][index], hidden[1][index]),
            "same": distance(hidden[0][index], hidden[1][index]) < SAME,
        },
        "attention": attention,
    }


def split_words(sentence: str, field: str) -> list[str]:
    """The words of a sentence, which spaces separate."""
    words = sentence.split()
    if not 0 < len(words) <= MAX_WORDS:
        raise FieldError(field, f"a sentence has 1 to {MAX_WORDS} words with spaces between them, not {len(words)}")
    return words


def number_words(words: list[str]) -> list[tuple[str, int]]:
    """Words with how often they stood before, so that each is another one.

    >>> number_words(["a", "b", "a"])
    [('a', 0), ('b', 0), ('a', 1)]
    """
    return [(word, words[:index].count(word)) for index, word in enumerate(words)]


def distance(first: Any, second: Any) -> float:
    """The length of the difference of two vectors, relative to that of the first."""
    return float((first - second).norm() / first.norm())


def list_models(request: ModelsRequest, folders: Folders) -> dict[str, Any]:
    """The folders with a model: their numbers and names, and what their configuration says; or why not."""
    return {"models": [describe_model(folder) for folder in folders.list() if folder.is_model]}


def describe_model(folder: Folder) -> dict[str, Any]:
    from phasor.checkpoints.load import read_config

    found: dict[str, Any] = {"folder": folder.number, "name": folder.name}
    try:
        check_model_links(folder)
        config = read_config(folder.path)
    except (ValueError, OSError) as error:
        return {**found, "error": folder.error_text(error)}
    return {**found, "shape": config.shape, "layers": config.num_layers, "heads": config.num_heads}


def read_text(request: TextRequest, folders: Folders) -> dict[str, Any]:
    """The tokens of a text, the kinds of attention there are, and the likeliest tokens after one of them."""
    reading = read(folders.get(request.folder), request.text, request.source)
    model, last = reading.model, len(reading.tokens) - 1
    if request.index is not None and request.index > last:
        raise FieldError("index", f"index must be at most {last}, that of the last token, not {request.index}")
    index = last if request.index is None else request.index
    source_tokenizer = model.source_tokenizer or model.tokenizer
    return {
        "shape": model.config.shape,
        "tokens": [token_text(model.tokenizer, token) for token in reading.tokens],
        "source": [token_text(source_tokenizer, token) for token in reading.source],
        "kinds": attention_layers(model),
        "heads": model.config.num_heads,
        "index": index,
        "likely": reading.likely_tokens(index, request.most),
        "fills": model.decoder is None,
    }


def read_attention(request: AttentionRequest, folders: Folders) -> Matrix:
    """Attention weights as a matrix `[layers, heads, T, S]`; rows are queries, columns keys."""
    folder = folders.get(request.folder)
    model = load_model(folder)
    layers, heads = attention_layers(model).get(request.kind), model.config.num_heads
    if layers is None:
        kinds = " and ".join(attention_layers(model))
        raise FieldError("kind", f"this {model.config.shape} has {kinds} attention, and no {request.kind} attention")
    for name, value, count in (("layer", request.layer, layers), ("head", request.head, heads)):
        if value is not None and value >= count:
            raise FieldError(name, f"{name} must be at most {count - 1}, not {value}: they are counted from 0")
    kept = None if request.layer is None else (request.kind, request.layer)
    return cut(read(folder, request.text, request.source, kept), request)


def cut(reading: Reading, request: AttentionRequest) -> Matrix:
    """The weights of a reading that a request asks for."""
    import torch

    of_kind = reading.attention[request.kind]
    chosen = of_kind if request.layer is None else [of_kind[request.layer]]
    keys = len(reading.source if request.kind == "cross" else reading.tokens)
    queries = len(reading.source if request.kind == "bidirectional" and reading.source else reading.tokens)
    keys = queries if request.kind == "bidirectional" else keys
    heads = reading.model.config.num_heads if request.head is None else 1
    if len(chosen) * heads * queries * keys > MAX_ELEMENTS or any(weights is None for weights in chosen):
        raise FieldError("layer", f"these are more than {MAX_ELEMENTS:,} weights: ask for one layer and one head")
    head = slice(None) if request.head is None else slice(request.head, request.head + 1)
    return Matrix.of(torch.stack([weights[head] for weights in chosen if weights is not None]))


register("order", "ticket", TicketRequest, compare_sentences)
register("order", "models", ModelsRequest, list_models, folders=True)
register("order", "text", TextRequest, read_text, folders=True)
register("order", "attention", AttentionRequest, read_attention, folders=True)

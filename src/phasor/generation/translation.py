"""Translation of many sources by an encoder-decoder, in batches of similar length."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phasor.generation.api import generate
from phasor.transformer import Stack, Transformer

Progress = Callable[[int, int], None]  # how many are done, and of how many
DEFAULT_BEAMS = 4
SHORTEST = 16  # sources up to this length share a batch, then up to twice this length, and so on
EXTRA = 32  # new tokens beyond twice the length of such a source


def translate_tokens(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    *,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    max_new_tokens: int | None = None,
    batch_tokens: int = 4096,
    progress: Progress | None = None,
) -> list[list[int]]:
    """The new tokens for each source, in their order, without the token they stopped at; none for an empty source.

    A batch has at most `batch_tokens` tokens of sources, padding included, or one source. Without `max_new_tokens` a
    translation may be about twice as long as its source and 32 tokens more, within the model's positions. That depends
    on its own source alone, not on the others in its batch. Without `num_beams` and `length_penalty` they are those of
    the model's folder, else 4 and 1.

    >>> from phasor import SpecialTokens, preset
    >>> model = Transformer(preset("transformer-base", dim=16, num_heads=2, num_layers=1, vocab_size=50))
    >>> model.special = SpecialTokens(start=1, stop=(2,))
    >>> new = translate_tokens(model, [[7, 8, 9], [], [5] * 20], num_beams=2)
    >>> len(new), new[1], translate_tokens(model, [[7, 8, 9]], num_beams=2) == new[:1]
    (3, [], True)
    """
    if model.encoder is None or model.decoder is None:
        raise ValueError(f"translation needs an encoder-decoder, and this model is a {model.config.shape}")
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, not {batch_tokens}")
    max_source, max_target = max_positions(model.encoder), max_positions(model.decoder)
    for number, source in enumerate(sources, 1):
        if max_source is not None and len(source) > max_source:
            raise ValueError(f"text {number} has {len(source)} tokens, and this model reads at most {max_source}")
    given = {"num_beams": num_beams, "length_penalty": length_penalty}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if model.generation_settings.get("num_beams") is None:
        options = {"num_beams": DEFAULT_BEAMS} | options
    translations: list[list[int]] = [[] for _ in sources]
    done = sum(not source for source in sources)
    for batch in length_batches([len(source) for source in sources], batch_tokens):
        if progress is not None:
            progress(done, len(sources))
        most = default_new_tokens(len(sources[batch[0]]), max_target) if max_new_tokens is None else max_new_tokens
        prompts = [list(sources[i]) for i in batch]
        answers = generate(model, prompts, max_new_tokens=most, num_return_sequences=1, **options)
        for i, new in zip(batch, answers, strict=True):
            translations[i] = new[:-1] if new[-1] in model.special.stop else new
        done += len(batch)
    if progress is not None:
        progress(done, len(sources))
    return translations


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """The indices of the sources in each batch, the longest first; empty ones are left out.

    Sources that may have as many new tokens are in batches of equal size, or one source less: on a GPU the same CUDA
    graph then serves all of them.

    >>> list(length_batches([3, 0, 40, 5, 4], 10))
    [[2], [3, 4], [0]]
    """
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    for _, group in itertools.groupby(order, key=lambda i: default_new_tokens(lengths[i])):
        alike = list(group)
        most = max(1, batch_tokens // lengths[alike[0]])
        count = -(-len(alike) // most)
        ends = [len(alike) - len(alike) * left // count for left in reversed(range(count))]
        yield from (alike[start:end] for start, end in zip([0, *ends], ends, strict=False))


def default_new_tokens(length: int, limit: int | None = None) -> int:
    """How many new tokens a source of some length may have: the same for lengths up to a power of two.

    >>> default_new_tokens(3), default_new_tokens(17), default_new_tokens(17, limit=50)
    (64, 96, 50)
    """
    rounded = SHORTEST
    while rounded < length:
        rounded *= 2
    return min(2 * rounded + EXTRA, limit or 2 * rounded + EXTRA)


def max_positions(stack: Stack) -> int | None:
    """The number of tokens that the positions of a stack suffice for, where that is limited."""
    return min((s.max_positions for s in stack.schemes if s.max_positions is not None), default=None)

"""Many sources through an encoder-decoder, those of about one length together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from phasor.generation import generate
from phasor.transformer import Stack, Transformer

Progress = Callable[[int, int], None]  # how much is done, and out of how much
SHORT = 16  # sources up to this length are translated together, then up to twice this length, and so on
EXTRA = 32  # new tokens beyond twice as many as such a source has


def translated(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    *,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    max_new_tokens: int | None = None,
    batch_tokens: int = 4096,
    progress: Progress | None = None,
) -> list[list[int]]:
    """The new tokens for each source, in their order, without the token they stopped at; none for an empty source.

    A batch has at most `batch_tokens` tokens of sources, padding included, or one source. Without `max_new_tokens` a
    translation may be about twice as long as its source and 32 tokens more, as far as the model reaches. That depends
    on its own source alone, and not on those it shares a batch with.

    >>> from phasor import SpecialTokens, preset
    >>> model = Transformer(preset("transformer-base", dim=16, num_heads=2, num_layers=1, vocab_size=50))
    >>> model.special = SpecialTokens(start=1, stop=(2,))
    >>> new = translated(model, [[7, 8, 9], [], [5] * 20], num_beams=2)
    >>> len(new), new[1], translated(model, [[7, 8, 9]], num_beams=2) == new[:1]
    (3, [], True)
    """
    if model.encoder is None or model.decoder is None:
        raise ValueError(f"translation needs an encoder-decoder, and this model is a {model.config.shape}")
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, not {batch_tokens}")
    readable, writable = reach(model.encoder), reach(model.decoder)
    for number, source in enumerate(sources, 1):
        if readable is not None and len(source) > readable:
            raise ValueError(f"text {number} has {len(source)} tokens, and this model reads at most {readable}")
    found: list[list[int]] = [[] for _ in sources]
    done = sum(not source for source in sources)
    for batch in batches([len(source) for source in sources], batch_tokens):
        if progress is not None:
            progress(done, len(sources))
        most = room(len(sources[batch[0]]), writable) if max_new_tokens is None else max_new_tokens
        given = [list(sources[i]) for i in batch]
        answers = generate(model, given, num_beams=num_beams, length_penalty=length_penalty, max_new_tokens=most)
        for i, new in zip(batch, answers, strict=True):
            found[i] = new[:-1] if new[-1] in model.special.stop else new
        done += len(batch)
    if progress is not None:
        progress(done, len(sources))
    return found


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Which sources go together, the longest first; empty ones are left out.

    >>> list(batches([3, 0, 40, 5, 4], 10))
    [[2], [3, 4], [0]]
    """
    batch: list[int] = []
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        longest = lengths[batch[0]] if batch else 0
        if batch and ((len(batch) + 1) * longest > most or room(longest) != room(lengths[i])):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def room(length: int, limit: int | None = None) -> int:
    """How many new tokens a source of some length may have: the same for all up to a power of two.

    >>> room(3), room(17), room(17, limit=50)
    (64, 96, 50)
    """
    rounded = SHORT
    while rounded < length:
        rounded *= 2
    return min(2 * rounded + EXTRA, limit or 2 * rounded + EXTRA)


def reach(stack: Stack) -> int | None:
    """How many tokens the positions of a stack reach, where that has an end."""
    return min((s.max_positions for s in stack.schemes if s.max_positions is not None), default=None)

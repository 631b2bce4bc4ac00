"""What the tests of generation share: models that do not repeat themselves, and decoding written out plainly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from schemes import build, tiny
from torch import Tensor

import phasor
from phasor import Transformer


def speaker(scheme: str = "rotary", seed: int = 0, **changes: object) -> Transformer:
    """A tiny model with an output table of its own; with a shared one the likeliest token is always the last."""
    return build(tiny(scheme, **{"embedding": phasor.EmbeddingConfig(tied=False), **changes}), seed)


def full_logits(model: Transformer, text: Sequence[int], length: int, source: Sequence[int] | None = None) -> Tensor:
    """Logits `[T, vocab]` of a text by one forward without a cache, at a stated length."""
    given = torch.tensor([list(text)])
    with torch.no_grad():
        if source is None:
            return model(given, length=length)[0]
        return model(torch.tensor([list(source)]), given, target_length=length)[0]


def greedy_ref(model: Transformer, prompt: Sequence[int], count: int, source: Sequence[int] | None = None) -> list[int]:
    """The likeliest token again and again, each by a fresh forward over all of the text."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(full_logits(model, text, len(prompt) + count, source)[-1].argmax()))
    return text[len(prompt) :]


def continuations(vocab: int, count: int, stop: Iterable[int] = ()) -> list[tuple[int, ...]]:
    """Every text of `count` tokens, or of fewer that ends in a stop token."""
    stop = set(stop)
    found = []
    for size in range(1, count + 1):
        for text in itertools.product(range(vocab), repeat=size):
            ended = text[-1] in stop
            if not stop & set(text[:-1]) and (ended or size == count):
                found.append(text)
    return found


def chi_square_tail(counts: Tensor, probabilities: Tensor) -> float:
    """How likely it is to see counts at least this far from their probabilities; rare outcomes are pooled."""
    expected = probabilities.double() * counts.sum()
    assert int(counts[probabilities == 0].sum()) == 0, "something impossible happened"
    rare = expected < 5
    seen, aim = counts.double()[~rare], expected[~rare]
    if float(expected[rare].sum()) >= 5:
        seen = torch.cat([seen, counts.double()[rare].sum()[None]])
        aim = torch.cat([aim, expected[rare].sum()[None]])
    statistic = ((seen - aim) ** 2 / aim).sum()
    freedom = torch.tensor(float(len(aim) - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))

"""Losses of a model over rows of text at a length: windows in batches, never all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from phasor.checkpoints.swap_positions import swap_config
from phasor.config import ModelConfig
from phasor.evaluation.length_settings import LengthSettings
from phasor.evaluation.protocols import Window, windows
from phasor.evaluation.rows import EvaluatedModel, LongRows
from phasor.generation.translation import Progress
from phasor.nn.mode import eval_mode
from phasor.nn.norm import at_least_float32
from phasor.transformer import Transformer

LOGITS_AT_ONCE = 1 << 25
BINS = 64  # of the curve by position
Key = tuple[ModelConfig, int]  # a configuration of the model, and the length it reads


@dataclass(frozen=True)
class Measured:
    """The mean loss of each row `[rows]`, and by position `[whole windows, bins]`, where windows count as a whole."""

    losses: NDArray[np.float64]
    by_position: NDArray[np.float64]


def measure(
    evaluated: EvaluatedModel,
    rows: LongRows,
    needed: Iterable[Key],
    settings: LengthSettings,
    report: Progress,
) -> dict[Key, Measured]:
    """The losses of configurations at lengths, each of them once."""
    needed = list(dict.fromkeys(needed))
    cut = {length: cut_windows(rows, length, settings) for length in settings.lengths}
    sizes = {length: sum(window.end - window.start for _, window in cut[length]) for length in cut}
    total, done = sum(sizes[length] for _, length in needed), 0
    measured: dict[Key, Measured] = {}
    models: dict[ModelConfig, Transformer] = {}

    def advance(before: int, tokens: int) -> None:
        report(before + tokens, total)

    for config, length in needed:
        if config not in models:
            models = {
                config: evaluated.model if config == evaluated.model.config else swap_config(evaluated.model, config)
            }
        with eval_mode(models[config]), torch.inference_mode():
            measured[config, length] = measure_length(
                models[config], evaluated.bos, rows, cut[length], length, settings, partial(advance, done)
            )
        done += sizes[length]
    return measured


def cut_windows(rows: LongRows, length: int, settings: LengthSettings) -> list[tuple[int, Window]]:
    """The windows of all documents, each with the number of its document."""
    return [
        (number, window)
        for number, count in enumerate(rows.counts)
        for window in windows(settings.protocol, count, rows.length, length, settings.targets, settings.stride)
    ]


def measure_length(
    model: Transformer,
    bos: int | None,
    rows: LongRows,
    cut: list[tuple[int, Window]],
    length: int,
    settings: LengthSettings,
    report: Callable[[int], None],
) -> Measured:
    """The losses of one model at one length, by row and, where windows are whole, by position."""
    first_row = np.cumsum([0, *rows.counts])
    sums = np.zeros(first_row[-1])
    counts = np.zeros(first_row[-1])
    bins = min(BINS, length)
    curve = np.zeros((2, first_row[-1], bins))
    done, batches = 0, []
    for batch in batch_windows(cut, settings.batch_tokens):
        tokens, wanted = gather(rows, batch, bos)
        batches.append((batch, target_losses(model, tokens, wanted)))
        done += tokens.numel()
        report(done)
    for batch, losses in batches:
        for (number, window), each in zip(batch, losses.cpu().double().numpy(), strict=True):
            places = np.arange(window.end - len(each) + 1, window.end + 1)  # of the targets in the document
            at = first_row[number] + (places - 1) // rows.length
            if window.whole:
                by_bin = (places - 1 - window.start) * bins // length
                np.add.at(curve[0], (at, by_bin), each)
                np.add.at(curve[1], (at, by_bin), 1)
            counted = places >= window.first
            np.add.at(sums, at[counted], each[counted])
            np.add.at(counts, at[counted], 1)
    seen = curve[1].all(1)
    return Measured(sums / counts, curve[0][seen] / curve[1][seen])


def batch_windows(cut: list[tuple[int, Window]], batch_tokens: int) -> Iterator[list[tuple[int, Window]]]:
    """Windows of one size with equally many targets, several at a time."""
    groups: dict[tuple[int, int], list[tuple[int, Window]]] = {}
    for number, window in cut:
        size = window.end - window.start
        wanted = size if window.whole else window.end - window.first + 1
        groups.setdefault((size, wanted), []).append((number, window))
    for (size, _), group in groups.items():
        at_once = max(1, batch_tokens // size)
        for start in range(0, len(group), at_once):
            yield group[start : start + at_once]


def gather(rows: LongRows, batch: list[tuple[int, Window]], bos: int | None) -> tuple[Tensor, Tensor]:
    """The tokens that windows read, `[B, L]`, and the targets that are asked for, `[B, K]`."""
    read = np.stack([rows.documents[number][w.start : w.end] for number, w in batch]).astype(np.int64)
    if bos is not None:
        read[:, 0] = bos
    firsts = [w.start + 1 if w.whole else w.first for _, w in batch]
    wanted = [rows.documents[n][first : w.end + 1] for first, (n, w) in zip(firsts, batch, strict=True)]
    return torch.from_numpy(read), torch.from_numpy(np.stack(wanted).astype(np.int64))


def target_losses(model: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """The losses `[B, K]` of the last K targets of tokens `[B, L]`; not all logits are held at once.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=50))
    >>> target_losses(model, torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)).shape
    torch.Size([2, 3])
    """
    table = model.tokens.weight
    tokens, targets = tokens.to(table.device), targets.to(table.device)
    hidden = model(tokens, head=False)[:, -targets.shape[1] :].flatten(0, 1)
    wanted = targets.flatten()
    step = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    losses = []
    for start in range(0, len(wanted), step):
        assert model.head is not None
        logits = at_least_float32(model.head(hidden[start : start + step], model.tokens.table))
        losses.append(F.cross_entropy(logits, wanted[start : start + step], reduction="none"))
    return torch.cat(losses).view_as(targets)

"""From logits to a token: penalties, temperature, filters, and the draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasor.config.generation import GenerationConfig

NOT = float("-inf")


def penalized(logits: Tensor, options: GenerationConfig, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
    """One row of logits `[vocab]` with what was said already made less likely.

    >>> options = GenerationConfig(repetition_penalty=2.0, presence_penalty=1.0)
    >>> penalized(torch.tensor([4.0, 4.0, -4.0]), options, prompt=[2], new=[0]).tolist()
    [1.0, 4.0, -8.0]
    """
    seen = sorted({*prompt, *new})
    if options.repetition_penalty != 1.0 and seen:
        logits, at = logits.clone(), torch.tensor(seen, device=logits.device)
        old = logits[at]
        logits[at] = torch.where(old > 0, old / options.repetition_penalty, old * options.repetition_penalty)
    if (options.frequency_penalty or options.presence_penalty) and new:
        counts = torch.bincount(torch.tensor(new, device=logits.device), minlength=len(logits)).to(logits.dtype)
        logits = logits - options.frequency_penalty * counts - options.presence_penalty * counts.clamp(max=1)
    return logits


def top_k(logits: Tensor, k: int) -> Tensor:
    """All but the `k` largest struck out; ties with the last of them stay."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, NOT)


def top_p(logits: Tensor, p: float) -> Tensor:
    """The fewest most likely tokens whose probabilities reach `p` stay (nucleus)."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    gone = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= p)
    return logits.masked_fill(gone, NOT)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Tokens at least `p` times as likely as the likeliest stay."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), NOT)


def typical(logits: Tensor, mass: float) -> Tensor:
    """The tokens whose surprise is nearest to the expected one stay, until they hold `mass` of the probability."""
    log_probabilities = logits.log_softmax(-1)
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities.masked_fill(probabilities == 0, 0)).sum(-1, keepdim=True)
    order = (-log_probabilities - entropy).abs().argsort(dim=-1, stable=True)
    sorted_probabilities = probabilities.gather(-1, order)
    before = sorted_probabilities.cumsum(-1) - sorted_probabilities
    gone = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= mass)
    return logits.masked_fill(gone, NOT)


def filtered(logits: Tensor, options: GenerationConfig) -> Tensor:
    """Logits after the temperature and every filter asked for, in the order temperature, k, p, min-p, typical."""
    if options.temperature:  # differences first, so that a low temperature leaves the best one finite
        least = torch.finfo(logits.dtype).tiny
        logits = (logits - logits.amax(-1, keepdim=True)) / max(options.temperature, least)
    if options.top_k is not None:
        logits = top_k(logits, options.top_k)
    if options.top_p is not None and options.top_p < 1:
        logits = top_p(logits, options.top_p)
    if options.min_p:
        logits = min_p(logits, options.min_p)
    if options.typical_p is not None and options.typical_p < 1:
        logits = typical(logits, options.typical_p)
    return logits


def draw(probabilities: Tensor, chance: Tensor) -> Tensor:
    """The token at which the running sum of probabilities `[..., vocab]` passes `chance` `[...]` in [0, 1).

    >>> draw(torch.tensor([0.25, 0.0, 0.75]), torch.tensor(0.5)).item()
    2
    """
    total = probabilities.to(torch.float64).cumsum(-1)
    aim = chance.to(torch.float64)[..., None] * total[..., -1:]
    return torch.searchsorted(total, aim, right=True)[..., 0].clamp(max=probabilities.shape[-1] - 1)


class Chance:
    """Random numbers of one row: the same whatever batch the row stands in."""

    def __init__(self, seed: int | None) -> None:
        self.generator = torch.Generator()
        self.generator.seed() if seed is None else self.generator.manual_seed(seed)

    def next(self) -> Tensor:
        return torch.rand((), generator=self.generator, dtype=torch.float64)


def chances(options: GenerationConfig, rows: int) -> list[Chance]:
    """A source of chance for every row: the same seed for each, or one of a list."""
    seeds = options.seed
    if isinstance(seeds, tuple):
        if len(seeds) != rows:
            raise ValueError(f"seed lists {len(seeds)} numbers for {rows} prompts")
        return [Chance(seed) for seed in seeds]
    return [Chance(seeds) for _ in range(rows)]

"""Sampling: from logits to a token by penalties, temperature, filters, and a random draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phasor.config.generation import GenerationConfig
from phasor.generation.constraints import MINUS_INFINITY

GREEDY = GenerationConfig()


def penalize(logits: Tensor, options: GenerationConfig, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
    """One row of logits `[vocab]` with tokens that occurred already made less likely.

    >>> options = GenerationConfig(repetition_penalty=2.0, presence_penalty=1.0)
    >>> penalize(torch.tensor([4.0, 4.0, -4.0]), options, prompt=[2], new=[0]).tolist()
    [1.0, 4.0, -8.0]
    """
    seen = sorted({*prompt, *new})
    if options.repetition_penalty != 1.0 and seen:
        logits, index = logits.clone(), torch.tensor(seen, device=logits.device)
        old = logits[index]
        logits[index] = torch.where(old > 0, old / options.repetition_penalty, old * options.repetition_penalty)
    if (options.frequency_penalty or options.presence_penalty) and new:
        counts = torch.bincount(torch.tensor(new, device=logits.device), minlength=len(logits)).to(logits.dtype)
        logits = logits - options.frequency_penalty * counts - options.presence_penalty * counts.clamp(max=1)
    return logits


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the `k` largest logits, and ties with the smallest of them."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, MINUS_INFINITY)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probabilities reach `p` (nucleus sampling)."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    removed = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= p)
    return logits.masked_fill(removed, MINUS_INFINITY)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least `p` times as likely as the likeliest."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), MINUS_INFINITY)


def typical_p(logits: Tensor, mass: float) -> Tensor:
    """Keep the tokens whose surprisal is nearest to the entropy, until they hold `mass` of the probability."""
    log_probabilities = logits.log_softmax(-1)
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities.masked_fill(probabilities == 0, 0)).sum(-1, keepdim=True)
    order = (-log_probabilities - entropy).abs().argsort(dim=-1, stable=True)
    sorted_probabilities = probabilities.gather(-1, order)
    before = sorted_probabilities.cumsum(-1) - sorted_probabilities
    removed = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= mass)
    return logits.masked_fill(removed, MINUS_INFINITY)


def filter_logits(logits: Tensor, options: GenerationConfig) -> Tensor:
    """Apply temperature, top-k, top-p, min-p and typical-p in this order, each where its option is set."""
    if options.temperature:  # the maximum is subtracted first, so that a low temperature keeps the best one finite
        least = torch.finfo(logits.dtype).tiny
        logits = (logits - logits.amax(-1, keepdim=True)) / max(options.temperature, least)
    if options.top_k is not None:
        logits = top_k(logits, options.top_k)
    if options.top_p is not None and options.top_p < 1:
        logits = top_p(logits, options.top_p)
    if options.min_p:
        logits = min_p(logits, options.min_p)
    if options.typical_p is not None and options.typical_p < 1:
        logits = typical_p(logits, options.typical_p)
    return logits


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the running sum of probabilities `[..., vocab]` passes `uniform` `[...]` in [0, 1).

    >>> draw(torch.tensor([0.25, 0.0, 0.75]), torch.tensor(0.5)).item()
    2
    """
    total = probabilities.to(torch.float64).cumsum(-1)
    aim = uniform.to(torch.float64)[..., None] * total[..., -1:]
    return torch.searchsorted(total, aim, right=True)[..., 0].clamp(max=probabilities.shape[-1] - 1)


class RandomStream:
    """Uniform random numbers of one row: the same in any batch."""

    def __init__(self, seed: int | None) -> None:
        self.generator = torch.Generator()
        self.generator.seed() if seed is None else self.generator.manual_seed(seed)

    def next(self) -> Tensor:
        return torch.rand((), generator=self.generator, dtype=torch.float64)


def random_streams(options: GenerationConfig, rows: int) -> list[RandomStream]:
    """A random stream for every row, the samples of a prompt one after the other.

    The first sample of a prompt has the seed of the options, one for all prompts or one each; the next ones count on.
    """
    seeds, samples = options.seed, options.num_return_sequences if options.num_beams == 1 else 1
    if isinstance(seeds, tuple) and len(seeds) != rows // samples:
        raise ValueError(f"seed lists {len(seeds)} seeds for {rows // samples} prompts")
    of_prompts = seeds if isinstance(seeds, tuple) else [seeds] * (rows // samples)
    return [RandomStream(None if seed is None else seed + i) for seed in of_prompts for i in range(samples)]


def check_best(score: float) -> None:
    """Refuse the best score of a row where no token can be chosen by it.

    >>> check_best(float("nan"))
    Traceback (most recent call last):
    ValueError: the largest logit is nan: the model's weights are not finite, or an activation exceeds its dtype's range
    """
    if score == MINUS_INFINITY:
        raise ValueError(
            "no token may come next: suppress_tokens, bad_words_ids, no_repeat_ngram_size and min_new_tokens "
            "together leave none of the vocabulary"
        )
    if not math.isfinite(score):
        raise ValueError(
            f"the largest logit is {score}: the model's weights are not finite, or an activation exceeds its dtype's "
            "range"
        )


def choose_tokens(
    scores: Tensor, options: GenerationConfig, randoms: Sequence[RandomStream]
) -> list[tuple[int, float]]:
    """The next token of each row of penalized logits `[B, vocab]`, and its largest one, which `check_best` judges.

    Tokens are the likeliest, or samples.

    >>> [token for token, _ in choose_tokens(torch.eye(3), GenerationConfig(), [])]
    [0, 1, 2]
    """
    best, tokens = scores.max(-1)
    if options.samples:
        uniform = torch.stack([random.next() for random in randoms]).to(scores.device)
        tokens = draw(filter_logits(scores, options).softmax(-1), uniform)
    values, chosen = torch.stack((best.double(), tokens.double())).tolist()
    return [(int(token), value) for token, value in zip(chosen, values, strict=True)]


def choose_token(scores: Tensor, options: GenerationConfig, random: RandomStream) -> int:
    """The next token from penalized logits `[vocab]`: the likeliest, or a sample."""
    token, best = choose_tokens(scores[None], options, [random])[0]
    check_best(best)
    return token


def likeliest_tokens(scores: Tensor) -> list[int]:
    """The likeliest token of each row `[B, vocab]`, read together with its score, which has to be finite."""
    found = choose_tokens(scores, GREEDY, [])
    for _, best in found:
        check_best(best)
    return [token for token, _ in found]

"""Speculative decoding: a cheap guess of several tokens, checked by the model in one call.

A guessed token `x` drawn from `q` is kept with probability `min(1, p(x)/q(x))`; at the first one refused the
token is drawn from what `p` has over `q`. What comes out is distributed as if drawn from `p` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from phasor.generation.loop import Job, Row, scored
from phasor.generation.sampling import chances, draw, filtered
from phasor.kv_cache.dynamic import KVCache
from phasor.transformer import Transformer


class Guesser(Protocol):
    """Proposes tokens, each with the distribution `[vocab]` it was drawn from."""

    def guess(self, row: Row, most: int) -> tuple[list[int], list[Tensor]]: ...


class Draft:
    """Guesses by a smaller model of the same vocabulary, with a cache of its own."""

    def __init__(self, job: Job, draft: Transformer, row: Row) -> None:
        self.job, self.draft = job, draft
        most = len(row.prompt) + (job.options.max_new_tokens or 0) + job.options.draft_tokens + 1
        self.cache: KVCache = draft.new_cache(1, most, spare=job.options.draft_tokens + 1)
        self.read: list[int] = []  # the tokens in the cache

    def guess(self, row: Row, most: int) -> tuple[list[int], list[Tensor]]:
        text = row.prompt + row.new
        shared = next((i for i, (a, b) in enumerate(zip(self.read, text, strict=False)) if a != b), None)
        keep = min(len(self.read), len(text) - 1) if shared is None else min(shared, len(text) - 1)
        self.cache.crop(len(self.read) - keep)
        self.read = self.read[:keep]
        ahead = Row(row.prompt, row.chance, new=list(row.new))
        guesses, distributions = [], []
        for _ in range(most):
            unread = (ahead.prompt + ahead.new)[len(self.read) :]
            logits = self.draft(torch.tensor([unread], device=self.draft.tokens.weight.device), cache=self.cache)
            self.read += unread
            distribution = distribution_of(scored(logits[0, -1], ahead, self.job.options), self.job)
            guesses.append(int(draw(distribution, row.chance.next().to(distribution.device))))
            distributions.append(distribution)
            ahead.new.append(guesses[-1])
        return guesses, distributions


class Lookup:
    """Guesses that the text goes on as it did the last time its latest tokens stood there."""

    def __init__(self, job: Job) -> None:
        self.longest, self.vocab = job.options.prompt_lookup_tokens, job.model.config.vocab_size

    def guess(self, row: Row, most: int) -> tuple[list[int], list[Tensor]]:
        text = row.prompt + row.new
        for size in range(min(self.longest, len(text) - 1), 0, -1):
            tail = text[-size:]
            for at in range(len(text) - size - 1, -1, -1):
                if text[at : at + size] == tail:
                    guesses = text[at + size : at + size + most]
                    return guesses, [certain(token, self.vocab) for token in guesses]
        return [], []


def certain(token: int, vocab: int) -> Tensor:
    distribution = torch.zeros(vocab)
    distribution[token] = 1.0
    return distribution


def distribution_of(scores: Tensor, job: Job) -> Tensor:
    """What the next token is drawn from: all on the likeliest, when greedy."""
    if job.options.samples:
        return filtered(scores, job.options).softmax(-1)
    return certain(int(scores.argmax()), len(scores)).to(scores.device)


def speculate(job: Job, draft: Transformer | None) -> Iterator[list[Row]]:
    """Decode the prompts one after the other; gives the rows after every call of the model."""
    options = job.options
    assert options.max_new_tokens is not None
    rows = [Row(list(p), c) for p, c in zip(job.prompts, chances(options, len(job.prompts)), strict=True)]
    for row in rows:
        guesser: Guesser = Lookup(job) if draft is None else Draft(job, draft, row)
        cache = job.new_cache([row.prompt], spare=options.draft_tokens + 1)
        unread = row.prompt
        while not row.done:
            most = min(options.draft_tokens, options.max_new_tokens - len(row.new) - 1)
            guesses, guessed = guesser.guess(row, most) if most > 0 else ([], [])
            tokens = torch.tensor([unread + guesses], device=job.model.tokens.weight.device)
            logits = job.model(tokens, cache=cache)[0, len(unread) - 1 :]
            accepted = accept(job, row, logits, guesses, guessed)
            cache.crop(max(0, len(guesses) - accepted))
            unread = row.new[-1:]
            yield rows


def accept(job: Job, row: Row, logits: Tensor, guesses: list[int], guessed: list[Tensor]) -> int:
    """Let the row go on with the guesses that pass and one token more; gives how many guesses passed."""
    for i, guess in enumerate(guesses):
        scores = scored(logits[i], row, job.options)
        p, q = distribution_of(scores, job), guessed[i].to(logits.device)
        if float(row.chance.next()) * float(q[guess]) < float(p[guess]):
            job.add(row, guess, scores)
            if row.done:
                return i + 1
            continue
        rest = (p - q).clamp(min=0)
        rest = rest if float(rest.sum()) > 0 else p  # nothing over but rounding
        job.add(row, int(draw(rest, row.chance.next().to(rest.device))), scores)
        return i
    scores = scored(logits[len(guesses)], row, job.options)
    job.add(row, int(draw(distribution_of(scores, job), row.chance.next().to(scores.device))), scores)
    return len(guesses)

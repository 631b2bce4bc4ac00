"""The state of beam searches, all of them together as tensors: no step needs the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.config.generation import GenerationConfig
from phasor.generation.constraints import MINUS_INFINITY


@dataclass
class Hypothesis:
    """A continuation and its score: the sum of log-probabilities over its length to the power of the penalty."""

    tokens: list[int]
    log_probabilities: list[float]
    score: float


class Candidates(NamedTuple):
    """The best beams of each search with one more token, best first, `[N, C]`.

    `totals` are the sums of their log-probabilities, the last of which are `steps`. `indices` are the beam that each
    comes from, times the size of the vocabulary, plus the token.
    """

    totals: Tensor
    indices: Tensor
    steps: Tensor


class Beams:
    """`N` searches with `width` running beams each, and as many finished ones, the best.

    Texts are not moved from beam to beam: every step keeps its candidates and which of them run on, and
    `hypotheses` reads the texts back at the end. Beams that are impossible have the sum -inf.

    >>> options = GenerationConfig(max_new_tokens=1, num_beams=2)
    >>> beams = Beams(options, torch.zeros(1, 3), searches=1, stop=())
    >>> totals = torch.tensor([[-1.0, -2.0]])
    >>> parents, tokens = beams.extend(Candidates(totals, torch.tensor([[2, 0]]), steps=totals))
    >>> beams.done.tolist(), [(one.tokens, one.score) for one in beams.hypotheses(2)[0]]
    ([True], [([2], -1.0), ([0], -2.0)])
    """

    def __init__(
        self, options: GenerationConfig, like: Tensor, searches: int, stop: tuple[int, ...] | frozenset[int]
    ) -> None:
        """`like` are log-probabilities `[..., vocab]`."""
        assert options.max_new_tokens is not None
        self.options, self.width, self.vocab_size = options, options.num_beams, like.shape[-1]
        self.max_length, self.length, self.can_stop = options.max_new_tokens, 0, bool(stop)
        self.num_candidates = min((1 + len(stop)) * self.width, self.width * self.vocab_size)
        self.stops = torch.zeros(self.vocab_size, dtype=torch.bool, device=like.device)
        self.stops[list(stop)] = True
        self.ranks = torch.arange(self.width, device=like.device)
        self.sums = like.new_full((searches, self.width), MINUS_INFINITY)
        self.sums[:, 0] = 0.0  # all beams begin the same, so all but one are impossible
        self.scores = self.sums.new_full(self.sums.shape, MINUS_INFINITY, dtype=torch.float64)  # of finished beams
        self.endings = self.ranks.new_zeros(self.sums.shape)  # of finished beams: step * width + rank
        self.done = self.stops.new_zeros(searches)
        self.history: list[tuple[Tensor, Tensor, Tensor]] = []

    def extend(self, best: Candidates) -> tuple[Tensor, Tensor]:
        """Extend every beam by a token.

        Returns the beam that each of the new running beams comes from and its last token, `[N, width]`. Those of
        searches that are done stay in place.
        """
        self.length += 1
        tokens = best.indices % self.vocab_size
        possible = (best.totals != MINUS_INFINITY) > self.done[:, None]
        ends = possible if self.length == self.max_length else possible & self.stops.take(tokens)
        if self.can_stop or self.length == self.max_length:
            self._finish(best.totals[:, : self.width], ends[:, : self.width])
        running = torch.where(possible > ends, best.totals, MINUS_INFINITY)
        sums, order = running.sort(dim=1, descending=True, stable=True)
        self.sums, chosen = sums[:, : self.width], order[:, : self.width]
        self.history.append((best.indices, best.steps, chosen))
        self.done = self.done | self._complete()
        parents = best.indices.gather(1, chosen) // self.vocab_size
        return torch.where(self.done[:, None], self.ranks, parents), tokens.gather(1, chosen)

    def _finish(self, totals: Tensor, ends: Tensor) -> None:
        """Add the candidates that end to the finished beams; of equal scores the earlier one is better."""
        scores = torch.where(ends, totals.double() / self._divisor(self.length), MINUS_INFINITY)
        endings = (self.ranks + (self.length - 1) * self.width).expand_as(self.endings)
        merged, order = torch.cat((self.scores, scores), 1).sort(dim=1, descending=True, stable=True)
        self.scores = merged[:, : self.width]
        self.endings = torch.cat((self.endings, endings), 1).gather(1, order[:, : self.width])

    def _complete(self) -> Tensor:
        """Whether no running beam can still beat the finished ones (or, stopping early, enough are finished), `[N]`.

        A search without a running beam is complete. One with fewer finished beams than `width` has a worst score of
        -inf, which every running beam beats.
        """
        options, first, worst = self.options, self.sums[:, 0], self.scores[:, -1]
        if options.early_stopping is True:
            return (worst != MINUS_INFINITY) | (first == MINUS_INFINITY)
        optimistic = options.early_stopping == "never" and options.length_penalty > 0
        return first.double() / self._divisor(self.max_length if optimistic else self.length) <= worst

    def _divisor(self, length: int) -> Tensor:
        """What a sum is divided by; a tensor, because a GPU multiplies by the reciprocal of a number instead."""
        return self.scores.new_full((), length**self.options.length_penalty)

    def hypotheses(self, count: int) -> list[list[Hypothesis]]:
        """The best `count` finished beams of each search, best first."""
        scores, endings = self.scores[:, :count].cpu(), self.endings[:, :count].cpu()
        last, rank = endings // self.width, endings % self.width
        history = self.history[: int(last.max()) + 1]
        indices, steps, chosen = (torch.stack(x).cpu() for x in zip(*history, strict=True))
        parents, ranks = indices // self.vocab_size, last.new_empty(len(history), *last.shape)
        beam = torch.zeros_like(last)
        for step in reversed(range(len(history))):  # from the end: the rank of each text's candidate at every step
            ranks[step] = torch.where(last == step, rank, chosen[step].gather(1, beam))
            beam = parents[step].gather(1, ranks[step])
        tokens = (indices.gather(2, ranks) % self.vocab_size).permute(1, 2, 0).tolist()
        log_probabilities = steps.gather(2, ranks).permute(1, 2, 0).tolist()
        return [
            [
                Hypothesis(text[: end + 1], own[: end + 1], score)
                for text, own, end, score in zip(*one, strict=True)
                if score != MINUS_INFINITY
            ]
            for one in zip(tokens, log_probabilities, last.tolist(), scores.tolist(), strict=True)
        ]

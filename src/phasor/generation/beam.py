"""Beam search: the likeliest whole continuations, by keeping the best few at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from phasor.generation.loop import Job, Row, only, scored
from phasor.generation.sampling import NOT, Chance


@dataclass
class Hypothesis:
    """A continuation and its score: the sum of log-probabilities over its length to the power of the penalty."""

    tokens: list[int]
    log_probabilities: list[float]
    score: float


@dataclass
class Beams:
    """The search for one prompt: running beams with their sums, and the best finished ones."""

    prompt: list[int]
    width: int
    running: list[list[int]] = field(default_factory=lambda: [[]])
    steps: list[list[float]] = field(default_factory=lambda: [[]])
    sums: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False

    def finish(self, tokens: list[int], steps: list[float], total: float, penalty: float) -> None:
        self.finished.append(Hypothesis(tokens, steps, total / len(tokens) ** penalty))
        self.finished = sorted(self.finished, key=lambda h: -h.score)[: self.width]


def beam_search(job: Job) -> list[list[Hypothesis]]:
    """The `results` best continuations of every prompt, best first."""
    options, width = job.options, job.options.beams
    assert options.max_new_tokens is not None
    beginnings = job.beginnings()
    searches = [Beams(list(b), width) for b in beginnings]
    cache = job.new_cache(beginnings, copies=width)
    logits = job.prefill(cache, beginnings, copies=width)
    for length in range(1, options.max_new_tokens + 1):
        order, tokens = [], []
        for i, search in enumerate(searches):
            rows = slice(i * width, (i + 1) * width)
            parents = [0] * width if search.done else advance(job, search, logits[rows], length)
            order += [i * width + parent for parent in parents]
            tokens += [beam[-1] if beam else 0 for beam in search.running]
        if all(search.done for search in searches):
            break
        cache.reorder(order)
        logits = job.step(cache, tokens)
    return [search.finished[: options.results] for search in searches]


def advance(job: Job, search: Beams, logits: torch.Tensor, length: int) -> list[int]:
    """Take every beam a token further; gives the beam that each of the new running beams comes from."""
    options, width, most = job.options, search.width, job.options.max_new_tokens or 0
    rows = [Row(search.prompt, Chance(0), new=beam) for beam in search.running]
    steps = torch.stack([scored(logits[i], row, options).log_softmax(-1) for i, row in enumerate(rows)])
    forced = job.forced(length - 1)
    if forced is not None:
        steps = only(forced, steps)
    totals = steps + torch.tensor(search.sums, device=steps.device, dtype=steps.dtype)[:, None]
    count = min((1 + len(job.stop)) * width, totals.numel())
    best, at = totals.flatten().topk(count)
    running: list[tuple[int, int, float]] = []
    for rank, (total, index) in enumerate(zip(best.tolist(), at.tolist(), strict=True)):
        parent, token = divmod(index, steps.shape[-1])
        if total == NOT:
            continue
        if token not in job.stop and length < most:
            running.append((parent, token, total))
        elif rank < width:
            new = [*search.running[parent], token]
            noted = [*search.steps[parent], float(steps[parent, token])]
            search.finish(new, noted, total, options.length_penalty)
    running = running[:width]
    while running and len(running) < width:  # fewer continuations than beams: fill up with impossible ones
        running.append((*running[-1][:2], NOT))
    if not running:
        search.done = True
        return [0] * width
    parents = [parent for parent, _, _ in running]
    search.running, search.steps, search.sums = (
        [[*search.running[p], t] for p, t, _ in running],
        [[*search.steps[p], float(steps[p, t])] for p, t, _ in running],
        [total for _, _, total in running],
    )
    search.done = over(job, search, length)
    return parents


def over(job: Job, search: Beams, length: int) -> bool:
    """Whether no running beam can still beat the finished ones (or, stopping early, enough are finished)."""
    options = job.options
    if len(search.finished) < search.width:
        return False
    if options.early_stopping is True:
        return True
    assert options.max_new_tokens is not None
    hopeful = options.early_stopping == "never" and options.length_penalty > 0
    reach = options.max_new_tokens if hopeful else length
    return max(search.sums) / reach**options.length_penalty <= search.finished[-1].score

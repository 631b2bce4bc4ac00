"""Beam search: the likeliest whole continuations, by keeping the best few at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from phasor.generation.loop import Job, only
from phasor.generation.sampling import NOT, penalized
from phasor.nn.norm import at_least_float32


@dataclass
class Hypothesis:
    """A continuation and its score: the sum of log-probabilities over its length to the power of the penalty."""

    tokens: list[int]
    log_probabilities: list[float]
    score: float


class Candidate(NamedTuple):
    """A beam with one token more: the sum of its log-probabilities, the last of which is `step`."""

    total: float
    parent: int
    token: int
    step: float


@dataclass
class Beams:
    """The search for one prompt: running beams with their sums, and the best finished ones."""

    prompt: list[int]
    width: int
    running: list[list[int]] = field(init=False)
    steps: list[list[float]] = field(init=False)
    sums: list[float] = field(init=False)
    finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:  # all beams begin alike, so all but one are impossible
        self.running, self.steps = [[]] * self.width, [[]] * self.width
        self.sums = [0.0] + [NOT] * (self.width - 1)

    def finish(self, tokens: list[int], steps: list[float], total: float, penalty: float) -> None:
        self.finished.append(Hypothesis(tokens, steps, total / len(tokens) ** penalty))
        self.finished = sorted(self.finished, key=lambda h: -h.score)[: self.width]


def beam_search(job: Job) -> list[list[Hypothesis]]:
    """The `results` best continuations of every prompt, best first."""
    options, width = job.options, job.options.num_beams
    assert options.max_new_tokens is not None
    beginnings = job.beginnings()
    searches = [Beams(list(b), width) for b in beginnings]
    cache = job.new_cache(beginnings, copies=width)
    logits = job.prefill(cache, beginnings, copies=width)
    going = searches
    for length in range(1, options.max_new_tokens + 1):
        order, tokens = [], []
        for i, (search, found) in enumerate(zip(going, candidates(job, going, logits, length), strict=True)):
            parents = advance(job, search, found, length)
            if not search.done:
                order += [i * width + parent for parent in parents]
                tokens += [beam[-1] for beam in search.running]
        going = [search for search in going if not search.done]
        if not going:
            break
        cache.reorder(order)  # without the rows of searches that are done
        logits = job.step(cache, tokens)
    return [search.finished[: options.num_return_sequences] for search in searches]


def candidates(job: Job, going: list[Beams], logits: torch.Tensor, length: int) -> Iterator[list[Candidate]]:
    """The best beams of each search with one token more, best first, from the logits `[searches * width, vocab]`.

    All searches are computed together, and a device is waited for once a step.
    """
    options, width = job.options, job.options.num_beams
    wide = at_least_float32(logits)
    if options.penalizes:
        said = [(search.prompt, beam) for search in going for beam in search.running]
        wide = torch.stack([penalized(row, options, *given) for row, given in zip(wide, said, strict=True)])
    steps = wide.log_softmax(-1).view(len(going), width, -1)
    forced = job.forced(length - 1)
    if forced is not None:
        steps = only(forced, steps)
    sums = torch.tensor([search.sums for search in going], device=steps.device, dtype=steps.dtype)
    totals, vocab_size = (steps + sums[..., None]).flatten(1), steps.shape[-1]
    best, at = totals.topk(min((1 + len(job.stop)) * width, totals.shape[-1]))
    own = steps.flatten(1).gather(1, at)
    for row in zip(best.tolist(), at.tolist(), own.tolist(), strict=True):
        yield [Candidate(total, i // vocab_size, i % vocab_size, step) for total, i, step in zip(*row, strict=True)]


def advance(job: Job, search: Beams, found: list[Candidate], length: int) -> list[int]:
    """Take every beam a token further; gives the beam that each of the new running beams comes from."""
    options, width, most = job.options, search.width, job.options.max_new_tokens or 0
    running: list[Candidate] = []
    for rank, candidate in enumerate(found):
        total, parent, token, step = candidate
        if total == NOT:
            continue
        if token not in job.stop and length < most:
            running.append(candidate)
        elif rank < width:
            new, noted = [*search.running[parent], token], [*search.steps[parent], step]
            search.finish(new, noted, total, options.length_penalty)
    running = running[:width]
    while running and len(running) < width:  # fewer continuations than beams: fill up with impossible ones
        running.append(running[-1]._replace(total=NOT))
    if not running:
        search.done = True
        return []
    search.running, search.steps, search.sums = (
        [[*search.running[one.parent], one.token] for one in running],
        [[*search.steps[one.parent], one.step] for one in running],
        [one.total for one in running],
    )
    search.done = over(job, search, length)
    return [one.parent for one in running]


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

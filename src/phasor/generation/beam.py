"""Beam search: the likeliest continuations, by keeping the best `num_beams` at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from phasor.generation.constraints import MINUS_INFINITY
from phasor.generation.request import GenerationRequest
from phasor.generation.runners import runs_cuda_graph, step_runner
from phasor.generation.runners.protocol import round_up
from phasor.nn.norm import at_least_float32


@dataclass
class Hypothesis:
    """A continuation and its score: the sum of log-probabilities over its length to the power of the penalty."""

    tokens: list[int]
    log_probabilities: list[float]
    score: float


class Candidate(NamedTuple):
    """A beam with one more token: the sum of its log-probabilities, the last of which is `step`."""

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

    def __post_init__(self) -> None:  # all beams begin the same, so all but one are impossible
        self.running, self.steps = [[]] * self.width, [[]] * self.width
        self.sums = [0.0] + [MINUS_INFINITY] * (self.width - 1)

    def finish(self, tokens: list[int], steps: list[float], total: float, penalty: float) -> None:
        self.finished.append(Hypothesis(tokens, steps, total / len(tokens) ** penalty))
        self.finished = sorted(self.finished, key=lambda h: -h.score)[: self.width]


def beam_search(request: GenerationRequest) -> list[list[Hypothesis]]:
    """The `num_return_sequences` best continuations of every prompt, best first."""
    options, width, count = request.options, request.options.num_beams, len(request.prompts)
    assert options.max_new_tokens is not None
    request = pad_request(request)
    prompts = request.decoder_prompts()
    searches = [Beams(list(prompt), width, done=i >= count) for i, prompt in enumerate(prompts)]
    rows = [prompt for prompt in prompts for _ in range(width)]
    with step_runner(request.step_spec(width)) as runner:
        logits = runner.prefill(rows, request.encode(copies=width), request.prompt_positions(width))
        places = searches  # the search of every `width` rows
        for length in range(1, options.max_new_tokens + 1):
            order: list[int] = []
            tokens: list[int] = []
            for i, (search, best) in enumerate(zip(places, candidates(request, places, logits), strict=True)):
                parents = [] if search.done else extend_beams(request, search, best, length)
                if not search.done:
                    order += [i * width + parent for parent in parents]
                    tokens += [beam[-1] for beam in search.running]
                elif runner.has_fixed_rows:
                    order += range(i * width, (i + 1) * width)
                    tokens += [0] * width
            if all(search.done for search in places):
                break
            places = places if runner.has_fixed_rows else [search for search in places if not search.done]
            runner.reorder(order)  # without the rows of searches that are done, unless it has fixed rows
            logits = runner.step(tokens)
    return [search.finished[: options.num_return_sequences] for search in searches[:count]]


def pad_request(request: GenerationRequest) -> GenerationRequest:
    """The request with some more prompts where steps are a CUDA graph, which then serves similar numbers of them."""
    extra = round_up(len(request.prompts)) - len(request.prompts)
    positions = None if request.positions is None else request.positions + request.positions[-1:] * extra
    padded = replace(request, prompts=request.prompts + request.prompts[-1:] * extra, positions=positions)
    return padded if extra and runs_cuda_graph(padded.step_spec(request.options.num_beams)) else request


def candidates(request: GenerationRequest, places: list[Beams], logits: torch.Tensor) -> Iterator[list[Candidate]]:
    """The best beams of each search with one more token, best first, from the logits `[searches * width, vocab]`.

    All searches are computed together, with one device synchronization per step. Penalties apply to
    log-probabilities, as in `transformers`.
    """
    width, rows = request.options.num_beams, at_least_float32(logits).log_softmax(-1)
    if request.options.penalizes or request.constraints.any:
        rows = constrain(request, places, rows)
        rows = rows.log_softmax(-1) if request.options.renormalize_logits else rows
    steps = rows.view(len(places), width, -1)
    sums = torch.tensor([search.sums for search in places], device=steps.device, dtype=steps.dtype)
    totals, vocab_size = (steps + sums[..., None]).flatten(1), steps.shape[-1]
    best, index = totals.topk(min((1 + len(request.stop)) * width, totals.shape[-1]))
    own = steps.flatten(1).gather(1, index)
    best, own = torch.stack((best, own)).cpu()
    for row in zip(best.tolist(), index.tolist(), own.tolist(), strict=True):
        yield [Candidate(total, i // vocab_size, i % vocab_size, step) for total, i, step in zip(*row, strict=True)]


def constrain(request: GenerationRequest, places: list[Beams], rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[searches * width, vocab]` penalized and constrained; in one call where all are alike."""
    first = next(search for search in places if not search.done)
    texts = [(first if search.done else search, beam) for search in places for beam in range(search.width)]
    pairs = [(search.prompt, search.running[beam]) for search, beam in texts]
    if not request.options.penalizes and len({request.constraints.rule(*pair) for pair in pairs}) == 1:
        return request.constraints.apply(rows, *pairs[0])
    return torch.stack([request.score(row, *pair) for row, pair in zip(rows, pairs, strict=True)])


def extend_beams(request: GenerationRequest, search: Beams, best: list[Candidate], length: int) -> list[int]:
    """Extend every beam by a token; the index of the beam that each of the new running beams comes from."""
    options, width, most = request.options, search.width, request.options.max_new_tokens or 0
    running: list[Candidate] = []
    for rank, candidate in enumerate(best):
        total, parent, token, step = candidate
        if total == MINUS_INFINITY:
            continue
        if token not in request.stop and length < most:
            running.append(candidate)
        elif rank < width:
            new, steps = [*search.running[parent], token], [*search.steps[parent], step]
            search.finish(new, steps, total, options.length_penalty)
    running = running[:width]
    while running and len(running) < width:  # fewer continuations than beams: fill up with impossible ones
        running.append(running[-1]._replace(total=MINUS_INFINITY))
    if not running:
        search.done = True
        return []
    search.running, search.steps, search.sums = (
        [[*search.running[one.parent], one.token] for one in running],
        [[*search.steps[one.parent], one.step] for one in running],
        [one.total for one in running],
    )
    search.done = is_complete(request, search, length)
    return [one.parent for one in running]


def is_complete(request: GenerationRequest, search: Beams, length: int) -> bool:
    """Whether no running beam can still beat the finished ones (or, stopping early, enough are finished)."""
    options = request.options
    if len(search.finished) < search.width:
        return False
    if options.early_stopping is True:
        return True
    assert options.max_new_tokens is not None
    optimistic = options.early_stopping == "never" and options.length_penalty > 0
    final_length = options.max_new_tokens if optimistic else length
    return max(search.sums) / final_length**options.length_penalty <= search.finished[-1].score

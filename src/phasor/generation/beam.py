"""Beam search: the likeliest continuations, by keeping the best `num_beams` at every step."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

import torch
from torch import Tensor

from phasor.generation.beam_state import Beams, Candidates, Hypothesis
from phasor.generation.constraints import MINUS_INFINITY
from phasor.generation.request import GenerationRequest
from phasor.generation.runners import runs_cuda_graph, step_runner
from phasor.generation.runners.protocol import round_up
from phasor.generation.sampling import check_best
from phasor.nn.norm import at_least_float32
from phasor.ops.topk import stable_topk

LOOKAHEAD = 2  # steps launched before the host reads whether all searches were done


def beam_search(request: GenerationRequest) -> list[list[Hypothesis]]:
    """The `num_return_sequences` best continuations of every prompt, best first.

    Where fewer are possible, they are repeated, as in `transformers`.
    """
    options, width, count = request.options, request.options.num_beams, len(request.prompts)
    assert options.max_new_tokens is not None
    request = pad_request(request)
    prompts = request.decoder_prompts()
    with step_runner(request.step_spec(width)) as runner:
        repeated = [prompt for prompt in prompts for _ in range(width)]
        logits = runner.prefill(repeated, request.encode(copies=width), request.prompt_positions(width))
        beams = Beams(options, at_least_float32(logits), len(prompts), request.stop)
        beams.done[count:] = True
        rows = (FixedRows if runner.has_fixed_rows else ShrinkingRows)(beams)
        texts = Texts(request, prompts) if request.options.penalizes or request.constraints.any else None
        while True:
            parents, tokens = beams.extend(candidates(request, beams, logits, rows.places, texts))
            next_rows = rows.advance(parents, tokens)
            if next_rows is None or beams.length == options.max_new_tokens:
                break
            if texts is not None:
                texts.extend(parents, tokens)
            order, tokens = next_rows
            runner.reorder(order)
            logits = runner.step(tokens)
    found = beams.hypotheses(options.num_return_sequences)[:count]
    for hypotheses in found:
        check_best(hypotheses[0].score if hypotheses else MINUS_INFINITY)
    return [list(islice(cycle(hypotheses), options.num_return_sequences)) for hypotheses in found]


def pad_request(request: GenerationRequest) -> GenerationRequest:
    """The request with some more prompts where steps are a CUDA graph, which then serves similar numbers of them."""
    extra = round_up(len(request.prompts)) - len(request.prompts)
    positions = None if request.positions is None else request.positions + request.positions[-1:] * extra
    padded = replace(request, prompts=request.prompts + request.prompts[-1:] * extra, positions=positions)
    return padded if extra and runs_cuda_graph(padded.step_spec(request.options.num_beams)) else request


class ShrinkingRows:
    """The rows of a runner that drops those of searches that are done; the host waits for every step.

    `places` are the searches that the runner still has; None where it has all of them.
    """

    def __init__(self, beams: Beams) -> None:
        self.beams = beams
        self.places: Tensor | None = None

    def advance(self, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """The order of rows and the tokens of the next step; None where all searches are done."""
        host = torch.cat((parents, self.beams.done[:, None]), 1).cpu()
        held = torch.arange(len(host), device=host.device) if self.places is None else self.places.cpu()
        kept = (host[held, -1] == 0).nonzero()[:, 0]  # which of the searches that the runner has
        if len(kept) == 0:
            return None
        order = kept[:, None] * self.beams.width + host[held[kept], :-1]
        if len(kept) < len(host):
            self.places = held[kept].to(tokens.device)
            tokens = tokens[self.places]
        return order.flatten(), tokens.flatten()


class FixedRows:
    """The rows of a runner that keeps all of them; the host does not wait for the device, but runs ahead of it.

    It learns two steps later that all searches were done: steps of a search that is done change nothing.
    """

    places: Tensor | None = None  # the runner has all searches

    def __init__(self, beams: Beams) -> None:
        self.beams, self.steps = beams, 0
        self.first_rows = torch.arange(len(beams.sums), device=beams.sums.device)[:, None] * beams.width
        self.stream = torch.cuda.current_stream(beams.sums.device) if beams.sums.is_cuda else None
        on_gpu = self.stream is not None
        self.flags = torch.zeros(LOOKAHEAD + 1, dtype=torch.bool, device="cpu", pin_memory=on_gpu)  # by step, in a ring
        self.copied = [torch.cuda.Event() for _ in self.flags] if on_gpu else []

    def advance(self, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """The order of rows and the tokens of the next step; None where all searches were done two steps ago."""
        self._copy_flag()
        return None if self._were_done() else ((self.first_rows + parents).flatten(), tokens.flatten())

    def _copy_flag(self) -> None:
        """Start copying to the host whether all searches are done."""
        slot = self.steps % len(self.flags)
        self.flags[slot].copy_(self.beams.done.all(), non_blocking=True)
        if self.stream is not None:
            self.copied[slot].record(self.stream)
        self.steps += 1

    def _were_done(self) -> bool:
        """Whether all searches were done `LOOKAHEAD` steps ago."""
        if self.steps <= LOOKAHEAD:
            return False
        slot = self.steps % len(self.flags)  # the oldest
        if self.stream is not None:
            self.copied[slot].synchronize()
        return bool(self.flags[slot])


class Texts:
    """The running texts on the host, which penalties and constraints depend on."""

    def __init__(self, request: GenerationRequest, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.running: list[list[list[int]]] = [[[]] * request.options.num_beams for _ in prompts]

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        """Let beams continue from their parents `[N, width]`, each with one more token."""
        chosen = zip(self.running, parents.tolist(), tokens.tolist(), strict=True)
        self.running = [[[*texts[p], token] for p, token in zip(*one, strict=True)] for texts, *one in chosen]

    def pairs(self, searches: list[int]) -> list[tuple[list[int], list[int]]]:
        """Prompt and new tokens of every beam of these searches."""
        return [(self.prompts[search], text) for search in searches for text in self.running[search]]


def candidates(
    request: GenerationRequest, beams: Beams, logits: Tensor, places: Tensor | None, texts: Texts | None
) -> Candidates:
    """The best beams of each search with one more token, from the logits `[searches * width, vocab]` of some of them.

    Penalties apply to log-probabilities, as in `transformers`.
    """
    rows = at_least_float32(logits).log_softmax(-1)
    if texts is not None:
        rows = constrain(request, rows, texts.pairs(live_searches(beams, places)))
        rows = rows.log_softmax(-1) if request.options.renormalize_logits else rows
    sums = beams.sums if places is None else beams.sums[places]
    steps = rows.view(*sums.shape, -1)
    totals, indices = stable_topk((steps + sums[..., None]).flatten(1), beams.num_candidates)
    best = Candidates(totals, indices, steps.flatten(1).gather(1, indices))
    return best if places is None else scatter_candidates(best, places, len(beams.sums))


def live_searches(beams: Beams, places: Tensor | None) -> list[int]:
    """The searches that a runner has; in place of those that are done one that is not, so that texts are alike."""
    done = beams.done.tolist()
    held = list(range(len(done))) if places is None else places.tolist()
    live = next((search for search in held if not done[search]), held[0])
    return [live if done[search] else search for search in held]


def scatter_candidates(best: Candidates, places: Tensor, searches: int) -> Candidates:
    """The candidates of some searches among those of all; the others have none."""
    fills = MINUS_INFINITY, 0, 0.0
    return Candidates(
        *(
            x.new_full((searches, x.shape[1]), fill).index_copy(0, places, x)
            for x, fill in zip(best, fills, strict=True)
        )
    )


def constrain(request: GenerationRequest, rows: Tensor, pairs: list[tuple[list[int], list[int]]]) -> Tensor:
    """Log-probabilities `[searches * width, vocab]` penalized and constrained; in one call where all are alike."""
    if not request.options.penalizes and len({request.constraints.rule(*pair) for pair in pairs}) == 1:
        return request.constraints.apply(rows, *pairs[0])
    return torch.stack([request.score(row, *pair) for row, pair in zip(rows, pairs, strict=True)])

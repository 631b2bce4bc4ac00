"""Greedy decoding and sampling: read the prompts, then one token per row and step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from torch import Tensor

from phasor.generation.prefix_cache import PrefixRunner
from phasor.generation.request import GenerationRequest, SequenceState
from phasor.generation.runners import StepRunner, step_runner
from phasor.generation.runners.cuda_graph import AsyncSteps, CudaGraphRunner, run_async
from phasor.generation.sampling import choose_token, likeliest_tokens


def decode_loop(request: GenerationRequest) -> Iterator[list[SequenceState]]:
    """Decode all rows together; yields the rows after every step."""
    rows = request.new_rows()
    kept = request.prefix
    with step_runner(request.step_spec()) if kept is None else nullcontext(PrefixRunner(kept, request)) as runner:
        logits = runner.prefill([row.prompt for row in rows], request.encode(), request.prompt_positions())
        if request.is_argmax_only and isinstance(runner, CudaGraphRunner):
            likeliest_tokens(logits)  # the only look at scores: later ones stay on the device
            runner.start(logits.argmax(-1))
            yield from decode_async(request, rows, runner)
        else:
            yield from decode_sync(request, rows, logits, runner)


def decode_async(
    request: GenerationRequest, rows: list[SequenceState], steps: AsyncSteps
) -> Iterator[list[SequenceState]]:
    """The rows after every step, with steps launched ahead; tokens after a row's end are ignored."""
    for tokens in run_async(steps, request.options.max_new_tokens):
        for row, token in zip(rows, tokens, strict=True):
            if not row.done:
                request.add_token(row, token, None)
        yield rows
        if all(row.done for row in rows):
            return


def decode_sync(
    request: GenerationRequest, rows: list[SequenceState], logits: Tensor, runner: StepRunner
) -> Iterator[list[SequenceState]]:
    """The rows after every step, each token chosen on the host before the next step begins."""
    options, constraints = request.options, request.constraints
    argmax_only = not (options.samples or options.penalizes or request.details or constraints.depends_on_text)
    while True:
        likeliest = likeliest_tokens(constraints.mask(logits)) if argmax_only else None
        for i, row in enumerate(rows):
            if row.done:
                continue
            scores = logits[i] if argmax_only else request.score(logits[i], row.prompt, row.new)
            token = choose_token(scores, options, row.random) if likeliest is None else likeliest[i]
            request.add_token(row, token, scores)
        yield rows
        if all(row.done for row in rows):
            return
        logits = runner.step([row.new[-1] for row in rows])

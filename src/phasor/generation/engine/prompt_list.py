"""Long lists of prompts, computed by an engine: a row that ends makes room for the next prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch.distributed as dist

from phasor.generation.engine.engine import Engine
from phasor.generation.engine.memory import default_pages
from phasor.generation.generated import Generated
from phasor.generation.request import GenerationRequest
from phasor.generation.runners import STEP_RUNNERS
from phasor.generation.runners.protocol import ENDLESS

MOST_ROWS = 64  # of a batch that begins and ends together
PAGE_SIZE = 16


def engine_why_not(request: GenerationRequest) -> str | None:
    """Why the prompts of a request are not computed by an engine; None where they are.

    >>> from phasor import preset
    >>> from phasor.generation.request import build_request
    >>> from phasor.transformer import Transformer
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=1, vocab_size=50, max_length=64))
    >>> engine_why_not(build_request(model, [[1, 2]], fields={"max_new_tokens": 5, "num_beams": 2}))
    'an engine decodes greedily and samples'
    """
    options = request.options
    if options.num_beams > 1 or options.penalty_alpha or options.prompt_lookup_tokens or request.draft is not None:
        return "an engine decodes greedily and samples"
    if request.positions is not None or request.prefix is not None:
        return "an engine counts positions from 0"
    if request.model.front_end is not None:
        return "an engine reads tokens"
    if dist.is_initialized() and dist.get_world_size() > 1:
        return "a model may be cut over processes"
    if (path := STEP_RUNNERS.choose(request.step_spec())).name != "eager":
        return f"steps of a batch are faster: {path.name}"
    return None


def split_request(request: GenerationRequest, size: int = 1) -> Iterator[GenerationRequest]:
    """Requests of `size` prompts each, with the options and the seeds that they have in the whole."""
    copies, seeds = request.samples_per_prompt, request.options.seed
    for start in range(0, len(request.prompts) // copies, size):
        options = request.options
        if isinstance(seeds, tuple):
            options = options.replace(seed=seeds[start : start + size])
        prompts = request.prompts[start * copies : (start + size) * copies]
        yield dataclasses.replace(request, prompts=prompts, options=options)


def generate_list(request: GenerationRequest, max_rows: int = MOST_ROWS) -> Iterator[Generated]:
    """The continuations of each prompt, in their order, up to `max_rows` of them computed at once."""
    longest = request.longest(request.decoder_prompts())
    tokens = None if longest == ENDLESS else longest
    pages = default_pages(request.model, max_rows, PAGE_SIZE, tokens) - 1
    waiting = len(request.prompts)
    with Engine(request.model, max_rows=max_rows, pages=pages, page_size=PAGE_SIZE, max_waiting=waiting) as engine:
        for handle in [engine.submit_request(own) for own in split_request(request)]:
            result = handle.result()
            yield from result if isinstance(result, list) else [result]

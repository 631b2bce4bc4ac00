"""`generate` and `stream`: every decoding strategy behind one set of options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from phasor.config.generation import GenerationConfig
from phasor.generation.beam import beam_search
from phasor.generation.contrastive import contrastive_search
from phasor.generation.decode import decode_loop
from phasor.generation.engine.prompt_list import MOST_ROWS, engine_why_not, generate_list
from phasor.generation.generated import Generated
from phasor.generation.request import GenerationRequest, Prompt, SequenceState, build_request
from phasor.generation.speculative import speculative_decoding
from phasor.generation.text import TextTracker, decode_text
from phasor.nn.mode import eval_mode
from phasor.transformer import Transformer


def generate(
    model: Transformer,
    prompt: Prompt,
    options: GenerationConfig | None = None,
    *,
    draft: Transformer | None = None,
    start: int | Sequence[int] | None = None,
    positions: Any = None,
    details: bool = False,
    **fields: Any,
) -> Any:
    """New tokens for a prompt (a list of ids, or text where the model has a tokenizer) or for a list of them.

    The keyword arguments are the fields of `GenerationConfig` (max_new_tokens, temperature, top_k, top_p, min_p,
    typical_p, num_beams, seed, stop, ...). What they leave open is as the model's folder says in
    `generation_config.json` (`model.generation_settings`), with the meaning it has in `transformers`; `options` are
    complete, and with them the folder's settings do not apply. Only new tokens are returned, as text for text; with
    `num_return_sequences` above 1 a list for each prompt, of beams with the best first or of samples; with `details`
    as `Generated`. A seed gives a prompt the same continuation in any batch. `draft` is a smaller model for
    speculative decoding; `start` is the token an encoder-decoder's decoder begins with, where its folder does not say,
    or several of them. Of a model with a front end a prompt is a tensor of features `[frames, features]`.
    `positions` are those of a prompt's tokens where they do not count from 0, a list for each prompt; new tokens count
    on from the last of them.

    Where frequencies depend on the length of the text (LongRoPE, dynamic extensions), those of prompt and
    `max_new_tokens` together are used from the first token on, so that the result equals a forward over the whole
    text. `transformers` uses those of the text so far, so that its tokens may differ, and here another
    `max_new_tokens` may change the first tokens. `planned_length` gives that length explicitly.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> [len(new) for new in generate(model, [[1, 2, 3], [4]], max_new_tokens=5, temperature=0.8, seed=0)]
    [5, 5]
    """
    request = build_request(
        model, prompt, options, fields, draft=draft, start=start, positions=positions, details=details
    )
    if request.options.max_new_tokens is None and not (request.stop or request.stop_texts):
        raise ValueError("without max_new_tokens and without a stop this would never end: give one of them, or stream")
    results = beam_results(request) if request.options.num_beams > 1 else decode_results(request)
    return results if request.is_batch else results[0]


def beam_results(request: GenerationRequest) -> list[Any]:
    """The result of each prompt by beam search; a list of the best where several are asked for."""
    results: list[Any] = []
    with eval_mode(request.model), torch.inference_mode():
        searched = beam_search(request)
    for i, hypotheses in enumerate(searched):
        best = [
            result(request, h.tokens, h.log_probabilities, decode_text(request, i, h.tokens), h.score)
            for h in hypotheses
        ]
        results.append(best if request.options.num_return_sequences > 1 else best[0])
    return results


def decode_results(request: GenerationRequest) -> list[Any]:
    """The result of each prompt by the other strategies; a list of samples where several are asked for."""
    results = [result(request, row.tokens, row.log_probabilities, row.text) for row in decode_rows(request)]
    count = request.samples_per_prompt
    return results if count == 1 else [results[i : i + count] for i in range(0, len(results), count)]


def decode_rows(request: GenerationRequest, most: int = MOST_ROWS) -> Iterator[Generated]:
    """The continuation of each row: of one batch, or of an engine with `most` rows where there are more of them."""
    if len(request.prompts) > most and engine_why_not(request) is None:
        yield from generate_list(request, most)
        return
    tracker = TextTracker(request)
    texts = [""] * len(request.prompts)
    with eval_mode(request.model, request.draft), torch.inference_mode():
        for rows in decode(request):
            texts = [text + new for text, new in zip(texts, tracker.read(rows), strict=True)]
    complete: list[str | None] = [None] * len(rows)
    if request.tokenizer is not None:
        complete = [text + rest for text, rest in zip(texts, tracker.flush(), strict=True)]
    for row, text in zip(rows, complete, strict=True):
        yield Generated(row.new, row.log_probabilities, text)


def result(
    request: GenerationRequest,
    tokens: list[int],
    log_probabilities: list[float],
    text: str | None,
    score: float | None = None,
) -> Any:
    """A continuation in the form the caller asked for."""
    if request.details:
        return Generated(tokens, log_probabilities, text, score)
    return tokens if text is None else text


def decode(request: GenerationRequest) -> Iterator[list[SequenceState]]:
    """The rows after each step of the strategy that the options ask for."""
    if request.options.penalty_alpha:
        return contrastive_search(request)
    if request.draft is not None or request.options.prompt_lookup_tokens:
        return speculative_decoding(request)
    return decode_loop(request)


def stream(
    model: Transformer,
    prompt: str | Sequence[int],
    options: GenerationConfig | None = None,
    *,
    draft: Transformer | None = None,
    start: int | Sequence[int] | None = None,
    positions: Any = None,
    details: bool = False,
    **fields: Any,
) -> Iterator[Any]:
    """The new tokens of one prompt as they come, or pieces of text for text; options as for `generate`.

    With `details` a `Generated` per step: its tokens, their log-probabilities, and the text that is final by then.

    With `max_new_tokens=None` a model with a window in every layer goes on without end, in constant memory; penalties
    and `no_repeat_ngram_size` alone need all tokens so far.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> len(list(stream(model, [1, 2, 3], max_new_tokens=4)))
    4
    """
    request = build_request(
        model, prompt, options, fields, draft=draft, start=start, positions=positions, details=details, streams=True
    )
    if request.is_batch:
        raise ValueError("stream takes one prompt, not a list of them")
    if request.samples_per_prompt > 1:
        raise ValueError("stream gives one continuation: use generate for num_return_sequences above 1")
    if request.options.num_beams > 1:
        raise ValueError("beam search knows its tokens only at the end and cannot stream: use generate, or num_beams=1")
    return stream_steps(request)


def stream_steps(request: GenerationRequest) -> Iterator[Any]:
    needed = None if request.options.penalizes else request.constraints.num_deciding_tokens
    tracker, steps = TextTracker(request), decode(request)
    while True:
        with eval_mode(request.model, request.draft), torch.inference_mode():
            rows = next(steps, None)
            if rows is None:
                break
            row, first = rows[0], rows[0].num_read
            text = tracker.read(rows)[0]
        yield from stream_items(request, row.new[first:], row.log_probabilities[first:], text)
        if request.options.max_new_tokens is None and needed is not None:  # nothing reads the others again
            row.new, row.log_probabilities = row.new[-needed:], row.log_probabilities[-needed:]
            row.num_read = len(row.new)
    for rest in filter(None, tracker.flush()):
        yield from stream_items(request, [], [], rest)


def stream_items(
    request: GenerationRequest, tokens: list[int], log_probabilities: list[float], text: str
) -> Iterator[Any]:
    """What a stream yields for a step."""
    if request.details:
        yield Generated(tokens, log_probabilities, None if request.tokenizer is None else text)
    elif request.tokenizer is None:
        yield from tokens
    elif text:
        yield text

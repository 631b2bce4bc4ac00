"""Generation: `generate` and `stream`, every way of decoding behind one set of options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from phasor.config.generation import GenerationConfig
from phasor.generation.beam import beam_search
from phasor.generation.contrastive import contrastive_search
from phasor.generation.loop import Job, Row, one_by_one
from phasor.generation.speculative import speculate
from phasor.generation.text import Pieces
from phasor.model import Transformer

Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Generated:
    """One continuation: its new tokens, their log-probabilities (after penalties), and its text if there is any."""

    tokens: list[int]
    log_probabilities: list[float]
    text: str | None = None
    score: float | None = None


def generate(
    model: Transformer,
    prompt: Prompt,
    options: GenerationConfig | None = None,
    *,
    draft: Transformer | None = None,
    start: int | None = None,
    details: bool = False,
    **fields: Any,
) -> Any:
    """New tokens for a prompt (a list of ids, or text where the model has a tokenizer) or for a list of them.

    The keyword arguments are the fields of `GenerationConfig` (max_new_tokens, temperature, top_k, top_p, min_p,
    typical, beams, seed, stop, ...). Only new tokens come back, as text for text; with `results` above 1 a list
    for each prompt, best first; with `details` as `Generated`. A seed gives a prompt the same continuation in
    whatever batch it stands. `draft` is a smaller model that guesses ahead; `start` is the token an
    encoder-decoder's decoder begins with, where its folder does not say.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> [len(new) for new in generate(model, [[1, 2, 3], [4]], max_new_tokens=5, temperature=0.8, seed=0)]
    [5, 5]
    """
    options = merged(options, fields)
    request = Request(model, prompt, options, draft, start, details)
    with evaluating(model, draft), torch.inference_mode():
        if options.beams > 1:
            best = beam_search(request.job)
            found = [
                [request.result(h.tokens, h.log_probabilities, h.score) for h in hypotheses] for hypotheses in best
            ]
            answers = [one if options.results > 1 else one[0] for one in found]
        else:
            for rows in request.steps():
                request.watch(rows)
            answers = [request.result(row.new, row.log_probabilities) for row in rows]
    return answers if request.many else answers[0]


def stream(
    model: Transformer,
    prompt: str | Sequence[int],
    options: GenerationConfig | None = None,
    *,
    draft: Transformer | None = None,
    start: int | None = None,
    **fields: Any,
) -> Iterator[Any]:
    """The new tokens of one prompt as they come, or pieces of text for text; options as for `generate`.

    With `max_new_tokens=None` a model with a window in every layer goes on without end, in constant memory.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> len(list(stream(model, [1, 2, 3], max_new_tokens=4)))
    4
    """
    options = merged(options, fields)
    request = Request(model, prompt, options, draft, start, False)
    if request.many:
        raise ValueError("stream takes one prompt, not a list of them")
    if options.beams > 1:
        raise ValueError("beam search knows its tokens only at the end and cannot stream: use generate, or beams=1")
    return streamed(request)


def streamed(request: Request) -> Iterator[Any]:
    given = 0
    steps = request.steps()
    while True:
        with evaluating(request.job.model, request.draft), torch.inference_mode():
            rows = next(steps, None)
            if rows is None:
                break
            pieces = request.watch(rows)
        if request.tokenizer is None:
            yield from rows[0].new[given:]
        elif pieces[0]:
            yield pieces[0]
        given = len(rows[0].new)
    if request.tokenizer is not None and (rest := request.pieces[0].rest()):
        yield rest


def merged(options: GenerationConfig | None, fields: dict[str, Any]) -> GenerationConfig:
    if isinstance(fields.get("stop"), str | int):
        fields["stop"] = (fields["stop"],)
    return GenerationConfig(**fields) if options is None else options.replace(**fields)


class Request:
    """A prompt as it was asked for: made into token ids, checked, and its answer made into what was asked with."""

    def __init__(
        self,
        model: Transformer,
        prompt: Prompt,
        options: GenerationConfig,
        draft: Transformer | None,
        start: int | None,
        details: bool,
    ) -> None:
        if model.decoder is None:
            raise ValueError("an encoder does not generate: generation needs a decoder or an encoder-decoder")
        if not model.config.has_logits:
            raise ValueError(f"this model's head is {model.config.head.kind!r}: generation needs logits, the head 'lm'")
        self.options, self.draft, self.details = options, draft, details
        if draft is not None:
            self._check_draft(model, draft)
        special = model.special
        stop = special.stop if options.stop is None else options.stop
        self.stop_texts = [s for s in stop if isinstance(s, str)]
        prompts, self.many, textual = as_prompts(prompt)
        self.tokenizer = model.tokenizer if textual else None
        if textual and model.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and this model has none: pass token ids")
        if self.stop_texts and not textual:
            raise ValueError(
                f"the stop text {self.stop_texts[0]!r} needs a text prompt; with token ids give stop tokens"
            )
        ids = [self._ids(p) for p in prompts]
        for p in ids:
            check_prompt(p, model)
        self.job = Job(
            model,
            options,
            ids,
            frozenset(s for s in stop if isinstance(s, int)),
            special.start if start is None else start,
            special.forced_first,
            details,
        )
        self.pieces = [Pieces(self.tokenizer, self.stop_texts) for _ in ids] if textual else []

    def _check_draft(self, model: Transformer, draft: Transformer) -> None:
        if draft.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"the draft model's vocabulary has {draft.config.vocab_size} tokens and the model's "
                f"{model.config.vocab_size}: they must be the same"
            )
        if self.options.beams > 1 or self.options.contrastive or self.options.lookup:
            raise ValueError(
                "a draft model goes with greedy decoding or sampling, not with beams, contrastive or lookup"
            )

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        return cast(Any, self.tokenizer).encode(prompt).ids if isinstance(prompt, str) else list(prompt)

    def steps(self) -> Iterator[list[Row]]:
        """The rows after each step of the way of decoding that was asked for."""
        if self.options.contrastive:
            return contrastive_search(self.job)
        if self.draft is not None or self.options.lookup:
            return speculate(self.job, self.draft)
        return one_by_one(self.job)

    def watch(self, rows: list[Row]) -> list[str]:
        """Follow the text of the rows; a stop text ends its row. The new pieces of text."""
        new = []
        for row, pieces in zip(rows, self.pieces, strict=False):
            tail = row.new[-1:] if row.done and row.new and row.new[-1] in self.job.stop else []
            said = row.new[: len(row.new) - len(tail)]
            new.append(pieces.add(said[len(pieces.tokens) :]))
            row.done = row.done or pieces.stopped
        return new

    def result(self, tokens: list[int], log_probabilities: list[float], score: float | None = None) -> Any:
        text = None
        if self.tokenizer is not None:
            pieces = Pieces(self.tokenizer, self.stop_texts)
            said = tokens[:-1] if tokens and tokens[-1] in self.job.stop else tokens
            text = pieces.add(said) + pieces.rest()
        if self.details:
            return Generated(tokens, log_probabilities, text, score)
        return tokens if text is None else text


def as_prompts(prompt: Prompt) -> tuple[list[Any], bool, bool]:
    """Prompts as a list, whether there was a list of them, and whether they are text."""
    if isinstance(prompt, str):
        return [prompt], False, True
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or not prompt:
        raise ValueError("the prompt is empty: give token ids, text, or a list of either")
    kinds = {type(p) for p in prompt}
    if kinds == {str}:
        return list(prompt), True, True
    if all(isinstance(p, int) and not isinstance(p, bool) for p in prompt):
        return [prompt], False, False
    if all(isinstance(p, Sequence | torch.Tensor) and not isinstance(p, str) for p in prompt):
        return (
            [p.tolist() if isinstance(p, torch.Tensor) else list(cast(Sequence[int], p)) for p in prompt],
            True,
            False,
        )
    raise ValueError("a prompt is a list of token ids, a list of such lists, a text, or a list of texts")


def check_prompt(prompt: list[int], model: Transformer) -> None:
    size = model.config.vocab_size
    if model.config.shape == "encoder-decoder":
        size = model.config.embedding.source_vocab_size or size
    if not prompt:
        raise ValueError("a prompt is empty: it needs at least one token")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise ValueError(f"the prompt's token {token!r} is outside the vocabulary of {size}")


class evaluating:  # noqa: N801
    """Models in evaluation mode for the length of a `with`, and as they were afterwards."""

    def __init__(self, *models: Transformer | None) -> None:
        self.models = [m for m in models if m is not None]

    def __enter__(self) -> None:
        self.were = [m for m in self.models if m.training]
        for model in self.were:
            model.eval()

    def __exit__(self, *_: object) -> None:
        for model in self.were:
            model.train()


__all__ = ["Generated", "generate", "stream"]

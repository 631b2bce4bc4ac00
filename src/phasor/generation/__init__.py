"""Generation: `generate` and `stream`, every way of decoding behind one set of options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from phasor.config import ModelConfig
from phasor.config.generation import GenerationConfig, SpecialTokens
from phasor.config.schema import quote
from phasor.generation.beam import beam_search
from phasor.generation.contrastive import contrastive_search
from phasor.generation.loop import Job, Row, one_by_one
from phasor.generation.speculative import speculate
from phasor.generation.text import Pieces
from phasor.transformer import Transformer

Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Generated:
    """One continuation: its new tokens, their log-probabilities (after penalties), and its text if there is any.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> new = generate(model, [1, 2, 3], max_new_tokens=5, details=True)
    >>> len(new.tokens), len(new.log_probabilities), new.text
    (5, 5, None)
    """

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
    if options.max_new_tokens is None and not (request.job.stop or request.stop_texts):
        raise ValueError("without max_new_tokens and without a stop this would never end: give one of them, or stream")
    with evaluating(model, draft), torch.inference_mode():
        if options.num_beams > 1:
            best = beam_search(request.job)
            found = [
                [request.result(i, h.tokens, h.log_probabilities, h.score) for h in hypotheses]
                for i, hypotheses in enumerate(best)
            ]
            answers = [one if options.num_return_sequences > 1 else one[0] for one in found]
        else:
            for rows in request.steps():
                request.watch(rows)
            answers = [request.result(i, row.new, row.log_probabilities) for i, row in enumerate(rows)]
    return answers if request.many else answers[0]


def stream(
    model: Transformer,
    prompt: str | Sequence[int],
    options: GenerationConfig | None = None,
    *,
    draft: Transformer | None = None,
    start: int | None = None,
    details: bool = False,
    **fields: Any,
) -> Iterator[Any]:
    """The new tokens of one prompt as they come, or pieces of text for text; options as for `generate`.

    With `details` a `Generated` a step: its tokens, their log-probabilities, and the text that is certain by then.

    With `max_new_tokens=None` a model with a window in every layer goes on without end, in constant memory.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> len(list(stream(model, [1, 2, 3], max_new_tokens=4)))
    4
    """
    options = merged(options, fields)
    request = Request(model, prompt, options, draft, start, details)
    if request.many:
        raise ValueError("stream takes one prompt, not a list of them")
    if options.num_beams > 1:
        raise ValueError("beam search knows its tokens only at the end and cannot stream: use generate, or num_beams=1")
    return streamed(request)


def streamed(request: Request) -> Iterator[Any]:
    endless = request.options.max_new_tokens is None and not request.options.penalizes
    steps = request.steps()
    while True:
        with evaluating(request.job.model, request.draft), torch.inference_mode():
            rows = next(steps, None)
            if rows is None:
                break
            row, begin = rows[0], rows[0].watched
            piece = request.watch(rows)[0]
        yield from request.told(row.new[begin:], row.log_probabilities[begin:], piece)
        if endless:  # nobody reads these again, and memory stays constant
            row.new, row.log_probabilities, row.watched = row.new[-1:], row.log_probabilities[-1:], 1
    if request.pieces and (rest := request.pieces[0].rest()):
        yield from request.told([], [], rest)


def merged(options: GenerationConfig | None, fields: dict[str, Any]) -> GenerationConfig:
    if not isinstance(options, GenerationConfig | None):
        raise ValueError(f"options must be a GenerationConfig, or its fields by name, not {quote(options)}")
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
        if not isinstance(getattr(model, "config", None), ModelConfig):
            raise ValueError(f"generation needs a Transformer, not {quote(model)}")
        if model.decoder is None:
            raise ValueError("an encoder does not generate: generation needs a decoder or an encoder-decoder")
        if not model.config.has_logits:
            raise ValueError(f"this model's head is {model.config.head.kind!r}: generation needs logits, the head 'lm'")
        if start is not None and model.config.shape != "encoder-decoder":
            raise ValueError("start is for an encoder-decoder; a decoder starts with its prompt")
        self.options, self.draft, self.details = options, draft, details
        if draft is not None:
            self._check_draft(model, draft)
        special = model.special
        stop = special.stop if options.stop is None else options.stop
        prompts, self.many, textual = as_prompts(prompt)
        self.tokenizer = model.tokenizer if textual else None
        self.reader = model.tokenizer if model.source_tokenizer is None else model.source_tokenizer
        if textual and model.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and this model has none: pass token ids")
        texts = [s for s in stop if isinstance(s, str)]
        if texts and not textual:
            raise ValueError(f"the stop text {texts[0]!r} needs a text prompt; with token ids give stop tokens")
        if texts and options.num_beams > 1:
            raise ValueError(
                "beam search ends at stop tokens, not at stop texts: its beams are compared token by token"
            )
        if "" in texts:
            raise ValueError("a stop text is empty: it would stop before it starts")
        special_ids = special_tokens(self.tokenizer) if texts else {}  # no text shows these: they stop as tokens
        self.stop_texts = [s for s in texts if s not in special_ids]
        ids = [self._ids(p) for p in prompts]
        for p in ids:
            check_prompt(p, model)
        bound = special if model.encoder is not None else SpecialTokens()
        self.job = Job(
            model,
            options,
            ids,
            frozenset(special_ids[s] if isinstance(s, str) else s for s in stop if s not in self.stop_texts),
            special.start if start is None else start,
            bound.forced_first,
            bound.forced_last,
            bound.never,
            details,
        )
        self.job.check(draft)
        self.pieces = [self._pieces(i) for i in range(len(ids))] if textual else []

    def _check_draft(self, model: Transformer, draft: Transformer) -> None:
        config = getattr(draft, "config", None)
        if not isinstance(config, ModelConfig) or config.shape != "decoder" or not config.has_logits:
            raise ValueError("a draft model must be a decoder with logits")
        if draft.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"the draft model's vocabulary has {draft.config.vocab_size} tokens and the model's "
                f"{model.config.vocab_size}: they must be the same"
            )
        if (
            self.options.num_beams > 1
            or self.options.penalty_alpha
            or self.options.prompt_lookup_tokens
            or self.options.compile
        ):
            raise ValueError(
                "a draft model goes with greedy decoding or sampling, not with beams, contrastive, lookup or compile"
            )

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        return self.reader.encode(prompt).ids if isinstance(prompt, str) else list(prompt)

    def steps(self) -> Iterator[list[Row]]:
        """The rows after each step of the way of decoding that was asked for."""
        if self.options.penalty_alpha:
            return contrastive_search(self.job)
        if self.draft is not None or self.options.prompt_lookup_tokens:
            return speculate(self.job, self.draft)
        return one_by_one(self.job)

    def watch(self, rows: list[Row]) -> list[str]:
        """Follow the text of the rows; a stop text ends its row. The new pieces of text."""
        new = []
        for i, row in enumerate(rows):
            piece = ""
            while row.watched < len(row.new):
                token = row.new[row.watched]
                row.watched += 1
                if self.pieces and token not in self.job.stop:
                    piece += self.pieces[i].add(token)
                    if self.pieces[i].stopped:
                        row.done = True
                        del row.new[row.watched :], row.log_probabilities[row.watched :]
            new.append(piece)
        return new

    def told(self, tokens: list[int], log_probabilities: list[float], piece: str) -> Iterator[Any]:
        """What a stream gives out of a step."""
        if self.details:
            yield Generated(tokens, log_probabilities, piece if self.pieces else None)
        elif not self.pieces:
            yield from tokens
        elif piece:
            yield piece

    def result(self, row: int, tokens: list[int], log_probabilities: list[float], score: float | None = None) -> Any:
        text = None
        if self.tokenizer is not None:
            pieces = self._pieces(row)
            said = tokens[:-1] if tokens and tokens[-1] in self.job.stop else tokens
            text = "".join([pieces.add(token) for token in said]) + pieces.rest()
        if self.details:
            return Generated(tokens, log_probabilities, text, score)
        return tokens if text is None else text

    def _pieces(self, row: int) -> Pieces:
        return Pieces(self.tokenizer, self.stop_texts, [] if self.job.crosses else self.job.prompts[row])


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens of a tokenizer that its texts leave out, by name."""
    return {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def as_prompts(prompt: Prompt) -> tuple[list[Any], bool, bool]:
    """Prompts as a list, whether there was a list of them, and whether they are text."""
    if isinstance(prompt, str):
        return [prompt], False, True
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and not prompt:
        raise ValueError("the prompt is empty: give token ids, text, or a list of either")
    if not isinstance(prompt, Sequence):
        raise ValueError(f"a prompt is a list of token ids, a text, or a list of either, not {quote(prompt)}")
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
    """Models in evaluation mode for the length of a `with`, and every part as it was afterward."""

    def __init__(self, *models: Transformer | None) -> None:
        self.models = [m for m in models if m is not None]

    def __enter__(self) -> None:
        self.were = [part for model in self.models for part in model.modules() if part.training]
        for part in self.were:
            part.training = False

    def __exit__(self, *_: object) -> None:
        for part in self.were:
            part.training = True


__all__ = ["Generated", "generate", "stream"]

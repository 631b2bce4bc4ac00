"""What a request means for the model: prompts, and the options of `generate`, one request of the engine for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from phasor.checkpoints.chat_template import ChatTemplate
from phasor.config.generation_settings import length_options
from phasor.config.schema import check_integer, quote
from phasor.generation.encode import encode_prompts
from phasor.generation.engine.handle import LogitsProcessor
from phasor.serving.errors import RequestError
from phasor.serving.fields import ChatFields, CompletionFields, SamplingFields
from phasor.serving.grammar import Grammars, read_form
from phasor.transformer import Stack, Transformer

COMPLETION_TOKENS, REPLY_TOKENS = 16, 1024  # where neither the request nor the folder says how many
SAME = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
# What `ChatTemplate.encode` takes beside variables; requests have fields for those that are theirs to say.
NOT_VARIABLES = ("self", "tokenizer", "messages", "tools", "name", "add_generation_prompt", "continue_final_message")


class RequestReader:
    """Turns the fields of requests into arguments of `Engine.submit`, for one model and its chat template.

    Prompt and new tokens may have `max_length` tokens, by default the model's; more where a request asks for an
    extension, and any number where every layer has a window or a state. A call may begin up to `most_rows` answers.
    """

    def __init__(
        self, model: Transformer, template: ChatTemplate | None, max_length: int | None, most_rows: int
    ) -> None:
        if max_length is not None:
            check_integer("max_length", max_length)
        self.model, self.template, self.most_rows = model, template, most_rows
        stack = cast(Stack, model.decoder)
        endless = not any(layer.attention.grows for layer in stack.layers)
        limited = any(scheme.max_positions is not None for scheme in stack.schemes)
        self.max_length = model.config.max_length if max_length is None and (limited or not endless) else max_length
        self.stops = tuple(dict.fromkeys((*model.special.stop, *self._end_of_turn())))
        self.grammars = Grammars(model.tokenizer, next(iter(self.stops), None))

    def _end_of_turn(self) -> tuple[int, ...]:
        if self.template is None or self.model.tokenizer is None:
            return ()
        try:
            end = self.template.end_of_turn(self.model.tokenizer)
        except ValueError:  # a template that refuses the turns which would show it
            return ()
        return () if end is None else (end,)

    def completions(self, fields: CompletionFields) -> tuple[list[dict[str, Any]], int]:
        """The requests of a completion, and how many choices each has."""
        if not fields.prompts:
            raise RequestError("prompt is an empty list: give a text, token ids, or a list of either", param="prompt")
        try:
            prompts = [self._encode(prompt) for prompt in fields.prompts]
        except ValueError as error:
            raise RequestError(str(error), param="prompt") from None
        return self._requests(fields, prompts, COMPLETION_TOKENS, self.model.special.stop)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        reader = self.model.source_tokenizer or self.model.tokenizer
        if reader is None:
            raise ValueError("this model has no tokenizer: give prompts as token ids")
        return encode_prompts(reader, [prompt])[0]

    def reply(self, fields: ChatFields) -> tuple[list[dict[str, Any]], int]:
        """The requests of a reply to a conversation."""
        if self.template is None or self.model.tokenizer is None:
            missing = "tokenizer" if self.model.tokenizer is None else "chat template, which says how one is written"
            raise RequestError(f"this model takes no conversations: it has no {missing}; use /v1/completions")
        for name in fields.chat_template_kwargs:
            if name in NOT_VARIABLES:
                raise RequestError(f"{name!r} is no variable of the chat template", param="chat_template_kwargs")
        try:
            prompt = self.template.encode(
                self.model.tokenizer,
                [plain_content(message) for message in fields.messages],
                None if fields.tool_choice == "none" else fields.tools,
                fields.add_generation_prompt and not fields.continue_final_message,
                continue_final_message=fields.continue_final_message,
                **fields.chat_template_kwargs,
            )
        except (ValueError, TypeError) as error:
            raise RequestError(str(error), param="messages") from None
        return self._requests(fields, [prompt], REPLY_TOKENS, self.stops)

    def _requests(
        self, fields: SamplingFields, prompts: Sequence[list[int]], most: int, stops: tuple[int, ...]
    ) -> tuple[list[dict[str, Any]], int]:
        options = self._options(fields, stops)
        if fields.n > 1 and options.get("temperature") == 0:
            raise RequestError(
                "at temperature 0 all choices are the same: ask for one, or for a temperature", param="n"
            )
        bias = read_bias(fields.logit_bias, self.model.config.vocab_size)
        has_form = read_form(fields.response_format) is not None
        if has_form and (fields.ignore_eos or fields.min_tokens):
            raise RequestError(
                "an answer ends where its response_format is complete: leave out ignore_eos and min_tokens",
                param="ignore_eos" if fields.ignore_eos else "min_tokens",
            )
        # A grammar follows the tokens of one choice, so that each is then a separate request.
        copies = 1 if has_form else fields.n
        if (len(prompts) * fields.n // copies - 1) * copies >= self.most_rows:
            raise RequestError(
                f"this server takes up to {self.most_rows} answers at once, and these are {len(prompts) * fields.n}",
                param="n" if len(prompts) == 1 else "prompt",
            )
        grammar = self.grammars.compile(fields.response_format)
        requests = []
        for prompt in prompts:
            length = self._check_length(fields, prompt, most)
            for sample in range(fields.n // copies):
                own = options | length | {"prompt": prompt, "num_return_sequences": copies}
                if fields.seed is not None:
                    own["seed"] = fields.seed + sample
                processors = [bias, grammar and grammar.copy()]
                if any(processors):
                    own["logits_processor"] = chain([each for each in processors if each is not None])
                requests.append(own)
        return requests, copies

    def _check_length(self, fields: SamplingFields, prompt: list[int], most: int) -> dict[str, int]:
        """How many tokens may follow a prompt: as many as the request or the folder says, or what there is room for."""
        stated, settings = fields.most_tokens, self.model.generation_settings
        read = 1 if self.model.encoder is not None else len(prompt)
        if stated is None:
            most = (settings | length_options(settings, read)).get("max_new_tokens") or most
        if self.max_length is None or fields.extension is not None:
            return {"max_new_tokens": most if stated is None else stated}
        room = self.max_length - read
        if room < (1 if stated is None else stated) or len(prompt) > self.max_length:
            new = "" if stated is None else f" and max_tokens {stated}"
            raise RequestError(
                f"the prompt has {len(prompt)} tokens{new}, and this server takes up to {self.max_length} in all",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return {"max_new_tokens": min(most, room) if stated is None else stated}

    def _options(self, fields: SamplingFields, stops: tuple[int, ...]) -> dict[str, Any]:
        """The options that a request gives; what it leaves open is the folder's, or else OpenAI's default."""
        settings = self.model.generation_settings
        options: dict[str, Any] = {name: value for name in SAME if (value := getattr(fields, name)) is not None}
        if fields.top_k in (-1, 0):
            options["top_k"] = None
        if "temperature" not in options and "do_sample" not in settings:
            stated = settings.get("temperature")
            options["temperature"] = 1.0 if stated is None else stated
        if fields.min_tokens:
            options["min_new_tokens"] = fields.min_tokens
        texts = (fields.stop,) if isinstance(fields.stop, str) else fields.stop
        options["stop"] = (*(() if fields.ignore_eos else stops), *fields.stop_token_ids, *texts)
        return options | {
            "logprobs": fields.top_log_probabilities,
            "extension": fields.extension,
            "as_text": self.model.tokenizer is not None,
        }


def plain_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with a role, whose content is text; parts of text are joined, and others refused.

    >>> plain_content({"role": "user", "content": [{"type": "text", "text": "Hello"}]})
    {'role': 'user', 'content': 'Hello'}
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError(f"the role of a message must be text, not {quote(role)}")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, list):
        raise ValueError(f"the content of a message must be text or a list of parts, not {quote(content)}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"a message has content that is not text: {quote(part)}")
    return {**message, "content": "".join(part["text"] for part in content)}


def chain(processors: Sequence[LogitsProcessor]) -> LogitsProcessor:
    """Processors one after the other."""

    def process(prompt: list[int], new: list[int], scores: Tensor) -> Tensor:
        for processor in processors:
            scores = processor(prompt, new, scores)
        return scores

    return process


def is_token(text: str, vocab_size: int) -> bool:
    """Whether a text is the number of a token.

    >>> is_token("7", 50), is_token("50", 50), is_token("-1", 50)
    (True, False, False)
    """
    return re.fullmatch("[0-9]{1,9}", text) is not None and int(text) < vocab_size


def read_bias(given: Mapping[str, Any], vocab_size: int) -> LogitsProcessor | None:
    """What `logit_bias` adds to the scores of tokens; None where it adds nothing."""
    if not given:
        return None
    for token, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 100
        if not is_token(token, vocab_size) or not number:
            raise RequestError(
                f"logit_bias maps token ids below {vocab_size} to numbers from -100 to 100, not {quote(token)} to "
                f"{quote(value)}",
                param="logit_bias",
            )
    tokens, values = [int(token) for token in given], [float(value) for value in given.values()]

    def process(prompt: list[int], new: list[int], scores: Tensor) -> Tensor:
        return scores.index_add(-1, scores.new_tensor(tokens).long(), scores.new_tensor(values))

    return process

"""The bodies of requests as records: OpenAI's fields, and those that other servers added to them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Literal, TypeVar

from phasor.config.schema import Config, unique_keys
from phasor.serving.errors import RequestError

MOST_CHOICES, MOST_PROMPTS, MOST_TOP_LOGPROBS = 128, 2048, 20
MOST_STOPS = 128  # each is looked for after every token, for which all answers wait
Body = TypeVar("Body", bound=Config)


class StreamOptions(Config):
    """Whether a stream ends with the number of tokens."""

    include_usage: bool = False


class SamplingFields(Config):
    """What completions and replies share: how tokens are chosen, where they end, and how they are returned.

    `model` is the name that the server has for its model. `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
    `stop_token_ids`, `ignore_eos` and `return_token_ids` are not OpenAI's, and as in vLLM. `extension` names the rotary
    extension of this request. `user` is for the caller's own records.
    """

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] = dataclasses.field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    response_format: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    extension: str | None = None
    user: str | None = None

    def check(self) -> None:
        name = type(self).__name__
        if not 1 <= self.n <= MOST_CHOICES:
            raise ValueError(f"{name}.n must be from 1 to {MOST_CHOICES}, not {self.n}")
        for field in ("frequency_penalty", "presence_penalty"):
            if not abs(getattr(self, field)) <= 2:
                raise ValueError(f"{name}.{field} must be from -2 to 2, not {getattr(self, field)}")
        penalty = self.repetition_penalty
        if penalty is not None and not 0.01 <= penalty <= 100:  # beyond that, scores are no longer finite
            raise ValueError(f"{name}.repetition_penalty must be from 0.01 to 100, not {penalty}")
        if not isinstance(self.stop, str) and len(self.stop) > MOST_STOPS:
            raise ValueError(f"{name}.stop must have at most {MOST_STOPS} texts, not {len(self.stop):,}")
        if self.stream_options is not None and not self.stream:
            raise ValueError(f"{name}.stream_options are for a stream: set stream to true")

    @property
    def most_tokens(self) -> int | None:
        """How many tokens a choice may have, where the request says so."""
        return self.max_tokens

    @property
    def top_log_probabilities(self) -> int | None:
        """How many of the likeliest tokens are returned in the place of each; None without log-probabilities."""
        return None


class CompletionFields(SamplingFields):
    """The body of /v1/completions: a text, token ids, or a list of either."""

    prompt: str | tuple[str, ...] | tuple[int, ...] | tuple[tuple[int, ...], ...]
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_TOP_LOGPROBS:
            raise ValueError(f"CompletionFields.logprobs must be from 0 to {MOST_TOP_LOGPROBS}, not {self.logprobs}")
        if len(self.prompts) > MOST_PROMPTS:
            raise ValueError(f"CompletionFields.prompt must have at most {MOST_PROMPTS:,} prompts")

    @property
    def prompts(self) -> list[Any]:
        """The prompts one by one, each a text or a list of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return [one if isinstance(one, str) else list(one) for one in self.prompt]  # type: ignore[arg-type]

    @property
    def top_log_probabilities(self) -> int | None:
        return self.logprobs


class ChatFields(SamplingFields):
    """The body of /v1/chat/completions: a conversation, which the folder's chat template writes.

    `chat_template_kwargs` are variables of the template, such as `enable_thinking`.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise ValueError("ChatFields.messages must have at least one message")
        if not 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS:
            raise ValueError(f"ChatFields.top_logprobs must be from 0 to {MOST_TOP_LOGPROBS}, not {self.top_logprobs}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("ChatFields.top_logprobs needs logprobs: set that to true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("ChatFields.max_tokens and max_completion_tokens are two names of one limit: give one")

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_log_probabilities(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class EmbeddingFields(Config):
    """The body of /v1/embeddings: a text, token ids, or a list of either."""

    input: str | tuple[str, ...] | tuple[int, ...] | tuple[tuple[int, ...], ...]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None

    def check(self) -> None:
        if not self.input:
            raise ValueError("EmbeddingFields.input is empty: give a text, token ids, or a list of either")
        if not isinstance(self.input, str) and len(self.input) > MOST_PROMPTS and not isinstance(self.input[0], int):
            raise ValueError(f"EmbeddingFields.input must have at most {MOST_PROMPTS:,} texts")


def read_fields(kind: type[Body], body: bytes) -> Body:
    """The fields of a JSON body; a `RequestError` names the one that is wrong. Fields that are null count as left out.

    >>> read_fields(EmbeddingFields, b'{"input": "Hello", "model": null}').input
    'Hello'
    """
    try:
        given = json.loads(body.decode(), object_pairs_hook=unique_keys, parse_constant=refuse_constant)
        if b"\\u" in body:
            json.dumps(given, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: its byte {error.start} is 0x{body[error.start]:02x}") from None
    except UnicodeEncodeError as error:
        raise RequestError(f"the body has half a character: {error.object[error.start]!r} alone is none") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return kind.from_dict({name: value for name, value in given.items() if value is not None})
    except (ValueError, RecursionError) as error:
        message, prefix = str(error).replace("StreamOptions", f"{kind.__name__}.stream_options"), kind.__name__
        named = re.search(rf"\b{prefix}\.(\w+)|^unknown field of {prefix} '(\w+)'|^{prefix} needs (\w+)", message)
        message = message.replace(f"{prefix}.", "").replace(f"field of {prefix}", "field")
        message = message.replace(f"{prefix} needs", "the body needs")
        raise RequestError(message, param=next(filter(None, named.groups()), None) if named else None) from None


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")

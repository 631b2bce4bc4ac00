"""Replies of a given form: a JSON schema or a regular expression decides which tokens may come next (llguidance)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phasor.config.schema import name_some, quote
from phasor.distribution import missing_package
from phasor.serving.errors import RequestError

FORMS = ("text", "json_object", "json_schema", "regex")
ANY_OBJECT = {"type": "object"}


def why_no_grammar() -> str | None:
    """Why no form can be asked for; None where the package is installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return str(missing_package("response_format needs the package llguidance", "grammar"))
    return None


class Grammars:
    """Compiles what requests ask for, for one tokenizer; `stop` is the token that ends a reply."""

    def __init__(self, tokenizer: Any, stop: int | None) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self._prepared: Any = None

    def compile(self, form: Mapping[str, Any] | None) -> GrammarProcessor | None:
        """The processor of the scores of one reply in a `response_format`; None where any text will do."""
        source = read_form(form)
        if source is None:
            return None
        if (why := why_no_grammar()) is not None:
            raise RequestError(why, param="response_format")
        from llguidance import LLMatcher

        name, text = source
        try:
            grammar = getattr(LLMatcher, f"grammar_from_{name}")(text)
            wrong = LLMatcher.validate_grammar(grammar, self._tokenizer())
        except (ValueError, RuntimeError) as error:
            wrong = str(error)
        if wrong:
            raise RequestError(f"response_format is not understood: {' '.join(wrong.split())}", param="response_format")
        processor = GrammarProcessor(LLMatcher(self._tokenizer(), grammar), self._tokenizer().vocab_size)
        try:
            processor.next_tokens([])
        except ValueError as error:  # of a form that no text has
            raise RequestError(f"response_format is not understood: {error}", param="response_format") from None
        return processor

    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        if self._prepared is None:
            if self.tokenizer is None or self.stop is None:
                missing = "tokenizer" if self.tokenizer is None else "token that ends a text"
                raise RequestError(
                    f"response_format cannot be kept: the model has no {missing}", param="response_format"
                )
            try:
                self._prepared = LLTokenizer(self.tokenizer.to_str(), eos_token=self.stop)
            except Exception as error:  # of a tokenizer that llguidance does not read
                raise RequestError(
                    f"response_format cannot be kept with this model's tokenizer: {error}", param="response_format"
                ) from None
        return self._prepared


class GrammarProcessor:
    """Bans the tokens that a grammar does not allow next; it belongs to one reply, which it follows as that grows."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        # Its module for torch would load torch's compiler, for which all answers wait for seconds.
        from llguidance.numpy import allocate_token_bitmask

        self.matcher, self.read = matcher, 0
        self.mask = allocate_token_bitmask(1, vocab_size)

    def __call__(self, prompt: list[int], new: list[int], scores: Tensor) -> Tensor:
        allowed = unpack(self.next_tokens(new), len(scores)).to(scores.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def next_tokens(self, new: list[int]) -> Tensor:
        """The tokens that may come after those of a reply so far, as bits of integers."""
        from llguidance.numpy import fill_next_token_bitmask

        self.matcher.consume_tokens(new[self.read :])
        self.read = len(new)
        fill_next_token_bitmask(self.matcher, self.mask)
        if self.matcher.is_error():
            raise ValueError(f"no token fits it: {self.matcher.get_error().partition('<state>')[0].strip()}")
        return torch.from_numpy(self.mask[0])


def unpack(mask: Tensor, count: int) -> Tensor:
    """The first bits of integers of 32 bits, lowest first; what lies beyond them is False.

    >>> unpack(torch.tensor([5], dtype=torch.int32), 4).tolist()
    [True, False, True, False]
    """
    bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)).bitwise_and(1).bool().flatten()
    return torch.nn.functional.pad(bits, (0, max(0, count - len(bits))))[:count]


def read_form(form: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """A `response_format` as a kind of grammar and its text; None for plain text.

    >>> read_form({"type": "regex", "regex": "yes|no"})
    ('regex', 'yes|no')
    """
    kind = "text" if form is None else form.get("type")
    if kind == "text":
        return None
    assert form is not None
    if kind == "json_object":
        return "json_schema", json.dumps(ANY_OBJECT)
    if kind == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise RequestError("response_format.json_schema must have the schema, an object", param="response_format")
        return "json_schema", json.dumps(schema)
    if kind == "regex":
        pattern = form.get("regex", form.get("pattern"))
        if not isinstance(pattern, str):
            raise RequestError("response_format.regex must be a regular expression", param="response_format")
        return "regex", pattern
    raise RequestError(
        f"response_format.type must be one of {name_some(FORMS)}, not {quote(kind)}", param="response_format"
    )

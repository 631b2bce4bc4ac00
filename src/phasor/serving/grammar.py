"""Replies of a given form: a JSON schema or a regular expression decides which tokens may come next (llguidance)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phasor.config.schema import name_some, quote, shorten
from phasor.distribution import missing_package
from phasor.serving.errors import RequestError

FORMS = ("text", "json_object", "json_schema", "regex")
ANY_OBJECT = {"type": "object"}
MOST_CHARACTERS = 1 << 16  # of a regular expression or a schema: ten thousand words
# Of a schema, all answers waiting while it is compiled. The time grows with the cube of the patterns of names, with two
# to the power of what is joined by allOf, and with the product of multipleOf: entries of the first two count as nodes.
MOST_NODES, MOST_MULTIPLE = 1000, 10_000
COSTLY: dict[str | int, int] = {"patternProperties": 10, "allOf": 64}
MOST_EXPRESSIONS = 100_000  # in its automaton: a step of one that has them all takes tens of milliseconds


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
        """The processor of the scores of one reply in a `response_format`; None where any text will do.

        Further replies to the same request take copies of it.
        """
        source = read_form(form)
        if source is None:
            return None
        if (why := why_no_grammar()) is not None:
            raise RequestError(why, param="response_format")
        from llguidance import LLMatcher, LLParserLimits

        name, text = source
        limits = LLParserLimits(initial_lexer_fuel=MOST_EXPRESSIONS)
        try:
            grammar = getattr(LLMatcher, f"grammar_from_{name}")(text)
            wrong = LLMatcher.validate_grammar(grammar, self._tokenizer(), limits=limits)
        except (ValueError, RuntimeError) as error:
            wrong = str(error)
        if wrong:
            raise not_understood(wrong)
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=limits)
        processor = GrammarProcessor(matcher, self._tokenizer().vocab_size)
        processor.copy().read_a_token()
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

        self.matcher, self.vocab_size, self.read = matcher, vocab_size, 0
        self.mask = allocate_token_bitmask(1, vocab_size)

    def copy(self) -> GrammarProcessor:
        """The same for another reply, before the first token."""
        return GrammarProcessor(self.matcher.deep_copy(), self.vocab_size)

    def read_a_token(self) -> None:
        """Find the tokens that may come first, and those after one of them: what is too large has failed by then."""
        first = unpack(self.next_tokens([]), self.vocab_size).nonzero()
        if not self.matcher.is_stopped():
            self.next_tokens(first[0].tolist())

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
            raise not_understood(f"no token fits it: {self.matcher.get_error().partition('<state>')[0]}")
        return torch.from_numpy(self.mask[0])


def not_understood(reason: str) -> RequestError:
    """What is said of a form that is wrong, that no text has, or that is too large.

    >>> str(not_understood("invalid regex (ab:\\n    (ab\\n    ^\\nerror: unclosed group\\n"))
    'response_format is not understood: unclosed group'
    """
    error = re.search(r"^error: (.+)$", reason, re.MULTILINE)  # of a regular expression, which is shown around it
    sentence = shorten(" ".join(error[1].split() if error else reason.split()))
    return RequestError(f"response_format is not understood: {sentence}", param="response_format")


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
        text = json.dumps(schema)
        check_length("json_schema", text)
        check_schema(schema)
        return "json_schema", text
    if kind == "regex":
        pattern = form.get("regex", form.get("pattern"))
        if not isinstance(pattern, str):
            raise RequestError("response_format.regex must be a regular expression", param="response_format")
        check_length("regex", pattern)
        return "regex", pattern
    raise RequestError(
        f"response_format.type must be one of {name_some(FORMS)}, not {quote(kind)}", param="response_format"
    )


def check_length(kind: str, text: str) -> None:
    """Refuse a form that has too many characters."""
    if len(text) > MOST_CHARACTERS:
        raise RequestError(
            f"response_format.{kind} has {len(text):,} characters, and may have up to {MOST_CHARACTERS:,}",
            param="response_format",
        )


def check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse a JSON schema that is too large.

    >>> check_schema({"anyOf": [{"type": "integer"}] * 2000})
    Traceback (most recent call last):
        ...
    phasor.serving.errors.RequestError: response_format.json_schema has 2,002 objects and lists, and may have 1,000
    """
    left: list[Any] = [schema]
    nodes, multiple = 0, 1
    while left:
        node = left.pop()
        nodes += 1
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            if isinstance(value, Mapping | list):
                left.append(value)
                nodes += COSTLY.get(key, 0) * max(0, len(value) - 1)
            elif key == "multipleOf":  # by its digits, as 0.25 is compiled as 25 hundredths
                multiple *= int(re.sub("[^0-9]", "", str(value)) or 1) or 1
    if nodes > MOST_NODES:
        reason = f"has {nodes:,} objects and lists, and may have {MOST_NODES:,}"
    elif multiple > MOST_MULTIPLE:
        reason = f"has values of multipleOf whose product is above {MOST_MULTIPLE:,}"
    else:
        return
    raise RequestError(f"response_format.json_schema {reason}", param="response_format")

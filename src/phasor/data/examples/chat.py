"""Conversations: the turns that a chat template writes, of which the replies are trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from phasor.data.conversations import Conversation, conversations
from phasor.data.dates import Split
from phasor.data.docstrings import docstring_conversations
from phasor.data.encoding import Report, Tokenizers, Tokens, given_tokenizer
from phasor.data.examples.base import ExampleBatches, Examples
from phasor.data.messages import BadRowError, Message
from phasor.data.packed import PackedRows
from phasor.data.split import Example, PlacedExample, format_place
from phasor.data.templates import add_markers, read_chat_template, template_hash, with_special_tokens

NOTHING = np.empty(0, np.uint32), np.empty(0, np.uint32)


class TemplatedExamples(Examples):
    """What conversations and preferences share: a chat template, and documents of tokens and 0 or 1 for each."""

    unrelated = frozenset({"share_vocabulary"})
    unit = "conversation"

    def origin(self) -> dict[str, Any]:
        folder = given_tokenizer(self.recipe)
        return {"chat_template": template_hash(read_chat_template(self.recipe, folder))}

    def adapt(self, tokenizers: Tokenizers, folder: Path | None) -> Tokenizers:
        template = read_chat_template(self.recipe, folder)
        add_markers(template, tokenizers.target)
        tokenizers.target.encode_special_tokens = False
        template = with_special_tokens(template, tokenizers.target, tokenizers.special, folder)
        return tokenizers._replace(template=template)

    def encode_replies(
        self, tokenizers: Tokenizers, messages: Sequence[Message], tools: Sequence[Any], example: Example
    ) -> tuple[Tokens, Tokens]:
        """The tokens of messages, and 1 where one is of a reply; `NOTHING` where the template refuses them.

        That is an error unless such examples are skipped.
        """
        assert tokenizers.template is not None
        try:
            ids, trained = tokenizers.template.encode_replies(tokenizers.target, messages, tools or None)
        except ValueError as error:
            if self.recipe.data.if_empty == "refuse":
                raise BadRowError(format_place(example).removesuffix(": "), str(error)) from None
            self.skipped["that the chat template refuses"] += 1
            return NOTHING
        mask = np.array(trained, np.uint32)
        if self.recipe.data.train_on == "all":
            mask[:] = 1
        return np.array(ids, np.uint32), mask

    def length(self, tokens: tuple[Tokens, ...]) -> int:
        return max(len(ids) for ids in tokens[0::2]) - 1  # the last token is only a target

    def fit(self, example: Example, tokens: tuple[Tokens, ...]) -> tuple[Tokens, ...] | None:
        if not all(map(len, tokens[0::2])):  # the template has refused it
            return None
        data = self.recipe.data
        if data.too_long == "truncate" and self.length(tokens) > data.sequence_length:
            tokens = tuple(side[: data.sequence_length + 1] for side in tokens)
            if not all(trained[1:].any() for trained in tokens[1::2]):
                self.skipped[f"whose first {data.sequence_length} tokens have no reply"] += 1
                return None
        return super().fit(example, tokens)


class Conversations(TemplatedExamples):
    """Conversations, whose replies are predicted."""

    sides = 2
    batch_source: ClassVar[Callable[..., ExampleBatches]] = PackedRows

    def read(self, path: str | None, target: str | None = None, split: Split = "train") -> Iterable[Example]:
        data = self.recipe.data
        found = docstring_conversations() if data.format == "docstrings" else conversations(path, data, self.skipped)
        return map(record_of, found)

    def texts(self, example: Example) -> tuple[str, ...]:
        return tuple(message["content"] for message in json.loads(example[0])["messages"])

    def encode(self, examples: Sequence[Example], tokenizers: Tokenizers, report: Report) -> Iterator[tuple[Any, ...]]:
        for example in examples:
            report(len(example[0]))
            given = json.loads(example[0])
            yield self.encode_replies(tokenizers, given["messages"], given["tools"], example)


def record_of(conversation: Conversation) -> PlacedExample:
    """A conversation as text that knows its place."""
    text = json.dumps({"messages": conversation.messages, "tools": conversation.tools}, ensure_ascii=False)
    return PlacedExample((text,), conversation.where)

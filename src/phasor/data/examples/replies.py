"""Replies of conversations for encoder-decoders: the turns before a reply as source, the reply as target."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phasor.checkpoints.chat_replies import is_trained
from phasor.checkpoints.chat_template import ChatTemplate
from phasor.config.recipe import Recipe
from phasor.data.dates import Split
from phasor.data.encoding import Report, Tokenizers, Tokens, add_ends, encode_texts, given_tokenizer
from phasor.data.examples.base import Examples
from phasor.data.examples.chat import Conversations
from phasor.data.messages import BadRowError, Message
from phasor.data.pairs import Pairs
from phasor.data.split import Example, PlacedExample, format_place
from phasor.data.templates import add_markers, end_of_turn, read_chat_template, template_hash
from phasor.generation.chat_source import encode_source, plain_text

NOTHING = np.empty(0, np.uint32)


class Replies(Conversations):
    """An example for each reply of a conversation: the text of all of it, and the reply's place among its messages.

    All replies of a conversation are held out together. The encoder reads what the template writes before a reply, or
    without a template the text of the turns; the decoder writes the reply and what ends it.
    """

    token_sides = (0, 1)
    ends = "$A <eos>"
    has_source = True
    unit = "reply"
    measured = "tokens on a side"
    batch_source = Pairs

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        if recipe.data.train_on == "all":
            raise ValueError(
                "data.train_on 'all' trains the turns that are read too, and a decoder that has an encoder writes "
                "replies alone: leave it out"
            )

    def read(self, path: str | None, target: str | None = None, split: Split = "train") -> Iterator[Example]:
        for example in super().read(path, target, split):
            places = reply_places(json.loads(example[0])["messages"])
            if not places:
                if self.recipe.data.if_empty == "refuse":
                    where = format_place(example).removesuffix(": ")
                    raise BadRowError(where, "nothing stands before the reply, and an encoder reads what does")
                self.skipped["with nothing before the reply"] += 1
            for place in places:
                yield PlacedExample((*example, str(place)), format_place(example).removesuffix(": "))

    def texts(self, example: Example) -> tuple[str, ...]:
        messages = json.loads(example[0])["messages"]
        first = int(example[1]) == reply_places(messages)[0]
        return tuple(message["content"] for message in messages) if first else ()

    def origin(self) -> dict[str, Any]:
        template = self.template(given_tokenizer(self.recipe))
        return {"chat_template": None if template is None else template_hash(template), "shape": "encoder-decoder"}

    def template(self, folder: Path | None) -> ChatTemplate | None:
        """The recipe's template, or that of the tokenizer's folder; None where there is none."""
        if self.recipe.data.chat_template is None and (folder is None or ChatTemplate.read(folder) is None):
            return None
        return read_chat_template(self.recipe, folder)

    def adapt(self, tokenizers: Tokenizers, folder: Path | None) -> Tokenizers:
        template = self.template(folder)
        if template is None:
            return tokenizers
        if tokenizers.source is not tokenizers.target:
            add_markers(template, tokenizers.source)
            tokenizers.source.encode_special_tokens = False
        return super().adapt(tokenizers, folder)

    def encode(self, examples: Sequence[Example], tokenizers: Tokenizers, report: Report) -> Iterator[tuple[Any, ...]]:
        end = tokenizers.special.eos
        if tokenizers.template is not None:
            own = end_of_turn(tokenizers.template, tokenizers.target)
            end = end if own is None else own
        for example in examples:
            report(len(example[0]))
            given, place = json.loads(example[0]), int(example[1])
            before, reply, tools = given["messages"][:place], given["messages"][place], given["tools"] or None
            try:
                source, new = encode_reply(tokenizers, before, reply, tools)
            except ValueError as error:
                if self.recipe.data.if_empty == "refuse":
                    raise BadRowError(format_place(example).removesuffix(": "), str(error)) from None
                self.skipped["that the chat template refuses"] += 1
                yield NOTHING, NOTHING
            else:
                yield source, add_ends([tokenizers.special.start], new, end)

    def length(self, tokens: tuple[Tokens, ...]) -> int:
        return max(len(tokens[0]), len(tokens[1]) - 1)  # a decoder reads its target without the last token

    def fit(self, example: Example, tokens: tuple[Tokens, ...]) -> tuple[Tokens, ...] | None:
        source, target = tokens
        if not len(source):  # the template has refused it
            return None
        data = self.recipe.data
        if data.too_long == "truncate":
            source, target = source[-data.sequence_length :], target[: data.sequence_length + 1]
        return Examples.fit(self, example, (source, target))


def reply_places(messages: Sequence[Message]) -> list[int]:
    """Which messages are replies to learn that something stands before.

    >>> reply_places([{"role": "assistant"}, {"role": "user"}, {"role": "assistant"}])
    [2]
    """
    return [place for place, message in enumerate(messages) if place and is_trained(message)]


def encode_reply(
    tokenizers: Tokenizers, before: Sequence[Message], reply: Message, tools: Sequence[Any] | None
) -> tuple[Tokens, Tokens]:
    """The tokens of the turns before a reply, and those of the reply.

    >>> from phasor.data.tokenizers import SpecialIds, byte_tokenizer
    >>> tokenizer = byte_tokenizer("$A <eos>")
    >>> tokenizers = Tokenizers(tokenizer, tokenizer, SpecialIds())
    >>> turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    >>> [side.tolist() for side in encode_reply(tokenizers, turns[:1], turns[1], None)]
    [[77, 110, 2], [77, 116, 2]]
    """
    template, special = tokenizers.template, tokenizers.special
    if template is None:
        text, answer = plain_text(before, tools), plain_text([reply])
        (source,), (new,) = (
            encode_texts([text], tokenizers.source, True, special),
            encode_texts([answer], tokenizers.target, True, special),
        )
        return source, new
    read = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in before]
    ids, trained = template.encode_replies(tokenizers.target, [*read, reply], tools)
    source = np.array(encode_source(template, tokenizers.source, before, tools), np.uint32)
    return source, np.array(ids, np.uint32)[np.array(trained)]

"""`chat` and `ChatSession`: talk with a model by the chat template of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phasor.artifacts import refuse_artifact_file
from phasor.checkpoints.chat_template import ChatTemplate
from phasor.config.schema import quote
from phasor.config.text_files import path_of
from phasor.files import atomic_write, write_errors
from phasor.generation.api import stream_steps
from phasor.generation.chat_source import encode_source
from phasor.generation.encode import without_limits
from phasor.generation.prefix_cache import PrefixCache
from phasor.generation.request import build_request
from phasor.transformer import Transformer

REPLY_TOKENS = 1024  # of a reply, where nobody says how long it may get
LENGTHS = ("max_new_tokens", "max_length")  # of a folder's settings


def chat(
    model: Transformer,
    messages: str | Sequence[Mapping[str, Any]],
    *,
    system: str | None = None,
    template: ChatTemplate | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **fields: Any,
) -> str:
    """The reply of a model to a text, or to a conversation as a list of messages with `role` and `content`.

    Its folder's chat template, or the one given, writes the conversation. The keyword arguments are those of
    `generate`; a reply ends at the template's end of a turn, or at `stop`. `ChatSession` keeps what was computed
    between turns. An encoder-decoder reads the conversation with its encoder, and its decoder writes the reply; without
    a template it reads the text of the turns.

    >>> from phasor import preset
    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=261)).eval()
    >>> model.tokenizer = byte_tokenizer()
    >>> template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }};{% endfor %}"})
    >>> isinstance(chat(model, "Hello", template=template, max_new_tokens=5), str)
    True
    """
    conversation = ChatSession(model, system=system, template=template, tools=tools, **fields)
    if isinstance(messages, str):
        return conversation.reply(messages)
    if system is not None:
        raise ValueError("a list of messages has its own system turn: leave system out")
    conversation.messages = [dict(message) for message in messages]
    return "".join(conversation.stream())


class ChatSession:
    """A conversation with a model: its messages so far, and the KV cache of them.

    `system` begins it, `tools` are JSON schemas that the template shows to the model, and the other keyword arguments
    those of `generate`. A turn computes its own tokens alone, where the template writes the turns before it as they
    were; the tokens are those of a `generate` over the whole text. An encoder reads all turns anew, since each of them
    attends to those after it.

    >>> from phasor import preset
    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=261)).eval()
    >>> model.tokenizer = byte_tokenizer()
    >>> template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }};{% endfor %}"})
    >>> talk = ChatSession(model, system="Be kind.", template=template, max_new_tokens=5)
    >>> reply = talk.reply("Hello")
    >>> [message["role"] for message in talk.messages]
    ['system', 'user', 'assistant']
    """

    def __init__(
        self,
        model: Transformer,
        *,
        system: str | None = None,
        template: ChatTemplate | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> None:
        template = ChatTemplate.of(model) if template is None else template
        if model.decoder is None:
            raise ValueError("a conversation needs a decoder, and this model is an encoder")
        if model.front_end is not None:
            raise ValueError("a conversation is text, and the source of this model are features")
        if model.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer, and this model has none")
        if template is None and model.encoder is None:
            raise ValueError(
                "this model has no chat template, which says how a conversation is written: give one, a file of Jinja "
                "(template), or continue a text with generate"
            )
        self.model, self.template, self.tools, self.system = model, template, tools, system
        self.tokenizer = without_limits(model.tokenizer)
        source = model.source_tokenizer
        self.reader = self.tokenizer if source is None else without_limits(source)  # of what was said so far
        self.fields = self._with_end_of_turn(fields)
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system's."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.prefix = PrefixCache(self.model)

    def reply(self, text: str) -> str:
        """The model's reply to a user's turn; both are added to the messages."""
        return "".join(self.stream(text))

    def stream(self, text: str | None = None) -> Iterator[str]:
        """The pieces of a reply as they come, to a user's turn or, without one, to the messages so far.

        Where the reader stops, the messages have what was said until then. A turn that is refused is not added.
        """
        turn = [] if text is None else [{"role": "user", "content": text}]
        prompt = encode_source(self.template, self.reader, [*self.messages, *turn], self.tools)
        continued = 1 if self.model.encoder is not None else len(prompt)  # tokens that the decoder begins with
        request = build_request(self.model, prompt, None, self._fields(continued), streams=True, as_text=True)
        if request.samples_per_prompt > 1 or request.options.num_beams > 1 or request.options.penalty_alpha:
            raise ValueError("a conversation goes on by greedy decoding or sampling, with one reply to a turn")
        if request.options.prompt_lookup_tokens or request.options.compile:
            raise ValueError("prompt_lookup_tokens and compile are for generate: a conversation keeps its own cache")
        if self.model.encoder is None:
            request = replace(request, prefix=self.prefix)
        return self._say(turn, stream_steps(request))

    def _say(self, turn: list[dict[str, Any]], pieces: Iterator[str]) -> Iterator[str]:
        self.messages += turn
        said = ""
        try:
            for piece in pieces:
                said += piece
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": said})

    def save(self, file: str | Path) -> None:
        """Write the conversation as a line of JSON, as training on conversations reads it; an existing file is left."""
        file = path_of(file, "a conversation")
        refuse_artifact_file(file)
        if file.exists():
            raise ValueError(f"{file} exists: name another file")
        line = json.dumps(
            {"messages": self.messages} | ({"tools": self.tools} if self.tools else {}), ensure_ascii=False
        )
        with write_errors(file), atomic_write(file) as staged:
            staged.write_text(line + "\n", encoding="utf-8")

    def _with_end_of_turn(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The options, with the template's end of a turn among the stops."""
        try:
            end = None if self.template is None else self.template.end_of_turn(self.tokenizer)
        except ValueError:  # a template that refuses the turns which would show it
            end = None
        stop = fields.get("stop")
        if isinstance(stop, str | int):
            stop = (stop,)
        if stop is not None and not isinstance(stop, list | tuple):
            raise ValueError(f"stop must be token ids and texts, not {quote(stop)}")
        ends = tuple(self.model.special.stop if stop is None else stop)
        return fields | {"stop": ends if end is None or end in ends else (*ends, end)}

    def _fields(self, prompt_length: int) -> dict[str, Any]:
        """The options of a turn: a reply is as long as what is left of the model's length, where nobody says more."""
        if "max_new_tokens" in self.fields or any(name in self.model.generation_settings for name in LENGTHS):
            return self.fields
        length = self.model.config.max_length
        if prompt_length >= length:
            raise ValueError(
                f"the conversation has {prompt_length:,} tokens, and the model reads {length:,}: begin again, or set "
                "max_new_tokens to go on all the same"
            )
        return self.fields | {"max_new_tokens": min(REPLY_TOKENS, length - prompt_length)}

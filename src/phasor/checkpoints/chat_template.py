"""Chat templates: the text of a conversation as a folder's model was trained on it, as transformers writes it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from phasor.checkpoints.chat_replies import (
    Message,
    added_tokens,
    encode_spans,
    end_of_turn,
    find_replies,
    trained_spans,
)
from phasor.checkpoints.folder import CHAT_TEMPLATE, TEMPLATES, TOKENIZER_CONFIG, TOKENS_MAP, read_json
from phasor.checkpoints.template_process import template_process
from phasor.config.schema import quote, unknown
from phasor.config.text_files import path_of, read_text
from phasor.transformer import Transformer

TEMPLATE_BYTES = 1 << 20
DEFAULT, TOOL_USE = "default", "tool_use"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names under which messages have it; templates read the first
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # stands where the text of a message that is continued ends
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a folder by name, and its special tokens, which they write.

    Most folders have one, `default`; some have `tool_use` besides, which is for conversations with tools, or `rag`.
    A template is rendered in a separate process, in Jinja's sandbox, with bounds on its time, memory and output.

    >>> text = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    >>> template = ChatTemplate({"default": text}, {"eos_token": "</s>"})
    >>> template.render([{"role": "user", "content": "Hello"}])
    'user: Hello</s>'
    """

    texts: Mapping[str, str]
    special: Mapping[str, str] = field(default_factory=dict)
    where: str = "the chat template"

    @classmethod
    def read(cls, folder: str | Path, file: str | Path | None = None) -> Self | None:
        """The templates of a folder, or the one of a `file` with the folder's special tokens; None where it has none.

        As transformers reads them: `chat_template.jinja` and `additional_chat_templates/*.jinja`, or else
        `chat_template` in tokenizer_config.json, one or a list of them with their names.
        """
        folder = path_of(folder)
        config = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
        if file is not None:
            texts = {DEFAULT: read_template(path_of(file, "the chat template"))}
            return cls(texts, special_tokens(folder, config), str(file))
        files = {DEFAULT: folder / CHAT_TEMPLATE} | {
            one.stem: one for one in sorted((folder / TEMPLATES).glob("*.jinja"))
        }
        texts = {name: read_template(one) for name, one in files.items() if one.is_file()}
        where = folder / CHAT_TEMPLATE
        if not texts:
            where = folder / TOKENIZER_CONFIG
            texts = named_templates(config.get("chat_template"), where)
        return cls(texts, special_tokens(folder, config), str(where)) if texts else None

    @classmethod
    def of(cls, model: Transformer) -> Self | None:
        """The templates of a model: its own, or those of the folder it was loaded from; None without any."""
        if model.chat_template is not None or model.origin is None:
            return model.chat_template
        return cls.read(model.origin.folder)

    def write(self, folder: str | Path) -> None:
        """Write the templates into a folder, as files that transformers reads."""
        for name, text in self.texts.items():
            file = Path(folder, CHAT_TEMPLATE) if name == DEFAULT else Path(folder, TEMPLATES, f"{name}.jinja")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def select(self, name: str | None = None, tools: object = None) -> str:
        """The template of this name; without one that for tools where there are any, else the default."""
        if name is None:
            name = TOOL_USE if tools is not None and TOOL_USE in self.texts else DEFAULT
        if name not in self.texts:
            raise unknown(f"template of {self.where}", name, self.texts)
        return self.texts[name]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool | str = False,
        name: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation; the same as `tokenizer.apply_chat_template(..., tokenize=False)`.

        A message is a mapping with a `role` and what the template reads: `content`, `tool_calls` and the like. Further
        keyword arguments are variables of the template, such as `enable_thinking`. With `add_generation_prompt` the
        text ends where the reply begins; with `continue_final_message`, where the last message's text ends.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("a final message is continued, or a reply to it begun: not both")
        text = self.select(name, tools)
        given = check_conversation(messages, tools, documents)
        continued = ""
        if continue_final_message:
            key = "content" if continue_final_message is True else continue_final_message
            continued = mark_final(given["messages"], key, text)
        rendered, _ = self._run(text, {"add_generation_prompt": add_generation_prompt} | given | variables)
        return cut_final(rendered, continued) if continue_final_message else rendered

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message], *args: Any, **options: Any) -> list[int]:
        """The tokens of a conversation; arguments as for `render`. The template writes all special tokens."""
        return encode_spans(tokenizer, self.render(messages, *args, **options), [])[0]

    def encode_replies(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        name: str | None = None,
        **variables: Any,
    ) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and of each whether the model writes it: replies with the token that ends them.

        Replies are what the template marks with `{% generation %}`, or else what it writes for messages of the role
        "assistant" after the beginning of a reply; those with a `weight` of 0 are not among them.

        >>> from phasor.data.tokenizers import byte_tokenizer
        >>> template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }};{% endfor %}"})
        >>> messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        >>> template.encode_replies(byte_tokenizer(), messages)
        ([102, 64, 103, 64], [False, False, True, True])
        """
        text = self.select(name, tools)
        if GENERATION.search(text):
            given = check_conversation(messages, tools)
            rendered, spans = self._run(text, {"add_generation_prompt": False} | given | variables)
        else:

            def render(part: Sequence[Message], begun: bool) -> str:
                return self.render(part, tools, begun, name=name, **variables)

            rendered, spans = find_replies(render, messages, added_tokens(tokenizer))
        return encode_spans(tokenizer, rendered, trained_spans(messages, spans))

    def end_of_turn(self, tokenizer: Tokenizer) -> int | None:
        """The token that ends a reply, as the template writes one; None where the tokenizer has none for that."""
        token = end_of_turn(lambda part, begun: self.render(part, None, begun), added_tokens(tokenizer))
        return None if token is None else tokenizer.token_to_id(token)

    def _run(self, text: str, variables: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        try:
            return template_process(os.getpid()).render(text, {**self.special, **variables})
        except ValueError as error:
            raise ValueError(f"{self.where} {error}") from None


def read_template(file: Path) -> str:
    return read_text(file, "the chat template", TEMPLATE_BYTES)


def named_templates(value: Any, file: Path) -> dict[str, str]:
    """The `chat_template` of tokenizer_config.json: a text, or a list of texts with their names."""
    if value is None:
        return {}
    listed = [{"name": DEFAULT, "template": value}] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
        for one in listed
    ):
        raise ValueError(f"{file}: chat_template must be a text, or a list of them with name and template")
    if any(len(one["template"]) > TEMPLATE_BYTES for one in listed):
        raise ValueError(f"{file}: a chat_template has more than {TEMPLATE_BYTES >> 10} KiB, which none needs")
    return {one["name"]: one["template"] for one in listed}


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a folder names, by their names in templates.

    The file special_tokens_map.json counts where tokenizer_config.json is of the old form, without its list of tokens.
    """
    stated = dict(config)
    if "added_tokens_decoder" not in config and (folder / TOKENS_MAP).is_file():
        stated |= read_json(folder / TOKENS_MAP)
    tokens = {name: stated.get(name) for name in NAMED_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def check_conversation(messages: Any, tools: Any = None, documents: Any = None) -> dict[str, Any]:
    """What a template is given of a conversation: plain copies, without fields that are None."""
    parts = {"messages": messages, "tools": tools, "documents": documents}
    for what, values in parts.items():
        if values is None and what != "messages":
            continue
        listed = isinstance(values, Sequence) and not isinstance(values, str)
        if not listed or not all(isinstance(value, Mapping) for value in values):
            raise ValueError(f"{what} must be a list of objects, not {quote(values)}")
    if not messages:
        raise ValueError("a conversation has at least one message")
    try:
        given = json.loads(json.dumps(parts))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a conversation holds what JSON can: {error}") from None
    given["messages"] = [alias_reasoning(message) for message in given["messages"]]
    return given


def alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message without fields that are None, and its reasoning under the names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def mark_final(messages: list[dict[str, Any]], key: str, template: str) -> str:
    """Mark the end of the last message's text under a key; that text. Reasoning is marked under all of its names."""
    last = messages[-1]
    if (text := last.get(key)) is None:
        raise ValueError(f"the final message has no {key} to continue")
    keys = [name for name in REASONING if last.get(name) == text] if key in REASONING else [key]
    if not any(name in template for name in keys):
        raise ValueError(f"the template does not read the field {quote(key)} of messages, which would be continued")
    if isinstance(text, str):
        for name in keys:
            last[name] = text + CONTINUED
        return text
    parts = [part for part in text if isinstance(part, dict) and "text" in part] if isinstance(text, list) else []
    if not parts:
        raise ValueError(f"the {key} of the final message has no text to continue")
    continued = parts[-1]["text"]
    parts[-1]["text"] = continued + CONTINUED
    return continued


def cut_final(rendered: str, text: str) -> str:
    """A rendered text up to the mark of `mark_final`."""
    mark = CONTINUED.strip()
    if text.strip() not in rendered or mark not in rendered:
        raise ValueError("the template leaves out parts of the final message, which can therefore not be continued")
    end = rendered.rindex(mark)
    whole = rendered[end : end + len(CONTINUED)] == CONTINUED
    return rendered[:end] if whole else rendered[:end].rstrip()  # a template may strip what it is given

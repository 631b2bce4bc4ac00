"""What a model reads of a conversation before it replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from phasor.checkpoints.chat_template import ChatTemplate
from phasor.generation.encode import encode_prompts


def encode_source(
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The tokens of the turns so far, as the template writes them before a reply; without one, those of their text.

    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> encode_source(None, byte_tokenizer("$A <eos>"), [{"role": "user", "content": "Hi"}])
    [77, 110, 2]
    """
    if template is not None:
        return template.encode(tokenizer, messages, tools, add_generation_prompt=True)
    return encode_prompts(tokenizer, [plain_text(messages, tools)])[0]


def plain_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The contents of turns, a line after another, for models without a chat template.

    >>> plain_text([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}])
    'Be kind.\\nHi'
    """
    texts = [message.get("content") for message in messages]
    if tools or not all(isinstance(text, str) for text in texts) or any("tool_calls" in each for each in messages):
        raise ValueError("without a chat template a conversation is plain text: tools and their calls need a template")
    return "\n".join(map(str, texts))

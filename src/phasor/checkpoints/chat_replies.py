"""Where the replies are in the text of a conversation, for templates that do not mark them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from phasor.checkpoints.tokenizer_errors import tokenizer_errors

MARK = "PLACE_OF_A_REPLY_5c1f"  # stands for a reply, to see what the template writes around it
PART_REPLIES = 4  # replies of a part of a long conversation: few, as each is rendered with all of its part

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]  # messages, and whether a reply is begun after them


def encode_spans(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
    """The tokens of a rendered text, and of each whether it has characters in one of these ranges.

    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> encode_spans(byte_tokenizer(), "ab c", [(1, 2)])
    ([102, 103, 37, 104], [False, True, False, False])
    """
    with tokenizer_errors("the conversation cannot be encoded"):
        encoding = tokenizer.encode(text, add_special_tokens=False)
    trained, rest = [], sorted(spans)
    for start, end in encoding.offsets:
        while rest and rest[0][1] <= start:
            rest.pop(0)
        trained.append(bool(rest) and rest[0][0] < end)
    return encoding.ids, trained


def is_trained(message: Message) -> bool:
    """Whether a message is a reply to learn: one whose weight is not 0, as OpenAI's files have it.

    >>> is_trained({"role": "assistant", "content": "Hi"}), is_trained({"role": "assistant", "weight": 0})
    (True, False)
    """
    return message.get("role") == "assistant" and bool(message.get("weight", 1))


def trained_spans(messages: Sequence[Message], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges of those replies that are to be learned, by the ranges of all."""
    replies = [message for message in messages if message.get("role") == "assistant"]
    if all(map(is_trained, replies)):
        return list(spans)
    if len(spans) != len(replies):
        raise ValueError(
            f"the template marks {len(spans)} parts of {len(replies)} replies, so that it is not known which are of "
            "those with the weight 0"
        )
    return [span for message, span in zip(replies, spans, strict=True) if is_trained(message)]


def added_tokens(tokenizer: Tokenizer) -> list[str]:
    """The texts of the tokens that a tokenizer takes whole, among which are those that end turns; without space."""
    added = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    return [text for text in added if text.strip()]


def find_replies(
    render: Render, messages: Sequence[Message], tokens: Sequence[str]
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the range of characters of each reply with the token that ends it.

    `tokens` are texts of the tokenizer's added tokens, one of which ends a turn in most templates.
    """
    text = render(messages, False)
    return text, find_by_parts(render, messages, text, tokens) or find_each(render, messages, text, tokens)


def find_each(render: Render, messages: Sequence[Message], text: str, tokens: Sequence[str]) -> list[tuple[int, int]]:
    """The ranges of all replies, each by renderings of the whole conversation: the time goes by the square of turns."""
    spans: list[tuple[int, int]] = []
    for i in reply_indices(messages):
        found = find_reply(render, messages, i, text, spans[-1][1] if spans else 0, tokens)
        if found is None:
            raise ValueError(f"message {i + 1}: the template does not write this reply so that it can be found")
        spans.append(found)
    return spans


def find_by_parts(
    render: Render, messages: Sequence[Message], text: str, tokens: Sequence[str]
) -> list[tuple[int, int]] | None:
    """The ranges of the replies of a long conversation, by renderings of a few turns: the time goes by their number.

    A part has what is before the first turn, a turn whose reply is known, and some turns after that, all but the last
    with a question after them. What the template writes from the known reply to the end of another one has to be in the
    whole text, there where the known one ends. None where it is not, and where the conversation is short.
    """
    replies = reply_indices(messages)
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if len(replies) <= 2 * PART_REPLIES or not users:
        return None
    head = messages[: min(users[0], replies[0])]
    spans: list[tuple[int, int]] = []
    while len(spans) < len(replies):
        begin = bisect_left(users, replies[len(spans) - 1]) - 1 if spans else -1
        first = users[begin] if begin >= 0 else len(head)
        known = len(spans) - bisect_left(replies, first, hi=len(spans))
        ahead = replies[len(spans) : len(spans) + PART_REPLIES][-1]
        end = bisect_left(users, ahead)
        stop = users[end] + 1 if len(spans) + PART_REPLIES < len(replies) and end < len(users) else len(messages)
        part = [*head, *messages[first:stop]]
        try:
            own = render(part, False)
            found = find_each(render, part, own, tokens)
        except ValueError:
            return None
        own_end, text_end = (found[known - 1][1], spans[-1][1]) if known else (0, 0)
        if not text.startswith(own[own_end : found[-1][1]], text_end):
            return None
        spans += [(start - own_end + text_end, end - own_end + text_end) for start, end in found[known:]]
    return spans


def reply_indices(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message.get("role") == "assistant"]


def find_reply(
    render: Render, messages: Sequence[Message], i: int, text: str, done: int, tokens: Sequence[str]
) -> tuple[int, int] | None:
    """The range of the reply `messages[i]`, which comes after `done` characters.

    In most templates it is what the first `i + 1` messages have more than the first `i` and the beginning of a reply.
    Some write earlier turns in another way than the last one, without its reasoning or with the tools elsewhere: there
    a mark in its place shows what is around it.
    """
    prompt, upto = prompt_before(render, messages, i), render(messages[: i + 1], False)
    reply = upto.removeprefix(prompt) if prompt and upto.startswith(prompt) else ""
    if reply and text.startswith(upto):
        start, end = len(prompt), len(prompt) + len(without_space(reply, tokens))
    else:
        found = find_by_mark(render, messages, i, text, prompt, tokens) or find_again(text, reply, done, tokens)
        if found is None:
            return None
        start, end = found
    if not text[start:end].endswith(tuple(tokens)):  # where nothing ends a turn but the next one
        end += len(first_token(text[end:], tokens))
    return start, end


def prompt_before(render: Render, messages: Sequence[Message], i: int) -> str:
    """What the model has read when it begins the reply; empty where the template cannot write that."""
    if i == 0:
        return ""
    try:
        return render(messages[:i], True)
    except ValueError:
        return ""


def find_by_mark(
    render: Render, messages: Sequence[Message], i: int, text: str, prompt: str, tokens: Sequence[str]
) -> tuple[int, int] | None:
    """The range of a reply by what the template writes around a mark that stands for its content."""
    marked = {**messages[i], "content": MARK}
    before, mark, after = render([*messages[:i], marked, *messages[i + 1 :]], False).partition(MARK)
    if not mark or MARK in after or not text.endswith(after):
        return None
    content_end = len(text) - len(after)
    start = next((len(known) for known in (prompt, before) if known and text.startswith(known)), None)
    last = render([*messages[:i], marked], False).partition(MARK)[2]  # what ends it where nothing follows
    ending = without_space(last, tokens)
    end = content_end + len(ending if after.startswith(ending) else first_token(after, tokens))
    return None if start is None or start > content_end or start >= end else (start, end)


def find_again(text: str, reply: str, done: int, tokens: Sequence[str]) -> tuple[int, int] | None:
    """The range of a reply, such as a call of a tool, by its own text."""
    reply = without_space(reply, tokens)
    start = text.find(reply, done) if first_token(reply, tokens) != reply else -1
    return None if start < 0 else (start, start + len(reply))


def first_token(text: str, tokens: Sequence[str]) -> str:
    """The added token with which a text begins, and the space before it; empty where it begins with none."""
    found = re.match(rf"\s*(?:{'|'.join(map(re.escape, tokens))})", text) if tokens else None
    return "" if found is None else found[0]


def end_of_turn(render: Render, tokens: Sequence[str]) -> str | None:
    """The added token that a template writes after a reply, or else before what follows it; None without one.

    >>> def render(messages, begun):
    ...     return "".join(f"<|{one['role']}|>{one['content']}" for one in messages)
    >>> end_of_turn(render, ["<|user|>", "<|assistant|>"])
    '<|user|>'
    """
    question, reply = {"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}
    for messages in ([question, reply], [question, reply, question]):
        found = first_token(render(messages, False).partition(MARK)[2], tokens).strip()
        if found:
            return found
    return None


def without_space(text: str, tokens: Sequence[str]) -> str:
    """A text without the space after the token that ends it, which the template writes and the model does not.

    >>> without_space("Hello.<|im_end|>\\n", ["<|im_end|>"]), without_space("Hello.\\n", ["<|im_end|>"])
    ('Hello.<|im_end|>', 'Hello.\\n')
    """
    stripped = text.rstrip()
    return stripped if stripped.endswith(tuple(tokens)) else text

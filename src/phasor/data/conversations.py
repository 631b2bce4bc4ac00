"""Conversations and preference pairs, in the forms people have them in, as lists of messages.

A row of JSON is a conversation by its fields: `messages` (OpenAI), `conversations` (ShareGPT), `prompt` and
`completion`, or `instruction`, perhaps `input`, and `output` (Alpaca). A preference has `chosen` and `rejected`, with
or without `prompt`. Texts stand for a user's turn and the reply to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from phasor.checkpoints.chat_replies import is_trained
from phasor.config.recipe import DataConfig
from phasor.config.schema import quote
from phasor.data.messages import (
    BadRowError,
    Message,
    list_of,
    messages_of,
    name_fields,
    one_message,
)
from phasor.data.sources import json_records

T = TypeVar("T")


class Conversation(NamedTuple):
    """The messages of a conversation, the tools it may call, and where it stands."""

    messages: list[Message]
    tools: list[Any]
    where: str


class PreferencePair(NamedTuple):
    """Two continuations of one prompt, of which the first is preferred, and where they stand."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[Any]
    where: str


def conversations(path: str | None, config: DataConfig, skipped: Counter[str] | None = None) -> Iterator[Conversation]:
    """The conversations of a file or folder of JSON lines; rows that are skipped are counted by their reasons.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "pairs.jsonl")
    ...     _ = file.write_text('{"prompt": "2 + 2?", "completion": "4"}')
    ...     [found] = conversations(str(file), DataConfig())
    >>> found.messages
    [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    """
    return read_rows(path, config, read_conversation, skipped)


def preferences(path: str | None, config: DataConfig, skipped: Counter[str] | None = None) -> Iterator[PreferencePair]:
    """The preference pairs of a file or folder of JSON lines."""
    return read_rows(path, config, read_preference, skipped)


def read_rows(
    path: str | None, config: DataConfig, read: Callable[[object, str], T], skipped: Counter[str] | None
) -> Iterator[T]:
    """Every row that can be trained on; others are an error, or left out where `data.if_empty` asks for that."""
    for record, where in json_records(path, config):
        try:
            row = read(record, where)
        except BadRowError:
            if config.if_empty == "refuse":
                raise
            if skipped is not None:
                skipped["with an empty turn, an unknown role or no reply"] += 1
            continue
        yield row


def read_conversation(record: object, where: str) -> Conversation:
    """One row as a conversation.

    >>> read_conversation({"instruction": "Add.", "input": "1 and 2", "output": "3"}, "line 1").messages[0]
    {'role': 'user', 'content': 'Add.\\n\\n1 and 2'}
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a conversation is an object, not {quote(record)}")
    if name := next((name for name in ("messages", "conversations") if name in record), None):
        messages = messages_of(record[name], where, name)
    elif "prompt" in record and "completion" in record:
        messages = [
            *one_message("user", record["prompt"], "prompt", where),
            *one_message("assistant", record["completion"], "completion", where),
        ]
    elif "instruction" in record and "output" in record:
        asked = [record["instruction"], record.get("input") or ""]
        if not all(isinstance(text, str) for text in asked):
            raise ValueError(f"{where}: 'instruction' and 'input' must be text, not {quote(asked)}")
        messages = [
            *one_message("user", "\n\n".join(filter(None, asked)), "instruction", where),
            *one_message("assistant", record["output"], "output", where),
        ]
    else:
        raise ValueError(
            f"{where}: a conversation has 'messages', 'conversations', 'prompt' and 'completion', or 'instruction' and "
            f"'output', and this row has {name_fields(record)}"
        )
    if not any(map(is_trained, messages)):
        raise BadRowError(where, "the conversation has no turn of the assistant to train on")
    return Conversation([*system_of(record, messages), *messages], tools_of(record, where), where)


def read_preference(record: object, where: str) -> PreferencePair:
    """One row as a preference; without a prompt it is what both sides begin with, as TRL finds it.

    >>> row = {"chosen": "Is 7 prime? Yes, it is.", "rejected": "Is 7 prime? No."}
    >>> read_preference(row, "line 1").prompt, read_preference(row, "line 1").rejected
    ([{'role': 'user', 'content': 'Is 7 prime?'}], [{'role': 'assistant', 'content': ' No.'}])
    """
    if not isinstance(record, dict) or not {"chosen", "rejected"} <= record.keys():
        raise ValueError(f"{where}: a preference has 'chosen' and 'rejected', and this row has {name_fields(record)}")
    chosen, rejected, prompt = record["chosen"], record["rejected"], record.get("prompt")
    if chosen == rejected:
        raise BadRowError(where, "'chosen' and 'rejected' are the same")
    if isinstance(chosen, str) and isinstance(rejected, str) and prompt is None:
        prompt, chosen, rejected = common_text(chosen, rejected)
    sides = [one_message("assistant", side, name, where) for name, side in (("chosen", chosen), ("rejected", rejected))]
    asked = common_messages(*sides)
    if isinstance(prompt, list) or (prompt is not None and not begins_with_question(asked)):
        asked = one_message("user", prompt, "prompt", where)
    if not asked:
        raise BadRowError(where, "'chosen' and 'rejected' begin differently, and there is no 'prompt'")
    if all(side[: len(asked)] == asked for side in sides):  # the sides are whole conversations
        sides = [side[len(asked) :] for side in sides]
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if not any(map(is_trained, side)):
            raise BadRowError(where, f"{name!r} has no turn of the assistant")
    return PreferencePair([*system_of(record, asked), *asked], sides[0], sides[1], tools_of(record, where), where)


def begins_with_question(messages: list[Message]) -> bool:
    """Whether a user speaks first, after the system's turn where there is one.

    >>> begins_with_question([{"role": "system"}, {"role": "user"}]), begins_with_question([{"role": "assistant"}])
    (True, False)
    """
    said = (message["role"] for message in messages if message["role"] not in ("system", "developer"))
    return next(said, None) == "user"


def common_text(chosen: str, rejected: str) -> tuple[str | None, str, str]:
    """What two texts begin with, and how they go on; a space before the first difference is of the continuations."""
    different = (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    cut = next(different, min(len(chosen), len(rejected)))
    if cut and chosen[cut - 1] == " ":
        cut -= 1
    return chosen[:cut] or None, chosen[cut:], rejected[cut:]


def common_messages(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """The messages that both sides begin with."""
    different = (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    return chosen[: next(different, min(len(chosen), len(rejected)))]


def system_of(record: dict[str, Any], messages: list[Message]) -> list[Message]:
    """The system prompt that a row states beside its turns, which then have none."""
    system = record.get("system")
    given = isinstance(system, str) and system.strip() and messages[0]["role"] != "system"
    return [{"role": "system", "content": system}] if given else []


def tools_of(record: dict[str, Any], where: str) -> list[Any]:
    """The tools that a conversation may call, as JSON schemas; a list, or one in JSON."""
    return list_of(record.get("tools"), "tools", where)

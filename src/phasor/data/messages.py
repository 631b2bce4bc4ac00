"""Messages: the turns of conversations in OpenAI's form or ShareGPT's, as `{"role", "content", ...}`.

>>> messages_of([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}], "chats.jsonl, line 1")
[{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello!'}]
"""

from __future__ import annotations

import json
from typing import Any

from phasor.config.schema import name_some, quote, unknown

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
} | {role: role for role in ROLES}


class BadRowError(ValueError):
    """A row that has the form of a conversation, and cannot be trained on; `data.if_empty` may ask to skip it."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what} (data.if_empty 'skip' leaves such rows out)")


def messages_of(turns: object, where: str, name: str = "messages") -> list[Message]:
    """The turns of a list as messages; an error names the place and the turn."""
    if not isinstance(turns, list):
        raise ValueError(f"{where}: {name!r} must be a list of turns, not {quote(turns)}")
    if not turns:
        raise BadRowError(where, f"{name!r} has no turns")
    return [message_of(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, 1)]


def message_of(turn: object, where: str) -> Message:
    """One turn as a message, with everything else it holds that a template may ask for.

    >>> message_of({"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"}, "turn 1")
    {'role': 'user', 'content': 'Hi', 'name': 'Ann'}
    """
    if not isinstance(turn, dict):
        raise ValueError(f"{where}: a turn is an object with 'role' and 'content', not {quote(turn)}")
    if "from" in turn:
        return sharegpt_message(turn, where)
    role = turn.get("role")
    if role not in ROLES:
        raise BadRowError(where, str(unknown("role", role, ROLES)))
    calls = [tool_call(call, where) for call in list_of(turn.get("tool_calls"), "tool_calls", where)]
    kept = {name: value for name, value in turn.items() if name not in ("role", "content", "tool_calls", "weight")}
    message = {"role": role, "content": text_of(turn.get("content"), where)} | kept | weight_of(turn, where)
    return check_content(message | {"tool_calls": calls} if calls else message, where)


def sharegpt_message(turn: dict[str, Any], where: str) -> Message:
    """A turn `{"from", "value"}`; that of a call of a function holds it as JSON."""
    author, value = turn["from"], text_of(turn.get("value"), where)
    if not isinstance(author, str) or author not in SHAREGPT_ROLES:
        raise BadRowError(where, str(unknown("role", author, SHAREGPT_ROLES)))
    if author == "function_call":
        calls = parse_json(value, "a call of a function", where)
        calls = [tool_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
        return {"role": "assistant", "content": "", "tool_calls": calls} | weight_of(turn, where)
    return check_content({"role": SHAREGPT_ROLES[author], "content": value} | weight_of(turn, where), where)


def weight_of(turn: dict[str, Any], where: str) -> dict[str, int]:
    """The field `weight` of a turn, where it has one.

    >>> weight_of({"role": "assistant", "content": "Hi", "weight": 0}, "turn 1")
    {'weight': 0}
    """
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"{where}: the weight of a turn is 0 or 1, not {quote(weight)}")
    return {} if weight is None else {"weight": int(weight)}


def text_of(content: object, where: str) -> str:
    """The text of a turn: as it is, or the parts of a list joined; nothing where there is none."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"{where}: the content is text or a list of parts, not {quote(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: of contents only text is read, {{'type': 'text', ...}}, not {quote(part)}")
    return "".join(part["text"] for part in content)


def tool_call(call: object, where: str) -> dict[str, Any]:
    """A call of a function in OpenAI's form, with its arguments as an object, which is what templates expect.

    >>> tool_call({"name": "add", "arguments": '{"a": 1}'}, "turn 2")
    {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
    """
    if isinstance(call, dict) and "function" not in call:
        call = {"type": "function", "function": call}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a call is an object whose 'function' has a 'name', not {quote(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"'arguments' of {function['name']!r}", where) if arguments.strip() else {}
    return {**call, "function": {**function, "arguments": arguments}}


def check_content(message: Message, where: str) -> Message:
    """A message, if it says something; a tool may return nothing."""
    if message["content"].strip() or message["role"] == "tool" or "tool_calls" in message:
        return message
    what = "the reply is empty" if message["role"] == "assistant" else f"the {message['role']} turn has no content"
    raise BadRowError(where, what)


def list_of(value: object, name: str, where: str) -> list[Any]:
    """A list, or one in JSON, or nothing."""
    if isinstance(value, str):
        value = parse_json(value, repr(name), where) if value.strip() else None
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{where}: {name!r} must be a list, not {quote(value)}")
    return value or []


def parse_json(text: str, what: str, where: str) -> Any:
    """JSON within a field."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {what} is not JSON ({error}): {quote(text)}") from None


def one_message(role: str, value: object, name: str, where: str) -> list[Message]:
    """A text as the only message of a role; a list of turns as it is."""
    if isinstance(value, str):
        return [check_content({"role": role, "content": value}, f"{where}, {name!r}")]
    if isinstance(value, list):
        return messages_of(value, f"{where}, {name!r}", name)
    raise ValueError(f"{where}: {name!r} must be text or a list of turns, not {quote(value)}")


def name_fields(record: object) -> str:
    """What a row has instead of what it should have."""
    return f"only: {name_some(record)}" if isinstance(record, dict) else quote(record)

"""Conversations and preferences: every form people have them in, and where a mistake is said to be."""

import json
from collections import Counter

import pytest
from trl.data_utils import extract_prompt, maybe_convert_to_chatml

from phasor.config.recipe import DataConfig
from phasor.data.conversations import conversations, preferences, read_conversation, read_preference


def user(text):
    return {"role": "user", "content": text}


def reply(text):
    return {"role": "assistant", "content": text}


WHERE = "chats.jsonl, line 7"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALL_IN_TEXT = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TALK = [user("Hi"), reply("Hello!"), user("1 + 2?"), reply("3")]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": TALK}, TALK),
        ({"messages": [{"role": "developer", "content": "Be brief."}, *TALK]},
         [{"role": "developer", "content": "Be brief."}, *TALK]),
        ({"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), reply("c")]},
         [user("ab"), reply("c")]),
        ({"messages": [user("Add"), {"role": "assistant", "content": None, "tool_calls": [CALL_IN_TEXT]},
                       {"role": "tool", "tool_call_id": "c1", "content": ""}, reply("3")]},
         [user("Add"), {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "c1"}]},
          {"role": "tool", "content": "", "tool_call_id": "c1"}, reply("3")]),
        ({"messages": [user("a"), reply("b") | {"weight": 0}, user("c"), reply("d") | {"weight": 1}]},
         [user("a"), reply("b") | {"weight": 0}, user("c"), reply("d") | {"weight": 1}]),
        ({"conversations": [*SHAREGPT, SHAREGPT[0] | {"weight": 0}, SHAREGPT[1] | {"weight": 0.0}]},
         [user("Hi"), reply("Hello!"), user("Hi") | {"weight": 0}, reply("Hello!") | {"weight": 0}]),
        ({"conversations": SHAREGPT, "system": "Be kind."},
         [{"role": "system", "content": "Be kind."}, user("Hi"), reply("Hello!")]),
        ({"conversations": [{"from": "user", "value": "Add"},
                            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": 2}}'},
                            {"from": "observation", "value": "3"}, {"from": "gpt", "value": "It is 3."}]},
         [user("Add"), {"role": "assistant", "content": "", "tool_calls": [CALL]},
          {"role": "tool", "content": "3"}, reply("It is 3.")]),
        ({"prompt": "2 + 2?", "completion": "4"}, [user("2 + 2?"), reply("4")]),
        ({"prompt": [user("2 + 2?")], "completion": [reply("4")]}, [user("2 + 2?"), reply("4")]),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [user("Add.\n\n1 2"), reply("3")]),
        ({"instruction": "Greet.", "input": "", "output": "Hi"}, [user("Greet."), reply("Hi")]),
    ],
)  # fmt: skip
def test_every_form_becomes_messages(record, expected):
    assert read_conversation(record, WHERE).messages == expected


def test_sharegpt_is_read_as_trl_reads_it():
    # TRL's function renames the keys and leaves the names of roles; a dataset of either names is read alike.
    turns = [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello!"}]
    theirs = maybe_convert_to_chatml({"conversations": turns})["messages"]
    assert read_conversation({"conversations": turns}, WHERE).messages == theirs
    assert read_conversation({"conversations": SHAREGPT}, WHERE).messages == theirs


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_are_a_list_or_one_in_json(tools):
    assert read_conversation({"messages": TALK, "tools": tools}, WHERE).tools == TOOLS


@pytest.mark.parametrize(
    "record",
    [
        {"chosen": [*TALK[:3], reply("3")], "rejected": [*TALK[:3], reply("4")]},
        {"chosen": [user("Hi"), reply("a"), user("b"), reply("c")], "rejected": [user("Hi"), reply("d")]},
        {"chosen": "Human: prime?\n\nAssistant: It is.", "rejected": "Human: prime?\n\nAssistant: No."},
        {"chosen": "Is 7 prime? Yes.", "rejected": "Is 7 prime? Yellow."},
    ],
)
def test_a_prompt_that_is_not_given_is_found_as_trl_finds_it(record):
    theirs, ours = extract_prompt(record), read_preference(record, WHERE)
    for name in ("prompt", "chosen", "rejected"):
        found = getattr(ours, name)
        assert (found if isinstance(theirs[name], list) else found[0]["content"]) == theirs[name], name


def test_a_prompt_that_is_given_is_not_said_twice():
    expected = ([user("Hi")], [reply("Hello!")], [reply("Go.")])
    for record in (
        {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go."},
        {"prompt": [user("Hi")], "chosen": [reply("Hello!")], "rejected": [reply("Go.")]},
        {"prompt": "Hi", "chosen": [reply("Hello!")], "rejected": [reply("Go.")]},
        {"prompt": "Hi", "chosen": [user("Hi"), reply("Hello!")], "rejected": [user("Hi"), reply("Go.")]},
        {"prompt": [user("Hi")], "chosen": [user("Hi"), reply("Hello!")], "rejected": [user("Hi"), reply("Go.")]},
    ):
        assert read_preference(record, WHERE)[:3] == expected, record


def test_a_prompt_is_kept_where_both_sides_begin_with_the_same_reply():
    first, more = reply("Which one?"), user("The red one")
    sides = {"chosen": [first, more, reply("Here.")], "rejected": [first, more, reply("No.")]}
    assert read_preference({"prompt": [user("Give me")], **sides}, WHERE).prompt == [user("Give me")]
    sides = {"chosen": [first, reply("Here.")], "rejected": [first, reply("No.")]}
    assert read_preference({"prompt": "Give me", **sides}, WHERE).prompt == [user("Give me")]


BAD_ROWS = [  # of the right form, with nothing to train on
    ({"messages": [{"role": "user"}, reply("a")]}, "turn 1: the user turn has no content"),
    ({"messages": [{"role": "system", "content": " "}, *TALK]}, "turn 1: the system turn has no content"),
    ({"messages": [user("a"), reply("")]}, "turn 2: the reply is empty"),
    ({"messages": [user("a"), {"role": "bot", "content": "b"}]}, "turn 2: unknown role 'bot'"),
    ({"messages": [user("a"), {"role": "assistent", "content": "b"}]}, "did you mean 'assistant'?"),
    ({"conversations": [{"from": "alien", "value": "b"}]}, "turn 1: unknown role 'alien'"),
    ({"messages": [user("a")]}, "the conversation has no turn of the assistant to train on"),
    ({"messages": [user("a"), reply("b") | {"weight": 0}]}, "has no turn of the assistant to train on"),
    ({"prompt": "a", "completion": " "}, "'completion': the reply is empty"),
    ({"messages": []}, "'messages' has no turns"),
]
BAD_FORMS = [
    ({"text": "a"}, "this row has only: text"),
    ([TALK], "a conversation is an object, not"),
    ({"messages": None}, "'messages' must be a list of turns, not None"),
    ({"messages": ["Hi"]}, "turn 1: a turn is an object with 'role' and 'content', not 'Hi'"),
    ({"messages": [user([{"type": "image_url"}]), reply("a")]}, "turn 1: of contents only text is read"),
    ({"messages": [user(7), reply("a")]}, "turn 1: the content is text or a list of parts, not 7"),
    ({"messages": [user("a"), reply("") | {"tool_calls": [{"function": "f"}]}]}, "whose 'function' has a 'name'"),
    ({"messages": [user("a"), reply("b") | {"weight": 0.5}]}, "turn 2: the weight of a turn is 0 or 1, not 0.5"),
    ({"messages": TALK, "tools": "[1,"}, "'tools' is not JSON"),
    ({"prompt": 3, "completion": "a"}, "'prompt' must be text or a list of turns, not 3"),
    ({"instruction": "a", "input": 3, "output": "a"}, "'instruction' and 'input' must be text"),
]
BAD_PAIRS = [
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are the same"),
    ({"chosen": [reply("a")], "rejected": [reply("b")]}, "begin differently, and there is no 'prompt'"),
    ({"chosen": "yes", "rejected": "no"}, "begin differently, and there is no 'prompt'"),
    ({"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected': the reply is empty"),
    ({"chosen": [user("a"), reply("b")], "rejected": [user("a")]}, "'rejected' has no turn of the assistant"),
]


def write(folder, *records):
    """A file of JSON lines, with an empty line in it."""
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize(("record", "said"), [*BAD_ROWS, *BAD_FORMS])
def test_a_bad_conversation_is_refused_by_its_file_and_line(record, said, tmp_path):
    file = write(tmp_path, {"messages": TALK}, record)
    with pytest.raises(ValueError, match=r"rows.jsonl, line 3") as refused:
        list(conversations(str(file), DataConfig()))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("record", "said"), BAD_PAIRS)
def test_a_bad_preference_is_refused_by_its_file_and_line(record, said, tmp_path):
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1") as refused:
        list(preferences(str(write(tmp_path, record)), DataConfig()))
    assert said in str(refused.value)


def test_bad_rows_are_skipped_and_counted_where_that_is_asked_for(tmp_path):
    skip, counts = DataConfig(if_empty="skip"), Counter()
    file = write(tmp_path, *(record for record, _ in BAD_ROWS), {"messages": TALK})
    assert [row.where for row in conversations(str(file), skip, counts)] == [f"{file}, line {2 * len(BAD_ROWS) + 1}"]
    assert counts.total() == len(BAD_ROWS)
    file = write(tmp_path, *(record for record, _ in BAD_PAIRS))
    assert list(preferences(str(file), skip, counts)) == []
    assert counts.total() == len(BAD_ROWS) + len(BAD_PAIRS)


@pytest.mark.parametrize(("record", "said"), BAD_FORMS)
def test_what_has_another_form_is_refused_even_then(record, said, tmp_path):
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1"):
        list(conversations(str(write(tmp_path, record)), DataConfig(if_empty="skip")))


def test_what_is_not_json_lines_is_refused(tmp_path):
    file = tmp_path / "chats.txt"
    file.write_text("Hi")
    with pytest.raises(ValueError, match=r"chats.txt is read as text, and conversations are read from JSON lines"):
        list(conversations(str(file), DataConfig()))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": [')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: this is not JSON"):
        list(conversations(str(file), DataConfig()))
    file.write_text('{"prompt": "\\ud800", "completion": "a"}')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: a text has half a character"):
        list(conversations(str(file), DataConfig()))

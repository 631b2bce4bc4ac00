"""`preview` and `phasor data preview`: what is shown is what a batch holds, for every task."""

import json

import pytest
from commands import CommandRunner

from phasor.cli.data import show_trained_tokens
from phasor.config.recipe import Recipe
from phasor.config.tasks import TASKS
from phasor.training.preview import Run, ShownText, preview

CHAT = [
    {"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]}
    for i in range(12)
]
FILES = {
    "lm": "".join(f"line {i}\n" for i in range(40)),
    "mlm": "".join(f"line {i}\n" for i in range(40)),
    "distill": "".join(f"line {i}\n" for i in range(40)),
    "translation": "".join(f"one {i}\tzwei {i}\n" for i in range(20)),
    "chat": "".join(json.dumps(row) + "\n" for row in CHAT),
    "preference": "".join(
        json.dumps({"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"}) + "\n" for i in range(12)
    ),
    "classify": "".join(
        json.dumps({"text": f"text {i}", "label": "spam" if i % 2 else "ham"}) + "\n" for i in range(20)
    ),
    "embed": "".join(json.dumps({"anchor": f"one {i}", "positive": f"two {i}"}) + "\n" for i in range(20)),
}
SUFFIX = {"translation": "tsv", "lm": "txt", "mlm": "txt", "distill": "txt"}


def recipe(tmp_path, task, **fields):
    file = tmp_path / f"data.{SUFFIX.get(task, 'jsonl')}"
    file.write_text(FILES[task], encoding="utf-8")
    data = {"train": str(file), "tokenizer": "bytes", "sequence_length": 96, "validation_fraction": 0.2}
    data |= {"chat_template": "chatml"} if TASKS[task].turns else {}
    settings = {"distill": {"distill": {"teacher": "nowhere"}}}.get(task, {})
    return Recipe.from_dict(
        {"task": task, "data": data | fields, "train": {"batch_tokens": 384}, "model": {}} | settings
    )


def trained(text):
    return "".join(run.text for run in text.runs if run.trained)


def shown(text):
    return "".join(run.text for run in text.runs)


@pytest.fixture
def run_phasor(capsys):
    return CommandRunner(capsys)


def test_every_task_has_a_case():
    assert FILES.keys() == TASKS.keys()


@pytest.mark.parametrize("task", TASKS)
def test_counts_are_those_of_the_batch(tmp_path, task):
    found = preview(recipe(tmp_path, task), rows=99)
    assert len(found.rows) == found.rows_of_step >= 1
    assert found.steps_per_epoch >= 1
    texts = [text for row in found.rows for text in row]
    assert texts
    for text in texts:
        assert 0 <= text.trained <= text.tokens
        assert all(run.text for run in text.runs)
        assert all(a.trained != b.trained for a, b in zip(text.runs, text.runs[1:], strict=False))
    if task != "embed":  # whose loss has one term per row, of many tokens
        assert sum(text.trained for text in texts) == found.trained_of_step


def test_a_language_model_predicts_all_but_the_first(tmp_path):
    ((row, *_),) = [preview(recipe(tmp_path, "lm", document="line"), rows=1).rows]
    for text in row:
        assert [run.trained for run in text.runs] == [False, True]
        assert shown(text).startswith("<bos>line ")
        assert shown(text).endswith("<eos>") or text is row[-1]
    assert sum(text.tokens for text in row) >= 96


def test_a_chat_predicts_replies(tmp_path):
    first = preview(recipe(tmp_path, "chat"), rows=99)
    found = [first, *(preview(recipe(tmp_path, "chat"), rows=99, step=i) for i in range(1, first.steps_per_epoch))]
    texts = [text for one in found for row in one.rows for text in row]
    assert (len(texts), sum(text.tokens for text in texts)) == first.train
    for text in texts:
        number = shown(text).partition("question ")[2].partition("<")[0]
        assert trained(text) == f"answer {number}<|im_end|>"


def test_a_preference_has_both_replies(tmp_path):
    found = preview(recipe(tmp_path, "preference"), rows=1)
    chosen, rejected = found.rows[0][:2]
    assert (chosen.name, rejected.name) == ("pair 1, chosen", "pair 1, rejected")
    assert trained(chosen).startswith("good ")
    assert trained(rejected).startswith("bad ")


def test_a_translation_has_a_source(tmp_path):
    source, target = preview(recipe(tmp_path, "translation"), rows=1).rows[0]
    number = shown(source).removeprefix("one ").removesuffix("<eos>")
    assert trained(target) == f"zwei {number}<eos>"
    assert not trained(source)


def test_masked_tokens_are_shown_as_they_were(tmp_path):
    text = preview(recipe(tmp_path, "mlm"), rows=1).rows[0][0]
    assert 0 < text.trained < text.tokens / 3
    assert all(part in FILES["mlm"] for part in shown(text).replace("<bos>", "").replace("<eos>", "").split("\n"))


def test_labels_and_neighbors_are_named(tmp_path):
    text, label = preview(recipe(tmp_path, "classify"), rows=1).rows[0]
    number = int(shown(text).replace("<eos>", "").rpartition(" ")[2])
    assert trained(label) == ("spam" if number % 2 else "ham")
    anchor, positive = preview(recipe(tmp_path, "embed"), rows=1).rows[0]
    assert (anchor.name, positive.name) == ("anchor", "positive")
    assert shown(anchor).replace("one", "two") == shown(positive)


def test_a_step_and_a_split_can_be_chosen(tmp_path):
    wanted = recipe(tmp_path, "chat")
    first, again, other = preview(wanted), preview(wanted), preview(wanted, step=3)
    assert first == again
    assert first.rows != other.rows
    held_out = preview(wanted, split="valid", rows=99)
    assert sum(map(len, held_out.rows)) == held_out.valid.examples
    for fields, message in (
        ({"rows": 0}, "rows must be"),
        ({"step": -1}, "step must be"),
        ({"split": "a"}, "split must"),
    ):
        with pytest.raises(ValueError, match=message):
            preview(wanted, **fields)


def test_the_command_prints_counts_and_brackets(tmp_path, run_phasor):
    wanted = recipe(tmp_path, "chat")
    options = ["--task", "chat", "--data.train", wanted.data.train, "--data.tokenizer", "bytes"]
    options += ["--data.chat-template", "chatml", "--data.sequence-length", "96", "--train.batch-tokens", "384"]
    options += ["--data.validation-fraction", "0.2", "--rows", "1"]
    printed = run_phasor("data", "preview", *options)
    found = preview(wanted, rows=1)
    assert f"train: {found.train.examples} examples, {found.train.tokens} tokens\n" in printed
    assert "[[answer " in printed
    assert "<|im_end|>]]" in printed
    assert not list(tmp_path.glob("run*"))
    assert "--rows must be an integer" in run_phasor.expect_error("data", "preview", "--rows", "many")
    assert "nowhere does not exist" in run_phasor.expect_error("data", "preview", "--data.train", "nowhere")


def test_what_is_left_out_is_counted(tmp_path):
    rows = [*CHAT, {"messages": [{"role": "user", "content": "a" * 500}, {"role": "assistant", "content": "b"}]}]
    wanted = recipe(tmp_path, "chat", too_long="skip")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (line,) = preview(wanted).left_out
    assert line.startswith("1 conversation")


def test_marks():
    text = ShownText("document 1", 3, 1, (Run("a\x1b[2J", False), Run("b", True)))
    assert show_trained_tokens(text, True, True) == "a\\x1b[2J\x1b[32mb\x1b[0m"
    assert show_trained_tokens(text, True, False) == "a\\x1b[2J[[b]]"
    assert show_trained_tokens(text, False, True) == "a\x1b[2J[[b]]"

"""Conversations: losses as in a loop of transformers over separate conversations, and packed rows as these."""

import json

import chat_folders
import pytest
import torch
import torch.nn.functional as F
import transformers

import phasor
from phasor.config.recipe import Recipe
from phasor.data.batches import Batches
from phasor.data.store import prepare
from phasor.evaluation import evaluate
from phasor.training import train
from phasor.training.objectives import objective_of


def separate(batch, most):
    """The documents of packed rows: their tokens, targets and which of these are trained."""
    for row in range(len(batch.tokens)):
        for number in batch.document_ids[row].unique().tolist():
            if number < most:
                here = batch.document_ids[row] == number
                yield batch.tokens[row][here], batch.targets[row][here], batch.weights[row][here] > 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_losses_of_20_steps_equal_a_loop_of_transformers(family, tmp_path):
    theirs, tokenizer = chat_folders.write_model(family, tmp_path / "model")
    rows = chat_folders.conversation_rows(60)
    file = chat_folders.write_rows(tmp_path / "rows.jsonl", rows)
    recipe, lines = chat_folders.run(
        tmp_path / "run", task="chat", init_from=str(tmp_path / "model"), data={"train": file, "sequence_length": 96}
    )
    # What is trained, by the tokenizer and template of transformers alone: the replies and what ends them.
    expected = {}
    for row in rows:
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        labels = [-100] * len(ids)
        for i, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                before = tokenizer.apply_chat_template(
                    row["messages"][:i], add_generation_prompt=True, return_dict=False
                )
                after = tokenizer.apply_chat_template(row["messages"][: i + 1], return_dict=False)
                labels[len(before) : len(after)] = ids[len(before) : len(after)]
        expected[tuple(ids)] = labels
    batches = Batches(prepare(recipe, tmp_path / "data").train, recipe)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    seen = set()
    for step in range(20):
        optimizer.zero_grad()
        total = count = 0
        for tokens, targets, _ in separate(batches[step], batches.source.most):
            ids = (*tokens.tolist(), int(targets[-1]))
            seen.add(ids)
            labels = torch.tensor(expected[ids])
            logits = theirs(torch.tensor([ids])).logits[0, :-1]
            total = total + F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
            count += int((labels[1:] != -100).sum())
        (total / count).backward()
        optimizer.step()
        assert abs(lines[step]["loss"] - total.item() / count) < 1e-5, step
    assert len(seen) > 40
    assert abs(lines[0]["loss"] - lines[-1]["loss"]) > 0.5


@pytest.mark.parametrize("position", ["rotary", "learned", "alibi"])
def test_packed_conversations_equal_separate_ones(position, tmp_path):
    file = chat_folders.write_rows(tmp_path / "rows.jsonl", chat_folders.conversation_rows(30))
    recipe = Recipe.from_dict({
        "task": "chat",
        "model": {"dim": 24, "num_heads": 3, "num_layers": 2, "position": position},
        "data": {"train": file, "tokenizer": "bytes", "chat_template": "chatml", "sequence_length": 160},
        "train": {"batch_tokens": 480},
    })  # fmt: skip
    prepared = prepare(recipe, tmp_path / "data")
    batches = Batches(prepared.train, recipe, special=prepared.special)
    config = phasor.ModelConfig.from_dict({"vocab_size": prepared.vocab_size, **recipe.model, "max_length": 160})
    torch.manual_seed(0)
    model = phasor.Transformer(config).double()
    batch = batches[0]
    assert batches.source.most > 2
    packed = objective_of(recipe).loss(model, batch)
    packed.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    total = count = 0
    for tokens, targets, trained in separate(batch, batches.source.most):
        total = total + F.cross_entropy(model(tokens[None])[0][trained], targets[trained], reduction="sum")
        count += int(trained.sum())
    (total / count).backward()
    # In float64 both are sums of a few hundred terms near 1, of which each is right to 1e-16.
    assert abs(packed.item() - total.item() / count) < 1e-12
    for name, weight in model.named_parameters():
        assert (weight.grad - gradients[name]).abs().max() < 1e-12, name


def test_a_fresh_model_learns_to_reply_and_keeps_its_template(tmp_path):
    file = chat_folders.write_rows(tmp_path / "rows.jsonl", [
        {"prompt": f"Say {word}", "completion": word} for word in ("one", "two", "three", "four") * 15
    ])  # fmt: skip
    recipe, lines = chat_folders.run(
        tmp_path / "run",
        task="chat",
        model={"preset": "llama-2", "dim": 32, "num_heads": 2, "num_layers": 2},
        data={"train": file, "valid": file, "tokenizer": "bytes", "chat_template": "chatml"},
        train={"steps": 150, "evaluate_every": 150},
    )
    assert lines[-1]["loss"] < 0.2 < lines[0]["loss"]
    folder = tmp_path / "run" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = phasor.load(folder)
    messages = [{"role": "user", "content": "Say three"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    new = phasor.generate(model, prompt, max_new_tokens=16)
    assert tokenizer.decode(new, skip_special_tokens=True) == "three"
    assert new[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
    assert "Say" in (tmp_path / "run" / "samples.txt").read_text()
    metrics = evaluate(tmp_path / "run", device="cpu")
    assert metrics["conversations"] == 60
    assert metrics["accuracy"] > 0.9
    # The last part of a conversation, trained on all of its tokens, has the prompt in its loss too.
    everything, _ = chat_folders.run(
        tmp_path / "all", task="chat", init_from=str(folder),
        data={"train": file, "valid": file, "train_on": "all"}, train={"steps": 1},
    )  # fmt: skip
    whole = Batches(prepare(everything, tmp_path / "all-data").train, everything)
    replies = Batches(prepare(recipe, tmp_path / "data").train, recipe)
    assert whole[0].weights.sum() > 2 * replies[0].weights.sum()


def test_a_vocabulary_grows_by_the_tokens_of_a_template(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one and two make three\n" * 50)
    small = {"preset": "llama-2", "dim": 16, "num_heads": 2, "num_layers": 1}
    chat_folders.run(
        tmp_path / "base", task="lm", model=small, data={"train": str(text), "tokenizer": "bytes"}, train={"steps": 1}
    )
    file = chat_folders.write_rows(tmp_path / "rows.jsonl", chat_folders.conversation_rows(20))
    chat_folders.run(
        tmp_path / "run", task="chat", init_from=str(tmp_path / "base"),
        data={"train": file, "chat_template": "chatml"}, train={"steps": 1}, optimizer={"lr": 1e-9},
    )  # fmt: skip
    before, after = (phasor.load(tmp_path / name) for name in ("base", "run"))
    assert (before.config.vocab_size, after.config.vocab_size) == (261, 263)
    table = before.tokens.weight
    # AdamW's first step changes a weight by its learning rate of 1e-9, which float32 rounds away.
    assert torch.allclose(after.tokens.weight, torch.cat([table, table.mean(0).expand(2, -1)]), atol=1e-7)
    assert after.special.stop == (262, 2)


ROW = {"messages": [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi!"}]}
LONG = {"prompt": "x" * 200, "completion": "y"}


def prepared(tmp_path, rows, task="chat", **fields):
    file = chat_folders.write_rows(tmp_path / "rows.jsonl", rows)
    data = {"train": file, "tokenizer": "bytes", "chat_template": "chatml", "sequence_length": 96} | fields
    return prepare(Recipe.from_dict({"task": task, "data": data, "model": {"dim": 8}}), tmp_path / "data")


def varied(count=30):
    return chat_folders.conversation_rows(count)


def test_a_conversation_that_is_too_long_is_refused_by_its_line(tmp_path):
    with pytest.raises(ValueError, match=r"rows.jsonl, line 31: a conversation has 2\d\d tokens, and data.sequence_le"):
        prepared(tmp_path, [*varied(), LONG])


def test_conversations_are_skipped_or_truncated_and_counted(tmp_path):
    skipped = prepared(tmp_path, [*varied(), LONG, LONG], too_long="skip")
    assert skipped.left_out == ("2 conversations with more than 96 tokens",)
    assert len(skipped.train) + len(skipped.valid) == 30
    long_reply = {"prompt": "x", "completion": "y" * 200}
    cut = prepared(tmp_path, [*varied(), LONG, long_reply], too_long="truncate")
    assert cut.left_out == ("1 conversations whose first 96 tokens have no reply",)
    assert max(cut.train.lengths.max(), cut.valid.lengths.max()) == 97
    bad = [{"prompt": "x", "completion": ""}, {"messages": [{"role": "bot", "content": "x"}]}]
    empty = prepared(tmp_path, [*varied(), *bad], if_empty="skip")
    assert empty.left_out == ("2 conversations with an empty turn, an unknown role or no reply",)


def test_a_role_that_the_template_refuses_is_named_by_its_line(tmp_path):
    file = tmp_path / "strict.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}"
        "{% endif %}{{ m.content + ';' }}{% endfor %}"
    )
    strict = {"messages": [{"role": "system", "content": "Be kind."}, *ROW["messages"]]}
    with pytest.raises(ValueError, match=r"rows.jsonl, line 31: .*no system turn.*data.if_empty 'skip'"):
        prepared(tmp_path, [*varied(), strict], chat_template=str(file))
    kept = prepared(tmp_path, [*varied(), strict], chat_template=str(file), if_empty="skip")
    assert kept.left_out == ("1 conversations that the chat template refuses",)


def test_the_lines_of_what_is_left_out_are_printed(tmp_path, capsys):
    file = chat_folders.write_rows(tmp_path / "rows.jsonl", [*varied(), LONG])
    data = {"train": file, "tokenizer": "bytes", "chat_template": "chatml", "too_long": "skip"}
    made = chat_folders.recipe(
        tmp_path / "run", task="chat", model={"dim": 8, "num_heads": 1, "num_layers": 1}, data=data, train={"steps": 1}
    )
    said = []
    progress = train.__globals__["TrainingProgress"]()
    progress.on_message = said.append
    train(made, progress=progress)
    assert "1 conversations with more than 96 tokens are left out" in said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"chat_template": None}, "a new tokenizer has no chat template: give data.chat_template"),
        ({"chat_template": "chatmll"}, "did you mean 'chatml'?"),
    ],
)
def test_a_template_that_is_not_there_is_refused(fields, said, tmp_path):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        prepared(tmp_path, varied(), **fields)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": {"chat_template": "chatml"}}, "DataConfig.chat_template is for conversations, not for the task 'lm'"),
        ({"data": {"too_long": "truncate"}}, "DataConfig.too_long 'truncate' is for conversations"),
        ({"task": "preference", "data": {"train_on": "all"}}, "DataConfig.train_on is 'replies' for preferences"),
        ({"preference": {"beta": 0.2}}, "Recipe.preference is for the task 'preference', not for 'lm'"),
        ({"task": "chat", "data": {"format": "python"}}, "the format 'python' is for lm, mlm and distill"),
        ({"data": {"format": "docstrings"}}, "the format 'docstrings' is for chat"),
    ],
)
def test_options_of_other_tasks_are_refused(fields, said):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        Recipe.from_dict(fields)
    assert said in str(refused.value)


def test_docstrings_are_the_same_every_time_and_hold_out_some(tmp_path):
    made = Recipe.from_dict({
        "task": "chat", "model": {"dim": 8},
        "data": {"format": "docstrings", "tokenizer": "bytes", "chat_template": "plain", "sequence_length": 1500},
    })  # fmt: skip
    kind = prepare.__globals__["examples_of"](made)
    first, again = ([tuple(row) for row in kind.read(None)] for _ in range(2))
    assert first == again
    assert len(first) > 2000
    messages = json.loads(first[0][0])["messages"]
    assert [m["role"] for m in messages[:2]] == ["user", "assistant"]

"""Conversations for encoder-decoders: losses as of transformers' T5 on the same sources and replies, and talking."""

import json
import shutil

import chat_folders
import pytest
import torch
import transformers

import phasor
from phasor.config.recipe import Recipe
from phasor.data.batches import Batches
from phasor.data.store import prepare
from phasor.evaluation import evaluate
from phasor.training import train
from phasor.training.preview import preview

SMALL = {"preset": "t5", "dim": 32, "num_heads": 2, "num_layers": 2, "hidden_dim": 64}
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "weight": 0},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def write_t5(folder, template=True):
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=263, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=3, dropout_rate=0.0,
            decoder_start_token_id=0, eos_token_id=2, pad_token_id=0, initializer_factor=1.0,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer = chat_folders.write_tokenizer(folder)
    if not template:
        (folder / "chat_template.jinja").unlink()
    return model, tokenizer


def expected_pairs(rows, tokenizer, template):
    """Source and labels of every reply, by the tokenizer and template of transformers alone."""
    for row in rows:
        for i, message in enumerate(row["messages"]):
            if message["role"] != "assistant":
                continue
            before = row["messages"][:i]
            if template:
                source = tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
                labels = [*tokenizer.encode(message["content"], add_special_tokens=False), 262]
            else:
                source = tokenizer.encode("\n".join(each["content"] for each in before), add_special_tokens=False)
                labels = [*tokenizer.encode(message["content"], add_special_tokens=False), 2]
            yield tuple(source), tuple(labels)


@pytest.mark.parametrize("template", [True, False], ids=["template", "plain"])
def test_losses_of_20_steps_equal_a_loop_of_transformers(template, tmp_path):
    theirs, tokenizer = write_t5(tmp_path / "model", template)
    rows = chat_folders.conversation_rows(40)
    file = chat_folders.write_rows(tmp_path / "rows.jsonl", rows)
    recipe, lines = chat_folders.run(
        tmp_path / "run", task="chat", init_from=str(tmp_path / "model"), data={"train": file}, optimizer={"lr": 1e-3}
    )
    expected = set(expected_pairs(rows, tokenizer, template))
    batches = Batches(prepare(recipe, tmp_path / "data").train, recipe)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    seen = set()
    for step in range(20):
        batch = batches[step]
        labels = batch.targets.where(batch.weights > 0, -100)
        rows_of = zip(batch.source, batch.source_attention_mask, labels, strict=True)
        seen |= {(tuple(s[m].tolist()), tuple(t[t >= 0].tolist())) for s, m, t in rows_of}
        optimizer.zero_grad()
        found = theirs(input_ids=batch.source, attention_mask=batch.source_attention_mask.long(), labels=labels)
        found.loss.backward()
        optimizer.step()
        assert abs(lines[step]["loss"] - found.loss.item()) < 1e-5, step
    assert len(seen) > 20
    assert seen <= expected


def test_a_run_learns_to_reply_talks_and_is_evaluated(tmp_path):
    words = ("one", "two", "three", "four")
    file = chat_folders.write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"Say {word}", "completion": word} for word in words * 15]
    )
    recipe, lines = chat_folders.run(
        tmp_path / "run", task="chat", model=SMALL, train={"steps": 200, "evaluate_every": 200}, optimizer={"lr": 3e-3},
        data={"train": file, "valid": file, "tokenizer": "bytes", "chat_template": "chatml"},
    )  # fmt: skip
    assert lines[-1]["loss"] < 0.2 < lines[0]["loss"]
    model = phasor.load(tmp_path / "run")
    assert [phasor.chat(model, f"Say {word}") for word in words] == list(words)
    assert "Say" in (tmp_path / "run" / "samples.txt").read_text()
    metrics = evaluate(tmp_path / "run", device="cpu")
    assert metrics["replies"] == 60
    assert metrics["accuracy"] > 0.9
    assert evaluate(tmp_path / "run", file, device="cpu") == metrics
    row = preview(recipe, rows=1).rows[0]
    assert [text.name for text in row] == ["source", "target"]


def test_a_run_is_resumed_without_the_model_it_began_with(tmp_path):
    write_t5(tmp_path / "model")
    file = chat_folders.write_rows(tmp_path / "rows.jsonl", chat_folders.conversation_rows(30))
    made = {"task": "chat", "init_from": str(tmp_path / "model"), "data": {"train": file}}
    chat_folders.run(tmp_path / "whole", **made, train={"steps": 8})
    recipe, _ = chat_folders.run(tmp_path / "run", **made, train={"steps": 4}, save={"every": 4})
    shutil.rmtree(tmp_path / "model")
    longer = recipe.replace(train=recipe.train.replace(steps=8))
    assert train(longer, resume=True).status == "finished"
    ends = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert ends[0] == ends[1]
    assert evaluate(tmp_path / "run", device="cpu")["replies"] > 0


def prepared(tmp_path, rows, **fields):
    file = chat_folders.write_rows(tmp_path / "rows.jsonl", rows)
    recipe = Recipe.from_dict({
        "task": "chat", "model": SMALL,
        "data": {"train": file, "valid": file, "tokenizer": "bytes", "sequence_length": 64, **fields},
    })  # fmt: skip
    return prepare(recipe, tmp_path / "data")


def test_every_reply_to_learn_is_an_example(tmp_path):
    found = prepared(tmp_path, [{"messages": TALK}])
    (source, target), tokenizer = found.train[0], found.tokenizer
    assert len(found.train) == 1
    assert tokenizer.decode(source.tolist(), skip_special_tokens=False) == "Be kind.\na\nb\nc<eos>"
    assert tokenizer.decode(target.tolist(), skip_special_tokens=False) == "<bos>d<eos>"
    written = prepared(tmp_path, [{"messages": TALK}], chat_template="chatml", sequence_length=200)
    source, target = (written.tokenizer.decode(side.tolist(), skip_special_tokens=False) for side in written.train[0])
    assert source.endswith("<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n")
    assert target == "<bos>d<|im_end|>"
    assert [len(json.loads(text)["messages"]) for text, _ in written.valid_texts()] == [5]


def test_a_conversation_that_is_too_long_keeps_its_last_turns(tmp_path):
    long = {"prompt": "x" * 90 + "end", "completion": "y" * 90}
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: a reply has 94 tokens on a side"):
        prepared(tmp_path, [long])
    source, target = prepared(tmp_path, [long], too_long="truncate").train[0]
    assert (len(source), len(target)) == (64, 65)
    assert bytes((source[-4:-1] - 5).tolist()) == b"end"


@pytest.mark.parametrize(
    ("fields", "row", "said"),
    [
        ({"train_on": "all"}, {"messages": TALK}, "data.train_on 'all' trains the turns that are read too"),
        ({}, {"messages": TALK, "tools": [{"type": "function"}]}, r"rows\.jsonl, line 1: .* calls need a template"),
        (
            {},
            {"messages": [{"role": "assistant", "content": "b"}]},
            r"rows\.jsonl, line 1: nothing stands before the reply",
        ),
    ],
)
def test_what_cannot_be_meant_is_said(fields, row, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        prepared(tmp_path, [row], **fields)


def test_preferences_of_an_encoder_decoder_are_refused_in_a_sentence(tmp_path):
    made = chat_folders.recipe(tmp_path / "run", task="preference", model=SMALL,
                               data={"train": "rows.jsonl", "chat_template": "plain"})  # fmt: skip
    with pytest.raises(ValueError, match="the task 'preference' trains a decoder, and this model is an encoder-dec"):
        train(made)

"""Classification: the losses of transformers' Trainer, labels in and out of folders, data with mistakes, resuming."""

import json
import random

import numpy as np
import pytest
import torch
import transformers
from fine_tuning import (
    BART_SIZES,
    T5_SIZES,
    datasets_of,
    fine_tuning,
    losses,
    save_body,
    save_tokenizer,
    sentences,
    their_losses,
    write_lines,
)
from safetensors.torch import load_file
from training_runs import Notes, StopAt

import phasor
from phasor.training.build import build_model
from phasor.training.loop import train

LABELS = ("animal", "neither", "place")


def texts(file, pairs=False):
    rng = random.Random(1)
    rows = [{"text": text, "label": rng.choice(LABELS)} for text in sentences(60)]
    if pairs:
        rows = [row | {"text_pair": other} for row, other in zip(rows, sentences(60, seed=2), strict=True)]
    return write_lines(file, rows)


def words(file):
    rng = random.Random(1)
    split = [text.split() for text in sentences(60)]
    return write_lines(file, [{"words": each, "labels": [rng.choice(LABELS) for _ in each]} for each in split])


def inputs(batch):
    labels = batch.targets.masked_fill(batch.weights == 0, -100)
    given = {"input_ids": batch.tokens, "attention_mask": batch.attention_mask.long()}
    return given | {"labels": labels[:, 0] if labels.shape[1] == 1 else labels}


# Both compute in float32 by other operations. AdamW divides by the root of squared gradients, so that an error of
# 1e-7 of a gradient that is near 0 moves a weight by up to 1e-3 of a step; 20 of them leave losses equal to 1e-5.
CLOSE = 1e-5


@pytest.mark.sample(3)
@pytest.mark.parametrize("of", ["sequence", "token"])
@pytest.mark.parametrize("name", ["bert", "llama", "qwen3"])
def test_losses_are_those_of_the_trainer_of_transformers(name, of, tmp_path):
    body = save_body(name, tmp_path / "body")
    data = (texts if of == "sequence" else words)(tmp_path / "data.jsonl")
    recipe = fine_tuning(tmp_path, "classify", data, init_from=str(body), classify={"of": of})
    datasets = datasets_of(recipe, tmp_path / "same")
    start = build_model(recipe, datasets)
    assert start.config.head.labels == LABELS
    phasor.save(start, tmp_path / "start", format="hf")
    cls = getattr(transformers, f"AutoModelFor{of.title()}Classification")
    theirs = cls.from_pretrained(tmp_path / "start", dtype=torch.float32)
    assert theirs.config.id2label == dict(enumerate(LABELS))
    for part in theirs.modules():  # before the scores, where its configuration has no field for it
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    expected = their_losses(theirs, datasets.train, inputs, tmp_path / "theirs")
    train(recipe)
    assert np.abs(np.array(losses(tmp_path / "run")) - expected).max() < CLOSE
    assert expected[-1] != expected[0]
    model = phasor.load(tmp_path / "run")
    phasor.save(model, tmp_path / "trained", format="hf")
    back = cls.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    batch = datasets.valid[0]
    with torch.no_grad():
        found = model(batch.tokens, attention_mask=batch.attention_mask)
        expected = back(batch.tokens, attention_mask=batch.attention_mask.long()).logits
    real = batch.attention_mask if of == "token" else slice(None)
    assert (found - expected)[real].abs().max() < CLOSE


def test_losses_of_a_t5_encoder_are_those_of_transformers(tmp_path):
    """Its class for labels of words, whose head is put beside the weights of the encoder."""
    torch.manual_seed(0)
    config = transformers.T5Config(**T5_SIZES, num_labels=len(LABELS), classifier_dropout=0.0, pad_token_id=0)
    theirs = transformers.T5ForTokenClassification(config).train()
    transformers.T5EncoderModel(config).save_pretrained(tmp_path / "body")
    body = transformers.T5EncoderModel.from_pretrained(tmp_path / "body")
    theirs.transformer.load_state_dict(body.state_dict(), strict=False)
    save_tokenizer(tmp_path / "body")
    data = words(tmp_path / "data.jsonl")
    recipe = fine_tuning(tmp_path, "classify", data, init_from=str(tmp_path / "body"), classify={"of": "token"})
    datasets = datasets_of(recipe, tmp_path / "same")
    theirs.classifier.load_state_dict(build_model(recipe, datasets).head.score.state_dict())
    expected = their_losses(theirs, datasets.train, inputs, tmp_path / "theirs")
    train(recipe)
    assert np.abs(np.array(losses(tmp_path / "run")) - expected).max() < CLOSE


def test_a_run_that_is_stopped_ends_with_the_same_bits(tmp_path):
    body, data = save_body("bert", tmp_path / "body"), texts(tmp_path / "data.jsonl", pairs=True)
    recipes = [fine_tuning(tmp_path / name, "classify", data, init_from=str(body)) for name in ("whole", "parts")]
    train(recipes[0])
    train(recipes[1], progress=Notes(each=StopAt(9)))
    train(recipes[1], resume=True)
    whole, parts = (load_file(tmp_path / name / "run/model/model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], weight) for name, weight in parts.items())
    assert losses(tmp_path / "whole/run") == losses(tmp_path / "parts/run")


def test_pairs_are_read_as_their_tokenizer_reads_them(tmp_path):
    body = save_body("bert", tmp_path / "body")
    (tmp_path / "data.tsv").write_text("the cat\ta dog sat\tplace\nthe hat\tcat\tanimal\n")
    recipe = fine_tuning(tmp_path, "classify", str(tmp_path / "data.tsv"), init_from=str(body))
    batch = datasets_of(recipe, tmp_path / "same").valid[0]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(body / "tokenizer.json"), pad_token="[PAD]")
    expected = tokenizer(
        ["the hat", "the cat"], ["cat", "a dog sat"], padding=True, return_tensors="pt", return_token_type_ids=True
    )
    assert torch.equal(batch.tokens, expected["input_ids"])
    assert torch.equal(batch.token_types, expected["token_type_ids"])
    assert torch.equal(batch.attention_mask, expected["attention_mask"].bool())
    assert batch.targets.tolist() == [[0], [1]]


def test_words_have_their_label_at_their_first_token(tmp_path):
    """As transformers' examples do it, where every byte is a token."""
    data = write_lines(tmp_path / "data.jsonl", [{"words": ["New", "York", "is"], "labels": [2, 10, 0]}])
    made = {"data": {"train": data, "valid": data, "tokenizer": "bytes", "sequence_length": 32}}
    recipe = fine_tuning(tmp_path, "classify", data, classify={"of": "token"}, **made)
    datasets = datasets_of(recipe, tmp_path / "same")
    assert datasets.labels == ("0", "2", "10")
    batch = datasets.train[0]
    assert datasets.tokenizer.decode(batch.tokens[0].tolist()) == "New York is"
    counted = batch.weights[0].nonzero().flatten().tolist()
    assert batch.targets[0, counted].tolist() == [1, 2, 0]
    assert [len(datasets.tokenizer.decode(batch.tokens[0, :i].tolist())) for i in counted] == [0, 3, 8]


def test_the_metrics_are_their_formulas(tmp_path):
    data = texts(tmp_path / "data.jsonl")
    recipe = fine_tuning(tmp_path, "classify", data, init_from=str(save_body("bert", tmp_path / "body")))
    train(recipe)
    found = phasor.evaluate(tmp_path / "run", device="cpu")
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    model = phasor.load(tmp_path / "run")
    with torch.no_grad():
        scores = torch.cat([model(torch.tensor([model.tokenizer.encode(row["text"]).ids])) for row in rows])
    predicted, true = scores.argmax(-1).tolist(), [LABELS.index(row["label"]) for row in rows]
    each = []
    for label in range(3):
        hits = sum(p == t == label for p, t in zip(predicted, true, strict=True))
        precision, recall = hits / max(predicted.count(label), 1), hits / max(true.count(label), 1)
        each.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    loss = torch.nn.functional.cross_entropy(scores.double(), torch.tensor(true))
    assert found["accuracy"] == sum(p == t for p, t in zip(predicted, true, strict=True)) / len(rows)
    assert found["macro_f1"] == pytest.approx(sum(each) / 3, abs=1e-12)
    assert found["loss"] == pytest.approx(float(loss), abs=1e-5)  # of float32 scores


def test_a_classifier_keeps_its_head(tmp_path):
    """A second fine-tuning begins with the head of the first, though its data have fewer labels."""
    data = texts(tmp_path / "data.jsonl")
    train(fine_tuning(tmp_path, "classify", data, init_from=str(save_body("llama", tmp_path / "body"))))
    some = write_lines(tmp_path / "some.jsonl", [{"text": text, "label": "place"} for text in sentences(9)])
    recipe = fine_tuning(tmp_path / "next", "classify", some, init_from=str(tmp_path / "run"))
    model = build_model(recipe, datasets_of(recipe, tmp_path / "same"))
    assert model.config.head.labels == LABELS
    assert torch.equal(model.head.score.weight, phasor.load(tmp_path / "run").head.score.weight)
    renamed = recipe.replace(classify=recipe.classify.replace(labels=("place", "other")))
    fresh = build_model(renamed, datasets_of(renamed, tmp_path / "renamed"))
    assert fresh.head.score.weight.shape == (2, 24)


MISTAKES = {
    '{"text": "the cat"}': "line 2: there is no 'label', only: text",
    '{"text": "the cat", "label": null}': "line 2: 'label' is null",
    '{"text": "", "label": 1}': "line 2: 'text' is '', and not a text",
    '{"text": "the cat", "label": 1.5}': "line 2: 'label' is 1.5, and a label is a text or an integer",
    '{"text": "the cat", "label": true}': "a label is a text or an integer",
    '["the cat"]': "line 2: this is ['the cat'], and not a JSON object",
    '{"text": "the cat", "label"': "line 2: this is not JSON",
    '{"text": "the cat", "text_pair": 3, "label": 1}': "line 2: 'text_pair' is 3, and not a text",
    json.dumps({"text": "cat " * 40, "label": 1}): "line 2: a text has 42 tokens, and data.sequence_length is 32",
}
WORD_MISTAKES = {
    '{"words": ["the"], "labels": [1, 2]}': "line 2: there are 1 words and 2 labels",
    '{"words": [], "labels": []}': "line 2: 'words' is [], and not a list",
    '{"words": ["the", 3], "labels": [1, 2]}': "line 2: 3 is one of 'words', and not a word",
    '{"words": ["the"], "labels": [null]}': "line 2: 'labels' is None, and a label is a text or an integer",
}


@pytest.mark.parametrize("line", [*MISTAKES, *WORD_MISTAKES])
def test_bad_data_name_file_and_line(line, tmp_path):
    first = '{"text": "a dog", "label": 1, "words": ["a"], "labels": [1]}\n'
    (tmp_path / "data.jsonl").write_text(first + line + "\n")
    of = {"of": "token" if line in WORD_MISTAKES else "sequence"}
    body = save_body("bert", tmp_path / "body")
    recipe = fine_tuning(tmp_path, "classify", str(tmp_path / "data.jsonl"), init_from=str(body), classify=of)
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: ") as error:
        train(recipe)
    assert (MISTAKES | WORD_MISTAKES)[line] in str(error.value)


@pytest.mark.sample(1)
@torch.no_grad()
@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_losses_of_an_encoder_decoder_are_those_of_transformers(name, tmp_path):
    """Its class for labels of texts, which both of its sides read."""
    torch.manual_seed(0)
    sizes = T5_SIZES if name == "T5" else BART_SIZES
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0, "bos_token_id": 1}
    config = getattr(transformers, f"{name}Config")(**sizes, **ids)
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path / "body")
    save_tokenizer(tmp_path / "body")
    data = texts(tmp_path / "data.jsonl")
    recipe = fine_tuning(tmp_path, "classify", data, init_from=str(tmp_path / "body"))
    datasets = datasets_of(recipe, tmp_path / "same")
    phasor.save(build_model(recipe, datasets), tmp_path / "start", format="hf")
    theirs = getattr(transformers, f"{name}ForSequenceClassification").from_pretrained(tmp_path / "start")
    assert theirs.config.id2label == dict(enumerate(LABELS))
    for part in theirs.modules():  # before the scores, where its configuration has no field for it
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    with torch.enable_grad():
        expected = their_losses(theirs, datasets.train, inputs, tmp_path / "theirs")
        train(recipe)
    assert np.abs(np.array(losses(tmp_path / "run")) - expected).max() < CLOSE
    phasor.convert(tmp_path / "run", tmp_path / "trained", check=True)
    metrics = phasor.evaluate(tmp_path / "run", device="cpu")
    assert metrics["texts"] > 0


@pytest.mark.parametrize(
    ("task", "of", "said"),
    [
        ("classify", {"classify": {"of": "token"}}, "classify.of 'token' trains an encoder or a decoder, and this"),
        ("embed", {}, "the task 'embed' trains an encoder or a decoder, and this model is an encoder-decoder"),
    ],
)
def test_what_an_encoder_decoder_does_not_learn_is_said_in_a_sentence(task, of, said, tmp_path):
    phasor.save(phasor.Transformer(phasor.preset("t5", dim=8, num_heads=1, num_layers=1)), tmp_path / "t5")
    for start in ({"init_from": str(tmp_path / "t5")}, {"init_from": None, "model": {"preset": "t5"}}):
        with pytest.raises(ValueError, match=said):
            train(fine_tuning(tmp_path, task, str(tmp_path / "data.jsonl"), **start, **of))


def test_a_label_that_the_model_does_not_have_is_named(tmp_path):
    data = write_lines(tmp_path / "data.jsonl", [{"text": "a cat", "label": "place"}, {"text": "a", "label": "odd"}])
    body = save_body("bert", tmp_path / "body")
    recipe = fine_tuning(tmp_path, "classify", data, init_from=str(body), classify={"labels": LABELS})
    with pytest.raises(ValueError, match=r"data.jsonl, line 2: the label 'odd' is not one of the model's: animal"):
        train(recipe)

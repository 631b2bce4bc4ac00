"""Embeddings: the contrastive loss by its formula in float64, sentence-transformers folders, metrics, resuming."""

import json
import math

import pytest
import torch
import transformers
from fine_tuning import datasets_of, fine_tuning, losses, save_body, sentences, write_lines
from safetensors.torch import load_file
from training_runs import Notes, StopAt

import phasor
from phasor.training.build import build_model
from phasor.training.loop import train
from phasor.training.objectives import objective_of


def similar(file, negatives=True):
    rows = [{"anchor": a, "positive": p} for a, p in zip(sentences(40), sentences(40, seed=1), strict=True)]
    for row, negative in zip(rows[::2], sentences(20, seed=2), strict=True):
        row |= {"negative": negative} if negatives else {}
    return write_lines(file, rows)


def formula(vectors, others, own, scale):
    """The mean of -log softmax(scale * cosines)[own], in Python's floats."""

    def cosine(x, y):
        return sum(a * b for a, b in zip(x, y, strict=True)) / math.dist(x, [0] * len(x)) / math.dist(y, [0] * len(y))

    total = 0.0
    for vector, place in zip(vectors, own, strict=True):
        scores = [scale * cosine(vector, other) for other in others]
        total += math.log(sum(map(math.exp, scores))) - scores[place]
    return total / len(vectors)


@pytest.mark.parametrize("negatives", [True, False])
@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_the_loss_is_that_of_multiple_negatives_ranking(name, negatives, tmp_path):
    """The vectors are those of transformers: a mean over the tokens of an encoder, the last token of a decoder."""
    body = save_body(name, tmp_path / "body")
    data = similar(tmp_path / "data.jsonl", negatives)
    recipe = fine_tuning(tmp_path, "embed", data, init_from=str(body), embed={"scale": 5.0})
    datasets = datasets_of(recipe, tmp_path / "same")
    model, batch = build_model(recipe, datasets).double(), datasets.train[1]
    found = objective_of(recipe).loss(model, batch)
    theirs = transformers.AutoModel.from_pretrained(body, dtype=torch.float64).eval()

    def embed(tokens, mask):
        with torch.no_grad():
            hidden = theirs(tokens[mask][None], attention_mask=torch.ones(1, int(mask.sum()))).last_hidden_state[0]
        return (hidden.mean(0) if name == "bert" else hidden[-1]).tolist()

    anchors = [embed(row, mask) for row, mask in zip(batch.tokens, batch.attention_mask, strict=True)]
    others, own = [], []
    for rows, masks in zip(batch.candidates, batch.candidate_mask, strict=True):
        own.append(len(others))
        others += [embed(row, mask) for row, mask in zip(rows, masks, strict=True) if mask.any()]
    assert (len(others) > len(anchors)) == negatives
    # Rotary angles and their mask are float32 in transformers.
    assert float(found) == pytest.approx(formula(anchors, others, own, 5.0), abs=1e-12 if name == "bert" else 1e-5)


def test_a_row_that_only_repeats_another_does_not_count(tmp_path):
    """As of several processes, whose shares of a batch have as many rows."""
    body = save_body("bert", tmp_path / "body")
    recipe = fine_tuning(tmp_path, "embed", similar(tmp_path / "data.jsonl"), init_from=str(body))
    datasets = datasets_of(recipe, tmp_path / "same")
    model, batch = build_model(recipe, datasets).double(), datasets.train[0]
    rows = len(batch.tokens)
    whole = objective_of(recipe).loss(model, batch)
    padded = batch.map(lambda x: torch.cat([x, x[:1]]))
    padded.weights[rows:] = 0.0
    assert float(objective_of(recipe).loss(model, padded)) == pytest.approx(float(whole), abs=1e-12)


def test_a_run_that_is_stopped_ends_with_the_same_bits(tmp_path):
    body, data = save_body("bert", tmp_path / "body"), similar(tmp_path / "data.jsonl")
    recipes = [fine_tuning(tmp_path / name, "embed", data, init_from=str(body)) for name in ("whole", "parts")]
    train(recipes[0])
    train(recipes[1], progress=Notes(each=StopAt(9)))
    train(recipes[1], resume=True)
    whole, parts = (load_file(tmp_path / name / "run/model/model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], weight) for name, weight in parts.items())
    assert losses(tmp_path / "whole/run")[-1] < losses(tmp_path / "whole/run")[0]


def test_the_metrics_are_their_formulas(tmp_path):
    data = similar(tmp_path / "data.jsonl")
    train(fine_tuning(tmp_path, "embed", data, init_from=str(save_body("bert", tmp_path / "body"))))
    found = phasor.evaluate(tmp_path / "run", device="cpu")
    model = phasor.load(tmp_path / "run")
    assert model.config.head.pooler == "mean"
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    texts = list(dict.fromkeys(row[name] for row in rows for name in ("positive", "negative") if name in row))

    def embed(text):
        with torch.no_grad():
            return model(torch.tensor([model.tokenizer.encode(text).ids]))[0].double()

    table = torch.nn.functional.normalize(torch.stack([embed(text) for text in texts]), dim=-1)
    ranks = []
    for row in rows:
        order = (table @ embed(row["anchor"])).argsort(descending=True).tolist()
        ranks.append(1 + order.index(texts.index(row["positive"])))
    assert found["texts"] == len(texts)
    assert found["accuracy"] == sum(rank == 1 for rank in ranks) / len(ranks)
    assert found["mrr_at_10"] == pytest.approx(sum(1 / rank for rank in ranks if rank <= 10) / len(ranks), abs=1e-12)


def test_bad_data_name_file_and_line(tmp_path):
    for line, sentence in {
        '{"anchor": "a"}': "there is no 'positive', only: anchor",
        '{"anchor": "a", "positive": " "}': "'positive' is ' ', and not a text",
        '{"anchor": "a", "positive": "b", "negative": ["c"]}': "'negative' is",
    }.items():
        (tmp_path / "data.jsonl").write_text('{"anchor": "a", "positive": "b"}\n' + line + "\n")
        recipe = fine_tuning(tmp_path, "embed", str(tmp_path / "data.jsonl"))
        with pytest.raises(ValueError, match=f"data.jsonl, line 2: {sentence}"):
            train(recipe.replace(model={"dim": 24, "num_heads": 3, "num_layers": 1}))

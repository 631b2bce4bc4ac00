"""Published results set beside ours: their claims, and a whole comparison at a tiny size."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from published_results import PUBLISHED
from reproduce import check_claims, format_figure, reproduce, times_name

from phasor.evaluation.compare import settings
from phasor.evaluation.compare.schemes import ComparedScheme
from phasor.training import TrainingProgress

OPTIONS = {"length": 8, "steps": 2, "rows": 12, "tokenizer": "bytes", "device": "cpu"}
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "by", "his", "old", "red", "house")


@pytest.fixture
def data(tmp_path, monkeypatch):
    small = {"dim": 16, "hidden_dim": 16, "num_layers": 1, "num_heads": 2}
    tiny = replace(settings.SIZES["small"], model=small, task_model=small, batch_tokens=64, task_rows=16)
    monkeypatch.setitem(settings.SIZES, "small", tiny)
    draw = random.Random(0)
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": " ".join(draw.choices(WORDS, k=60))}) for _ in range(60)))
    return str(file)


class Silent(TrainingProgress):
    def on_message(self, message):
        pass


def test_figures_and_lengths_are_named():
    assert [format_figure(x) for x in (5158.0, 2.774, None)] == ["5,158", "2.77", "not finite"]
    assert [times_name(x) for x in (1, 4)] == ["the trained length", "4 times it"]


def test_what_a_publication_says_cannot_be_chosen(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'yarn'"):
        reproduce("yarm", tmp_path / "out")
    with pytest.raises(ValueError, match="says what is compared: leave --schemes out"):
        reproduce("alibi", tmp_path / "out", schemes="none")
    with pytest.raises(ValueError, match="says what is compared: leave --question out"):
        reproduce("alibi", tmp_path / "out", question="base")
    with pytest.raises(ValueError, match="says what is compared: leave --task out"):
        reproduce("yarn", tmp_path / "out", task="copy")
    assert not (tmp_path / "out").exists()


def test_claims_are_derived_from_the_figures_and_checked():
    yarn = PUBLISHED["yarn"]
    claims = {tuple(claim) for claim in yarn.claims()}
    assert ("by parts", "YaRN", 1) in claims
    assert ("YaRN", "by parts", 16) in claims
    assert ("PI", "NTK", 16) in claims  # 3.57 and 8.49
    assert len(claims) == 24
    pairs = [
        {"first": "tuned yarn", "second": "tuned ntk", "times": 16, "shown": True},
        {"first": "tuned ntk", "second": "tuned linear", "times": 16, "shown": True},
        {"first": "tuned yarn", "second": "tuned linear", "times": 16, "shown": False},
    ]
    seen = {(c["better"], c["worse"], c["times"]): c["seen"] for c in check_claims(yarn, pairs)}
    assert seen["YaRN", "NTK", 16] == "seen here"
    assert seen["PI", "NTK", 16] == "the opposite was seen here"
    assert seen["YaRN", "PI", 16] == "not shown here"
    assert [tuple(claim) for claim in PUBLISHED["streaming"].claims()] == [("four sinks", "window alone", 16)]
    for published in PUBLISHED.values():
        assert {name for claim in published.claims() for name in claim[:2]} <= set(published.labels)
        assert all(isinstance(scheme, ComparedScheme) for scheme in published.schemes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yarn", "streaming"])
def test_published_results_are_set_beside_ours(tmp_path, name, data):
    result = reproduce(name, tmp_path / "out", data=data, progress=Silent(), **OPTIONS)
    assert len(result["claims"]) == len(PUBLISHED[name].claims())
    assert [row[0] for row in result["ours"]["table"]] == list(PUBLISHED[name].labels)
    assert "Published: " in (tmp_path / "out" / "compare.html").read_text()

"""Retrieval: prompts of exact token counts, what counts as found, reports, and what is refused."""

import json
import random
import re
import string
from itertools import pairwise

import numpy as np
import pytest
import torch
from commands import CommandRunner
from tokenizers import Tokenizer, decoders, models, normalizers, processors

import phasor
from phasor.config.recipe import DataConfig
from phasor.data import recall
from phasor.data.tokenizers import byte_tokenizer, train_tokenizer
from phasor.evaluation import evaluate_retrieval
from phasor.evaluation.intervals import binomial_interval
from phasor.evaluation.retrieval import heat_map
from phasor.evaluation.retrieval.prompts import PromptBuilder
from phasor.evaluation.retrieval.tasks import TASKS

TEXT = " ".join(f"Line {i} of the harbor log. The tide came in; it went out at {i % 12}." for i in range(400))


def word_tokenizer() -> Tokenizer:
    """Like those of SentencePiece: a space is part of the word behind it, and one is put before the text."""
    merges = [("▁", "T"), ("▁T", "h"), ("▁Th", "e"), ("▁", "i"), ("▁i", "s")]
    pieces = ["<unk>", "<s>", "▁", *string.printable, *("".join(pair) for pair in merges)]
    names = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", names["<s>"])])
    return tokenizer


TOKENIZERS = {
    "bytes": byte_tokenizer,
    "bpe": lambda: train_tokenizer([TEXT], DataConfig(tokenizer="bpe", vocab_size=330)),
    "words": word_tokenizer,
}


def make_model(tokenizer, **changes):
    torch.manual_seed(0)
    sizes = {"dim": 16, "num_heads": 2, "num_layers": 1, "max_length": 64, "vocab_size": tokenizer.get_vocab_size()}
    model = phasor.Transformer(phasor.preset("llama-2", **sizes | changes)).eval()
    model.tokenizer = tokenizer
    return model


@pytest.fixture(scope="module")
def small():
    return make_model(byte_tokenizer())


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_prompts_have_exactly_the_tokens_asked_for(name, tokenizer):
    """At any depth and length, with the question and the answer at the end and all needles whole."""
    model = make_model(TOKENIZERS[tokenizer]())
    builder, task = PromptBuilder(model), TASKS[name]
    start = len(builder.first)
    for length, depth in ((1200, 0.0), (1201, 0.3), (1500, 0.5), (2048, 1.0)):
        sample = task.draw(random.Random(7))
        pieces = builder.encode(task, length, depth, random.Random(7))
        prompt, answer = builder.join(task, pieces, random.Random(8))
        assert len(prompt) + len(answer) == length
        assert prompt[:start].tolist() == builder.first.tolist()
        text = model.tokenizer.decode(np.concatenate([prompt, answer]).tolist())
        assert text.endswith(sample.question + sample.answer)
        assert text.count(sample.answer.strip()) >= 1
        for needle in sample.needles:
            assert text.count(needle) == 1
        first, haystack = text.index(sample.needles[0]), len(text) - len(sample.question + sample.answer)
        assert abs(first / haystack - depth) < 0.3  # by characters, where other needles count too
        if name == "variables":
            places = [text.index(needle) for needle in sample.needles]
            assert places == sorted(places)


def test_needles_of_a_text_go_behind_sentences(tmp_path):
    """At the depth, or a little before it, where a sentence ends; the haystack is the file's tokens in order."""
    (tmp_path / "log.txt").write_text(TEXT)
    model = make_model(byte_tokenizer())
    builder = PromptBuilder(model, tmp_path / "log.txt", 2000)
    for depth in (0.2, 0.5, 0.77):
        pieces = builder.encode(TASKS["passkey"], 2000, depth, random.Random(1))
        prompt, _ = builder.join(TASKS["passkey"], pieces, random.Random(2))
        before, needle, after = model.tokenizer.decode(prompt.tolist()).partition(" The pass key is")
        assert needle
        assert before.endswith(".")
        hidden = before.removeprefix(TASKS["passkey"].draw(random.Random(1)).intro)
        share = len(hidden) / pieces.haystack_tokens
        assert depth - 0.05 <= share <= depth
        rest = after[after.index("is the pass key.") + len("is the pass key.") : after.index(" What is the pass key?")]
        assert hidden + rest in TEXT


def test_trials_are_the_same_for_every_extension(small, monkeypatch):
    """And another seed makes others."""
    seen = []
    join = PromptBuilder.join
    monkeypatch.setattr(PromptBuilder, "join", lambda *args: seen.append(join(*args)) or seen[-1])
    evaluate_retrieval(small, "recall", lengths="64", extensions="none,linear", depths=2, trials=2)
    evaluate_retrieval(small, "recall", lengths="64", extensions="none", depths=2, trials=2, seed=1)
    rows = [np.concatenate(pair).tolist() for pair in seen]
    assert rows[:4] == rows[4:8]
    assert not any(row in rows[:8] for row in rows[8:])
    assert all(len(row) == 64 for row in rows)


def trials_of(builder, cell, count):
    """The prompts and answers of a cell, by the seed 0."""
    task = TASKS[cell["task"]]
    for trial in range(count):
        key = f"0 {task.name} {cell['length']} {cell['depth']} {trial}"
        pieces = builder.encode(task, cell["length"], cell["depth"], random.Random(f"{key} text"))
        yield builder.join(task, pieces, random.Random(f"{key} haystack"))


def test_log_probabilities_are_those_of_a_forward():
    model = make_model(byte_tokenizer()).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0 if weight.dim() == 2 else 1.0)
    result = evaluate_retrieval(model, "recall,passkey", lengths="400", depths=2, trials=3, batch_tokens=800)
    for cell in result["cells"]:
        total = 0.0
        for prompt, answer in trials_of(PromptBuilder(model), cell, 3):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :].log_softmax(-1)
            total += float(logits[range(len(answer)), answer].sum())
        assert cell["log_probability"] == pytest.approx(total / 3, abs=1e-9)


def test_found_is_where_the_likeliest_token_is_the_answer():
    """A model that has one digit for each letter finds a pair where it happens to be that digit, and no other."""
    model = make_model(byte_tokenizer())
    digits = dict(zip(recall.KEYS, recall.VALUES * 3, strict=False))
    logits = torch.zeros(261, 261)
    for key, value in digits.items():
        logits[5 + ord(key), 5 + ord(value)] = 50.0
    model.forward = lambda tokens, **arguments: tokens[..., None].float()
    model.head.forward = lambda hidden, table: logits[hidden[..., 0].long()]
    result = evaluate_retrieval(model, ["recall"], lengths=[64], depths=2, trials=30)
    for cell in result["cells"]:
        texts = [
            model.tokenizer.decode([*prompt, *answer]) for prompt, answer in trials_of(PromptBuilder(model), cell, 30)
        ]
        correct = sum(text[-1] == digits[text[-2]] for text in texts)
        assert 0 < correct < 15
        assert (cell["correct"], cell["exact_match"]) == (correct, binomial_interval(correct, 30).to_dict())
    total = sum(cell["correct"] for cell in result["cells"])
    assert result["all_depths"][0]["exact_match"] == binomial_interval(total, 60).to_dict()


def test_report(small, tmp_path):
    sizes = {"lengths": "512,600", "depths": 2, "trials": 2}
    named = {"extensions": "none,yarn", "command": "phasor evaluate x", "out": tmp_path / "report"}
    result = evaluate_retrieval(small, "recall,passkey", **sizes, **named)
    assert json.loads((tmp_path / "report" / "retrieval.json").read_text()) == json.loads(json.dumps(result))
    html = (tmp_path / "report" / "retrieval.html").read_text()
    assert "phasor evaluate x" in html
    assert "yarn (factor 9.375)" in html
    assert not re.search(r"<script |<link|@import|url\(http|src=", html)
    assert (tmp_path / "report" / "retrieval.png").read_bytes().startswith(b"\x89PNG")
    assert result["notes"][0].startswith("a cell has 2 trials: its 95 % interval is up to 81 points wide")


def test_titles_of_narrow_maps_do_not_run_into_each_other(small, monkeypatch):
    figures = []
    monkeypatch.setattr(heat_map, "to_png", figures.append)
    heat_map.chart(evaluate_retrieval(small, "recall", lengths="512", extensions="linear,yarn,longrope", trials=1))
    figures[0].figure.canvas.draw()
    boxes = [axes._left_title.get_window_extent() for axes in figures[0].figure.axes[:3]]
    assert all(before.x1 < after.x0 for before, after in pairwise(boxes))


def test_many_trials_need_no_note(small):
    assert evaluate_retrieval(small, "recall", lengths="48", depths=1, trials=60)["notes"] == []


def test_command(small, tmp_path, run_phasor):
    phasor.save(small, tmp_path / "model")
    command = ["evaluate", str(tmp_path / "model"), "--retrieval", "recall", "--lengths", "48,64", "--device", "cpu"]
    out = run_phasor(*command, "--extension", "none,ntk", "--depths", "2", "--trials", "3")
    assert "recall, ntk" in out
    assert out.startswith("exact match (mean log-probability of the answer, in nats), by depth and length\n")
    assert "exactly the tokens of the length" in out
    assert "its 95 % interval is up to" in out
    result = json.loads(run_phasor(*command, "--depths", "2", "--trials", "3", "--seed", "5", "--json"))
    assert result["provenance"]["seed"] == 5
    assert len(result["cells"]) == 4
    command[5] = "128"
    out = run_phasor(*command, "--extension", "ntk", "--trials", "1", "--out", str(tmp_path / "report"))
    assert out.index("recall, own") < out.index("recall, ntk (factor 2)")
    assert f"report   {tmp_path / 'report' / 'retrieval.html'}" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--retrieval", "recall"], "--retrieval needs --lengths"),
        (["--retrieval", "recal", "--lengths", "64"], "unknown retrieval task 'recal' (did you mean 'recall'?)"),
        (
            ["--retrieval", "passkey", "--lengths", "64"],
            "a prompt of 64 tokens for 'passkey' has no room for the haystack",
        ),
        (
            ["--retrieval", "passkey", "--lengths", "300"],
            "and its needle has 59 tokens: a haystack is at least as long",
        ),
        (["--retrieval", "recall", "--lengths", "64", "--trials", "0"], "trials must be an integer of at least 1"),
        (["--retrieval", "recall", "--lengths", "64", "--depths", "0"], "depths must be an integer of at least 1"),
        (["--retrieval", "recall", "--lengths", "64", "--extension", "yran"], "unknown extension 'yran'"),
        (["--retrieval", "recall", "--lengths", "64", "--haystack", "absent.txt"], "absent.txt does not exist"),
        (["--retrieval", "recall", "--lengths", "64", "--protocol", "last"], "--protocol does not go with --retrieval"),
        (["--lengths", "64", "--depths", "3"], "--depths does not go with --lengths"),
        (["--depths", "3"], "--depths is for --retrieval"),
        (["--retrieval", "recall", "--lengths", "64", "--limit", "3"], "--limit does not go with --retrieval"),
        (["--retrieval", "recall", "--lengths", "64", "--stream", "x"], "are two evaluations"),
    ],
    ids=str,
)
def test_bad_input(small, tmp_path, run_phasor, options, said):
    phasor.save(small, tmp_path / "model")
    assert said in run_phasor.expect_error("evaluate", str(tmp_path / "model"), *options, "--device", "cpu")


def test_what_does_not_fit_is_refused(small, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(ValueError, match=r"short\.txt has 10 tokens, and a prompt of 64 tokens for 'recall' needs 42"):
        evaluate_retrieval(small, "recall", lengths="64", haystack=tmp_path / "short.txt", out=tmp_path / "report")
    np.save(tmp_path / "ids.npy", np.full(500, 400))
    with pytest.raises(ValueError, match="another vocabulary"):
        evaluate_retrieval(small, "recall", lengths="64", haystack=tmp_path / "ids.npy", out=tmp_path / "report")
    learned = make_model(byte_tokenizer(), position={"kind": "learned"})
    with pytest.raises(ValueError, match="--lengths 128 is beyond this model's table of 64 positions"):
        evaluate_retrieval(learned, "recall", lengths="64,128", out=tmp_path / "report")
    with pytest.raises(ValueError, match="an extension needs rotary positions"):
        evaluate_retrieval(learned, "recall", lengths="64", extensions="yarn", out=tmp_path / "report")
    bare = make_model(byte_tokenizer())
    bare.tokenizer = None
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        evaluate_retrieval(bare, "recall", lengths="64", out=tmp_path / "report")
    assert not (tmp_path / "report").exists()


@pytest.mark.slow
def test_a_model_trained_for_recall_finds_everything_within_its_length(tmp_path):
    """The recipe `recall`: all of the map is 100 % within the trained length, and YaRN carries it further than none."""
    from phasor import recipes
    from phasor.config.recipe import Recipe
    from phasor.training import train

    recipe = Recipe.from_file(recipes.find("recall"))
    train(recipe.replace(out=str(tmp_path / "run"), train=recipe.train.replace(device="cpu")))
    result = evaluate_retrieval(
        tmp_path / "run", "recall", lengths="48,64,96,128,512", extensions="none,yarn", trials=40, device="cpu"
    )
    within = [cell for cell in result["cells"] if cell["length"] <= 128 and cell["extension"] == "none"]
    assert all(cell["correct"] == cell["trials"] for cell in within)
    beyond = {row["extension"]: row["exact_match"] for row in result["all_depths"] if row["length"] == 512}
    assert beyond["yarn"]["low"] > beyond["none"]["high"]

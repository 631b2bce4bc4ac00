"""The loss by length against loops in float64 that follow the definitions, and against models of transformers."""

import json
import math
import random
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import CommandRunner

import phasor
from phasor.cli import main
from phasor.data.tokenizers import byte_tokenizer
from phasor.evaluation import evaluate_lengths
from phasor.evaluation.intervals import paired_interval
from phasor.evaluation.length_settings import parse_lengths
from phasor.evaluation.lengths_report import describe_orders, loss_headline, order_lines
from phasor.evaluation.report import Curve, chinese, draw_curves
from phasor.evaluation.rows import cut_rows
from phasor.evaluation.variants import SINK_TOKENS, SINKS, variant_names

TRAINED, VOCABULARY = 16, 40
LARGEST, ROWS = 24, 2  # of the tests of protocols
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": TRAINED,
    "rope_theta": 100.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Sums of float32 rounding in a model of two layers, relative to losses of order 4.
CLOSE = 2e-6


@torch.no_grad()
def enlarge(model, factor):
    for weight in model.parameters():
        weight.mul_(factor if weight.dim() == 2 else 1.0)


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


@pytest.fixture(scope="module")
def model():
    """A small model in float64 whose losses depend on positions, since its weights are large."""
    torch.manual_seed(0)
    config = phasor.preset(
        "llama-2", dim=16, num_heads=2, num_layers=2, vocab_size=VOCABULARY, max_length=TRAINED, hidden_dim=24
    )
    made = phasor.Transformer(config).double()
    enlarge(made, 4.0)
    made.special = phasor.SpecialTokens(bos=3)
    return made


@pytest.fixture
def data(tmp_path):
    """157 tokens: three rows of 48, and some that are left over."""
    np.save(tmp_path / "ids.npy", tokens())
    return tmp_path / "ids.npy"


def tokens(count=157):
    return np.random.default_rng(1).integers(4, VOCABULARY, count)


def row_of(result, extension, length):
    return next(row for row in result["rows"] if (row["extension"], row["length"]) == (extension, length))


def context_start(protocol, target, length, stride=7):
    """The first token of what is read before a target, by the words of the protocols' definitions."""
    if protocol == "last":
        return math.ceil(target / LARGEST) * LARGEST - length
    if protocol == "truncated":
        return (target - 1) // length * length
    if target <= length:
        return 0
    end = length + math.ceil((target - length) / stride) * stride
    return min(end, ROWS * LARGEST) - length


@torch.no_grad()
def naive_loss(model, target, start):
    """The loss of one token by a forward pass over what is before it, alone."""
    ids = tokens()
    read = torch.from_numpy(ids[start:target].copy())
    read[0] = 3
    return -float(model(read[None])[0, -1].log_softmax(-1)[ids[target]])


@pytest.mark.parametrize("protocol", ["last", "sliding", "truncated"])
def test_every_protocol_is_what_it_says(model, data, protocol):
    options = {"targets": 5, "stride": 7, "protocol": protocol, "limit": ROWS}
    result = evaluate_lengths(model, data, lengths=[8, 14, LARGEST], extensions=["own"], **options)
    assert (result["row_count"], result["unit"]) == (ROWS, "row")
    assert result["targets"] == ROWS * (5 if protocol == "last" else LARGEST)
    for length in (8, 14, LARGEST):
        expected = []
        for row in range(ROWS):
            places = range(LARGEST * row + (LARGEST - 4 if protocol == "last" else 1), LARGEST * (row + 1) + 1)
            each = [naive_loss(model, t, context_start(protocol, t, length)) for t in places]
            expected.append(sum(each) / len(each))
        interval = paired_interval(expected)
        found = row_of(result, "own", length)["loss"]
        for end in ("estimate", "low", "high"):
            assert found[end] == pytest.approx(getattr(interval, end), rel=1e-12)


def test_the_curve_is_the_loss_at_each_position(model, data):
    result = evaluate_lengths(model, data, lengths=[12, 48], extensions=["own"])
    curve = result["positions"]
    assert (curve["length"], curve["edges"]) == (48, list(range(49)))
    for position in (0, 7, 47):
        each = [naive_loss(model, 48 * row + position + 1, 48 * row) for row in range(3)]
        assert curve["loss"]["own"][position] == pytest.approx(sum(each) / 3, rel=1e-12)


def test_the_batch_does_not_matter(model, data):
    one, many = (
        evaluate_lengths(model, data, lengths=[12, 48], protocol="sliding", stride=5, batch_tokens=size)
        for size in (1, 10_000)
    )
    for a, b in zip(one["rows"], many["rows"], strict=True):
        assert a["loss"]["estimate"] == pytest.approx(b["loss"]["estimate"], rel=1e-12)


SCALINGS = {
    "none": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": TRAINED}},
    "ntk": {"rope_theta": 100.0 * 3.0 ** (16 / 14)},  # of a head of 16: base * factor^(d / (d - 2))
    "window": {"sliding_window": TRAINED},
}


def theirs(weights, name):
    kind = "Mistral" if name == "window" else "Llama"
    fields = SIZES | {"num_key_value_heads": 2} | SCALINGS[name]
    config = getattr(transformers, f"{kind}Config")(**fields, attn_implementation="eager")
    made = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    made.load_state_dict(weights)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    enlarge(made, 6.0)
    place = tmp_path_factory.mktemp("llama")
    made.save_pretrained(place)
    return place


def test_losses_are_those_of_transformers(folder, data):
    """The same rope_scaling, or a sliding window, on the same tokens."""
    result = evaluate_lengths(
        folder, data, lengths=[16, 48], extensions=["none", "linear", "ntk", "yarn"], device="cpu", targets=5
    )
    weights = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    losses = {}
    for name in SCALINGS:
        other = theirs(weights, name)
        for length in (16, 48):
            rows = [torch.from_numpy(tokens()[48 * (row + 1) - length : 48 * (row + 1) + 1]) for row in range(3)]
            ids = torch.stack(rows)
            with torch.no_grad():
                logits = other(ids[:, :-1]).logits[:, -5:].flatten(0, 1)
            each = torch.nn.functional.cross_entropy(logits, ids[:, -5:].flatten(), reduction="none")
            losses[name, length] = each.view(3, 5).mean(1).double()
            found = row_of(result, name, length)["loss"]["estimate"]
            assert found == pytest.approx(float(losses[name, length].mean()), rel=CLOSE), (name, length)
    assert row_of(result, "yarn", 16)["factor"] == row_of(result, "yarn", 48)["factor"] == 3.0
    found = row_of(result, "yarn", 48)["difference"]
    expected = paired_interval((losses["yarn", 48] - losses["window", 48]).tolist())
    assert found["estimate"] == pytest.approx(expected.estimate, abs=1e-5)
    assert found["high"] == pytest.approx(expected.high, abs=1e-4)
    means = {name: float(losses[name, 48].mean()) for name in SCALINGS}
    assert result["orders"][-1]["second"] == max(means, key=means.get)
    for pair in result["orders"]:
        excludes = pair["difference"]["low"] > 0 or pair["difference"]["high"] < 0
        assert pair["shown"] == excludes == (not pair["statement"].endswith("not shown"))


def test_a_factor_per_length_leaves_short_contexts_as_they_are(model, data):
    fixed, own = (
        evaluate_lengths(model, data, lengths=[8, 16, 48], extensions=["none", "yarn"], factor=factor)
        for factor in ("largest", "per-length")
    )
    assert [row_of(own, "yarn", length)["factor"] for length in (8, 16, 48)] == [1.0, 1.0, 3.0]
    for length in (8, 16):
        assert row_of(own, "yarn", length)["loss"] == row_of(own, "none", length)["loss"]
        assert row_of(fixed, "yarn", length)["loss"] != row_of(own, "none", length)["loss"]
    assert row_of(own, "yarn", 48) == row_of(fixed, "yarn", 48)
    assert any("at 8, 16 the factor would be 1 or less" in note for note in own["notes"])
    assert row_of(evaluate_lengths(model, data, lengths="48", extensions="yarn", factor=2), "yarn", 48)["factor"] == 2


def test_a_dynamic_extension_follows_the_length_whatever_the_factor(model, data):
    results = [
        evaluate_lengths(model, data, lengths=[8, 48], extensions=["ntk", "dynamic-ntk"], factor=factor)
        for factor in ("largest", "per-length", 2, 1)
    ]
    for result in results:
        assert [row_of(result, "dynamic-ntk", length)["factor"] for length in (8, 48)] == [None, None]
        assert row_of(result, "dynamic-ntk", 48) == row_of(results[0], "dynamic-ntk", 48)
    dynamic, fixed = (row_of(results[0], name, 48)["loss"]["estimate"] for name in ("dynamic-ntk", "ntk"))
    assert dynamic == pytest.approx(fixed, abs=1e-5)


def test_every_order_that_is_shown_is_printed():
    pairs = {"ab": False, "ac": True, "ad": True, "bc": False, "bd": True, "cd": True}
    orders = [{"length": 8, "first": a, "second": b, "shown": shown} for (a, b), shown in pairs.items()]
    assert order_lines({"lengths": [8], "orders": orders})[0].en == "8: {a, b, c} < d, and a < c"
    draw = random.Random(0)
    for _ in range(300):
        chance = draw.random()
        shown = {pair for pair in combinations("abcdef", 2) if draw.random() < chance}
        shown |= {(a, c) for a, b in shown for other, c in shown if other == b}
        shown |= {(a, c) for a, b in shown for other, c in shown if other == b}
        orders = [
            {"length": 8, "first": a, "second": b, "shown": (a, b) in shown} for a, b in combinations("abcdef", 2)
        ]
        (line,) = order_lines({"lengths": [8], "orders": orders})
        groups, *within = line.en.removeprefix("8: ").split(", and ")
        stated = {tuple(pair.split(" < ")) for text in within for pair in text.split(", ")}
        tiers = [re.findall("[a-f]", group) for group in groups.split(" < ")]
        stated |= {(a, b) for one, other in combinations(tiers, 2) for a in one for b in other}
        for _ in range(6):
            stated |= {(a, c) for a, b in stated for other, c in stated if other == b}
        assert stated == shown


def test_what_is_said_of_chance_is_that_of_one_seed():
    """Of pairs that do not differ, one in twenty has an interval that excludes 0; hardly any has one in every seed."""
    draw = np.random.default_rng(0)
    pairs = [[paired_interval(row.tolist()).excludes_zero for row in draw.normal(0, 1, (3, 30))] for _ in range(400)]
    assert np.mean(pairs) == pytest.approx(1 / 20, abs=3 * (0.05 * 0.95 / 1200) ** 0.5)
    assert np.mean(np.all(pairs, axis=1)) < 1 / 100
    assert "of twenty pairs that do not differ, one is shown on average" in describe_orders({}).en
    assert "of twenty pairs that do not differ, one seed alone shows one on average" in describe_orders({"seeds": 3}).en


def headline_pairs(shown, gaps):
    pairs = [(a, b, (a, b) in shown, gaps["abcd".index(b)] - gaps["abcd".index(a)]) for a, b in combinations("abcd", 2)]
    return [
        {"length": 64, "first": a, "second": b, "shown": stated, "difference": {"estimate": -gap}}
        for a, b, stated, gap in pairs
    ]


@pytest.mark.parametrize(
    ("shown", "english", "chinese"),
    [
        (
            ["ab", "ac", "ad"],
            "a has a lower loss than all others, by 0.250 nats",
            "a 的损失低于其余所有模型，每词元至少低 0.250",
        ),
        (
            ["ad", "bd", "cd"],
            "d has a higher loss than all others, by 1.500 nats",
            "d 的损失高于其余所有模型，每词元至少高 1.500",
        ),
        (
            ["ac", "ad", "bc", "bd"],
            "a and b have lower losses than all others, by 0.250",
            "a、b 的损失低于其余所有模型",
        ),
        (["ab", "ac", "bd"], "no model is shown to be better or worse than all others", "没有模型被证明优于或劣于"),
    ],
)
def test_the_headline_states_what_is_shown(shown, english, chinese):
    orders = headline_pairs({tuple(pair) for pair in shown}, [1.0, 1.25, 1.5, 3.0])
    found = loss_headline({"lengths": [16, 64], "trained_length": 16, "orders": orders})
    assert found.en.startswith("At 64 tokens, 4 times the trained length, ")
    assert english in found.en
    assert chinese in found.zh
    found = loss_headline({"lengths": [64], "trained_length": 64, "orders": orders, "seeds": 3})
    assert found.en.startswith("At 64 tokens ")
    assert ("in each of 3 seeds" in found.en) == ("no model" not in found.en)


def test_curves_of_many_models_are_told_apart():
    curves = [Curve(str(number), [1, 2], [1, 2]) for number in range(10)]
    figure = draw_curves([*curves, Curve("window", [1, 2], [1, 2], baseline=True)], x_label="x", y_label="y")
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.figure.axes[0].lines}
    assert len(looks) == 11


def test_a_window_equals_the_model_within_its_trained_length(model, data):
    result = evaluate_lengths(model, data, lengths=[TRAINED, 48], extensions=["own", "sinks"])
    assert row_of(result, "window", 16)["loss"]["estimate"] == pytest.approx(
        row_of(result, "own", 16)["loss"]["estimate"]
    )
    assert row_of(result, "window", 48)["loss"] != row_of(result, "own", 48)["loss"]
    assert row_of(result, "sinks", 48)["loss"] != row_of(result, "window", 48)["loss"]


def test_intervals_are_over_documents_where_there_are_many(tmp_path, model):
    """Ten documents of one row or two: a document counts by its rows, as one observation."""
    from phasor.data.tokenizers import byte_tokenizer

    config = model.config.replace(vocab_size=261)
    torch.manual_seed(1)
    reader = phasor.Transformer(config)
    reader.tokenizer = byte_tokenizer()
    rng = np.random.default_rng(3)
    texts = ["".join(chr(97 + c) for c in rng.integers(0, 26, 34 + 32 * (n % 2))) for n in range(10)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, "short"]))
    result = evaluate_lengths(reader, file, lengths=[8, 32])
    assert (result["unit"], result["units"], result["row_count"]) == ("document", 10, 15)
    assert result["documents"] == {"found": 11, "used": 10, "longest": 66}
    assert any("10 of 11 documents are used" in note for note in result["notes"])
    joined = evaluate_lengths(reader, file, lengths=[8, 32], join=True)
    assert joined["documents"]["found"] == 1
    assert evaluate_lengths(reader, file, lengths=[8, 32], limit=4)["row_count"] == 4


def test_a_run_is_evaluated_on_its_validation_texts(tmp_path):
    """Its rows are cut from documents between `bos` and `eos`, and the window is the length that it was trained at."""
    (tmp_path / "train.txt").write_text("the cat sat on the mat " * 40)
    texts = ["a dog ran to the other end of the garden", "short"]
    (tmp_path / "valid.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"train": str(tmp_path / "train.txt"), "valid": str(tmp_path / "valid.jsonl"), "tokenizer": "bytes"}
    recipe = {
        "model": {"preset": "llama-2", "dim": 16, "num_heads": 2, "num_layers": 1, "max_length": 64},
        "data": {**data, "sequence_length": 16},
        "train": {"steps": 1, "device": "cpu"},
        "out": str(tmp_path / "run"),
    }
    phasor.train(phasor.Recipe.from_dict(recipe))
    result = evaluate_lengths(tmp_path / "run", lengths=[8, 40], targets=4, device="cpu")
    assert result["documents"] == {"found": 2, "used": 1, "longest": 42}
    assert (result["trained_length"], result["bos"], result["data"]) == (16, 1, "the validation data")
    ids = torch.tensor([1, *(byte + 5 for byte in texts[0].encode())])
    model = phasor.load(tmp_path / "run")
    for length in (8, 40):
        read = ids[40 - length : 40].clone()
        read[0] = 1
        with torch.no_grad():
            logits = model(read[None])[0, -4:]
        expected = torch.nn.functional.cross_entropy(logits, ids[37:41]).item()
        assert row_of(result, "own", length)["loss"]["estimate"] == pytest.approx(expected, rel=CLOSE)
    with pytest.raises(ValueError, match=r"the longest has 42; give shorter lengths, longer documents, or --join"):
        evaluate_lengths(tmp_path / "run", lengths=[48], device="cpu")


def test_one_row_has_no_interval(model, data):
    result = evaluate_lengths(model, data, lengths=[48], limit=1)
    assert [note for note in result["notes"] if "row" in note] == ["one row gives no interval and shows no order"]


def test_lengths_are_integers_or_in_k():
    assert parse_lengths("2k,1024, 16") == (16, 1024, 2048)
    for wrong in ("", "4m", "0", "1", "-8", "1.5k", "4k,,8k", [True], [2.0]):
        with pytest.raises(ValueError, match="a length is an integer"):
            parse_lengths(wrong)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"extensions": ["yarm"]}, "unknown extension 'yarm' \\(did you mean 'yarn'\\?\\); known: own, none, window"),
        ({"protocol": "first"}, "unknown protocol 'first'.*known: last, sliding, truncated"),
        ({"factor": 0.5}, "--factor 0.5 is below 1"),
        ({"factor": "all"}, "--factor is largest, per-length or a number"),
        ({"targets": 17}, "--targets 17 is more than the smallest length has tokens, 16"),
        ({"protocol": "sliding", "stride": 20}, "--stride 20 is more than the smallest length, 16"),
        ({"limit": 0}, "limit must be an integer of at least 1"),
        ({"lengths": [16, 200]}, "a length of 200 needs documents of 201 tokens.*the longest has 157"),
        ({"out": "/nowhere/at/all"}, "there is no folder /nowhere/at"),
    ],
)
def test_mistakes_are_sentences(model, data, options, says):
    with pytest.raises(ValueError, match=says):
        evaluate_lengths(model, data, **{"lengths": [16, 48], **options})


def test_models_that_cannot_be_read_so_far_are_refused(data, tmp_path):
    learned = phasor.preset("gpt-2", dim=16, num_heads=2, num_layers=1, vocab_size=VOCABULARY, max_length=32)
    made = phasor.Transformer(learned)
    with pytest.raises(ValueError, match="--lengths 48 is beyond this model's table of 32 positions"):
        evaluate_lengths(made, data, lengths=[16, 48])
    with pytest.raises(ValueError, match="an extension needs rotary positions"):
        evaluate_lengths(made, data, lengths=[16, 32], extensions=["yarn"])
    encoder = phasor.Transformer(phasor.preset("bert", dim=16, num_heads=2, num_layers=1, vocab_size=VOCABULARY))
    with pytest.raises(ValueError, match="of a decoder with a language head, and this is an encoder"):
        evaluate_lengths(encoder, data, lengths=[16])
    phasor.save(made, tmp_path / "model")
    with pytest.raises(ValueError, match="is no run with validation data: give --data"):
        evaluate_lengths(tmp_path / "model", lengths=[16])
    with pytest.raises(ValueError, match="there is no text in the data to evaluate on"):
        cut_rows([], 16, None, True, "the data")
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(ValueError, match="has no tokenizer, so --data must be a token file"):
        evaluate_lengths(tmp_path / "model", tmp_path / "notes.txt", lengths=[16])


def test_the_command_prints_tables_and_writes_a_report(folder, data, tmp_path, run_phasor: CommandRunner):
    options = ["--data", str(data), "--lengths", "16,48", "--extension", "none,yarn", "--device", "cpu"]
    out = run_phasor("evaluate", str(folder), *options, "--out", str(tmp_path / "report"))
    for text in (
        "loss, nats per token",
        "yarn (factor 3)",
        "paired difference to window",
        "16: ",
        "48: ",
        "Protocol last",
        f"report   {tmp_path / 'report' / 'lengths.html'}",
    ):
        assert text in out
    files = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert files == [
        "lengths.html", "lengths.json", "loss-by-length.png", "loss-by-position.png", "phasor_manifest.json"
    ]  # fmt: skip
    printed = json.loads(run_phasor("evaluate", str(folder), *options, "--json"))
    saved = json.loads((tmp_path / "report" / "lengths.json").read_text())
    assert saved["rows"] == printed["rows"]
    assert saved["provenance"]["command"].startswith(f"phasor evaluate {folder} --data ")
    html = (tmp_path / "report" / "lengths.html").read_text()
    assert "http" not in html.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "own" in run_phasor.expect_error("evaluate", str(folder), *options[:4], "--extension", "x")
    assert "--target is for translation" in run_phasor.expect_error("evaluate", str(folder), *options, "--target", "b")
    assert "--stride is for --protocol sliding" in run_phasor.expect_error(
        "evaluate", str(folder), *options, "--stride", "2"
    )
    assert "--stride is for --lengths" in run_phasor.expect_error("evaluate", str(folder), "--stride", "2")


@pytest.mark.parametrize(
    "options",
    [
        ("--data", "notes.txt"),
        ("--data", "notes.txt", "--json"),
        ("--data", "notes.txt", "--lengths", "16,48"),
        ("--data", "notes.txt", "--lengths", "16,48", "--json"),
        ("--stream", "notes.txt", "--window", "16"),
    ],
)
def test_a_model_that_computes_no_numbers_is_an_error(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("letters of a text, one after another\n" * 20)
    broken = phasor.Transformer(phasor.preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=259))
    broken.tokenizer = byte_tokenizer()
    with torch.no_grad():
        broken.tokens.weight.fill_(torch.nan)
    phasor.save(broken, "broken")
    assert main(["evaluate", "broken", *options, "--device", "cpu"]) == 2
    out, error = capsys.readouterr()
    assert "loss" in out
    assert error.startswith("phasor: the loss is not finite: the model's weights are not")
    assert error.count("\n") == 1


def test_what_a_model_is_does_not_depend_on_the_row_above():
    """Reports sort models in their own ways."""
    for text in (*variant_names().values(), *chinese.MODELS.values()):
        assert not re.search("the same|同上", text)
    for texts in (variant_names(), chinese.MODELS):
        assert f" {SINK_TOKENS} " in texts[SINKS]

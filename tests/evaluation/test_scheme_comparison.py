"""Comparisons of schemes: tasks against their definitions, runs against single evaluations, resuming, claims."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import CommandRunner
from tokenizers import Tokenizer, models

import phasor
from phasor.data.tasks import TASKS, TaskProblems, spell
from phasor.data.tokenizers import SpecialIds, byte_tokenizer
from phasor.evaluation import evaluate_lengths
from phasor.evaluation.compare import compare, problems, settings, texts
from phasor.evaluation.compare.schemes import ComparedScheme, comparable_kinds
from phasor.evaluation.compare.settings import SIZES, check_compare_settings
from phasor.evaluation.intervals import compare_lengths, paired_interval
from phasor.evaluation.report import check_out
from phasor.manifest import DamagedError
from phasor.training import TrainingProgress

TINY = replace(
    SIZES["small"],
    model={"dim": 16, "hidden_dim": 16, "num_layers": 1, "num_heads": 2},
    task_model={"dim": 16, "hidden_dim": 16, "num_layers": 1, "num_heads": 2},
    batch_tokens=64,
    task_rows=16,
    task_lr=0.03,
)
OPTIONS = {"length": 8, "steps": 2, "rows": 12, "tokenizer": "bytes", "device": "cpu"}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(settings.SIZES, "small", TINY)
    monkeypatch.setattr(settings, "TASK_SIZES", {})


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


def write_texts(file, count=60):
    draw = random.Random(0)
    words = "the cat sat on a mat and saw one dog run by his old red house in rain".split()  # noqa: SIM905
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=60))}) for _ in range(count))
    file.write_text("\n".join(lines))
    return str(file)


class Silent(TrainingProgress):
    def on_message(self, message):
        pass


def solve(name, prompt):
    """The answer to a prompt, from the definition of the task."""
    if name == "addition":
        first, second = prompt.removesuffix("=").split("+")
        return f"{int(first) + int(second):0{len(first) + 1}}"[::-1]
    if name == "recall":
        return dict(re.findall(r"\.([A-Z])(\d)", prompt))[prompt[-1]]
    items = prompt.removesuffix("=")
    return {
        "copy": items,
        "reverse": "".join(reversed(items)),
        "sort": "".join(sorted(items)),
        "parity": str(sum(map(int, filter(str.isdecimal, items))) % 2),
    }[name]


@pytest.mark.parametrize("name", TASKS)
def test_problems_have_their_right_answers_and_one_shape_per_size(name):
    draw = random.Random(0)
    for size in range(TASKS[name].shortest, 9):
        made = [TASKS[name].make(draw, size) for _ in range(20)]
        assert all(problem.answer == solve(name, problem.prompt) for problem in made)
        assert len({(len(problem.prompt), len(problem.answer)) for problem in made}) == 1
        assert set("".join(p.prompt + p.answer for p in made)) <= set(TASKS[name].alphabet)


def test_given_positions_reach_all_that_are_tested():
    chosen = check_compare_settings(
        schemes="learned:coupled,rotary:randomized", task="addition", length=3, device="cpu"
    )
    for scheme in chosen.schemes:
        source = problems.problems_of(chosen, scheme, seed=0)
        tested = source.test_batch(12, 50).positions
        trained = torch.cat([source.train_batch(step, 64, 3).positions.flatten() for step in range(20)])
        assert set(tested.flatten().tolist()) <= set(trained.tolist()) <= set(range(source.positions_to))
    whole = problems.problems_of(chosen, chosen.schemes[0], seed=0).test_batch(3, 1).positions[0].tolist()
    first, second, answer = whole[1:4], whole[5:8], whole[9:13]
    assert first == second == answer[2::-1]  # digits of one place; the answer is written from its lowest one on


@pytest.mark.parametrize("trained", [8, 31, 64, 512])
def test_distances_in_two_pieces_stay_within_those_that_are_trained(trained):
    largest = 16 * trained
    chunks = ComparedScheme("dualchunk", "dualchunk").position(trained, largest)
    assert trained / 2 < chunks["chunk_length"] < chunks["trained_length"] == trained
    groups = ComparedScheme("selfextend", "selfextend").position(trained, largest)
    window, group = groups["window"], groups["group"]
    last = np.arange(window, largest)  # the farthest keys are the first
    distances = window + last // group - window // group
    assert trained / 2 < distances.max() < trained


def test_orders_are_those_that_every_seed_shows():
    draw = np.random.default_rng(0)
    values = {("a", 8): draw.normal(0, 1, (3, 40)), ("c", 8): draw.normal(0.3, 1, (3, 40))}
    values["b", 8] = values["a", 8] + 0.2 + 0.01 * draw.normal(0, 1, (3, 40))
    for pair in compare_lengths(values, ["a", "b", "c"], [8]):
        rows = values[pair["first"], 8] - values[pair["second"], 8]
        shown = [paired_interval(row.tolist()).high < 0 for row in rows]
        assert pair["seeds_shown"] == sum(shown)
        assert pair["shown"] == all(shown)
    assert any(pair["shown"] for pair in compare_lengths(values, ["a", "b"], [8]))


def test_a_comparison_on_texts_is_resumed_and_refused_when_its_data_change(tmp_path, monkeypatch, run_phasor):
    data = write_texts(tmp_path / "texts.jsonl")
    out = tmp_path / "out"
    options = {**OPTIONS, "data": data, "progress": Silent()}
    result = compare(out, schemes=["rotary"], **options)
    assert (out / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert [row["length"] for row in result["rows"]][:5] == [8, 16, 32, 64, 128]
    assert {"rotary", "rotary (yarn)", "rotary (window)", "rotary (sinks)"} <= set(result["names"])
    single = evaluate_lengths(
        out / "runs" / "rotary-0", lengths=[8, 16, 32, 64, 128], extensions=["yarn"], limit=12, device="cpu"
    )
    for row in single["rows"]:
        label = f"rotary ({row['extension']})"
        ours = next(r for r in result["rows"] if (r["extension"], r["length"]) == (label, row["length"]))
        np.testing.assert_allclose(ours["losses"], row["losses"], rtol=1e-6)

    # More schemes are added, and nothing is trained twice.
    trained = []

    def train_once(recipe, *rest):
        trained.append((recipe.model["position"]["kind"], recipe.train.seed))
        return before(recipe, *rest)

    before = texts.train_recipe
    monkeypatch.setattr("phasor.evaluation.compare.comparison.train_recipe", train_once)
    printed = run_phasor("compare", "--out", str(out), "--schemes", "learned,rotary", "--data", data, *arguments())
    assert f"report   {out / 'compare.html'}" in printed
    assert "rotary (yarn)" in printed
    assert trained == [("learned", 0)]
    html = (out / "compare.html").read_text()
    assert f"phasor compare --out {out}" in html
    assert torch.__version__ in html
    assert not re.search(r"(src|href)=\"(?!#)", html)
    report = json.loads((out / "lengths.json").read_text())
    assert report["provenance"]["seeds"] == "0"

    error = run_phasor.expect_error("compare", "--out", str(out), "--data", data, *arguments(steps=3))
    assert "was begun with steps 2, and this is 3" in error.replace("--steps", "steps")
    write_texts(tmp_path / "texts.jsonl", 61)
    error = run_phasor.expect_error("compare", "--out", str(out), "--data", data, *arguments())
    assert "the data of the comparison" in error
    assert "have changed" in error


def arguments(**changes):
    """The options of the command line that are those of `OPTIONS`."""
    return [text for name, value in (OPTIONS | changes).items() for text in (f"--{name}", str(value))]


def test_all_schemes_are_trained_on_the_same_batches_in_the_same_order(tmp_path):
    chosen = check_compare_settings(schemes="all,rotary+alibi", data="texts.jsonl", **OPTIONS)
    assert {"none", "learned", "sinusoidal", "t5", "alibi", "rotary", "xpos"} <= set(comparable_kinds())
    recipes = [texts.text_recipe(chosen, scheme, 1, tmp_path) for scheme in chosen.schemes]
    fixed = {"position": {"kind": "none"}, "embedding": {}}  # the scale of embeddings is another beside learned vectors
    alike = {recipe.replace(model={**recipe.model, **fixed}).to_json() for recipe in recipes}
    assert len(alike) == 1
    chosen = check_compare_settings(schemes="none,learned:coupled", task="addition", device="cpu", length=3)
    batches = [problems.problems_of(chosen, scheme, 1).train_batch(5, 4, 3) for scheme in chosen.schemes]
    assert torch.equal(batches[0].tokens, batches[1].tokens)
    assert batches[0].positions is None
    assert batches[1].positions is not None


def test_exact_answers_are_counted_as_greedy_decoding_writes_them(tmp_path):
    out = tmp_path / "out"
    result = compare(
        out, task="parity", schemes="alibi", length=2, steps=40, seeds=2, rows=30, device="cpu", progress=Silent()
    )
    model = phasor.load(out / "runs" / "alibi-0")
    source = TaskProblems("parity", byte_tokenizer(), SpecialIds(), seed=0)
    draw = random.Random("parity 0 test 2")
    made = [source.task.make(draw, 2) for _ in range(30)]
    right = 0
    for problem in made:
        tokens = torch.tensor([[1, *(source.ids[c] for c in problem.prompt)]])
        with torch.no_grad():
            first = model(tokens)[0, -1].argmax()
            second = model(torch.cat([tokens, first.view(1, 1)], dim=1))[0, -1].argmax()
        right += first.item() == source.ids[problem.answer] and second.item() == 2
    row = next(row for row in result["rows"] if row["size"] == 2)
    assert 0 < right <= 30
    assert row["seeds"][0] == pytest.approx(right / 30)
    assert row["exact"]["count"] == 60
    assert row["exact"]["estimate"] == pytest.approx(sum(row["seeds"]) / 2)


def test_mistakes_are_one_sentence(tmp_path, run_phasor):
    digits = Tokenizer(models.WordLevel({"1": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(ValueError, match="cannot spell the task 'parity': '0' is not a single token"):
        spell("parity", digits)
    out = ["--out", str(tmp_path / "new")]
    for given, said in (
        (["--task", "sort", "--length", "1"], "--length 1 is below the shortest problem of the task 'sort'"),
        (["--task", "sorting"], "unknown task"),
        (["--schemes", "rotery"], "did you mean 'rotary'"),
        (["--schemes", "axial"], "'axial' cannot be compared: its tokens have 2 positions each"),
        (["--schemes", "learned:coupled"], "has coupled positions, which are for the task addition, not for text"),
        (["--schemes", "none:coupled", "--task", "addition"], "has no positions that could be coupled"),
        (["--schemes", "rotary:coupled", "--task", "copy"], "which are for the task addition, not for the task 'copy'"),
        (
            ["--schemes", "xpos", "--length", "4k"],
            "the scheme 'xpos' has 32,768 positions, and a length of 4,096 is measured to 65,536",
        ),
        (["--schemes", "rotary+xpos"], "which both rotate queries and keys"),
        (["--schemes", "all+retention"], "'all' stands alone, and not in 'all+retention': name the schemes"),
        (["--task", "copy", "--schemes", "all:randomized"], "'all' stands alone, and not in 'all:randomized'"),
        (["--task", "copy", "--data", "x"], "--task copy makes its own problems"),
        (["--task", "copy", "--join"], "--join is for texts: leave it out with --task copy"),
        (["--task", "copy", "--protocol", "sliding"], "--protocol is for texts: leave it out with --task copy"),
        (["--size", "huge"], "unknown size"),
        (["--question", "bases"], "unknown question 'bases' (did you mean 'base'?); known: subspaces, base, decay"),
        (["--question", "base", "--schemes", "alibi"], "--question base says what is compared: leave --schemes out"),
    ):
        assert said in run_phasor.expect_error("compare", "--steps", "1", *out, *given), given
    assert not (tmp_path / "new").exists()


TASK = {"task": "copy", "length": 2, "steps": 1, "rows": 4, "device": "cpu"}


def contents(folder):
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("options", [TASK, OPTIONS], ids=["task", "texts"])
def test_a_folder_with_a_run_of_somebody_else_is_left_alone(tmp_path, options):
    options = {**options, "schemes": "alibi", "progress": Silent()}
    for linked in (False, True):
        out = tmp_path / f"linked-{linked}"
        place = tmp_path / "elsewhere" if linked else out / "runs" / "alibi-0"
        phasor.save(phasor.Transformer(phasor.preset("llama-2", **TINY.model, vocab_size=50)), place)
        (place / "notes.txt").write_text("mine")
        if linked:
            (out / "runs").mkdir(parents=True)
            (out / "runs" / "alibi-0").symlink_to(place)
        before = contents(tmp_path)
        with pytest.raises(ValueError, match="is not empty and holds no comparison"):
            compare(out, **options)
        assert contents(tmp_path) == before


def test_a_run_that_a_comparison_did_not_train_is_left_alone(tmp_path):
    out, place = tmp_path / "out", tmp_path / "out" / "runs" / "t5-0"
    compare(out, schemes="alibi", progress=Silent(), **TASK)
    (out / "runs" / "alibi-0").rename(place)
    before = contents(place)
    with pytest.raises(ValueError, match="t5-0 was not written by this comparison, and is left alone"):
        compare(out, schemes="alibi,t5", progress=Silent(), **TASK)
    assert contents(place) == before
    mine = tmp_path / "mine"
    place.rename(mine)
    (out / "runs" / "alibi-0").symlink_to(mine)
    (out / "measured" / "alibi-0.json").unlink()
    with pytest.raises(ValueError, match="alibi-0 was not written by this comparison, and is left alone"):
        compare(out, schemes="alibi", progress=Silent(), **TASK)
    assert [*contents(mine).values()] == [*before.values()]
    (out / "runs" / "alibi-0").unlink()
    mine.rename(out / "runs" / "alibi-0")
    (out / "runs" / "alibi-0" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds more than a model \(notes\.txt\)"):
        compare(out, schemes="alibi", progress=Silent(), **TASK)
    assert (out / "runs" / "alibi-0" / "notes.txt").read_text() == "mine"


def test_what_was_measured_is_as_it_was_written_and_of_this_comparison(tmp_path):
    """One digit of a measurement, or a run in the comparison's list: nothing but the checksum can see that."""
    out = tmp_path / "out"
    compare(out, schemes="alibi", progress=Silent(), **TASK)
    changes = {
        "measured/alibi-0.json": ('"4": [\n        0', '"4": [\n        1'),
        "comparison.json": ('"alibi-0"', '"alibi-0", "t5-0"'),
    }
    for name, (before, after) in changes.items():
        text = (out / name).read_text()
        assert text.count(before) == 1
        (out / name).write_text(text.replace(before, after))
        with pytest.raises(DamagedError, match=f"{name} is damaged, or was changed after it was written"):
            compare(out, schemes="alibi", progress=Silent(), **TASK)
        (out / name).write_text(text)
    (out / "measured" / "t5-0.json").write_text((out / "measured" / "alibi-0.json").read_text())
    with pytest.raises(ValueError, match="is of another comparison, scheme or seed"):
        compare(out, schemes="alibi,t5", progress=Silent(), **TASK)


def test_a_run_of_another_recipe_is_not_adopted(tmp_path):
    data = write_texts(tmp_path / "texts.jsonl")
    options = {**OPTIONS, "data": data, "schemes": "alibi", "progress": Silent()}
    compare(tmp_path / "two", **options)
    compare(tmp_path / "four", **options | {"steps": 4})
    (tmp_path / "two" / "measured" / "alibi-0.json").unlink()
    shutil.rmtree(tmp_path / "two" / "runs" / "alibi-0")
    shutil.move(tmp_path / "four" / "runs" / "alibi-0", tmp_path / "two" / "runs")
    with pytest.raises(ValueError, match=r"is a run of another recipe \(.*steps was 4 and is 2"):
        compare(tmp_path / "two", **options)


def test_short_documents_are_refused_before_anything_is_trained(tmp_path, monkeypatch):
    data = write_texts(tmp_path / "texts.jsonl")
    out = tmp_path / "out"
    options = {**OPTIONS, "data": data, "schemes": "alibi", "progress": Silent()}
    trained = []
    monkeypatch.setattr("phasor.evaluation.compare.comparison.train_recipe", lambda *given: trained.append(given))
    with pytest.raises(ValueError, match="a length of 16,384 needs documents of 16,385 tokens"):
        compare(out, **options | {"length": 1024})
    assert not trained
    assert not out.exists()
    out.mkdir()
    with pytest.raises(ValueError, match="a length of 16,384 needs documents of 16,385 tokens"):
        compare(out, **options | {"length": 1024})
    assert not list(out.iterdir())
    monkeypatch.undo()
    monkeypatch.setitem(settings.SIZES, "small", TINY)
    assert compare(out, **options)["lengths"][-1] == 128


def test_the_report_of_a_comparison_is_not_that_of_another_command(tmp_path):
    out = tmp_path / "out"
    compare(out, schemes="alibi", progress=Silent(), **TASK)
    with pytest.raises(ValueError, match="is a comparison folder, and no report goes there"):
        check_out(out)
    (out / "phasor_manifest.json").unlink()
    with pytest.raises(ValueError, match=r"tasks\.json is not by the comparison in this folder"):
        compare(out, schemes="alibi", progress=Silent(), **TASK)


@pytest.mark.slow
def test_a_comparison_that_is_killed_goes_on_and_ends_as_one_that_was_not(tmp_path):
    data = write_texts(tmp_path / "texts.jsonl")
    options = {**OPTIONS, "data": data, "schemes": "alibi,none", "steps": 200}
    code = (
        "import sys\nfrom dataclasses import replace\nfrom phasor.evaluation.compare import compare, settings\n"
        f"settings.SIZES['small'] = replace(settings.SIZES['small'], model={TINY.model!r}, batch_tokens=64)\n"
        f"compare(sys.argv[1], **{options!r})\n"
    )
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", code, str(out)], stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(out.glob("runs/none-0/checkpoints/*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / "measured" / "alibi-0.json").exists()
    went_on = compare(out, progress=Silent(), **options)
    whole = compare(tmp_path / "whole", progress=Silent(), **options)
    for name in ("rows", "orders", "extension_orders", "positions", "fingerprint"):
        assert went_on[name] == whole[name]


def test_attention_with_a_state_is_compared_beside_positions(tmp_path):
    """At about as many weights, without a window, with positions where the kind takes them."""
    given = {"data": write_texts(tmp_path / "texts.jsonl"), **OPTIONS}
    names = ["gated-delta", "rotary", "rotary+retention", "mamba2"]
    result = compare(tmp_path / "report", schemes=",".join(names), **given)
    assert result["schemes"] == names
    assert result["baseline"] == "rotary (window)"
    labels = {row["extension"] for row in result["rows"]}
    assert {name for name in labels if name.endswith("(window)")} == {"rotary (window)"}
    assert all(result["names_zh"][name] != result["names"][name] for name in names)
    for scheme, attention, position in (
        ("rotary+retention", "retention", "rotary"),
        ("gated-delta", "gated-delta", "none"),
        ("rotary", "softmax", "rotary"),
    ):
        parsed = ComparedScheme(scheme, scheme)
        assert (parsed.attention, parsed.position(8, 128)["kind"]) == (attention, position)


QUESTIONS = {  # the frequencies of every variant in the 4 pairs of a head, trained at 8 tokens
    "subspaces": {"rotary": 1e4 ** (-np.arange(4) / 4), "1 of 4 pairs": [1.0], "2 of 4 pairs": [1.0, 1e4**-0.5]},
    "base": {"rotary": 1e4 ** (-np.arange(4) / 4)}
    | {f"base {base}": float(base) ** (-np.arange(4) / 4) for base in (100, 1000, 100000, 1000000)},
    "decay": dict.fromkeys(("rotary", "xpos", "rotary+alibi"), 1e4 ** (-np.arange(4) / 4))
    | {"alibi": [], "long wavelengths": 1e4 ** (-np.arange(4) / 4) / 8},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_compares_variants_of_rotary(tmp_path, run_phasor, question):
    data, out = write_texts(tmp_path / "texts.jsonl"), tmp_path / "out"
    given = [f"--{name}={value}" for name, value in OPTIONS.items()]
    result = json.loads(
        run_phasor("compare", "--out", str(out), "--data", data, "--question", question, "--json", *given)
    )
    variants = QUESTIONS[question]
    assert result["schemes"] == list(variants)
    assert result["baseline"] == "rotary (window)"
    assert result["extended"] == "rotary"
    labels = {row["extension"] for row in result["rows"]}
    assert {name for name in labels if not name.startswith("rotary (")} == variants.keys() | {
        f"{name} (window)" for name in variants if name != "rotary"
    }
    shown = [result["names"][name] for name in variants]
    assert len(set(shown)) == len(shown)  # fields are said where the kind is the same
    for name, frequencies in variants.items():
        config = phasor.load(out / "runs" / f"{name.replace('+', '-')}-0").config
        rotated = [pair.extended_frequency for part in config.position.parts for pair in part.rotary_pairs(config, 8)]
        assert rotated == pytest.approx(list(frequencies), rel=1e-12)  # rounded from decimals
        assert config.trained_length == 8


def test_a_question_is_answered_by_a_task_and_goes_on(tmp_path):
    given = {"task": "copy", "length": 2, "steps": 2, "rows": 4, "device": "cpu", "progress": Silent()}
    first = compare(tmp_path / "out", question="subspaces", **given)
    assert first["schemes"] == ["rotary", "1 of 4 pairs", "2 of 4 pairs"]
    more = compare(tmp_path / "out", question="base", **given)
    assert more["rows"][:4] == first["rows"][:4]
    assert [run.name for run in sorted((tmp_path / "out" / "runs").glob("rotary*"))] == ["rotary-0"]


@pytest.mark.parametrize(
    ("schemes", "why"),
    [
        ("gated-delta,mamba2", "layers with a state have none: give a scheme without them too"),
        ("rotary+mamba2", "has positions, and mamba2 attention takes none: give mamba2"),
        ("rotary,mamba2+retention", "names two kinds of attention, mamba2 and retention: give one"),
        ("rotary,alibi+retention", "cannot be compared: retention takes positions that rotate queries and keys"),
    ],
)
def test_what_layers_with_a_state_cannot_have_is_refused(tmp_path, schemes, why):
    with pytest.raises(ValueError, match=why):
        compare(tmp_path / "report", schemes=schemes, data=write_texts(tmp_path / "texts.jsonl"), **OPTIONS)

"""The command line: what it prints, and how it says no."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import importlib
import io
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import CommandRunner, run
from decoding import byte_tokenizer, reciter, speaker

import phasor
from phasor.cli import VERBS
from phasor.cli.parser import Parser, Verb
from phasor.config import Extension
from phasor.config.schema import names
from phasor.evaluation.compare.settings import SIZES, TEXT_SCHEMES, size_for
from phasor.evaluation.stream import CPU_CHUNK, GPU_CHUNK
from phasor.models.presets import PRESETS


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


HELP = """
import sys
from phasor.cli import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "numpy", "rich", "safetensors", "tokenizers", "triton"} & set(sys.modules)
    print("loaded:", sorted(heavy))
"""


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)])
def test_help_is_there_and_light(arguments: list[str]) -> None:
    done = run(*arguments, code=HELP)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("phasor 0." if arguments == ["--version"] else "usage: phasor")
    assert done.stdout.endswith("loaded: []\n")
    if arguments in ([], ["--help"]):
        assert all(verb in done.stdout for verb in VERBS)


def test_help_tells_of_every_option_of_generation() -> None:
    text = run("generate", "--help").stdout
    for name in phasor.GenerationConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_defaults(verb: str) -> None:
    parser = Verb(prog=f"phasor {verb}")
    importlib.import_module(f"phasor.cli.{verb}").add_options(parser)
    classes = (phasor.GenerationConfig, *Extension.kinds.values()) if verb in ("generate", "convert") else ()
    fields = {(field.name, field.default) for cls in classes for field in dataclasses.fields(cls)}
    count = Counter(name for name, _ in fields)
    of_fields = {name: default for name, default in fields if count[name] == 1}  # the same in all that have it
    for action in parser._actions:
        default = of_fields.get(action.dest) if action.default == argparse.SUPPRESS else action.default
        if isinstance(default, int | float | str) and action.default is not False and action.help != argparse.SUPPRESS:
            shown = str(default).lower() if isinstance(default, bool | str) else f"{default:g}"
            assert shown in (action.help or "") % {"default": default}, action.option_strings


def test_help_shows_sizes_that_follow_from_others() -> None:
    small, large = (SIZES[name] for name in ("small", "large"))
    adding = [size_for(name, "addition").task_steps for name in ("small", "large")]
    shown = " ".join(run("compare", "--help").stdout.split())
    for text in (
        f"(small: {small.length} or {small.task_length}, large: {large.length} or {large.task_length})",
        f"(small: {small.steps}, of a task {small.task_steps}, of addition {adding[0]}; "
        f"large: {large.steps}, {large.task_steps}, {adding[1]})",
        f"(small: {small.rows} or {small.trials}, large: {large.rows} or {large.trials})",
        f"({TEXT_SCHEMES})",
    ):
        assert text in shown
    shown = " ".join(run("evaluate", "--help").stdout.split())
    assert f"tokens that are read at a time ({CPU_CHUNK}, on a GPU {GPU_CHUNK}; fewer for a decaying scheme)" in shown


@pytest.mark.parametrize("verb", ["generate", "convert", "explain"])
def test_help_explains_every_field(verb: str) -> None:
    """No option stands without a line about it."""
    parser = Parser()
    importlib.import_module(f"phasor.cli.{verb}").add_options(parser)
    assert [action.dest for action in parser._actions if not action.help] == []
    fields = {name for cls in Extension.kinds.values() for name in names(cls)}
    assert fields <= {action.dest for action in parser._actions}


def test_as_a_module() -> None:
    done = run("kinds", "norms", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(json.loads(done.stdout)) == phasor.kinds("norms")
    failed = run("kinds", "nonsense")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("phasor: unknown group of kinds 'nonsense'; known: positions")
    assert failed.stderr.count("\n") == 1


def test_kinds(run_phasor: CommandRunner) -> None:
    text = run_phasor("kinds")
    groups = json.loads(run_phasor("kinds", "--json"))
    assert {"positions", "extensions", "norms", "activations", "placements", "presets"} <= set(groups)
    for group, lines in groups.items():
        assert list(lines) == phasor.kinds(group)
        assert all(kind in text and line for kind, line in lines.items())
        assert json.loads(run_phasor("kinds", group, "--json")) == lines
    assert "alibi" in run_phasor("kinds", "positions")


@pytest.mark.parametrize("name", PRESETS)
def test_explain_every_preset(name: str, run_phasor: CommandRunner) -> None:
    config = phasor.preset(name)
    text = run_phasor("explain", f"preset:{name}")
    assert f"{name}: {config.position.kind}" in text
    found = json.loads(run_phasor("explain", f"preset:{name}", "--json"))
    scheme = found["schemes"][0]
    assert scheme["kind"] == config.position.kind
    if isinstance(config.position, phasor.RotaryConfig):
        assert len(scheme["pairs"]) == config.head_dim // 2
        for i, pair in enumerate(scheme["pairs"]):
            frequency = config.position.base ** (-2 * i / config.head_dim)
            assert pair["frequency"] == pytest.approx(frequency, rel=1e-12)
            assert pair["wavelength"] == pytest.approx(2 * math.pi / frequency, rel=1e-12)
            assert pair["rotations"] == pytest.approx(scheme["trained_length"] / pair["wavelength"], rel=1e-12)


def test_explain_an_extension(run_phasor: CommandRunner) -> None:
    arguments = ["explain", "preset:llama-3.1", "--extension", "yarn", "--factor", "8"]
    text = run_phasor(*arguments)
    assert "slowed 8 times" in text
    assert "kept" in text
    scheme = json.loads(run_phasor(*arguments, "--json"))["schemes"][0]
    assert scheme["settings"]["extension"]["original_length"] == 8192
    assert scheme["attention_factor"] == pytest.approx(0.1 * math.log(8) + 1)  # YaRN's own formula
    assert scheme["pairs"][-1]["slowed"] == pytest.approx(8)
    one = json.loads(run_phasor(*arguments, "--beta-fast", "64", "--original-length", "4096", "--json"))
    assert one["schemes"][0]["settings"]["extension"]["beta_fast"] == 64
    assert one["schemes"][0]["settings"]["extension"]["original_length"] == 4096


def test_explain_lists_and_truth_values_of_extensions(run_phasor: CommandRunner) -> None:
    arguments = ["explain", "preset:llama-2", "--extension", "longrope", "--json", "--length", "9000"]
    factors = ",".join(["1.5"] * 64)
    found = json.loads(run_phasor(*arguments, "--short-factor", factors, "--long-factor", factors, "--factor", "4"))
    assert found["schemes"][0]["pairs"][7]["slowed"] == pytest.approx(1.5)
    arguments = ["explain", "preset:llama-2", "--extension", "yarn", "--factor", "4", "--json", "--truncate", "false"]
    assert json.loads(run_phasor(*arguments))["schemes"][0]["settings"]["extension"]["truncate"] is False


def test_explain_for_a_length(run_phasor: CommandRunner) -> None:
    arguments = ["explain", "preset:llama-2", "--extension", "dynamic-ntk", "--factor", "4", "--json"]
    short, long = (json.loads(run_phasor(*arguments, "--length", n))["schemes"][0] for n in ("4096", "16384"))
    assert short["length"] == 4096
    assert short["pairs"][20]["effect"] == "kept"
    assert long["pairs"][20]["slowed"] > 1.1


def test_explain_two(run_phasor: CommandRunner, tmp_path: Path) -> None:
    text = run_phasor("explain", "preset:llama-2", "preset:llama-3.1")
    assert "what differs" in text
    assert "128256" in text
    found = json.loads(run_phasor("explain", "preset:llama-2", "preset:llama-3.1", "--json"))
    assert ["vocab_size", 32000, 128256] in found["differences"]
    assert len(found["other"]["schemes"][0]["pairs"]) == 64
    config = phasor.preset("llama-2", vocab_size=7)
    (tmp_path / "config.json").write_text(config.to_json())
    for path in (tmp_path, tmp_path / "config.json"):
        found = json.loads(run_phasor("explain", str(path), "preset:llama-2", "--json"))
        assert found["differences"] == [["vocab_size", 7, 32000]]


@pytest.mark.parametrize("command", [("explain",), ("plan", "--model"), ("bench", "--explain")], ids=lambda c: c[0])
def test_sizes_of_a_configuration_have_bounds(run_phasor: CommandRunner, tmp_path: Path, command: tuple[str]) -> None:
    """First a size that only takes seconds where nothing bounds it, then one that would not end."""
    config = json.loads(
        phasor.preset("llama-2", dim=8, hidden_dim=8, num_heads=2, num_layers=1, vocab_size=7).to_json()
    )
    for name, most, beyond in (("num_layers", "10,000", (10_001, 10**9)), ("dim", "262,144", (262_146, 10**12))):
        for value in beyond:
            (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
            message = run_phasor.expect_error(*command, str(tmp_path))
            assert f"{name} must be at most {most}, not {value:,}" in message


def test_explain_what_is_not_there(run_phasor: CommandRunner, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "did you mean 'llama-2'" in run_phasor.expect_error("explain", "preset:lama-2")
    assert "there is no folder nowhere" in run_phasor.expect_error("explain", "nowhere")
    assert "config.json" in run_phasor.expect_error("explain", str(tmp_path))
    assert "belongs to an extension" in run_phasor.expect_error("explain", "preset:llama-2", "--factor", "8")
    assert "did you mean 'yarn'" in run_phasor.expect_error("explain", "preset:llama-2", "--extension", "yarm")
    assert "unknown field" in run_phasor.expect_error(
        "explain", "preset:llama-2", "--extension", "linear", "--factor", "2", "--beta-fast", "3"
    )
    assert "finite" in run_phasor.expect_error("explain", "preset:llama-2", "--extension", "ntk", "--factor", "nan")
    assert "needs rotary" in run_phasor.expect_error("explain", "preset:gpt-2", "--extension", "ntk", "--factor", "2")
    assert "at least 1" in run_phasor.expect_error("explain", "preset:gpt-2", "--length", "0")
    assert "--factor must be a number, not 'many'" in run_phasor.expect_error(
        "explain", "preset:llama-2", "--factor", "many"
    )
    assert "truncate must be true or false" in run_phasor.expect_error(
        "explain", "preset:llama-2", "--extension", "yarn", "--factor", "2", "--truncate", "maybe"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder that answers in token ids, and one that answers in text."""
    place = tmp_path_factory.mktemp("folders")
    phasor.save(speaker(), place / "ids")
    tokenizer = byte_tokenizer()
    model = reciter(tokenizer.encode("Grüße, 世界!\nand more").ids, tokenizer, len("Say: "))
    phasor.save(model, place / "text")
    endless = speaker(attention={"window": 4})
    endless.special = phasor.SpecialTokens(stop=(38,))
    phasor.save(endless, place / "endless")
    return {name: str(place / name) for name in ("ids", "text", "endless")}


IDS = [7, 3, 3, 58, 12]
AS_TEXT = "7 3 3 58 12"


def test_generate_ids(folders: dict[str, str], run_phasor: CommandRunner) -> None:
    expected = phasor.generate(speaker(), IDS, max_new_tokens=6)
    for prompt in (AS_TEXT, "7,3,3,58,12", " 7, 3\n3 58 12 "):
        out = run_phasor("generate", folders["ids"], "--prompt", prompt, "--max-new-tokens", "6")
        assert [int(token) for token in out.split()] == expected
        assert run_phasor.error.startswith("6 tokens in ")
    out = run_phasor("generate", folders["ids"], "--prompt", AS_TEXT, "--max-new-tokens", "6", "--stream")
    assert [int(token) for token in out.split()] == expected
    assert run_phasor.error.startswith("6 tokens in ")


def test_generate_with_weights_in_int8(folders: dict[str, str], run_phasor: CommandRunner) -> None:
    expected = phasor.generate(phasor.quantize(speaker()), IDS, max_new_tokens=6)
    arguments = ["generate", folders["ids"], "--prompt", AS_TEXT, "--max-new-tokens", "6", "--weights"]
    assert [int(i) for i in run_phasor(*arguments, "int8").split()] == expected
    expected = phasor.generate(phasor.quantize(speaker(), bits=4), IDS, max_new_tokens=6)
    assert [int(i) for i in run_phasor(*arguments, "int4").split()] == expected
    assert "int8" in run_phasor.expect_error(*arguments, "int5")
    assert "cannot be used" in run_phasor.expect_error(*arguments, "int8", "--device", "nowhere")


def test_generate_text(folders: dict[str, str], run_phasor: CommandRunner) -> None:
    arguments = ["generate", folders["text"], "--prompt", "Say: ", "--max-new-tokens"]
    assert run_phasor(*arguments, "16") == "Grüße, 世界!\n"
    assert run_phasor.error.startswith("16 tokens in ")
    assert run_phasor(*arguments, "16", "--stream") == "Grüße, 世界!\n"
    assert run_phasor.error.startswith("16 tokens in ")
    assert run_phasor(*arguments, "20", "--stop", r"\n") == "Grüße, 世界!\n"
    assert run_phasor(*arguments, "20", "--stop", "xyz,界", "--stream") == "Grüße, 世\n"
    assert run_phasor(*arguments, "20", "--stop", r"\x2c") == "Grüße\n"


def test_generate_json(folders: dict[str, str], run_phasor: CommandRunner) -> None:
    arguments = ["generate", folders["ids"], "--prompt", AS_TEXT, "--max-new-tokens", "6", "--json"]
    (found,) = json.loads(run_phasor(*arguments))
    expected = phasor.generate(speaker(), IDS, max_new_tokens=6, details=True)
    assert found["tokens"] == expected.tokens
    assert found["log_probabilities"] == pytest.approx(expected.log_probabilities)
    assert found["text"] is None
    several = json.loads(run_phasor(*arguments, "--num-beams", "3", "--num-return-sequences", "2"))
    best = phasor.generate(speaker(), IDS, max_new_tokens=6, num_beams=3, num_return_sequences=2)
    assert [one["tokens"] for one in several] == best
    assert several[0]["score"] >= several[1]["score"]
    (text,) = json.loads(
        run_phasor("generate", folders["text"], "--prompt", "Say: ", "--json", "--max-new-tokens", "8")
    )
    assert text["text"] == "Grüße,"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--temperature", "0.8", "--seed", "5"], {"temperature": 0.8, "seed": 5}),
        (["--top-k", "5", "--top-p", "0.9", "--min-p", "0.1", "--seed", "5"], None),
        (["--typical-p", "0.7", "--seed", "5,"], "invalid"),
        (["--num-beams", "3", "--length-penalty", "0.5", "--early-stopping", "never"], None),
        (["--num-beams", "3", "--early-stopping", "true"], {"num_beams": 3, "early_stopping": True}),
        (["--penalty-alpha", "0.6", "--top-k", "4"], {"penalty_alpha": 0.6, "top_k": 4}),
        (["--prompt-lookup-tokens", "2", "--draft-tokens", "3"], {"prompt_lookup_tokens": 2, "draft_tokens": 3}),
        (["--repetition-penalty", "1.5", "--frequency-penalty", "0.1", "--presence-penalty", "0.2"], None),
        (["--stop", "19,38"], {"stop": [19, 38]}),
        (["--suppress-tokens", "19"], {"suppress_tokens": [19]}),
    ],
)
def test_options_of_generate(
    arguments: list[str], options: dict[str, object] | str | None, folders: dict[str, str], run_phasor: CommandRunner
) -> None:
    command = ["generate", folders["ids"], "--prompt", AS_TEXT, "--max-new-tokens", "8", *arguments]
    if options == "invalid":
        assert "--seed must be a number, or several between commas, not '5,'" in run_phasor.expect_error(*command)
        return
    if options is None:
        names = [name.removeprefix("--").replace("-", "_") for name in arguments[::2]]
        options = {
            n: v if n == "early_stopping" else json.loads(v) for n, v in zip(names, arguments[1::2], strict=True)
        }
    expected = phasor.generate(speaker(), IDS, max_new_tokens=8, **options)
    assert [int(token) for token in run_phasor(*command).split()] == expected


def test_prompts_from_elsewhere(
    folders: dict[str, str], run_phasor: CommandRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_phasor("generate", folders["ids"], "--prompt", AS_TEXT, "--max-new-tokens", "4")
    (tmp_path / "prompt").write_text(AS_TEXT + "\n")
    file = str(tmp_path / "prompt")
    assert run_phasor("generate", folders["ids"], "--prompt-file", file, "--max-new-tokens", "4") == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO(AS_TEXT + "\n"))
    assert run_phasor("generate", folders["ids"], "--max-new-tokens", "4") == expected
    (tmp_path / "prompt").write_text("Say: ", encoding="utf-8")
    assert run_phasor("generate", folders["text"], "--prompt-file", file, "--max-new-tokens", "1") == "G\n"


def test_a_draft_model(folders: dict[str, str], run_phasor: CommandRunner) -> None:
    arguments = ["generate", folders["ids"], "--prompt", AS_TEXT, "--max-new-tokens", "12"]
    assert run_phasor(*arguments, "--draft", folders["endless"]) == run_phasor(*arguments)
    assert "vocabulary" in run_phasor.expect_error(*arguments, "--draft", folders["text"])


def test_without_end_until_a_stop_token(folders: dict[str, str], run_phasor: CommandRunner) -> None:
    arguments = ["generate", folders["endless"], "--prompt", AS_TEXT, "--max-new-tokens", "none"]
    for more in ([], ["--stream"]):
        assert run_phasor(*arguments, *more).split()[-1] == "38"
    assert "without end" in run_phasor.expect_error(
        "generate", folders["ids"], "--prompt", "1", "--max-new-tokens", "none"
    )


def test_a_stream_is_printed_as_it_comes_and_may_be_cut_off(folders: dict[str, str]) -> None:
    """The reader goes away after the first token: the command ends, and says nothing."""
    arguments = [sys.executable, "-m", "phasor", "generate", folders["endless"], "--prompt", AS_TEXT, "--stream"]
    arguments += ["--max-new-tokens", "none", "--temperature", "1", "--seed", "1", "--stop", "60"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(1).isdigit()
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        process.wait(timeout=60)


@pytest.mark.parametrize("how", [[], ["--temperature", "1"], ["--num-beams", "2"], ["--stream"]])
def test_logits_that_are_not_finite_are_an_error(how: list[str], tmp_path: Path, run_phasor: CommandRunner) -> None:
    model = speaker(num_layers=1)
    torch.nn.init.constant_(next(model.parameters()), math.nan)
    phasor.save(model, tmp_path / "model")
    said = run_phasor.expect_error(
        "generate", str(tmp_path / "model"), "--prompt", "1 2", "--max-new-tokens", "3", *how
    )
    assert "the model's weights are not finite" in said


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["generate"], "required: folder"),
        (["generate", "nowhere", "--prompt", "1"], "there is no folder nowhere here"),
        (["generate", "IDS", "--prompt", ""], "prompt is empty"),
        (["generate", "IDS", "--prompt", "one two"], "must be token ids such as '1 2 3'"),
        (["generate", "IDS", "--prompt", "1 -2"], "must be token ids"),
        (["generate", "IDS", "--prompt", "1 ²"], "must be token ids"),
        (["generate", "IDS", "--prompt", "1 61"], "61 is outside the vocabulary"),
        (["generate", "IDS", "--prompt", "1", "--prompt-file", "x"], "not both"),
        (["generate", "IDS", "--prompt-file", "nowhere"], "nowhere cannot be read"),
        (["generate", "IDS", "--prompt", "1", "--stream", "--json"], "not both"),
        (["generate", "IDS", "--prompt", "1", "--temperature", "hot"], "--temperature must be a number, not 'hot'"),
        (["generate", "IDS", "--prompt", "1", "--temperature", "-1"], "phasor: --temperature must not be negative"),
        (["generate", "IDS", "--prompt", "1", "--temperature", "nan"], "phasor: --temperature must be a finite number"),
        (["generate", "IDS", "--prompt", "1", "--top-p", "0"], "--top-p must be in (0, 1]"),
        (["generate", "IDS", "--prompt", "1", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["generate", "IDS", "--prompt", "1", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["generate", "IDS", "--prompt", "1", "--num-beams", "2", "--stream"], "cannot stream"),
        (["generate", "IDS", "--prompt", "1", "--num-return-sequences", "2"], "cannot exceed num_beams"),
        (["generate", "IDS", "--prompt", "1", "--num-beams", "1000000000"], "--num-beams must be at most 4096"),
        (["generate", "", "--prompt", "1"], "a folder must be given by its path, not by empty text"),
        (["convert", "IDS", ""], "a folder must be given by its path, not by empty text"),
        (["verify", ""], "a folder must be given by its path, not by empty text"),
        (["explain", "preset:llama-2", "--extension", "yarn", "--factor", "0.5"], "--factor must be at least 1"),
        (
            ["generate", "IDS", "--prompt", "1", "--num-beams", "2", "--early-stopping", "soon"],
            "--early-stopping must be",
        ),
        (["generate", "IDS", "--prompt", "1", "--stop", "end"], "needs a text prompt"),
        (["generate", "IDS", "--prompt", "1", "--stop", "\\"], "--stop"),
        (["generate", "IDS", "--prompt", "1", "--draft", "nowhere"], "there is no folder nowhere here"),
        (["generate", "IDS", "--prompt", "1", "--device", "nonsense"], "device 'nonsense' cannot be used"),
        (["generate", "IDS", "--prompt", "1", "--temprature", "1"], "unrecognized arguments: --temprature"),
        (["generate", "TEXT", "--prompt", "Say: ", "--max-new-tokens", "500"], "past the 30 positions"),
        (["kinds", "norm"], "did you mean 'norms'"),
        (["convert", "IDS", "/dev/null/model", "--format", "phasor"], "/dev/null/model cannot be written"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], mention: str, folders: dict[str, str], run_phasor: CommandRunner
) -> None:
    named = {"IDS": folders["ids"], "TEXT": folders["text"]}
    assert mention in run_phasor.expect_error(*(named.get(a, a) for a in arguments))


def test_a_broken_folder_is_told_in_one_line(
    folders: dict[str, str], run_phasor: CommandRunner, tmp_path: Path
) -> None:
    phasor.save(speaker(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    message = run_phasor.expect_error("generate", str(tmp_path), "--prompt", "1")
    assert "is damaged: model.safetensors has 20 bytes and not" in message
    (tmp_path / "phasor_manifest.json").unlink()
    assert "cannot be read as safetensors" in run_phasor.expect_error("generate", str(tmp_path), "--prompt", "1")


@pytest.fixture
def evaluation(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In place of the library's functions some that note what they are given; translations are upside down."""
    given: dict[str, Any] = {}

    def evaluate(run, data=None, target=None, **options):
        options.pop("progress")(1, 1)
        given.update(run=run, data=data, target=target, **options)
        return {"bleu": 51.623456, "tokens": 12345, "signature": "char"}

    def translate(run, texts, **options):
        options.pop("progress")(len(texts), len(texts))
        given.update(run=run, texts=texts, **options)
        return [text[::-1] if text.strip() else "" for text in texts]

    monkeypatch.setitem(sys.modules, "phasor.evaluation", SimpleNamespace(evaluate=evaluate, translate=translate))
    return given


def test_evaluate(evaluation: dict[str, Any], run_phasor: CommandRunner) -> None:
    assert run_phasor("evaluate", "run").splitlines() == [
        "bleu       51.623",
        "tokens     12,345",
        "signature  char",
    ]
    usual = {"data": None, "target": None, "num_beams": 5, "limit": None, "checkpoint": None, "device": "auto"}
    usual |= {"part": None, "adapter": None}
    assert evaluation == {"run": "run", **usual}
    options = ["--data", "a", "--target", "b", "--num-beams", "2", "--limit", "9", "--device", "cpu", "--json"]
    options += ["--checkpoint", "best", "--part", "text"]
    assert json.loads(run_phasor("evaluate", "run", *options))["bleu"] == 51.623456
    asked = {"data": "a", "target": "b", "num_beams": 2, "limit": 9, "checkpoint": "best", "device": "cpu"}
    assert evaluation == {"run": "run", "part": "text", "adapter": None, **asked}
    assert "--target needs --data" in run_phasor.expect_error("evaluate", "run", "--target", "b")


def test_translate_arguments(evaluation: dict[str, Any], run_phasor: CommandRunner) -> None:
    assert run_phasor("translate", "run", "one two", "", "三") == "owt eno\n\n三\n"
    by_folder = {"num_beams": None, "length_penalty": None, "max_new_tokens": None}
    usual = {**by_folder, "batch_tokens": 4096, "device": "auto"}
    assert evaluation == {"run": "run", "texts": ["one two", "", "三"]} | usual
    options = ["--num-beams", "2", "--length-penalty", "0.6", "--max-new-tokens", "7", "--batch-tokens", "99"]
    found = json.loads(run_phasor("translate", "run", "ab", *options, "--device", "cpu", "--json"))
    assert found == [{"source": "ab", "translation": "ba"}]
    assert evaluation == {
        "run": "run",
        "texts": ["ab"],
        "num_beams": 2,
        "length_penalty": 0.6,
        "max_new_tokens": 7,
        "batch_tokens": 99,
        "device": "cpu",
    }


LINES = "one\r\n\n \ntwo\u2028three\nfünf"  # neither the line separator nor a carriage return ends a line


def test_translate_files(
    evaluation: dict[str, Any], run_phasor: CommandRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(LINES.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(LINES.encode()))
    expected = "eno\n\n\neerht owt\nfnüf\n"
    for file in ("a.txt", "a.txt.gz"):
        assert run_phasor("translate", "run", "--file", str(tmp_path / file)) == expected
        assert evaluation["texts"] == ["one", "", " ", "two\u2028three", "fünf"]
    for arguments in ([], ["--file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES.encode())))
        assert run_phasor("translate", "run", *arguments) == expected
    (tmp_path / "empty").write_text("")
    assert run_phasor("translate", "run", "--file", str(tmp_path / "empty")) == ""


def test_translations_are_written_whole_or_not_at_all(
    evaluation: dict[str, Any], run_phasor: CommandRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.txt"
    assert run_phasor("translate", "run", "ab", "", "--out", str(out)) == ""
    assert out.read_text() == "ba\n\n"

    def refuse(run, texts, **options):
        raise ValueError("the run has no model")

    monkeypatch.setattr(sys.modules["phasor.evaluation"], "translate", refuse)
    assert "no model" in run_phasor.expect_error("translate", "run", "cd", "--out", str(out))
    assert out.read_text() == "ba\n\n"
    assert list(tmp_path.iterdir()) == [out]


def test_mistakes_of_translate(evaluation: dict[str, Any], run_phasor: CommandRunner, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"eins\nf\xfcnf\n")
    latin, missing = str(tmp_path / "latin.txt"), str(tmp_path / "none" / "out.txt")
    assert "latin.txt, line 2: the byte 6 is not UTF-8" in run_phasor.expect_error("translate", "run", "--file", latin)
    assert "nowhere cannot be read" in run_phasor.expect_error("translate", "run", "--file", "nowhere")
    assert "not both" in run_phasor.expect_error("translate", "run", "a", "--file", latin)
    assert f"{missing} cannot be written" in run_phasor.expect_error("translate", "run", "a", "--out", missing)
    assert "required: RUN" in run_phasor.expect_error("translate")
    assert not evaluation
    assert f"{tmp_path} cannot be written: it is a folder" in run_phasor.expect_error(
        "translate", "run", "a", "--out", str(tmp_path)
    )


def test_translate_passes_empty_texts_on_so_that_texts_are_counted_as_given(
    evaluation: dict[str, Any], run_phasor: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: str, texts: list[str], **options: Any) -> list[str]:
        raise ValueError(f"text {texts.index('long') + 1} is too long")

    monkeypatch.setattr(sys.modules["phasor.evaluation"], "translate", refuse)
    assert "text 3 is too long" in run_phasor.expect_error("translate", "run", "one", "", "long")


def test_translate_writes_into_a_device_and_does_not_replace_it(
    evaluation: dict[str, Any], run_phasor: CommandRunner, tmp_path: Path
) -> None:
    (tmp_path / "device").symlink_to("/dev/null")
    run_phasor("translate", "run", "ab", "--out", str(tmp_path / "device"))
    assert Path("/dev/null").is_char_device()
    assert [path.name for path in tmp_path.iterdir()] == ["device"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("plan --devices x", "--devices must be an integer, not 'x'"),
        ("generate folder --max-new-tokens ten", "--max-new-tokens must be an integer, not 'ten'"),
        ("generate folder --seed few", "--seed must be a number, or several between commas, not 'few'"),
        ("generate folder --bad-words-ids 1;x", "--bad-words-ids must be integers between commas, with semicolons"),
        (r"generate folder --stop \x", "--stop must be token ids and texts between commas, with escapes as in Python"),
        ("generate folder --temperature warm", "--temperature must be a number, not 'warm'"),
        ("translate folder --length-penalty much", "--length-penalty must be a number, not 'much'"),
        ("explain preset:llama-2 --length 8.5", "--length must be an integer, not '8.5'"),
        ("lab --port http", "--port must be an integer, not 'http'"),
        ("compare --out report --seeds few", "--seeds must be an integer, not 'few'"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_would_be_right(
    run_phasor: CommandRunner, arguments: str, sentence: str
) -> None:
    assert sentence in run_phasor.expect_error(*arguments.split())

"""`phasor generate`: which model it runs, and the rate it prints."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from commands import CommandRunner

import phasor
from phasor.generation.runners import compiled

IDS, PROMPT = [7, 3, 3, 58, 12], "7 3 3 58 12"


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(0)
    config = phasor.preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=61, max_length=16)
    model = phasor.Transformer(config)
    for weight in model.parameters():  # so large that another position changes what comes
        torch.nn.init.normal_(weight, std=0.5)
    phasor.save(model, tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        (["--dtype", "bfloat16"], {"dtype": torch.bfloat16}),
        (["--position", "alibi"], {"position": "alibi"}),
        (["--extension", "yarn", "--factor", "4"], {"extension": phasor.YaRN(factor=4.0, original_length=16)}),
        (["--extension", "linear", "--factor", "2"], {"extension": phasor.LinearScaling(factor=2.0)}),
        (["--extension", "none"], {"extension": "none"}),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else None,
)
def test_the_model_is_loaded_as_asked(
    folder: str, run_phasor: CommandRunner, arguments: list[str], loaded: dict[str, object]
) -> None:
    model = phasor.load(folder, **loaded)
    expected = phasor.generate(model, IDS, max_new_tokens=20)
    command = ["generate", folder, "--prompt", PROMPT, "--max-new-tokens", "20"]
    assert [int(token) for token in run_phasor(*command, *arguments).split()] == expected
    assert ("longer than the 16 tokens" in run_phasor.error) == (model.config.max_length == 16)


def test_wrong_ways_to_ask_for_positions(folder: str, run_phasor: CommandRunner) -> None:
    command = ["generate", folder, "--prompt", PROMPT]
    assert "--factor belongs to an extension" in run_phasor.expect_error(*command, "--factor", "4")
    assert "unknown extension 'yarm'" in run_phasor.expect_error(*command, "--extension", "yarm")
    assert "--dtype must be one of float32" in run_phasor.expect_error(*command, "--dtype", "int3")


def test_positions_are_replaced_before_weights_are_quantized(folder: str, run_phasor: CommandRunner) -> None:
    model = phasor.quantize(phasor.load(folder, position="alibi"))
    command = ["generate", folder, "--prompt", PROMPT, "--max-new-tokens", "6", "--position", "alibi"]
    found = [int(token) for token in run_phasor(*command, "--weights", "int8").split()]
    assert found == phasor.generate(model, IDS, max_new_tokens=6)


@pytest.mark.parametrize("how", [[], ["--stream"]], ids=["at once", "stream"])
def test_the_rate_excludes_compiling(
    folder: str, run_phasor: CommandRunner, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    """A compiler that takes a second stands in for torch's."""
    steps: dict[phasor.Transformer, object] = {}

    def slow_to_compile(model: phasor.Transformer) -> object:
        if model not in steps:
            time.sleep(1.0)
            steps[model] = compiled.static_step
        return steps[model]

    monkeypatch.setattr(compiled, "compiled_step", slow_to_compile)
    expected = phasor.generate(phasor.load(folder), IDS, max_new_tokens=6)
    command = ["generate", folder, "--prompt", PROMPT, "--max-new-tokens", "6", "--compile", "true", *how]
    assert [int(token) for token in run_phasor(*command).split()] == expected
    said = re.search(r"6 tokens in ([\d.]+) s, [\d.]+ tokens/s, after ([\d.]+) s of compiling", run_phasor.error)
    assert said is not None
    assert float(said[1]) < 0.9
    assert float(said[2]) >= 1.0

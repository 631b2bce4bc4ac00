"""`phasor extend`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import phasor
from phasor.cli import main
from phasor.cli.extend import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "long-context.md"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"dim": 32, "num_heads": 2, "num_layers": 1, "vocab_size": 60, "hidden_dim": 48, "max_length": 64}
    phasor.save(phasor.Transformer(phasor.preset("llama-2", **sizes, trained_length=32)), tmp_path / "model")
    return tmp_path / "model"


def test_extend_writes_and_says_what(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(model.parent / "out")
    assert main(["extend", str(model), out, "--to", "1k"]) == 0
    printed = capsys.readouterr().out
    assert f"written: {out}" in printed
    assert "yarn from 32 to 1,024 tokens, trained at 32" in printed
    factors = ",".join(["2"] * 8)
    options = ["--method", "longrope", "--short-factor", factors, "--long-factor", factors, "--format", "hf", "--json"]
    assert main(["extend", str(model), f"{out}-hf", "--to", "256", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["max_length"], result["original_length"], result["status"]) == (256, 32, "finished")
    written = json.loads((model.parent / "out-hf/config.json").read_text())
    assert written["rope_parameters"]["long_factor"] == [2.0] * 8


@pytest.mark.filterwarnings("ignore:.*needs training")
@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_writes_without_training_is_not_said_to_need_it(model: Path, method: str) -> None:
    assert main(["extend", str(model), str(model.parent / "out"), "--to", "128", "--method", method]) == 0
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{method}` |")]
    assert "need" not in METHODS[method] + row


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--to", "32"], "--to must be greater than the 32 tokens the model was trained at, not 32"),
        (
            ["--to", "8K tokens"],
            "a length is an integer from 2 on, or one with k for 1,024 such as 8k",
        ),
        (["--to", "128", "--method", "yarm"], "unknown method 'yarm' (did you mean 'yarn'?)"),
        (["--to", "128", "--factor", "0.5"], "--factor must be at least 1, not 0.5"),
        (["--to", "256", "--factor", "2"], "--factor 2 reaches 64 tokens, fewer than the 256 asked for"),
        (["--to", "128", "--steps", "5"], "--steps is for fine-tuning: add --train FILE"),
        (["--to", "128", "--positions", "skipped"], "--positions skipped is for training"),
        (["--to", "128", "--method", "linear", "--beta-fast", "3"], "unknown field of LinearScaling 'beta_fast'"),
        ([], "the following arguments are required: --to"),
    ],
)
def test_mistakes_are_one_line(
    model: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["extend", str(model), str(model.parent / "out"), *options]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert [path.name for path in model.parent.iterdir()] == ["model"]

"""`phasor bench families`: both libraries are checked against transformers in a higher precision, then timed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandRunner
from torch.utils._python_dispatch import TorchDispatchMode

import phasor
from phasor.bench import FAMILIES, families, runner
from phasor.bench.report import Report
from phasor.bench.runner import build_machine, measure
from phasor.bench.sizes import TINY
from phasor.bench.timing import Timer
from phasor.bench.workload import run_workload
from phasor.config import ExpertsConfig


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandRunner:
    monkeypatch.setattr(runner, "CPU", TINY)
    return CommandRunner(capsys)


class OperationCount(TorchDispatchMode):
    """Counts torch's operations, a clock that other work on the machine does not disturb."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def operations_as_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def wall(timer: Timer, call: Callable[[], object], warmups: int = 3) -> float:
        with OperationCount() as clock:
            call()
        return float(clock.count)

    monkeypatch.setattr(Timer, "wall", wall)


def assert_right(report: Report) -> None:
    for row in report.rows:
        assert [entry.name for entry in row.entries] == ["phasor", "transformers"]
        assert row.limit > 0
        for entry in row.entries:
            assert entry.note == ""
            assert entry.error is not None
            assert entry.error < 1e-5
            assert entry.device is None  # there is no GPU
            assert entry.idle is None


@pytest.mark.slow
@pytest.mark.usefixtures("operations_as_seconds")
def test_every_family_is_right_and_timed() -> None:
    report = measure(["families"], device="cpu", sizes=TINY)
    assert_right(report)
    parts = ["2 x 12 tokens", "decode, batch 1", "decode, batch 3"]
    assert [(row.family, row.part) for row in report.rows] == [
        (family, part) for family in FAMILIES for part in parts[: 1 if family == "modernbert" else 3]
    ]


@pytest.mark.usefixtures("operations_as_seconds")
def test_the_command_prints_one_table_and_reads_it_again(run_phasor: CommandRunner, tmp_path: Path) -> None:
    file = tmp_path / "families.json"
    text = run_phasor("bench", "families", "--family", "mixtral", "gpt-2", "--device", "cpu", "--json", str(file))
    for words in ("mixtral of", "forward and backward, 2 x 12 tokens", "phasor speedup over transformers", "batch 3"):
        assert words in text
    report = Report.from_dict(json.loads(file.read_text()))
    assert_right(report)
    assert [row.family for row in report.rows] == ["mixtral"] * 3 + ["gpt-2"] * 3
    assert run_phasor("bench", "--read", str(file)) == text


@pytest.mark.usefixtures("operations_as_seconds")
def test_no_time_for_a_wrong_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong weight shows in logits and gradients, a prompt that lacks a token in what is decoded."""
    machine = build_machine(torch.device("cpu"), TINY, compiles=False)
    models = families.FamilyModels("gpt-2", machine)
    real = phasor.generate
    with monkeypatch.context() as patch:
        patch.setattr(
            families, "generate", lambda model, rows, *rest, **o: real(model, [r[1:] for r in rows], *rest, **o)
        )
        ours, theirs = run_workload(families.decoding(models, 3), machine, lambda line: None).entries
    assert "wrong" in ours.note
    assert theirs.value is not None
    with torch.no_grad():
        models.pair[0].tokens.weight[5] *= 1.01
    ours, theirs = run_workload(families.training(models, 2, 12), machine, lambda line: None).entries
    assert "wrong" in ours.note
    assert theirs.value is not None


def test_a_device_that_waits_is_said_to_be_idle() -> None:
    row = {"name": "phasor", "value": 20.0, "error": 0.0, "memory": 1.0, "note": ""}
    fields: dict[str, Any] = {"workload": "families", "title": "", "unit": "ms", "limit": 1.0, "limit_basis": ""}
    head: dict[str, Any] = {"device": "", "dtype": "", "versions": {}, "bandwidth": 1.0, "arithmetic": 1.0}
    report = Report.from_dict(head | {"rows": [fields | {"entries": [row, row | {"device": 5.0}]}]})
    without, known = report.rows[0].entries  # older files have no device time
    assert (without.idle, known.idle) == (None, 0.75)
    assert report.to_dict()["rows"][0]["entries"][1]["idle"] == 0.75


def test_bytes_of_a_step_are_those_of_the_experts_that_are_used() -> None:
    weight = torch.zeros(8, 2, 2)
    experts = ExpertsConfig(num_experts=8, top_k=2)
    assert families.used_share(weight, experts, 1) == 2 / 8
    assert families.used_share(weight, experts, 2) == pytest.approx(1 - (6 / 8) ** 2)
    assert families.used_share(weight[0], experts, 1) == families.used_share(weight, None, 1) == 1


def test_bytes_of_a_step_count_the_experts_of_each_layer() -> None:
    layers = [{"hidden_dim": 64}, *({"experts": {"num_experts": count, "top_k": 2}} for count in (4, 8))]
    sizes = {"dim": 32, "hidden_dim": 48, "num_heads": 2, "num_layers": 3, "vocab_size": 50}
    config = phasor.preset("llama-2", **sizes, layers=tuple({"feedforward": each} for each in layers))
    model = phasor.Transformer(config)
    weights = {name: weight.nbytes for name, weight in model.named_parameters() if name != "tokens.weight"}
    experts = [sum(weights[f"decoder.blocks.{i}.feedforward.{name}"] for name in ("up", "down")) for i in (1, 2)]
    expected = sum(weights.values()) - experts[0] * 2 / 4 - experts[1] * 6 / 8
    assert families.decode_bytes(model, 1, 0) == expected


def test_what_cannot_be_run_is_refused_in_a_sentence(
    run_phasor: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run_phasor.expect_error
    assert "unknown family 'lama' (did you mean 'llama'?)" in refused("bench", "families", "--family", "lama")
    assert "--family goes with the workload families" in refused("bench", "rotary", "--family", "llama")
    assert "--family needs" not in refused("bench", "--family", "llama")
    assert "--family does not go with --explain" in refused("bench", "--explain", "--family", "llama")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else find(name, *a)
    )
    assert "needs the package transformers: pip install transformers" in refused("bench", "families")

"""`phasor bench`: results are checked before they are timed; `phasor bench --explain`."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandRunner

import phasor
from phasor.bench import DEFAULT_WORKLOADS, FULL_WORKLOADS, WORKLOADS, attention, llama, rope, runner
from phasor.bench.llama import decoding, training
from phasor.bench.report import Entry, Report, WorkloadResult
from phasor.bench.runner import build_machine, measure
from phasor.bench.sizes import TINY
from phasor.bench.workload import Machine, run_workload
from phasor.ops.attention import attention as attend


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


@pytest.fixture(scope="module")
def report() -> Report:
    """Every workload but the families, which are tested elsewhere, at sizes that take no time."""
    return measure(FULL_WORKLOADS, device="cpu", sizes=TINY)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return build_machine(torch.device("cpu"), TINY, compiles=False)


def test_every_workload_is_right_and_timed(report: Report) -> None:
    assert [row.workload for row in report.rows] == [
        name for workload in FULL_WORKLOADS for name in [workload] * (2 if workload in ("rotary", "positions") else 1)
    ]
    assert set(DEFAULT_WORKLOADS) <= set(FULL_WORKLOADS) < set(WORKLOADS)
    for row in report.rows:
        assert row.best is not None
        assert row.limit > 0
        for entry in row.entries:
            assert entry.note == ""
            assert entry.value is not None
            assert entry.value > 0
            assert entry.error is not None
            # Sums in float32; transformers' angles are float32 products of small positions.
            assert entry.error < 1e-5
        assert {"transformers", "torch SDPA"} & {entry.name for entry in row.entries}


def wrong(entry: Entry) -> bool:
    return entry.value is None and "wrong" in entry.note


def ours(row: WorkloadResult) -> Entry:
    return next(entry for entry in row.entries if entry.ours)


def test_no_time_for_a_wrong_result(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each workload notices a result that is a little off, in ours alone."""

    def silent(line: str) -> None: ...

    real = rope.Rotary.rotate
    with monkeypatch.context() as patch:
        patch.setattr(rope.Rotary, "rotate", lambda self, q, k, positions: real(self, q, k, positions + 1))
        for workload in rope.workloads(machine, packed=True):
            row = run_workload(workload, machine, silent)
            assert wrong(ours(row))
            assert row.best is None
            assert row.speedup_over(row.entries[1]) is None
            assert row.entries[1].value is not None
    with monkeypatch.context() as patch:  # and not even where it is a single token
        last = torch.arange(machine.sizes.rotary[1]) == machine.sizes.rotary[1] - 1
        patch.setattr(rope.Rotary, "rotate", lambda self, q, k, positions: real(self, q, k, positions + last))
        assert all(
            wrong(ours(run_workload(workload, machine, silent))) for workload in rope.workloads(machine, packed=False)
        )
    with monkeypatch.context() as patch:
        patch.setattr(attention, "attention", lambda q, k, v, mask, score_mod: 1.01 * attend(q, k, v, mask, score_mod))
        assert wrong(ours(run_workload(attention.workload(machine, "window"), machine, silent)))
    with monkeypatch.context() as patch:
        real_loss = llama.next_token_loss
        patch.setattr(llama, "next_token_loss", lambda *a: 1.01 * real_loss(*a))
        assert wrong(ours(run_workload(training(machine, "train"), machine, silent)))
    with monkeypatch.context() as patch:
        real_generate = phasor.generate
        patch.setattr("phasor.bench.llama.generate", lambda m, p, **o: real_generate(m, [row[1:] for row in p], **o))
        assert wrong(ours(run_workload(decoding(machine, "decode-batch"), machine, silent)))


def test_a_contender_that_fails_is_noted_and_the_others_go_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(rope, "transformers_rope", broken)
    workload = next(rope.workloads(machine, packed=False))
    row = run_workload(workload, machine, lambda line: None)
    by_name = {entry.name: entry for entry in row.entries}
    assert by_name["transformers"] == Entry("transformers", None, note="failed: out of luck")
    assert ours(row).value is not None


def test_ratios() -> None:
    row = WorkloadResult(
        "train", "", "tokens/s", 100.0, "", (Entry("phasor", 40.0), Entry("phasor, x", 50.0), Entry("they", 25.0))
    )
    assert row.best == 50.0
    assert [row.speedup_over(entry) for entry in row.entries] == [1.25, 1.0, 2.0]
    assert [row.fraction_of_limit(entry) for entry in row.entries] == [0.4, 0.5, 0.25]


# The command.


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CPU", TINY)


@pytest.mark.usefixtures("tiny")
def test_the_command_prints_writes_and_draws(run_phasor: CommandRunner, tmp_path: Path) -> None:
    file, chart = tmp_path / "bench.json", tmp_path / "bench.png"
    text = run_phasor("bench", "rotary", "decode", "--device", "cpu", "--json", str(file), "--plot", str(chart))
    assert run_phasor.error == ""
    for words in ("rotary, forward and backward", "greedy decoding", "of the limit", "phasor speedup", "GB/s"):
        assert words in text
    found = json.loads(file.read_text())
    assert [row["workload"] for row in found["rows"]] == ["rotary", "rotary", "decode"]
    first = found["rows"][0]["entries"][0]
    assert first["name"].startswith("phasor")
    assert first["fraction_of_limit"] == pytest.approx(found["rows"][0]["limit"] / first["value"])
    assert found["bandwidth"] > 0
    assert found["versions"]["torch"] == torch.__version__
    assert chart.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    chart.unlink()
    again = run_phasor("bench", "--read", str(file), "--plot", str(chart))
    assert again == text
    assert chart.exists()
    assert "rotary" not in run_phasor("bench", "decode", "--read", str(file))
    assert json.loads(run_phasor("bench", "--read", str(file), "--json", "-")) == found
    assert "known: rotary, decode" in run_phasor.expect_error("bench", "window", "--read", str(file))
    assert (
        json.loads(run_phasor("bench", "window", "--device", "cpu", "--json", "-"))["rows"][0]["workload"] == "window"
    )


@pytest.mark.usefixtures("tiny")
def test_a_benchmark_that_is_stopped_has_written_what_it_knew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llama, "decoding", stop)
    file = tmp_path / "bench.json"
    with contextlib.suppress(KeyboardInterrupt):
        phasor.cli.main(["bench", "window", "rotary", "decode", "--device", "cpu", "--json", str(file)])
    assert [row.workload for row in Report.from_dict(json.loads(file.read_text())).rows] == [
        "window",
        "rotary",
        "rotary",
    ]
    assert [place.name for place in tmp_path.iterdir()] == ["bench.json"]


def test_json_goes_to_where_a_link_points_and_into_pipes(tmp_path: Path) -> None:
    told, link, pipe = (tmp_path / name for name in ("told.json", "link.json", "pipe.json"))
    told.write_text("")
    link.symlink_to(told)
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(json.loads(pipe.read_text())))
    reader.start()
    for place in (link, pipe):
        assert phasor.cli.main(["bench", "--explain", "preset:bloom", "--device", "cpu", "--json", str(place)]) == 0
    reader.join()
    assert link.is_symlink()
    assert read == [json.loads(told.read_text())]


@pytest.mark.usefixtures("tiny")
def test_a_wrong_result_of_ours_is_not_a_success(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(attention, "attention", lambda q, *rest: torch.full_like(q, torch.nan))
    chart = tmp_path / "bench.png"
    assert phasor.cli.main(["bench", "attention", "--device", "cpu", "--plot", str(chart)]) == 1
    assert "phasor: wrong: off by inf" in capsys.readouterr().out
    assert chart.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rotery"], "unknown workload 'rotery' (did you mean 'rotary'?); known: rotary, positions"),
        (["--device", "tpu"], "the device 'tpu' cannot be used"),
        (["--full", "--device", "cpu"], "needs a GPU"),
        (["--read", "nowhere.json"], "nowhere.json"),
        (["--read", str(Path(__file__))], "test_bench.py: Extra data"),
        (["--read", "nowhere.json", "--full"], "--read times nothing"),
        (["--plot", "nowhere/bench.png"], "there is no folder"),
        (["--plot", "bench.xyz"], "does not end in any of them"),
        (["--json", "nowhere/bench.json"], "there is no folder"),
        (["--length", "5"], "--length needs --explain"),
        (["rotary", "--explain", "preset:bert"], "workloads does not go with --explain"),
        (["--explain", "preset:lama-2"], "did you mean 'llama-2'"),
        (["--explain", "nowhere"], "there is no folder nowhere"),
        (["--explain", "--device", "tpu"], "unknown device 'tpu'"),
        (["--explain", "--dtype", "float23"], "did you mean 'float32'"),
        (["--explain", "--length", "-1"], "length must be an integer"),
        (["--explian"], "did you mean '--explain'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments: list[str], said: str, run_phasor: CommandRunner) -> None:
    assert said in run_phasor.expect_error("bench", *arguments)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["llama-3.1", "grok-1", "t5", "bloom", "bert"])
def test_explain(name: str, device: str, run_phasor: CommandRunner) -> None:
    text = run_phasor("bench", "--explain", f"preset:{name}", "--device", device)
    assert f"{name} on {device}" in text
    assert "attention" in text
    found = json.loads(run_phasor("bench", "--explain", f"preset:{name}", "--device", device, "--json", "-"))
    assert found["ops"] == json.loads(json.dumps(phasor.backends(f"preset:{name}", device=device).to_dict()["ops"]))
    trained = run_phasor("bench", "--explain", f"preset:{name}", "--training", "--length", "128", "--dtype", "float32")
    assert "float32, 128 tokens, training" in trained


def test_explain_a_folder(run_phasor: CommandRunner, tmp_path: Path) -> None:
    config = phasor.ModelConfig(vocab_size=50, dim=32, num_layers=2, num_heads=4, position="rotary", norm="rmsnorm")
    phasor.save(phasor.Transformer(config), tmp_path / "model")
    assert "rotation" in run_phasor("bench", "--explain", str(tmp_path / "model"), "--device", "cpu")

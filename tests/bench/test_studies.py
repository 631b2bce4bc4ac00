"""Workloads that run alone: each at a tiny size on the CPU, its checks, its settings and its JSON."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandRunner

from phasor.bench import STUDIES
from phasor.bench.studies import attention_kernels, linear_attention, scaling, sparse, stream, train_cpu
from phasor.bench.study import load_study, run_study

# What the results of earlier runs in benchmarks/results have, so that new ones can be compared with them.
KEYS = {
    "rotary-kernels": {"errors", "milliseconds"},
    "attention-kernels": {"checks", "matmul_tflops", "rows"},
    "schemes": {"rows"},
    "sparse": {"checks", "rows"},
    "linear-attention": {"copy bytes/s", "rows", "slopes"},
    "scaling": {"rows", "slopes"},
    "fused": {"rows"},
    "train-gpu": {"length", "rows", "weights", "limit", "systems"},
    "train-cpu": {"tokens_per_second", "products_alone", "outside"},
    "lora": {"checks", "rows", "beside_peft"},
    "decode-gpu": {
        "copy bytes/s",
        "bytes of weights",
        "limit, tokens/s at batch 1",
        "shape",
        "prompt",
        "new",
        "bytes of weights in int8",
        "limit in int8, tokens/s at batch 1",
        "int8 against bfloat16, random weights",
        "batch 2",
    },
    "decode-schemes": {"rows"},
    "latent": {"copy bytes/s", "rows"},
    "decode-cpu": {"batch 1, prompt 16", "milliseconds per token against tokens in the cache"},
    "serving": {"shape", "threads", "at_once", "steps", "tokens in", "tokens out", "rows"},
    "quantized": {"threads", "cpu", "products, least milliseconds"},
    "loading": {"into float32"},
    "stream": {"sizes", "dtype", "limits", "rows"},
    "host": {"gpt-2"},
}
SLOW = ("rotary-kernels", "attention-kernels", "decode-gpu", "loading", "fused", "lora")  # kernels, or processes
RESULTS = {
    "rotary-kernels": "rotary",
    "attention-kernels": "attention",
    "decode-cpu": "decode",
    "decode-gpu": "decode_gpu",
    "train-gpu": "training-gpu",
    "train-cpu": "training",
    "quantized": "quantized-aarch64",
}


def silent(line: str) -> None: ...


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


@pytest.mark.cpu_only("studies at a tiny size, with interpreted kernels")
@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in STUDIES]
)
def test_every_study_checks_and_times(name: str) -> None:
    saved: list[dict[str, Any]] = []
    lines: list[str] = []
    result = run_study(
        name, device="cpu", tiny=True, say=lines.append, save=lambda x: saved.append(json.loads(json.dumps(x)))
    )
    assert {"device", "torch"} | KEYS[name] <= set(result)
    assert "failed" not in json.dumps(result)
    assert len(saved) >= 2 or name == "train-gpu"  # written while it runs, and at the end
    assert lines
    assert name in KEYS


@pytest.mark.parametrize(
    "name", sorted(set(KEYS) - {"host", "linear-attention", "decode-schemes", "latent", "lora", "serving"})
)
def test_keys_are_those_of_earlier_results(name: str) -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "results" / f"{RESULTS.get(name, name)}.json"
    earlier = json.loads(file.read_text())
    assert KEYS[name] - {"batch 2"} <= set(earlier)


def test_no_time_for_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sparse.sparse_attention
    with monkeypatch.context() as patch:
        patch.setattr(sparse, "sparse_attention", lambda *given: 1.01 * real(*given))
        with pytest.raises(ValueError, match=r"nothing is timed: top-k, 1/8 in float32 is wrong"):
            run_study("sparse", device="cpu", tiny=True, say=silent)
    with monkeypatch.context() as patch:
        attend = scaling.attention
        patch.setattr(scaling, "attention", lambda *given: 1.01 * attend(*given))
        with pytest.raises(ValueError, match=r"all tokens at 64 tokens is off by .*: it is not timed"):
            run_study("scaling", device="cpu", tiny=True, say=silent)
    with monkeypatch.context() as patch:
        forward = stream.ChunkReader.__call__
        patch.setattr(stream.ChunkReader, "__call__", lambda self, tokens: 1.01 * forward(self, tokens))
        with pytest.raises(ValueError, match="phasor with a window of 8 is off by"):
            run_study("stream", device="cpu", tiny=True, say=silent)
    with monkeypatch.context() as patch:
        targets = train_cpu.marked_targets
        patch.setattr(train_cpu, "marked_targets", lambda batch: targets(batch).roll(1))
        with pytest.raises(ValueError, match="the loss of plain torch in step 0 is off by"):
            run_study("train-cpu", device="cpu", tiny=True, say=silent)


def test_no_time_for_linear_attention_that_is_wrong_at_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear_attention.gated_delta

    def wrong_when_long(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, state = right(*given)
        return (y if given[0].shape[2] < 300 else 1.01 * y), state

    monkeypatch.setitem(linear_attention.OPERATIONS, "delta", wrong_when_long)
    settings = {"kinds": (), "batches": (), "operations": ("delta",)}
    rows = run_study("linear-attention", settings, device="cpu", tiny=True, say=silent)["rows"]
    assert [(row["tokens"], "forward_ms" in row) for row in rows if row["who"] == "phasor"] == [
        (70, True),
        (330, False),
    ]
    assert "delta over 330 tokens is off by" in rows[1]["failed"]


def test_a_failure_is_a_line_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(sparse, "flex_attention", broken)
    rows = run_study("sparse", device="cpu", tiny=True, say=silent)["rows"]
    assert {row["failed"] for row in rows if row["who"] == "Flex"} == {"RuntimeError: out of"}
    assert all("forward_ms" in row for row in rows if row["who"] != "Flex")


def test_visible_pairs_are_those_that_the_mask_shows() -> None:
    tokens = 96
    index = torch.arange(tokens)
    for name, pattern in sparse.patterns(tokens, 8).items():
        if not name.startswith("top-k"):
            shown = pattern.visible(index[:, None], index)
            assert shown is not None
            assert sparse.visible_pairs(pattern, tokens) == int((shown & (index <= index[:, None])).sum())
    assert attention_kernels.visible_pairs("window 5", 7) == 5 + 6 * 5 - 20 + 10  # 1 + 2 + 3 + 4 + 5 + 5 + 5
    assert attention_kernels.visible_pairs("causal", 7) == 28


# The command.


def test_the_command_takes_settings_writes_and_draws(run_phasor: CommandRunner, tmp_path: Path) -> None:
    file, chart = tmp_path / "scaling.json", tmp_path / "scaling.png"
    given = ["--set", "longest=64", "--set", "longest-backward=64", "--set", "shortest=64", "--device", "cpu"]
    text = run_phasor("bench", "scaling", *given, "--json", str(file), "--plot", str(chart))
    assert "tokens 64, seconds" in text
    result = json.loads(file.read_text())
    assert {row["tokens"] for row in result["rows"]} == {64}
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert json.loads(run_phasor("bench", "scaling", *given, "--json", "-"))["rows"][0]["rule"] == "all tokens"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sparse", "rotary"], "the workload sparse runs alone"),
        (["sparse", "--full"], "--full does not go with the workload sparse"),
        (
            ["sparse", "--set", "lenghts=5"],
            "unknown setting of the workload sparse 'lenghts' (did you mean 'lengths'?)",
        ),
        (["sparse", "--set", "lengths"], "--set takes NAME=VALUE"),
        (["sparse", "--set", "lengths=x"], "lengths"),
        (["sparse", "--plot", "x.png"], "the workload sparse draws nothing"),
        (["fused", "--set", "parts=norms"], "did you mean 'norm'"),
        (["rotary", "--set", "rows=5"], "--set is for one of the workloads that run alone"),
        (["--explain", "--set", "rows=5"], "--set does not go with --explain"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments: list[str], said: str, run_phasor: CommandRunner) -> None:
    assert said in run_phasor.expect_error("bench", *arguments)


def test_a_missing_peer_or_gpu_is_said(run_phasor: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else find(name, *a)
    )
    assert "the workload host needs the package transformers" in run_phasor.expect_error("bench", "host")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    said = run_phasor.expect_error("bench", "rotary-kernels", "--device", "cpu")
    assert "the workload rotary-kernels times Triton kernels and needs a GPU" in said


def test_help_lists_every_workload(run_phasor: CommandRunner) -> None:
    with pytest.raises(SystemExit):
        run_phasor("bench", "--help")
    for name in STUDIES:
        assert load_study(name).TINY.replace() == load_study(name).TINY


def test_the_packages_import_nothing_heavy() -> None:
    code = (
        "import sys, phasor.bench, phasor.bench.study\n"
        f"import {', '.join('phasor.bench.studies.' + name.replace('-', '_') for name in STUDIES)}\n"
        "print([name for name in ('transformers', 'triton', 'liger_kernel', 'matplotlib') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"

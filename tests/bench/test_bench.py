"""`phasor bench` and `phasor.backends`: results are checked before they are timed, and paths are told truly."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandRunner

import phasor
from phasor.bench import DEFAULT_WORKLOADS, WORKLOADS, attention, llama, rope, runner
from phasor.bench.llama import decoding, training
from phasor.bench.report import Entry, Report, Row
from phasor.bench.runner import build_machine, measure
from phasor.bench.sizes import TINY
from phasor.bench.workload import Machine, run_workload
from phasor.inspect.case import Case
from phasor.inspect.operations import OPERATIONS
from phasor.models.presets import PRESETS
from phasor.ops import dispatch
from phasor.ops.attention import ATTENTION, Mask, ScoreMod
from phasor.ops.attention import attention as attend
from phasor.ops.dispatch import Dispatch
from phasor.ops.dispatch import Path as OpPath


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


@pytest.fixture(scope="module")
def report() -> Report:
    """Every workload, at sizes that take no time."""
    return measure(list(WORKLOADS), device="cpu", sizes=TINY)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return build_machine(torch.device("cpu"), TINY, compiles=False)


# What is fast where.


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_path_for_every_operation(name: str, device: str, training: bool) -> None:
    config = phasor.preset(name)
    found = phasor.backends(config, device=device, training=training)
    ops = {one.op for one in found.ops}
    assert {"attention", "norm"} <= ops
    assert ("rotation" in ops) == isinstance(config.position, phasor.RotaryConfig)
    assert ("gated activation" in ops) == config.feedforward.gated
    assert ("cross-attention" in ops) == (config.shape == "encoder-decoder")
    assert ("cross-entropy" in ops) == (training and config.has_logits)
    assert ("decoding step" in ops) == (not training and config.has_logits and config.shape != "encoder")
    assert (found.device, found.dtype) == (device, "bfloat16" if device == "cuda" else "float32")
    text = str(found)
    for one in found.ops:
        assert one.path in text
        assert all(why in text and why.count(".") == 0 for _, why in one.why_not)


def path_of(config: phasor.ModelConfig, op: str = "attention", **about: Any) -> tuple[str, str]:
    one = next(one for one in phasor.backends(config, **about).ops if one.op == op)
    return one.path, one.reason


def small(**fields: Any) -> phasor.ModelConfig:
    sizes = {"vocab_size": 50, "dim": 32, "num_layers": 2, "num_heads": 4, "max_length": 700}
    return phasor.ModelConfig(**{**sizes, **fields})


@pytest.mark.parametrize(
    ("fields", "path", "reason"),
    [
        ({}, "one call", ""),
        ({"attention": {"window": 100}}, "SDPA in blocks", "window"),
        ({"attention": {"window": 700}}, "one call", ""),
        ({"attention": {"window": 100, "sink_tokens": 2, "cap_sinks": True}, "position": "rotary"}, "blocks", "capped"),
        ({"attention": {"softcap": 30.0}}, "reference in blocks", "soft-cap"),
        ({"attention": {"sink_logits": True}}, "reference in blocks", "sink logits"),
        ({"position": "alibi"}, "SDPA in blocks", "bias"),
        ({"position": "t5"}, "SDPA in blocks", "bias"),
    ],
)
def test_attention_takes_the_path_that_is_told(
    fields: dict[str, Any], path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(**fields)
    told = path_of(config, device="cpu")
    assert path in told[0]
    assert reason in told[1]
    taken = []

    def record(path: OpPath) -> OpPath:
        return path._replace(run=lambda *args: taken.append(path.name) or path.run(*args))

    monkeypatch.setattr(ATTENTION, "paths", tuple(map(record, ATTENTION.paths)))
    with torch.no_grad():
        phasor.Transformer(config).eval()(torch.randint(0, 50, (1, 700)))
    assert taken == [told[0]] * 2


def test_attention_over_a_cache_is_a_path_of_the_table() -> None:
    """Padding in a decoder, documents, a prefix, a single query, and queries that follow those in a cache."""
    score_mod = ScoreMod(scale=1.0)
    flags, ids = torch.ones(1, 8, dtype=torch.bool), torch.zeros(1, 8, dtype=torch.int64)
    masks = {
        "padding": Mask(causal=True, key_mask=flags),
        "documents": Mask(query_document_ids=ids, key_document_ids=ids),
        "prefix": Mask(causal=True, prefix_length=torch.tensor([2])),
    }
    x = torch.zeros(1, 8, 2, 4)
    for word, mask in masks.items():
        path, reasons = ATTENTION.explain(x, x, x, mask, score_mod)
        assert path == "SDPA in blocks of queries"
        assert word in reasons["SDPA in one call"]
        assert ATTENTION.explain(x[:, :1], x, x, mask, score_mod)[0] == "SDPA with one mask row"
    chunk = x[:, :3], x, x, Mask(causal=True, offset=5)
    path, reasons = ATTENTION.explain(*chunk, score_mod)
    assert path == "SDPA over a cache"
    assert "cache" in reasons["SDPA in one call"]
    assert ATTENTION.explain(x[:, :1], x, x, chunk[3], score_mod)[0] == "SDPA in one call"
    assert ATTENTION.explain(*chunk, ScoreMod(scale=1.0, softcap=2.0))[0] == "reference in blocks of queries"
    assert ATTENTION.explain(x, x, x, Mask(key_mask=flags), score_mod)[0] == "SDPA with one mask row"


def test_layers_that_differ_are_told_apart() -> None:
    local = phasor.LayerConfig(attention=phasor.AttentionConfig(window=16))
    config = small(num_layers=6, layers=(local, local, phasor.LayerConfig()), norm="rmsnorm")
    found = {(one.where, one.path) for one in phasor.backends(config, device="cpu").ops if one.op == "attention"}
    assert found == {
        ("layers 0-1, 3-4", "SDPA in blocks of queries"),
        ("layers 2, 5", "SDPA in one call"),
    }


def test_norms_and_decoding_say_why_not() -> None:
    offset = small(norm=phasor.RMSNormConfig(unit_offset=True))
    assert "add nothing to their weight" in path_of(offset, "norm", device="cpu")[1]
    assert path_of(small(norm="rmsnorm"), "norm", device="cpu")[0] == "one operation of torch"
    headwise = small(norm="rmsnorm", attention=phasor.AttentionConfig(qk_norm="heads"))
    assert "weights of its own" in path_of(headwise, "query and key norm", device="cpu")[1]
    dynamic = phasor.RotaryConfig(extension=phasor.DynamicNTKScaling(factor=2.0, original_length=64))
    assert "frequencies depend on the length" in path_of(small(position=dynamic), "decoding step")[1]
    assert "frequencies" not in path_of(small(position="rotary"), "decoding step")[1]


def test_a_stand_in_says_it_is_on_a_device_that_is_not_there() -> None:
    """What rules of kernels look at: `dispatch.triton_why_not` and the like are asked with these."""
    config = phasor.preset("llama-3.1")
    case = Case(config, config.layer(0), "decoder", torch.device("cuda"), torch.bfloat16, 4096, True)
    for x in (case.queries, case.keys, case.hidden, case.projected):
        assert x.is_cuda
        assert x.dtype == torch.bfloat16
        assert x.requires_grad
    assert case.queries.shape == (1, 4096, 32, 128)
    assert case.projected.shape == (1, 4096, 2 * config.hidden_dim)
    if dispatch.TRITON_INSTALLED:
        assert dispatch.triton_why_not(case.queries) is None
    assert "not on a GPU" in (
        dispatch.triton_why_not(replace(case, device=torch.device("cpu")).queries) or "not on a GPU"
    )


def test_a_new_path_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    op = next(op for op in OPERATIONS if op.name == "attention")
    new = OpPath("new kernel", attend, lambda q, k, *_: dispatch.triton_why_not(q, k))
    table = Dispatch(new, *op.table.paths)
    monkeypatch.setattr("phasor.inspect.backends.OPERATIONS", (replace(op, table=table),))
    config = small()
    assert "GPU" in path_of(config, device="cpu")[1] or not dispatch.TRITON_INSTALLED
    assert path_of(config, device="cuda")[0] == ("new kernel" if dispatch.TRITON_INSTALLED else op.table.paths[-1].name)


@pytest.mark.skipif(not dispatch.TRITON_INSTALLED, reason="Triton is not installed")
def test_kernels_are_taken_on_a_gpu() -> None:
    """By rules alone: there need be no GPU."""
    config = phasor.preset("llama-3.1", attention=phasor.AttentionConfig(window=1024))
    found = {one.op: one for one in phasor.backends(config, device="cuda", length=8192, training=True).ops}
    assert found["rotation"].path == "Triton kernel on the projection"
    assert found["attention"].path == "Triton kernel over key intervals"
    assert "window" in found["attention"].reason
    for op in ("norm", "gated activation", "cross-entropy", "optimizer step"):
        assert "Triton kernel" in found[op].path
    normed = config.replace(norm="rmsnorm", attention=phasor.AttentionConfig(qk_norm="head", softcap=30.0))
    found = {one.op: one for one in phasor.backends(normed, device="cuda", length=8192).ops}
    assert found["rotation"].path == "Triton kernel on queries and keys"
    assert "normalized" in found["rotation"].reason
    wide = phasor.backends(config, device="cuda", dtype="float64", length=8192, training=True)
    assert not [one for one in wide.ops if "Triton" in one.path]


@pytest.mark.skipif(not dispatch.TRITON_INSTALLED, reason="Triton is not installed")
def test_training_in_float8_has_paths_of_its_own() -> None:
    def told(config: phasor.ModelConfig, device: str = "cuda") -> tuple[str, str]:
        found = phasor.backends(config, device=device, training=True, precision="float8")
        assert "with matmuls in float8" in found.title
        assert "gated activation" not in {one.op for one in found.ops}
        one = next(one for one in found.ops if one.op == "gated activation in float8")
        return one.path, one.reason

    config = phasor.preset("llama-3.1")
    assert told(config) == ("Triton kernels that write float8, one operation with both projections", "")
    assert "not on a GPU" in told(config, "cpu")[1]
    assert "biases or dropout" in told(config.replace(dropout={"feedforward": 0.1}))[1]
    assert "a hidden dim of 20480" in told(config.replace(hidden_dim=20480))[1]
    with pytest.raises(ValueError, match="not a multiple of 16"):
        told(config.replace(hidden_dim=8200))


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"precision": "float8"}, "precision is float8 with training=True"),
        ({"precision": "fp4", "training": True}, "precision is float8 .* not precision='fp4'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"dtype": "int8"}, "unknown floating-point type 'int8'"),
        ({"length": 0}, "length must be an integer of at least 1"),
        ({"training": "yes"}, "training must be True or False"),
        ({"config": "preset:lama-2"}, "did you mean 'llama-2'"),
        ({"config": 7}, "a model is a ModelConfig"),
    ],
)
def test_what_cannot_be_told(about: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        phasor.backends(**about)


# Measuring.


def test_every_workload_is_right_and_timed(report: Report) -> None:
    assert [row.workload for row in report.rows] == [
        name for workload in WORKLOADS for name in [workload] * (2 if workload in ("rotary", "positions") else 1)
    ]
    assert set(DEFAULT_WORKLOADS) <= set(WORKLOADS)
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


def ours(row: Row) -> Entry:
    return next(entry for entry in row.entries if entry.ours)


def test_no_time_for_a_wrong_result(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each workload notices a result that is a little off, in ours alone."""

    def silent(line: str) -> None: ...

    real = rope.Rotary.rotate
    with monkeypatch.context() as patch:
        patch.setattr(rope.Rotary, "rotate", lambda self, q, k, at: real(self, q, k, at + 1))
        for workload in rope.workloads(machine, packed=True):
            row = run_workload(workload, machine, silent)
            assert wrong(ours(row))
            assert row.best is None
            assert row.speedup_over(row.entries[1]) is None
            assert row.entries[1].value is not None
    with monkeypatch.context() as patch:  # and not even where it is a single token
        last = torch.arange(machine.sizes.rotary[1]) == machine.sizes.rotary[1] - 1
        patch.setattr(rope.Rotary, "rotate", lambda self, q, k, at: real(self, q, k, at + last))
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
    row = Row(
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
        (["--explain", "nowhere"], "neither a configuration file"),
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
    phasor.save(phasor.Transformer(small(position="rotary", norm="rmsnorm")), tmp_path / "model")
    assert "rotation" in run_phasor("bench", "--explain", str(tmp_path / "model"), "--device", "cpu")

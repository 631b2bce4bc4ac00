"""`phasor.backends`: the reported paths are those that the model takes, with the reasons of the dispatch tables."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import phasor
from phasor.config import AttentionConfig, PositionConfig
from phasor.inspect.case import Case
from phasor.inspect.operations import OPERATIONS
from phasor.models.presets import PRESETS
from phasor.nn.adapted_linear import ADAPTED_LINEAR
from phasor.nn.attention.softmax.module import APPLY_POSITIONS
from phasor.nn.feed_forward import ACTIVATE_PROJECT
from phasor.ops import dispatch
from phasor.ops.attention import ATTENTION, Mask, ScoreMod, attention
from phasor.ops.dispatch import Dispatch, Path


@pytest.mark.sample(30)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_path_for_every_operation(name: str, device: str, training: bool) -> None:
    config = phasor.preset(name)
    paths = phasor.backends(config, device=device, training=training)
    ops = {one.op for one in paths.ops}
    assert {"attention", "norm"} <= ops
    assert ("rotation" in ops) == isinstance(config.position, phasor.RotaryConfig)
    assert ("gated activation" in ops) == config.feedforward.gated
    assert ("cross-attention" in ops) == (config.shape == "encoder-decoder")
    assert ("cross-entropy" in ops) == (training and config.has_logits)
    assert ("decoding step" in ops) == (not training and config.has_logits and config.shape != "encoder")
    assert (paths.device, paths.dtype) == (device, "bfloat16" if device == "cuda" else "float32")
    text = str(paths)
    for one in paths.ops:
        assert one.path in text
        assert all(why in text and why.count(".") == 0 for _, why in one.why_not)


@pytest.mark.sample(30)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kind", PositionConfig.kinds)
def test_every_scheme_has_paths(kind: str, window: int | None) -> None:
    fields = {"attention": {"window": window}} if window else {}
    ops = {one.op for one in phasor.backends(small(position=kind, **fields), device="cpu").ops}
    assert {"attention", "attention after a cache", "decoding step"} <= ops


def path_of(config: phasor.ModelConfig, op: str = "attention", **options: Any) -> tuple[str, str]:
    one = next(one for one in phasor.backends(config, **options).ops if one.op == op)
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
        ({"attention": "latent", "position": {"kind": "rotary", "rotary_dim": 2}}, "one call", ""),
    ],
)
def test_attention_takes_the_path_that_backends_reports(
    fields: dict[str, Any], path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(**fields)
    reported = path_of(config, device="cpu")
    assert path in reported[0]
    assert reason in reported[1]
    taken = []

    def record(path: Path) -> Path:
        return path._replace(run=lambda *args: taken.append(path.name) or path.run(*args))

    monkeypatch.setattr(ATTENTION, "paths", tuple(map(record, ATTENTION.paths)))
    with torch.no_grad():
        phasor.Transformer(config).eval()(torch.randint(0, 50, (1, 700)))
    assert taken == [reported[0]] * 2


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "fields",
    [
        {"position": "rotary"},
        {"position": "rotary", "attention": {"qk_norm": "head"}},
        {"position": "xpos"},
        {"feedforward": {"activation": "swiglu"}},
        {"feedforward": {"activation": "swiglu", "bias": True}},
        {"feedforward": {"activation": "swiglu-clamped"}},
    ],
)
@pytest.mark.parametrize("forced", [None, "triton"] if dispatch.TRITON_INSTALLED else [None])
def test_layers_ask_the_tables_that_backends_asks(
    fields: dict[str, Any], forced: dispatch.ForcedPath | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tables answer to the layers of a training step is what `backends` reports."""
    answers: dict[str, set[tuple[str, frozenset[str]]]] = {"rotation": set(), "gated activation": set()}

    class Recorder(Dispatch):
        def __init__(self, op: str, table: Dispatch) -> None:
            super().__init__(*table.paths)
            self.op = op

        def __call__(self, *args: Any) -> Any:
            path, reasons = self.explain(*args)
            answers[self.op].add((path, frozenset(reasons.values())))
            return super().__call__(*args)

    monkeypatch.setattr("phasor.nn.attention.softmax.module.APPLY_POSITIONS", Recorder("rotation", APPLY_POSITIONS))
    monkeypatch.setattr("phasor.nn.feed_forward.ACTIVATE_PROJECT", Recorder("gated activation", ACTIVATE_PROJECT))
    config = small(**fields)
    with dispatch.force_path(forced) if forced is not None else nullcontext():
        paths = phasor.backends(config, device="cpu", length=5, training=True).ops
        phasor.Transformer(config).train()(torch.randint(0, 50, (1, 5)))
    reported = {one.op: {(one.path, frozenset(why for _, why in one.why_not))} for one in paths if one.op in answers}
    assert reported
    assert {op: answers[op] for op in reported} == reported


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


def test_training_reports_a_frozen_layer_with_an_adapter() -> None:
    def reported(**options: Any) -> tuple[str, str]:
        return path_of(small(), "frozen layer with an adapter", device="cpu", training=True, **options)

    assert reported() == (ADAPTED_LINEAR.paths[0].name, "")
    assert "frozen layer with an adapter" not in {one.op for one in phasor.backends(small(), device="cpu").ops}


def test_layers_that_differ_are_listed_separately() -> None:
    local = phasor.LayerConfig(attention=phasor.SoftmaxAttentionConfig(window=16))
    config = small(num_layers=6, layers=(local, local, phasor.LayerConfig()), norm="rmsnorm")
    paths = {(one.where, one.path) for one in phasor.backends(config, device="cpu").ops if one.op == "attention"}
    assert paths == {
        ("layers 0-1, 3-4", "SDPA in blocks of queries"),
        ("layers 2, 5", "SDPA in one call"),
    }


def test_reasons_of_norms_and_decoding() -> None:
    offset = small(norm=phasor.RMSNormConfig(unit_offset=True))
    assert "add nothing to their weight" in path_of(offset, "norm", device="cpu")[1]
    assert path_of(small(norm="rmsnorm"), "norm", device="cpu")[0] == "one operation of torch"
    headwise = small(norm="rmsnorm", attention=phasor.SoftmaxAttentionConfig(qk_norm="heads"))
    assert "its own weights" in path_of(headwise, "query and key norm", device="cpu")[1]
    dynamic = phasor.RotaryConfig(extension=phasor.DynamicNTKScaling(factor=2.0, original_length=64))
    for position in (dynamic, "rotary"):  # frequencies by length are planned before the first step
        found, reason = path_of(small(position=position), "decoding step", device="cuda")
        assert "CUDA graph" in found
        assert "frequencies" not in reason


def test_stand_ins_are_on_a_device_that_need_not_be_present() -> None:
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


def test_a_new_path_of_a_table_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    op = next(op for op in OPERATIONS if op.name == "attention")
    new = Path("new kernel", attention, lambda q, k, *_: dispatch.triton_why_not(q, k))
    table = Dispatch(new, *op.table.paths)
    monkeypatch.setattr("phasor.inspect.operations.OPERATIONS", (replace(op, table=table),))
    config = small()
    assert "GPU" in path_of(config, device="cpu")[1] or not dispatch.TRITON_INSTALLED
    assert path_of(config, device="cuda")[0] == ("new kernel" if dispatch.TRITON_INSTALLED else op.table.paths[-1].name)


@pytest.mark.skipif(not dispatch.TRITON_INSTALLED, reason="Triton is not installed")
def test_kernels_are_used_on_a_gpu() -> None:
    """By rules alone: there need be no GPU."""
    config = phasor.preset("llama-3.1", attention=phasor.SoftmaxAttentionConfig(window=1024))
    paths = {one.op: one for one in phasor.backends(config, device="cuda", length=8192, training=True).ops}
    assert paths["rotation"].path == "Triton kernel on the projection"
    assert paths["attention"].path == "Triton kernel over key intervals"
    assert "window" in paths["attention"].reason
    for op in ("norm", "gated activation", "cross-entropy", "optimizer step"):
        assert "Triton kernel" in paths[op].path
    normed = config.replace(norm="rmsnorm", attention=phasor.SoftmaxAttentionConfig(qk_norm="head", softcap=30.0))
    paths = {one.op: one for one in phasor.backends(normed, device="cuda", length=8192).ops}
    assert paths["rotation"].path == "Triton kernel on queries and keys"
    assert "normalized" in paths["rotation"].reason
    wide = phasor.backends(config, device="cuda", dtype="float64", length=8192, training=True)
    assert not [one for one in wide.ops if "Triton" in one.path]


@pytest.mark.skipif(not dispatch.TRITON_INSTALLED, reason="Triton is not installed")
def test_training_in_float8_has_its_own_paths() -> None:
    def reported(config: phasor.ModelConfig, device: str = "cuda") -> tuple[str, str]:
        paths = phasor.backends(config, device=device, training=True, precision="float8")
        assert "with matmuls in float8" in paths.title
        assert "gated activation" not in {one.op for one in paths.ops}
        one = next(one for one in paths.ops if one.op == "gated activation in float8")
        return one.path, one.reason

    config = phasor.preset("llama-3.1")
    assert reported(config) == ("Triton kernels that write float8, one operation with both projections", "")
    assert "not on a GPU" in reported(config, "cpu")[1]
    assert "biases or dropout" in reported(config.replace(dropout={"feedforward": 0.1}))[1]
    assert "a hidden dim of 20480" in reported(config.replace(hidden_dim=20480))[1]
    with pytest.raises(ValueError, match="not a multiple of 16"):
        reported(config.replace(hidden_dim=8200))


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_wrong_arguments_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        phasor.backends(**options)


@pytest.mark.parametrize(("held", "count", "absorbed"), [(0, 9, False), (64, 2, True), (64, 60, False)])
def test_latent_attention_is_called_with_what_backends_asks_about(
    held: int, count: int, absorbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of all heads, or latent vectors, of which values are a part; `attend_shapes` tells the shapes."""
    config = small(attention="latent", num_layers=1)
    model, called = phasor.Transformer(config).eval(), []
    attention = model.decoder.blocks[0].attention  # type: ignore[union-attr]

    def record(path: Path) -> Path:
        return path._replace(run=lambda q, k, v, *rest: called.append((q, k, v)) or path.run(q, k, v, *rest))

    monkeypatch.setattr(ATTENTION, "paths", tuple(map(record, ATTENTION.paths)))
    with torch.no_grad():
        cache = model.new_cache(1, 128)
        for tokens in filter(None, (held, count)):
            model(torch.randint(0, 50, (1, tokens)), cache=cache)
    q, k, v = called[-1]
    assert attention.attend_shapes(count, held + count) == (*q.shape[2:], k.shape[2], v.shape[3])
    assert (k.shape[2] == 1) == absorbed


def test_an_indexer_has_a_row_where_it_leaves_tokens_out() -> None:
    attention = {"kind": "latent", "q_rank": 8, "indexer": {"num_heads": 2, "head_dim": 4, "top_k": 16}}
    config = small(attention=attention, position={"kind": "rotary", "rotary_dim": 2})
    rows = {n: [row.op for row in phasor.backends(config, device="cuda", length=n).ops] for n in (8, 16, 17)}
    assert [row for row in rows[8] if "attention" in row] == ["attention", "attention after a cache"]
    assert [row for row in rows[16] if "attention" in row] == ["attention", "attention to chosen tokens"]
    assert [row for row in rows[17] if "attention" in row] == ["attention to chosen tokens"]
    assert all("rotation" in row for row in rows.values())


EXAMPLES = {name: example for cls in AttentionConfig.kinds.values() for name, example in cls.examples().items()}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_kind_of_attention_has_paths(name: str, training: bool) -> None:
    """What it calls is reported, on a GPU that need not be there."""
    attention, width = EXAMPLES[name], EXAMPLES[name].rotated_width(small())
    config = small(attention=attention, position={"kind": "rotary", "rotary_dim": width}, norm="rmsnorm")
    ops = {one.op for one in phasor.backends(config, device="cuda", length=300, training=training).ops}
    assert ("rotation" in ops) == attention.takes_positions
    assert ("query and key norm" in ops) == (getattr(attention, "qk_norm", "none") != "none")
    assert ("gated delta rule" in ops) == (attention.kind == "gated-delta")
    assert ("retention" in ops) == (attention.kind in ("mamba2", "retention"))
    assert ("short convolution" in ops) == (getattr(attention, "conv_width", None) is not None)
    attends = not attention.keeps_state and attention.sparse is None
    assert (ops & {"attention", "attention to chosen tokens"} != set()) == attends


def test_layers_with_a_state_have_their_own_operations() -> None:
    delta = {"kind": "gated-delta", "num_heads": 4, "num_key_heads": 2, "key_dim": 16, "value_dim": 16}
    sizes: dict[str, Any] = {"vocab_size": 9, "dim": 32, "num_layers": 4, "num_heads": 2}
    config = phasor.ModelConfig.from_dict({**sizes, "layers": [{"attention": delta}, {}]})
    for device, path in (("cpu", "torch, in chunks"), ("cuda", "Triton kernels, in chunks")):
        found = {(each.op, each.where): each.path for each in phasor.backends(config, device=device, length=64).ops}
        assert found["gated delta rule", "layers 0, 2"] == path
        assert {("short convolution", "layers 0, 2"), ("attention", "layers 1, 3")} <= found.keys()

"""Weights in int4 in the kernels of a decoding step: projections and fused steps against float64."""

from __future__ import annotations

import pytest
import torch
from decode_kernels import (  # noqa: F401
    ROUNDING,
    bfloat16_in_the_interpreter,
    large_tiles,
    on_the_device,
    randn,
    rms_norm,
)
from decoding import speaker
from schemes import build, relative_change, tiny, tokens

import phasor
from phasor.generation.runners import STEP_RUNNERS, StepSpec, fused
from phasor.generation.runners.cuda_graph import StepBuffers
from phasor.kv_cache.static import StaticKVCache
from phasor.ops import dispatch
from phasor.ops.decode import NormArgs, Tiles, choose_tiles, gemv, lm_head_argmax, project_ref
from phasor.ops.quantized import Int4Matrix, dequantize_int4_ref, quantize_int4

UNTIED = phasor.EmbeddingConfig(tied=False)


def exact(matrix: Int4Matrix) -> torch.Tensor:
    return dequantize_int4_ref(matrix.values, matrix.scale.double())


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group", "tiles"),
    [
        (1, 32, 5, 32, Tiles(4, 16, 1)),
        (1, 96, 37, 32, Tiles(4, 64, 1)),
        (1, 192, 7, 64, Tiles(4, 32, 1)),
        (1, 384, 3, 128, Tiles(2, 256, 1)),
        (1, 96, 11, 32, choose_tiles(1, 32000, 2048, bits=4)),
        (1, 64, 8, 64, choose_tiles(1, 16384, 2048, bits=4, glu=True)),
        (1, 64, 8, 32, choose_tiles(1, 4096, 2048, bits=4)),
        (1, 128, 8, 32, choose_tiles(1, 2048, 8192, bits=4)),
        (3, 96, 37, 32, Tiles(16, 32, 1, 2)),
        (3, 384, 5, 128, Tiles(16, 64, 1, 2)),
        (16, 64, 16, 32, choose_tiles(16, 2048, 2048, bits=4)),
        (17, 96, 70, 32, choose_tiles(64, 32000, 2048, bits=4)),
        (17, 128, 33, 64, choose_tiles(17, 2048, 2048, bits=4)),
    ],
)
def test_projections(rows, inputs, outputs, group, tiles, dtype):
    if rows > 1 and dtype == torch.float16:
        pytest.skip("the step takes matrix multiplications there")
    x, matrix, bias = randn(rows, inputs, dtype=dtype), quantize_int4(randn(outputs, inputs), group), randn(outputs)
    bias, size, residual = bias.to(dtype), randn(inputs, dtype=dtype), randn(rows, outputs, dtype=dtype)
    wide = [t.double() for t in (x, bias, size, residual)]
    norm = NormArgs(size, 1.0, 1e-3)
    product = rms_norm(wide[0], wide[2], 1.0, 1e-3) @ exact(matrix).mT + wide[1]
    given = {"norm": NormArgs(wide[2], 1.0, 1e-3), "bias": wide[1], "multiplier": 0.5}
    assert relative_change(project_ref(wide[0], matrix, residual=wide[3], **given), wide[3] + 0.5 * product) < 1e-13

    plain = gemv.project(x, matrix, torch.empty(rows, outputs, dtype=dtype), tiles=tiles)
    assert relative_change(plain.double(), wide[0] @ exact(matrix).mT) < ROUNDING[dtype]
    out = residual.clone()
    gemv.project(x, matrix, out, norm=norm, bias=bias, residual=out, multiplier=0.5, tiles=tiles)
    assert relative_change(out.double(), wide[3] + 0.5 * product) < ROUNDING[dtype]
    logits, argmax = torch.empty(rows, outputs, dtype=dtype), torch.full((rows,), lm_head_argmax.EMPTY_ARGMAX)
    lm_head_argmax.lm_head_argmax(x, matrix, logits, argmax, norm=norm, bias=bias, multiplier=0.5, tiles=tiles)
    assert relative_change(logits.double(), 0.5 * product) < ROUNDING[dtype]
    assert lm_head_argmax.unpack_argmax(argmax).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_project_and_activate(name, rows):
    config = phasor.FeedForwardConfig(activation=name, bias=True)
    outputs = 21 * (2 if config.gated else 1)
    x, matrix, bias, size = randn(rows, 96), quantize_int4(randn(outputs, 96)), randn(outputs), randn(96)
    projected = rms_norm(x.double(), size.double(), 0.0, 1e-5) @ exact(matrix).mT + bias.double()
    expected = phasor.nn.feed_forward.activate(projected, config.activation)
    given = {"glu": config.gated, "norm": NormArgs(size, 0.0, 1e-5), "bias": bias, "tiles": Tiles(8, 64, 1)}
    found = gemv.project_activate(x, matrix, torch.empty(rows, 21), fused.ACTIVATIONS[name], **given)
    assert relative_change(found.double(), expected) < ROUNDING[torch.float32]


@pytest.mark.parametrize("rows", [1, 2])
def test_scales_may_have_another_dtype(rows):
    """As files of others have them, in float16."""
    x, matrix = randn(rows, 64), quantize_int4(randn(9, 64))
    matrix = matrix._replace(scale=(1.001 * matrix.scale.float()).half())
    found = gemv.project(x, matrix, torch.empty(rows, 9))
    assert relative_change(found.double(), x.double() @ exact(matrix).mT) < ROUNDING[torch.float32]


MODELS = {
    "untied": {"embedding": UNTIED},
    "tied": {"embedding": phasor.EmbeddingConfig(scale="sqrt")},
    "experts": {
        "embedding": UNTIED,
        "feedforward": {"activation": "swiglu", "experts": {"num_experts": 4, "top_k": 2}},
    },
}


@pytest.mark.sample(2)
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(("rows", "most"), [(1, 16), (3, 16), (3, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_fused_step(name, rows, most, monkeypatch):
    monkeypatch.setattr(gemv, "MAX_GEMV_ROWS_QUANTIZED", {torch.float32: most})
    model = build(tiny("rotary", dim=64, hidden_dim=96, num_layers=1, **MODELS[name]))
    model, ids = phasor.quantize(model, bits=4), tokens(rows, 9)
    assert model.decoder.blocks[0].attention.qkv.weight.dtype == torch.uint8
    with dispatch.force_path("triton"):
        assert STEP_RUNNERS.explain(StepSpec(model)) == ("fused kernels in one CUDA graph", {})
    with torch.inference_mode():
        cache, plain = model.new_cache(rows, 24), model.new_cache(rows, 24)
        for each in (cache, plain):
            with dispatch.force_path("reference"):  # in float32 throughout
                model(ids[:, :6], cache=each)
        buffers = StepBuffers(StaticKVCache(cache))
        step = fused.FusedStep(model, buffers)
        assert step.few == (rows <= most)
        for position in range(6, 9):
            buffers.tokens.copy_(ids[:, position])
            with dispatch.force_path("reference"):
                expected, logits = model(ids[:, position : position + 1], cache=plain)[:, 0], step()
            assert relative_change(logits, expected) < 3e-6
            assert buffers.tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.usefixtures("large_tiles")
def test_generation_is_the_same(request):
    model = phasor.quantize(speaker(dim=64, num_heads=2, num_layers=1, num_kv_heads=1), bits=4)
    prompts = [[5, 9, 2], [7], [3, 3, 8, 1, 4, 6, 2]]
    with dispatch.force_path("reference"):
        plain = phasor.generate(model, prompts, max_new_tokens=8)
    request.getfixturevalue("on_the_device")
    assert phasor.generate(model, prompts, max_new_tokens=8) == plain


def test_backends_show_the_fused_step():
    found = phasor.backends("preset:llama-3.1", device="cuda", weights="int4")
    paths_taken = {one.op: one for one in found.ops}
    assert paths_taken["decoding step"].path.startswith("fused kernels")
    assert paths_taken["quantized weights, one row"].path.startswith("as they are")

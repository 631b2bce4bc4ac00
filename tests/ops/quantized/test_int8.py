"""Weights in int8: the kernels against float64, the quantized model against its weights and the original model."""

from __future__ import annotations

import copy
import math

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
from decoding import full_logits, speaker
from device import DEVICE
from schemes import VIEWS, build, relative_change, tiny, tokens

import phasor
from phasor.generation.runners import RETAINED, STEP_RUNNERS, StepSpec, fused
from phasor.generation.runners.cuda_graph import StepBuffers
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.quantized import QuantizedEmbedding, QuantizedHead, QuantizedLinear
from phasor.ops import dispatch
from phasor.ops.decode import (
    NormArgs,
    Tiles,
    choose_tiles,
    gemv,
    lm_head_argmax,
    lm_head_argmax_ref,
    project_activate_ref,
    project_ref,
)
from phasor.ops.quantized import (
    Int8Matrix,
    dequantize,
    dequantize_ref,
    int8_embedding_ref,
    int8_linear_ref,
    quantize_int8,
    quantize_int8_ref,
    quantized_embedding,
    quantized_linear,
)

TIED, UNTIED = phasor.EmbeddingConfig(), phasor.EmbeddingConfig(tied=False)


def tiny_llama(**changes: object) -> phasor.Transformer:
    return build(tiny("rotary", **{"embedding": UNTIED, "num_layers": 1, **changes}))


def bytes_of(model: torch.nn.Module) -> int:
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


# Quantization


def test_every_weight_is_rounded_to_nearest():
    weight = randn(7, 33) * torch.logspace(-6, 6, 7)[:, None]
    weight[3] = 0.0
    values, scale = quantize_int8(weight)
    assert values.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert int(values.abs().max()) == 127
    assert int(values[3].abs().sum()) == 0
    off = (dequantize(Int8Matrix(values, scale), torch.float64) - weight.double()).abs()
    assert bool((off <= 0.5000001 * scale.double()[:, None]).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_linear_equals_the_dequantized_matrix_in_float64(dtype):
    x, matrix = randn(2, 5, 37, dtype=dtype), quantize_int8(randn(11, 37))
    bias = randn(11, dtype=dtype)
    expected = x.double() @ dequantize(matrix, torch.float64).mT + bias.double()
    with dispatch.force_path("reference"):
        found = quantized_linear(x, matrix, bias)
    assert found.dtype == dtype
    assert relative_change(found.double(), expected) < ({torch.float64: 1e-12} | ROUNDING)[dtype]


def test_references_are_the_formulas():
    """Against torch's own integers, and sums that float64 has exactly."""
    weight = randn(5, 17).double()
    weight[2] = 0.0
    values, scale = quantize_int8_ref(weight)
    wanted = torch.stack([(127 * row / row.abs().max().clamp(min=1e-30)).round() for row in weight])
    assert torch.equal(values.double(), wanted)
    tokens_of_rows = torch.tensor([[4, 2], [0, 1]])
    whole = torch.diag(scale) @ values.double()
    torch.testing.assert_close(dequantize_ref(values, scale), whole, rtol=1e-15, atol=0)
    torch.testing.assert_close(int8_embedding_ref(tokens_of_rows, values, scale), whole[tokens_of_rows])
    x, bias = randn(3, 17).double(), randn(5).double()
    wanted = torch.einsum("tk,nk->tn", x, whole) + bias
    torch.testing.assert_close(int8_linear_ref(x, values, scale, bias), wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (11, 37), (3, 1030)])
def test_functions_equal_their_references(outputs, inputs):
    weight, bias = randn(outputs, inputs) * torch.logspace(-4, 4, outputs)[:, None], randn(outputs).double()
    matrix = quantize_int8(weight)
    values, scale = quantize_int8_ref(weight)
    assert torch.equal(matrix.values, values)
    torch.testing.assert_close(matrix.scale, scale, rtol=1e-6, atol=0)
    exact = matrix.scale.double()
    x, ids = randn(2, 3, inputs).double(), torch.randint(0, outputs, (2, 3))
    torch.testing.assert_close(dequantize(matrix, torch.float64), dequantize_ref(values, exact))
    torch.testing.assert_close(quantized_linear(x, matrix, bias), int8_linear_ref(x, values, exact, bias))
    torch.testing.assert_close(quantized_embedding(ids, matrix, torch.float64), int8_embedding_ref(ids, values, exact))


def test_values_are_contiguous():
    weight = randn(33, 7).t()
    values, scale = quantize_int8(weight)
    assert values.is_contiguous()
    assert torch.equal(values, quantize_int8(weight.contiguous()).values)
    assert scale.shape == (7,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    layer, x = torch.nn.Linear(64, 8), 100 * torch.ones(2, 64)
    small = QuantizedLinear(layer).eval()
    with torch.autocast(DEVICE.type, dtype):
        assert small(x).dtype == layer(x).dtype == dtype
        assert relative_change(small(x).double(), layer(x).double()) < 0.05


def test_sums_of_integers_stay_in_the_range_of_float16():
    x, weight = torch.full((1, 4096), 8.0, dtype=torch.float16), torch.full((3, 4096), 1e-3)
    assert (
        relative_change(quantized_linear(x, quantize_int8(weight)).double(), torch.full((1, 3), 32.768).double()) < 2e-3
    )


@pytest.mark.sample(14)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "tiles"),
    [
        (1, 48, 37, Tiles(4, 32, 1)),
        (1, 37, 5, Tiles(4, 16, 1)),
        (1, 64, 11, choose_tiles(1, 32000, 2048, bits=8)),
        (1, 64, 8, choose_tiles(1, 16384, 2048, bits=8, glu=True)),
        (17, 40, 70, choose_tiles(64, 32000, 2048, bits=8)),
        (1, 64, 8, choose_tiles(1, 4096, 2048, bits=8)),
        (1, 100, 8, choose_tiles(1, 2048, 8192, bits=8)),
        (3, 80, 37, Tiles(16, 32, 1, 2)),
        (16, 40, 16, choose_tiles(16, 2048, 2048, bits=8)),
        (17, 40, 33, choose_tiles(17, 2048, 2048, bits=8)),
    ],
)
def test_projections(rows, inputs, outputs, tiles, dtype):
    if rows > 1 and dtype == torch.float16:
        pytest.skip("the step takes matrix multiplications there")
    x, matrix, bias = randn(rows, inputs, dtype=dtype), quantize_int8(randn(outputs, inputs)), randn(outputs)
    bias, size, residual = bias.to(dtype), randn(inputs, dtype=dtype), randn(rows, outputs, dtype=dtype)
    exact = dequantize(matrix, torch.float64)
    wide = [t.double() for t in (x, bias, size, residual)]
    norm = NormArgs(size, 1.0, 1e-3)
    product = rms_norm(wide[0], wide[2], 1.0, 1e-3) @ exact.mT + wide[1]
    given = {"norm": NormArgs(wide[2], 1.0, 1e-3), "bias": wide[1], "multiplier": 0.5}
    references = (
        project_ref(wide[0], matrix, residual=wide[3], **given),
        lm_head_argmax_ref(wide[0], matrix, **given)[0],
    )
    assert relative_change(references[0], wide[3] + 0.5 * product) < 1e-13
    assert relative_change(references[1], 0.5 * product) < 1e-13

    plain = gemv.project(x, matrix, torch.empty(rows, outputs, dtype=dtype), tiles=tiles)
    assert relative_change(plain.double(), wide[0] @ exact.mT) < ROUNDING[dtype]
    out = residual.clone()
    gemv.project(x, matrix, out, norm=norm, bias=bias, residual=out, multiplier=0.5, tiles=tiles)
    assert relative_change(out.double(), wide[3] + 0.5 * product) < ROUNDING[dtype]
    assert relative_change(out.double(), references[0]) < ROUNDING[dtype]
    logits, argmax = torch.empty(rows, outputs, dtype=dtype), torch.full((rows,), lm_head_argmax.EMPTY_ARGMAX)
    lm_head_argmax.lm_head_argmax(x, matrix, logits, argmax, norm=norm, bias=bias, multiplier=0.5, tiles=tiles)
    assert relative_change(logits.double(), 0.5 * product) < ROUNDING[dtype]
    assert relative_change(logits.double(), references[1]) < ROUNDING[dtype]
    assert [0x7FFFFFFF - (packed & 0xFFFFFFFF) for packed in argmax.tolist()] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_project_and_activate(name, rows):
    config = phasor.FeedForwardConfig(activation=name, bias=True)
    outputs = 21 * (2 if config.gated else 1)
    x, matrix, bias, size = randn(rows, 24), quantize_int8(randn(outputs, 24)), randn(outputs), randn(24)
    normed = rms_norm(x.double(), size.double(), 0.0, 1e-5)
    projected = normed @ dequantize(matrix, torch.float64).mT + bias.double()
    expected = phasor.nn.feed_forward.activate(projected, config.activation)
    given = {"glu": config.gated, "norm": NormArgs(size, 0.0, 1e-5), "bias": bias, "tiles": Tiles(8, 16, 1)}
    kind = fused.ACTIVATIONS[name]
    found = gemv.project_activate(x, matrix, torch.empty(rows, 21), kind, **given)
    assert relative_change(found.double(), expected) < ROUNDING[torch.float32]
    wide = {"glu": config.gated, "norm": NormArgs(size.double(), 0.0, 1e-5), "bias": bias.double()}
    reference = project_activate_ref(x.double(), matrix, kind, **wide)
    assert relative_change(reference, expected) < 1e-13


# The model


@pytest.mark.parametrize("embedding", [TIED, UNTIED], ids=["tied", "untied"])
def test_which_weights_quantize_converts(embedding):
    model = tiny_llama(embedding=embedding, dim=64, hidden_dim=160, num_layers=2).to(torch.bfloat16)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    small = phasor.quantize(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert type(model.decoder.blocks[0].attention.qkv) is torch.nn.Linear
    assert not {x.data_ptr() for x in model.parameters()} & {x.data_ptr() for x in small.parameters()}
    linears = [part for part in small.modules() if isinstance(part, QuantizedLinear)]
    assert len(linears) == 2 * 4
    assert isinstance(small.tokens, QuantizedEmbedding) == embedding.tied
    assert isinstance(small.head, QuantizedHead) != embedding.tied
    kept = sum(p.nbytes for p in small.parameters())
    large = bytes_of(model) - kept
    scales = sum(part.scales.nbytes for part in small.modules() if hasattr(part, "scales"))
    assert bytes_of(small) == kept + large // 2 + scales
    assert small.tokens.dtype == small.new_cache(1, 4).layers[0]["keys"].dtype == torch.bfloat16
    assert small.float().tokens.dtype == torch.float32
    assert linears[0].scales.dtype == torch.float32


@pytest.mark.parametrize("embedding", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("changes", [{}, {"position": "alibi", "norm": "layernorm", "feedforward": {"bias": True}}])
def test_logits_equal_a_model_with_the_dequantized_weights(embedding, changes):
    model = tiny_llama(embedding=embedding, num_layers=2, **changes).double()
    small = phasor.quantize(model)
    exact = copy.deepcopy(model)
    names = dict(small.named_buffers())
    state = exact.state_dict()
    for name in [name for name in names if name.endswith(".scales")]:
        weight_name = name.removesuffix("scales") + "weight"
        state[weight_name].copy_(dequantize(Int8Matrix(names[weight_name], names[name]), torch.float64))
    ids = tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(small(ids), exact(ids), atol=1e-10, rtol=1e-10)


def test_predictions_are_near_the_original_models():
    model = speaker(dim=64, num_heads=4, num_layers=2)
    small, ids = phasor.quantize(model), tokens(4, 30)
    with torch.no_grad():
        log_p, log_q = model(ids).log_softmax(-1), small(ids).log_softmax(-1)
    divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert 0 < divergence < 1e-3
    assert float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()) > 0.9


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        ("sinusoidal", {"shape": "encoder-decoder"}),
        ("rotary", {"feedforward": {"activation": "swiglu", "experts": {"num_experts": 4, "shared_dim": 8}}}),
        ("learned", {"shape": "encoder"}),
        ("rotary", {"head": "none"}),
    ],
)
def test_quantize_takes_any_model(scheme, changes):
    model = build(tiny(scheme, **changes))
    small, ids = phasor.quantize(model), tokens(2, 7)
    given = (ids, ids) if model.config.shape == "encoder-decoder" else (ids,)
    with torch.no_grad():
        assert relative_change(small(*given), model(*given)) < 0.05
    assert bytes_of(small) < bytes_of(model)


def test_quantize_skips_modified_layers():
    model = tiny_llama(num_layers=2)
    block = model.decoder.blocks[0]
    block.attention.out.register_forward_hook(lambda part, given, y: 2 * y)
    block.feedforward.down = torch.nn.Sequential(block.feedforward.down)
    small = phasor.quantize(model).decoder.blocks[0]
    assert type(small.attention.out) is torch.nn.Linear
    assert type(small.feedforward.down) is torch.nn.Sequential
    assert type(small.feedforward.up) is QuantizedLinear


def test_a_weight_shared_with_another_layer_stays_the_models_own():
    model = tiny_llama(num_layers=2)
    first, second = model.decoder.blocks
    second.attention.out.weight = first.attention.out.weight
    second.attention.out.register_forward_hook(lambda part, given, y: y)  # and so is not quantized
    small = phasor.quantize(model)
    kept = small.decoder.blocks[1].attention.out.weight
    assert torch.equal(kept, first.attention.out.weight)
    assert kept is not first.attention.out.weight
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in small.parameters())


def test_errors(tmp_path):
    model = tiny_llama()
    small = phasor.quantize(model)
    with pytest.raises(ValueError, match="quantized weights are saved in the format phasor, not hf"):
        phasor.save(small, tmp_path / "folder", format="hf")
    assert not (tmp_path / "folder").exists()
    with pytest.raises(ValueError, match="a model with quantized weights cannot be trained: train the original model"):
        small.train()(tokens(1, 3))
    assert len(phasor.generate(small, [1, 2], max_new_tokens=2)) == 2
    with pytest.raises(ValueError, match="quantized already"):
        phasor.quantize(small)
    for bits in ("int4", 3, True, None, 8.0):
        with pytest.raises(ValueError, match='bits must be 8, 4 or "nf4", not'):
            phasor.quantize(model, bits)
    for size in (16, "32", None):
        with pytest.raises(ValueError, match="group_size must be one of 32, 64, 128, not"):
            phasor.quantize(model, bits=4, group_size=size)
    with pytest.raises(ValueError, match="quantize takes a Transformer"):
        phasor.quantize(torch.nn.Linear(2, 2))
    with torch.no_grad():
        model.head.weight[0, 0] = math.inf
    with pytest.raises(ValueError, match="not finite"):
        phasor.quantize(model)


def test_state_dict_copies_and_losses():
    model = tiny_llama(embedding=TIED)
    small, other = phasor.quantize(model), phasor.quantize(tiny_llama(embedding=TIED, init="fan-in"))
    other.load_state_dict(small.state_dict())
    ids = tokens(2, 6)
    with torch.no_grad(), dispatch.force_path("reference"):  # in float32 throughout
        expected = small(ids)
        assert torch.equal(other(ids), expected)
        assert torch.equal(copy.deepcopy(small)(ids), expected)
        hidden = small(ids, head=False)
        sums = small.head.cross_entropy(hidden, small.tokens.table, ids, torch.ones(2, 6))
    expected = torch.nn.functional.cross_entropy(expected.flatten(0, 1), ids.flatten(), reduction="sum")
    torch.testing.assert_close(sums.cross_entropy, expected, atol=1e-4, rtol=1e-5)


# The decoding step


MODELS = {
    "untied": {},
    "tied": {"embedding": phasor.EmbeddingConfig(scale="sqrt")},
    "biases": {
        "attention": phasor.SoftmaxAttentionConfig(bias=("q", "k", "v", "out")),
        "feedforward": {"activation": "gelu", "bias": True},
    },
    "multiplier": {"placement": phasor.PreConfig(multiplier=0.3), "head": phasor.LanguageHeadConfig(multiplier=0.2)},
}


@pytest.mark.sample(2)
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(("rows", "most"), [(1, 16), (3, 16), (3, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_fused_step(name, rows, most, monkeypatch):
    monkeypatch.setattr(gemv, "MAX_GEMV_ROWS_QUANTIZED", {torch.float32: most})
    model, ids = phasor.quantize(tiny_llama(**MODELS[name])), tokens(rows, 9)
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


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("rows", [1, 2])
def test_bfloat16_logits_are_as_near_to_float64_as_the_eager_steps(rows):
    model = phasor.quantize(tiny_llama(num_layers=2).to(torch.bfloat16))
    exact, ids = copy.deepcopy(model).double(), tokens(rows, 9)
    with torch.inference_mode():
        caches = [m.new_cache(rows, 16) for m in (model, model, exact)]
        for m, cache in zip((model, model, exact), caches, strict=True):
            m(ids[:, :6], cache=cache)
        buffers = StepBuffers(StaticKVCache(caches[0]))
        step = fused.FusedStep(model, buffers)
        off = torch.zeros(2, dtype=torch.float64)
        for position in range(6, 9):
            buffers.tokens.copy_(ids[:, position])
            column = ids[:, position : position + 1]
            plain, expected = (m(column, cache=c)[:, 0] for m, c in zip((model, exact), caches[1:], strict=True))
            off += torch.stack([(logits.double() - expected).square().sum() for logits in (step(), plain)])
    assert off[0] < 1.5 * off[1]


def test_how_many_rows_the_kernels_take():
    model = tiny_llama()

    def by_kernels(model: phasor.Transformer, rows: int) -> bool:
        return fused.FusedStep(model, StepBuffers(StaticKVCache(model.new_cache(rows, 8)))).few

    assert [by_kernels(model.bfloat16(), n) for n in (1, 2)] == [True, False]
    assert [by_kernels(phasor.quantize(model), n) for n in (17, 64, 65)] == [True, True, False]
    assert [by_kernels(phasor.quantize(model).float(), n) for n in (16, 17)] == [True, False]
    assert [by_kernels(phasor.quantize(model).half(), n) for n in (1, 2)] == [True, False]


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("embedding", [TIED, UNTIED], ids=["tied", "untied"])
def test_generation_is_the_same(embedding, request):
    model = phasor.quantize(speaker(embedding=embedding, attention=VIEWS["sinks"], num_layers=1, num_kv_heads=1))
    prompts = [[5, 9, 2], [7], [3, 3, 8, 1, 4, 6, 2]]
    with dispatch.force_path("reference"):
        plain = phasor.generate(model, prompts, max_new_tokens=8)
    text = list(prompts[0])
    for _ in range(8):
        text.append(int(full_logits(model, text, 11)[-1].argmax()))
    assert text[3:] == plain[0]
    request.getfixturevalue("on_the_device")
    assert phasor.generate(model, prompts, max_new_tokens=8) == plain


@pytest.mark.usefixtures("large_tiles", "on_the_device")
def test_steps_are_rebuilt_for_other_weights():
    model = phasor.quantize(speaker(num_layers=1, num_kv_heads=1))
    phasor.generate(model, [1, 2], max_new_tokens=2)
    kept = RETAINED[model].latest
    phasor.generate(model, [1, 2], max_new_tokens=2)
    assert RETAINED[model].latest is kept
    model.head.scales = model.head.scales.flip(0).contiguous()
    phasor.generate(model, [1, 2], max_new_tokens=2)
    assert RETAINED[model].latest is not kept


def test_backends_show_the_path_of_the_weights():
    found = phasor.backends("preset:llama-3.1", device="cuda", weights="int8")
    paths_taken = {one.op: one for one in found.ops}
    assert "bfloat16 with weights in int8" in found.title
    assert paths_taken["decoding step"].path.startswith("fused kernels")
    assert paths_taken["quantized weights, one row"].path.startswith("as they are")
    for preset, reason in (("gpt-2", "not an RMS norm"), ("llama-2", "not on a GPU")):
        with dispatch.force_path("reference"):
            forced = phasor.backends(f"preset:{preset}", device="cpu", weights="int8").ops[-1]
        assert forced.path == "converted layer by layer"
        other = phasor.backends(f"preset:{preset}", device="cpu", weights="int8").ops[-1]
        assert reason in other.reason
    with pytest.raises(ValueError, match="is not trained"):
        phasor.backends(weights="int8", training=True)
    with pytest.raises(ValueError, match="int8"):
        phasor.backends(weights="int3")

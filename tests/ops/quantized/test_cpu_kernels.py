"""Weights in 8 and 4 bits on the CPU: kernels against float64, which path is taken, folders that are saved."""

from __future__ import annotations

import copy
import json
import pickle
import re
from functools import partial

import pytest
import torch
from decoding import speaker
from safetensors.torch import load_file, save_file
from schemes import relative_change, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import phasor
from phasor.checkpoints.load import open_folder
from phasor.config.recipe import Recipe
from phasor.nn.quantized import Quantization, Quantized, QuantizedLinear
from phasor.ops import dispatch
from phasor.ops.quantized import (
    GROUP_SIZES,
    QUANTIZED_LINEAR,
    cpp,
    dequantize,
    dequantize_int4_ref,
    int4_linear_ref,
    int4_vnni,
    int8_linear_ref,
    int8_neon,
    int8_vnni,
    linear,
    pack,
    quantize_int4,
    quantize_int4_ref,
    quantize_int8,
    quantized_embedding,
    quantized_linear,
)
from phasor.training.build import check_model

pytestmark = pytest.mark.cpu_only("these are kernels of CPUs")

# What rounding changes: of rows, results and sums with a bias to bfloat16, and of rows to 8 bits.
BFLOAT16, INT8_ROWS = 3 * 2**-8, 1.5e-2
TIED, UNTIED = phasor.EmbeddingConfig(), phasor.EmbeddingConfig(tied=False)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model_of(**changes) -> phasor.Transformer:
    return speaker(dim=64, hidden_dim=128, num_heads=2, head_dim=32, num_layers=2, **changes)


def quantized_layer(bits: int) -> QuantizedLinear:
    layer = torch.nn.Linear(64, 48)
    return QuantizedLinear(layer, Quantization(bits).quantize(layer.weight))


# Quantization to 4 bits


@pytest.mark.parametrize("size", GROUP_SIZES)
def test_integers_are_the_nearest_of_their_group(size):
    weight = randn(7, 256)
    matrix = quantize_int4(weight, size)
    assert matrix.group_size == size
    assert (matrix.values.dtype, matrix.scale.dtype) == (torch.uint8, torch.bfloat16)
    integers = quantize_int4_ref(weight.double(), matrix.scale.double())
    exact = dequantize_int4_ref(matrix.values, matrix.scale.double())
    scale = matrix.scale.double().repeat_interleave(size, -1)
    torch.testing.assert_close(exact, integers * scale, atol=1e-12, rtol=0)
    assert torch.equal(dequantize(matrix, torch.float64), exact)
    # A scale of extreme / -8 alone would leave more error.
    groups = weight.unflatten(-1, (-1, size))
    plain = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1) / -8
    other = quantize_int4_ref(weight, plain) * plain.repeat_interleave(size, -1)
    assert (exact - weight).norm() < (other - weight).norm()


def test_zeros_rows_and_values_that_are_not_finite():
    assert not dequantize(quantize_int4(torch.zeros(2, 32)), torch.float32).any()
    table = quantize_int4(randn(9, 64))
    ids = torch.tensor([[3, 8], [0, 3]])
    assert torch.equal(quantized_embedding(ids, table, torch.float32), dequantize(table, torch.float32)[ids])
    model = model_of()
    with torch.no_grad():
        model.decoder.blocks[0].attention.qkv.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite, and cannot be quantized to 4 bits"):
        phasor.quantize(model, bits=4)


# Kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [48, 50])  # a multiple of 16, as the x86 kernel needs it, and not
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("bits", [8, 4])
def test_products_equal_float64_of_the_dequantized_matrix(bits, rows, outputs, dtype):
    weight, x, bias = randn(outputs, 128), randn(rows, 128, seed=1).to(dtype), randn(outputs, seed=2).to(dtype)
    matrix = quantize_int8(weight) if bits == 8 else quantize_int4(weight)
    expected = x.double() @ dequantize(matrix, torch.float64).mT + bias.double()
    found = quantized_linear(x[None], matrix, bias)
    assert (found.shape, found.dtype) == ((1, rows, outputs), dtype)
    tolerance = INT8_ROWS if pack.VNNI or (pack.KLEIDIAI and bits == 4) else BFLOAT16
    assert relative_change(found[0].double(), expected) < tolerance
    with dispatch.force_path("reference"):
        assert relative_change(quantized_linear(x, matrix, bias).double(), expected) < BFLOAT16


@pytest.mark.parametrize("path", [None, "reference"])
@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
@pytest.mark.parametrize("width", [32, 63, 96])
def test_rows_that_do_not_fit_are_refused(quantize, path, width):
    """Kernels would read past the end of the weights."""
    matrix = quantize(randn(16, 64))
    with (
        dispatch.force_path(path),
        pytest.raises(ValueError, match=f"rows of {width} elements do not fit a quantized matrix of 64 inputs"),
    ):
        quantized_linear(randn(2, width), matrix)


@pytest.mark.parametrize("rows", [1, 3, 33])
def test_products_of_integers_are_exact_but_for_the_rounding_of_rows(rows):
    """Any build of torch has the operation; without VNNI it is slow, and never chosen."""
    for outputs, inputs in ((33, 47), (16, 256)):
        matrix, x = quantize_int8(randn(outputs, inputs)), randn(rows, inputs, seed=1)
        x[0] = 0
        step = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        rounded = (x.double() / step).round() * step
        found = linear.multiply_integers(x, matrix, None).double()
        expected = rounded @ dequantize(matrix, torch.float64).mT
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        if rows > 1:  # a row does not depend on the others
            alone = linear.multiply_integers(x[-1:], matrix, None)
            assert torch.equal(alone[0].double(), found[-1])


@pytest.fixture
def vnni_kernel() -> None:
    if not (pack.VNNI and cpp.load_kernel("int4_vnni") and cpp.load_kernel("int8_vnni")):
        pytest.skip("needs VNNI instructions and a C++ compiler")


@pytest.mark.usefixtures("vnni_kernel")
@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("outputs", [1, 33, 560])  # 560 are enough for several threads
def test_the_vnni_kernel_is_exact_but_for_the_rounding_of_rows(outputs, size):
    matrix = quantize_int4(randn(outputs, 256), size)
    reference = partial(int4_linear_ref, values=matrix.values, scale=matrix.scale.double())
    check_exact_but_for_rows(partial(int4_vnni.int4_vnni, matrix=matrix, bias=None), reference, 256, 32)


def check_exact_but_for_rows(product, reference, inputs, chunk, change=lambda x: x):
    """The product equals its reference of rows in which every `chunk` elements are rounded to 255 values."""
    for rows in (1, 2, 3, 4, 9):
        x = randn(rows, inputs, seed=1)
        x[0, chunk : 2 * chunk] = 0
        change(x)
        pieces = x.double().unflatten(-1, (-1, chunk))
        step = pieces.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        rounded = ((pieces / step).round() * step).flatten(-2)
        found = product(x[None])[0]
        torch.testing.assert_close(found.double(), reference(rounded), atol=1e-4, rtol=1e-5)
        assert torch.equal(product(x[-1:])[0], found[-1])  # a row does not depend on the others


@pytest.mark.usefixtures("vnni_kernel")
@pytest.mark.parametrize("inputs", [32, 64, 256, 352])  # 352 ends in a chunk of 32
@pytest.mark.parametrize("outputs", [1, 33, 560])
def test_the_8_bit_vnni_kernel_is_exact_but_for_the_rounding_of_rows(outputs, inputs):
    matrix = quantize_int8(randn(outputs, inputs))
    matrix.values[0, 0] = -128  # of a file that was quantized otherwise
    padding = -inputs % 64

    def reference(rows):
        return int8_linear_ref(rows[..., :inputs], matrix.values, matrix.scale.double())

    def product(x):  # of rows to which zeros were added up to a whole chunk
        return int8_vnni.int8_vnni(x[..., :inputs].contiguous(), matrix, None)

    check_exact_but_for_rows(product, reference, inputs + padding, 64, lambda x: x[:, inputs:].zero_())


@pytest.mark.usefixtures("vnni_kernel")
@pytest.mark.parametrize("inputs", [17, 64, 350])
@pytest.mark.parametrize("outputs", [1, 33, 560])
def test_8_bit_integers_in_one_operation_are_exact_but_for_the_rounding_of_rows(outputs, inputs):
    matrix = quantize_int8(randn(outputs, inputs))
    for rows in (1, 9, 96):  # 96 are enough for several threads
        x = randn(rows, inputs, seed=1)
        x[0] = 0
        step = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        expected = int8_linear_ref((x.double() / step).round() * step, matrix.values, matrix.scale.double())
        found = int8_vnni.int8_gemm_vnni(x[None], matrix, None)[0]
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
        assert torch.equal(int8_vnni.int8_gemm_vnni(x[-1:], matrix, None)[0], found[-1])


@pytest.mark.usefixtures("vnni_kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vnni_kernels_take_any_shape_and_a_bias(dtype):
    for run, matrix in (
        (int4_vnni.int4_vnni, quantize_int4(randn(20, 64))),
        (int8_vnni.int8_vnni, quantize_int8(randn(20, 64))),
        (int8_vnni.int8_gemm_vnni, quantize_int8(randn(20, 64))),
    ):
        check_any_shape_and_a_bias(run, matrix, dtype)


def check_any_shape_and_a_bias(run, matrix, dtype):
    x, bias = randn(2, 3, 64, seed=1).transpose(0, 1).to(dtype), randn(20, seed=2).to(dtype)
    rows = torch.stack([run(row[None], matrix, None)[0].float() for row in x.flatten(0, 1)])
    found = run(x, matrix, bias)
    assert (found.shape, found.dtype) == ((3, 2, 20), dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found.float().flatten(0, 1), rows + bias.float(), atol=tolerance, rtol=tolerance)
    assert run(x[:0], matrix, bias).shape == (0, 2, 20)


@pytest.mark.usefixtures("vnni_kernel")
def test_the_vnni_kernels_with_values_that_are_not_finite():
    check_values_that_are_not_finite(partial(int4_vnni.int4_vnni, matrix=quantize_int4(randn(20, 64)), bias=None))
    for run in (int8_vnni.int8_vnni, int8_vnni.int8_gemm_vnni):
        check_values_that_are_not_finite(partial(run, matrix=quantize_int8(randn(20, 64)), bias=None))


def check_values_that_are_not_finite(product):
    x = randn(3, 64, seed=1)
    x[0, 5], x[1, 40] = torch.nan, torch.inf
    found = product(x)
    assert found[:2].isnan().all()
    assert found[2].isfinite().all()


@pytest.fixture
def neon_kernel() -> None:
    if not (pack.ARM and cpp.load_kernel("int8_neon")):
        pytest.skip("needs an ARM processor with dot products and a C++ compiler")


@pytest.mark.usefixtures("neon_kernel")
@pytest.mark.parametrize(("inputs", "chunk"), [(256, 64), (96, 32)])
@pytest.mark.parametrize("outputs", [1, 33, 560])
def test_the_8_bit_kernel_for_arm_is_exact_but_for_the_rounding_of_rows(outputs, inputs, chunk):
    matrix = quantize_int8(randn(outputs, inputs))
    reference = partial(int8_linear_ref, values=matrix.values, scale=matrix.scale.double())
    check_exact_but_for_rows(partial(int8_neon.int8_neon, matrix=matrix, bias=None), reference, inputs, chunk)


@pytest.mark.usefixtures("neon_kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_8_bit_kernel_for_arm_takes_any_shape_and_a_bias(dtype):
    check_any_shape_and_a_bias(int8_neon.int8_neon, quantize_int8(randn(20, 64)), dtype)


@pytest.mark.usefixtures("neon_kernel")
def test_the_8_bit_kernel_for_arm_multiplies_the_rows_of_a_long_prompt_some_at_a_time():
    matrix, x = quantize_int8(randn(33, 4096)), randn(150, 4096, seed=1)
    alone = torch.cat([int8_neon.int8_neon(row[None], matrix, None) for row in x])
    assert torch.equal(int8_neon.int8_neon(x, matrix, None), alone)


@pytest.mark.usefixtures("neon_kernel")
def test_the_8_bit_kernel_for_arm_with_values_that_are_not_finite():
    check_values_that_are_not_finite(partial(int8_neon.int8_neon, matrix=quantize_int8(randn(20, 64)), bias=None))


@pytest.mark.usefixtures("neon_kernel")
def test_the_8_bit_kernel_for_arm_in_a_compiled_step(monkeypatch):
    monkeypatch.setattr(cpp, "BUILT", {})  # a new process: making the layer loads the kernel, and compiling it cannot
    layer = quantized_layer(8).eval()
    x = randn(1, 64)
    with torch.inference_mode():
        step = torch.compile(layer, fullgraph=True)
        found = step(x)
        assert torch.equal(found, int8_neon.int8_neon(x, layer.matrix, layer.bias))


@pytest.mark.usefixtures("vnni_kernel")
def test_the_vnni_kernel_reads_what_a_module_holds():
    layer = quantized_layer(4).eval()
    x = randn(1, 64)
    assert QUANTIZED_LINEAR.explain(x, layer.matrix, None)[0] == "4-bit kernel for VNNI"
    many = randn(linear.MAX_ROWS["int4 vnni"] + 1, 64)
    assert QUANTIZED_LINEAR.explain(many, layer.matrix, None)[0] == "8-bit integers, in one operation"
    reason = linear.int4_x86_why_not(x, layer.matrix, None)
    assert reason is not None
    assert "kernel for VNNI reads them" in reason
    with torch.inference_mode():
        step = torch.compile(layer, fullgraph=True)
        torch.testing.assert_close(step(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("vnni_kernel")
@pytest.mark.parametrize("bits", [8, 4])
def test_many_rows_are_one_operation_in_a_compiled_step_too(bits, monkeypatch):
    monkeypatch.setattr(cpp, "BUILT", {})  # a new process: making the layer loads the kernels, and compiling it cannot
    layer = quantized_layer(bits).eval()
    x = randn(40, 64)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
        with Operations() as seen:
            layer(x)
    assert seen.names == ["phasor::int8_gemm_vnni"]


class Operations(TorchDispatchMode):
    """The operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_without_a_compiler_the_kernel_of_torch_is_taken(monkeypatch):
    if not pack.VNNI:
        pytest.skip("needs VNNI instructions")
    for module in (pack, linear):
        monkeypatch.setattr(module, "load_kernel", lambda name: False)
    layer = quantized_layer(4).eval()
    name, reasons = QUANTIZED_LINEAR.explain(randn(1, 64), layer.matrix, None)
    assert name == "4-bit kernel for x86, in bfloat16"
    assert reasons["4-bit kernel for VNNI"] == linear.NOT_BUILT
    name, reasons = QUANTIZED_LINEAR.explain(randn(40, 64), layer.matrix, None)
    assert name == "8-bit integers"
    assert reasons["8-bit integers, in one operation"] == linear.NOT_BUILT


def test_without_a_compiler_arm_takes_the_8_bit_kernel_of_torch(monkeypatch):
    if not pack.ARM:
        pytest.skip("needs an ARM processor")
    monkeypatch.setattr(linear, "load_kernel", lambda name: False)
    matrix, x = quantize_int8(randn(48, 64)), randn(2, 64, seed=1)
    name, reasons = QUANTIZED_LINEAR.explain(x, matrix, None)
    assert name == "8-bit kernel of torch"
    assert reasons["8-bit kernel for ARM"] == linear.NOT_BUILT
    expected = int8_linear_ref(x.double(), matrix.values, matrix.scale.double())
    assert relative_change(quantized_linear(x, matrix).double(), expected) < 1e-5


def test_a_pickled_layer_is_packed_for_the_machine_that_reads_it(monkeypatch):
    layer = quantized_layer(4).eval()
    stored, x = pickle.dumps(layer), randn(1, 64)
    assert torch.equal(pickle.loads(stored)(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    for module, name, value in ((pack, "VNNI", False), (linear, "VNNI", False), (linear, "X86_KERNELS", False)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(pack, "X86_KERNELS", False)
    monkeypatch.setattr(pack, "KLEIDIAI", False)
    assert pickle.loads(stored).packed is None


def test_the_x86_kernel_in_every_group_size():
    if not pack.X86_KERNELS:
        pytest.skip("needs AVX2 or AVX-512")
    for size in GROUP_SIZES:
        matrix, x = quantize_int4(randn(33, 256), size), randn(3, 256, seed=1)
        found = linear.int4_x86(x, matrix, None)
        assert (
            relative_change(found.double(), int4_linear_ref(x.double(), matrix.values, matrix.scale.double()))
            < BFLOAT16
        )


def test_the_layout_of_the_kleidiai_kernel():
    """Every build of torch has the operation; on other processors than ARM it is slow, and never chosen."""
    for size in GROUP_SIZES[:2]:
        matrix, x = quantize_int4(randn(33, 128), size), randn(2, 3, 128, seed=1)
        found = linear.int4_kleidiai(x, matrix, None)
        expected = int4_linear_ref(x.double(), matrix.values, matrix.scale.double())
        assert relative_change(found.double(), expected) < INT8_ROWS


def test_which_path_a_product_takes(monkeypatch):
    x, eight, four = randn(1, 64), quantize_int8(randn(16, 64)), quantize_int4(randn(16, 64))

    def path(x, matrix):
        return QUANTIZED_LINEAR.explain(x, matrix, None)

    for vnni, x86, kleidiai, arm, expected in (
        (True, True, False, False, ["8-bit kernel for VNNI", "4-bit kernel for VNNI"]),
        (False, True, False, False, ["8-bit kernel of torch", "4-bit kernel for x86, in bfloat16"]),
        (False, False, True, True, ["8-bit kernel for ARM", "4-bit KleidiAI kernel"]),
        (False, False, False, True, ["8-bit kernel for ARM", "converted layer by layer"]),
        (False, False, False, False, ["converted layer by layer"] * 2),
    ):
        for name, value in (("VNNI", vnni), ("X86_KERNELS", x86), ("KLEIDIAI", kleidiai), ("ARM", arm)):
            monkeypatch.setattr(linear, name, value)
        monkeypatch.setattr(linear, "load_kernel", lambda name: True)
        assert [path(x, matrix)[0] for matrix in (eight, four)] == expected
    monkeypatch.setattr(linear, "X86_KERNELS", True)
    many = linear.MAX_ROWS["int8"] + 1
    for given, matrix, reason in (
        (x.double(), eight, "float64 has no kernel"),
        (randn(many, 64), eight, "other paths are faster"),
        (x.clone().requires_grad_(), eight, "no derivative"),
        (randn(1, 48), quantize_int8(randn(16, 48)), "48 inputs are not a multiple of 32"),
    ):
        name, reasons = path(given, matrix)
        assert name == "converted layer by layer"
        assert reason in reasons["8-bit kernel of torch"]


def test_gradients_flow_through_quantized_weights():
    x, matrix = randn(2, 64).requires_grad_(), quantize_int4(randn(16, 64))
    quantized_linear(x, matrix).sum().backward()
    torch.testing.assert_close(x.grad, dequantize(matrix, torch.float32).sum(0).expand(2, -1), atol=1e-4, rtol=1e-4)


# Models


@pytest.mark.parametrize("embedding", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("bits", [8, 4])
def test_logits_equal_those_of_the_dequantized_weights(bits, embedding):
    model = model_of(embedding=embedding)
    small, exact = phasor.quantize(model, bits=bits), copy.deepcopy(model).double()
    state = exact.state_dict()
    for name, part in small.named_modules():
        if isinstance(part, Quantized):
            assert part.weight.dtype == (torch.int8 if bits == 8 else torch.uint8)
            state[f"{name}.weight"].copy_(dequantize(part.matrix, torch.float64))
    ids = tokens(1, 9)
    with torch.no_grad():
        assert relative_change(small(ids).double(), exact(ids)) < 0.02
        assert relative_change(copy.deepcopy(small).bfloat16().float()(ids).double(), exact(ids)) < 0.02
        torch.testing.assert_close(copy.deepcopy(small).double()(ids), exact(ids), atol=1e-9, rtol=1e-9)


def test_rows_that_groups_do_not_divide_stay_in_8_bits():
    small = phasor.quantize(speaker(dim=32, hidden_dim=48, num_heads=2, num_layers=1), bits=4)
    network = small.decoder.blocks[0].feedforward
    assert (network.up.weight.dtype, network.down.weight.dtype) == (torch.uint8, torch.int8)
    assert isinstance(network.down, QuantizedLinear)


@pytest.mark.sample(3)
@pytest.mark.parametrize("embedding", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"bits": 4, "group_size": 64}], ids=str)
def test_saved_and_loaded(options, embedding, tmp_path):
    model = model_of(embedding=embedding)
    small, ids = phasor.quantize(model, **options), tokens(2, 5)
    phasor.save(small, tmp_path / "small")
    phasor.save(model, tmp_path / "large")
    loaded = phasor.load(tmp_path / "small")
    files = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "large")]
    assert files[0] < 0.6 * files[1]
    with torch.no_grad():
        assert torch.equal(loaded(ids), small(ids))
        rounded = phasor.load(tmp_path / "small", dtype=torch.bfloat16)
        assert relative_change(rounded(ids).float(), small(ids)) < 0.1
    assert rounded.decoder.norm.weight.dtype == rounded.tokens.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in loaded.parameters())
    assert phasor.generate(loaded, [3, 5], max_new_tokens=6) == phasor.generate(small, [3, 5], max_new_tokens=6)
    phasor.save(loaded, tmp_path / "small")  # in its own place
    assert phasor.verify(tmp_path / "small")[0].wrong == []


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    folder = tmp_path / "model"
    phasor.save(phasor.quantize(model_of(), bits=4), folder)
    file, weights = folder / "quantization.json", folder / "model.safetensors"
    told, held = file.read_text(), load_file(weights)
    assert json.loads(told) == {"bits": 4, "group_size": 32}
    name = "decoder.blocks.0.attention.qkv"

    def refused(text):
        with pytest.raises(ValueError, match=text) as error:
            phasor.load(folder, verify=False)
        assert "\n" not in str(error.value)

    for wrong in ({"bits": 3, "group_size": 32}, {"bits": 4}, {"bits": 4, "group_size": "32"}, {}):
        file.write_text(json.dumps(wrong))
        refused(f"{re.escape(str(file))} must say bits")
    file.write_text(json.dumps({"bits": 8, "group_size": 32}))
    refused(f"does not fit its configuration.*{name}.weight has the shape")
    file.write_text(json.dumps({"bits": 4, "group_size": 64}))
    refused(f"does not fit its configuration.*{name}.scales has the shape")
    file.unlink()
    refused("does not fit its configuration.*scales is not the model's")
    file.write_text(told)
    for part, kind, stored in (("weight", torch.int8, "I8, not U8"), ("scales", torch.float32, "F32, not BF16")):
        save_file(held | {f"{name}.{part}": held[f"{name}.{part}"].to(kind)}, weights, {"format": "pt"})
        refused(f"does not fit its quantization.json: {name}.{part} is stored as {stored}")
    save_file({k: v for k, v in held.items() if k != f"{name}.scales"}, weights, {"format": "pt"})
    refused(f"{name}.scales is missing")
    own = phasor.quantize(model_of(), bits=4)
    own.decoder.blocks[0].attention.out = torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(
        ValueError, match=r"configuration's cannot be saved: decoder\.blocks\.0\.attention\.out\.scales is missing"
    ):
        phasor.save(own, tmp_path / "other")


def test_convert_and_commands(tmp_path):
    model = model_of()
    phasor.save(model, tmp_path / "large")
    phasor.convert(tmp_path / "large", tmp_path / "small", bits=4)
    expected = phasor.generate(phasor.quantize(model, bits=4), [3, 5], max_new_tokens=6)
    assert phasor.generate(phasor.load(tmp_path / "small"), [3, 5], max_new_tokens=6) == expected
    with pytest.raises(ValueError, match="quantized weights are saved in the format phasor, not hf"):
        phasor.convert(tmp_path / "small", tmp_path / "hf")
    with pytest.raises(ValueError, match="quantized already"):
        phasor.convert(tmp_path / "small", tmp_path / "again", bits=8)
    with pytest.raises(ValueError, match="leave check out"):
        phasor.convert(tmp_path / "large", tmp_path / "again", bits=8, check=True)
    found = phasor.backends(tmp_path / "small", device="cuda", weights="int4")
    taken = {one.op: one for one in found.ops}
    assert taken["decoding step"].path.startswith("fused kernels")
    assert taken["quantized weights, one row"].path.startswith("as they are")


def test_a_quantized_folder_is_neither_trained_nor_cut_over_processes(tmp_path):
    phasor.save(phasor.quantize(model_of()), tmp_path / "small")
    with pytest.raises(ValueError, match="small are quantized: train the original model"):
        check_model(Recipe.from_dict({"init_from": str(tmp_path / "small")}))
    with open_folder(tmp_path / "small") as opened, pytest.raises(ValueError, match="neither trained nor cut"):
        next(opened.weights())


def test_compiled_steps_generate_the_same():
    for bits in (8, 4):
        small = phasor.quantize(model_of(), bits=bits)
        with torch.inference_mode():
            step = torch.compile(small.decoder.blocks[0].feedforward, backend="eager", fullgraph=True)
            x = randn(1, 2, 64)
            assert torch.equal(step(x), small.decoder.blocks[0].feedforward(x))

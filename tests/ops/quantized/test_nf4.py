"""NF4 against bitsandbytes: the table, the bits, the values, the products; kernels against the reference; gradients."""

import pytest
import torch
from device import DEVICE
from references import normal

from phasor.ops import dispatch
from phasor.ops.quantized import (
    NF4_LINEAR,
    NF4Matrix,
    dequantize,
    dequantize_nf4_ref,
    frozen_linear,
    nf4_linear_ref,
    quantize_int8,
    quantize_nf4,
    quantize_nf4_ref,
)
from phasor.ops.quantized.nf4 import block_scales, dynamic_map, nf4_code
from phasor.ops.quantized.nf4_dequantize import NF4_DEQUANTIZE

CPU = torch.device("cpu")
SHAPES = [(48, 128), (33, 100), (7, 6), (300, 192)]


def weight_of(shape, dtype=torch.float32, seed=0):
    return (0.02 * normal(*shape, seed=seed)).to(dtype)


def block_absmax(weight):
    return torch.stack([block.float().abs().max() for block in weight.flatten().split(64)])


@pytest.mark.cpu_only("bitsandbytes takes tensors on the CPU here")
def test_tables_are_those_of_bitsandbytes():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    assert torch.equal(nf4_code(CPU), bitsandbytes.functional.get_4bit_type("nf4", "cpu"))
    assert torch.equal(dynamic_map(CPU), bitsandbytes.functional.create_dynamic_map())


@pytest.mark.cpu_only("bitsandbytes takes tensors on the CPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_and_values_are_those_of_bitsandbytes(shape, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weight_of(shape, dtype)
    stored, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    ours = quantize_nf4(weight)
    assert torch.equal(ours.values.flatten(), stored.flatten())
    assert torch.equal(ours.nested_absmax, state.state2.absmax)
    assert torch.equal(ours.offset, state.offset)
    # Its CPU kernel (not that for GPUs) looks scales up in bins of 2^-15: near the middle of two it takes either.
    code, most = dynamic_map(CPU), ours.nested_absmax.repeat_interleave(256)[: len(ours.absmax)]
    scaled = (block_absmax(weight) - ours.offset) / most
    farther = (code[state.absmax.int()] - scaled).abs() - (code[ours.absmax.int()] - scaled).abs()
    assert (farther[most > 0] >= -1e-7).all()
    assert (farther[most > 0] <= 2**-15).all()
    theirs = NF4Matrix(stored.view(ours.values.shape), state.absmax, state.state2.absmax, state.offset)
    assert torch.equal(dequantize(theirs, dtype), functional.dequantize_4bit(stored, state))


@pytest.mark.cpu_only("bitsandbytes takes tensors on the CPU here")
@pytest.mark.parametrize("bias", [False, True])
def test_products_and_gradients_are_those_of_linear4bit(bias):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = torch.nn.Linear(192, 40, bias=bias)
    theirs = bitsandbytes.nn.Linear4bit(192, 40, bias=bias, compute_dtype=torch.float32, quant_type="nf4")
    theirs.load_state_dict(layer.state_dict())
    theirs = theirs.to("cpu")
    x = normal(5, 192, seed=1).float()
    ours_x, theirs_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, expected = frozen_linear(ours_x, quantize_nf4(layer.weight), layer.bias), theirs(theirs_x)
    # sums of 192 products of float32, in another order
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    direction = normal(5, 40, seed=2).float()
    ours.backward(direction)
    expected.backward(direction)
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_its_reference(shape):
    weight = weight_of(shape, seed=3).to(DEVICE)
    matrix, code = quantize_nf4(weight), nf4_code(weight.device)
    places, absmax = quantize_nf4_ref(weight, code)
    nibbles = torch.stack((matrix.values >> 4, matrix.values & 15), dim=-1).flatten()
    assert torch.equal(nibbles.long(), places)
    scales = block_scales(*matrix[1:], dynamic_map(weight.device), 256)
    # Middles of 0.9 / 64 of the largest difference from the mean are the coarsest steps of the dynamic map.
    assert ((scales - absmax).abs() <= 0.9 / 64 / 2 * (absmax - absmax.mean()).abs().max() * 1.01 + 1e-9).all()
    assert torch.equal(dequantize(matrix, torch.float32).flatten(), dequantize_nf4_ref(places, scales, code))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 64), (33, 104), (130, 192)], ids=str)
def test_the_kernel_dequantizes_to_the_same_bits(shape, dtype):
    matrix = quantize_nf4(weight_of(shape, seed=4).to(DEVICE))
    with dispatch.force_path("reference"):
        expected = dequantize(matrix, torch.float32)
    with dispatch.force_path("triton"):
        assert NF4_DEQUANTIZE.choose(matrix, dtype).name == "NF4 kernel"
        found = dequantize(matrix, dtype)
    if dtype == torch.float32:
        assert torch.equal(found, expected)
    else:  # the interpreter cuts off where a GPU rounds: one unit in the last place, 2^-7 relative
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=0)


def test_bytes_that_are_no_whole_words_are_looked_up_in_tables():
    odd, part = (quantize_nf4(weight_of(shape, seed=4).to(DEVICE)) for shape in ((33, 100), (4, 4)))
    part = part._replace(values=part.values[1:3])  # begins at the third byte
    with dispatch.force_path("triton"):
        for matrix in (odd, part):
            name, reasons = NF4_DEQUANTIZE.explain(matrix, torch.float32)
            assert (name, reasons["NF4 kernel"]) == (
                "table lookups",
                "its bytes do not begin and end at multiples of 4",
            )


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 33, 192), (5, 16, 64), (23, 70, 320), (64, 40, 128)])
def test_the_kernel_for_few_rows_is_its_reference(rows, outputs, inputs):
    weight = weight_of((outputs, inputs), seed=5).to(DEVICE)
    matrix, x = quantize_nf4(weight), normal(rows, inputs, seed=6).float().to(DEVICE)
    code, places = nf4_code(weight.device).double(), quantize_nf4_ref(weight, nf4_code(weight.device))[0]
    scales = block_scales(*matrix[1:], dynamic_map(weight.device), 256).double()
    with dispatch.force_path("triton"):
        assert NF4_LINEAR.choose(x, matrix).name == "NF4 kernel for few rows"
        found = frozen_linear(x, matrix)
    # sums of at most 320 products of float32 numbers near 0.02
    torch.testing.assert_close(found.double(), nf4_linear_ref(x.double(), places, scales, code), rtol=1e-5, atol=1e-6)


def test_many_rows_and_awkward_rows_are_dequantized_first():
    matrix, awkward = quantize_nf4(weight_of((8, 64))), quantize_nf4(weight_of((8, 66)))
    with dispatch.force_path("triton"):
        many, across = NF4_LINEAR.explain(torch.zeros(65, 64), matrix), NF4_LINEAR.explain(torch.zeros(2, 66), awkward)
    assert many[0] == across[0] == "dequantized, then multiplied"
    assert "65 rows" in many[1]["NF4 kernel for few rows"]
    assert "cross rows of 66" in across[1]["NF4 kernel for few rows"]


@pytest.mark.parametrize("quantize", [quantize_nf4, quantize_int8])
def test_gradients_are_those_of_the_dequantized_matrix(quantize):
    matrix = quantize(weight_of((9, 66), seed=7).to(DEVICE))
    x, bias = (normal(*shape, seed=8).to(DEVICE).requires_grad_() for shape in ((2, 3, 66), (9,)))
    assert torch.autograd.gradcheck(lambda x, bias: frozen_linear(x, matrix, bias), (x, bias))
    exact = x @ dequantize(matrix, torch.float64).mT + bias
    torch.testing.assert_close(frozen_linear(x, matrix, bias), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("quantize", [quantize_nf4, quantize_int8])
def test_only_the_quantized_matrix_is_kept_for_the_backward_pass(quantize):
    matrix, kept = quantize(weight_of((96, 128))), []
    x = normal(7, 128, seed=9).float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        frozen_linear(x, matrix)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in matrix}


def test_odd_rows_and_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match="rows of 7 elements are odd"):
        quantize_nf4(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="rows of 6 elements do not fit a quantized matrix of 8 inputs"):
        frozen_linear(torch.zeros(2, 6), quantize_nf4(torch.zeros(2, 8)))

"""Frozen quantized layers: gradients to their input under autocast, compilation and checkpointing; their state."""

import copy
import pickle

import pytest
import torch
from device import DEVICE
from references import normal
from torch import nn
from torch.utils.checkpoint import checkpoint

import phasor
from phasor.nn.quantized import Quantization, QuantizedLinear
from phasor.nn.quantized_experts import QuantizedStack
from phasor.ops.quantized import dequantize, quantize_int4, quantize_int8, quantize_nf4

KINDS = {"nf4": quantize_nf4, "int8": quantize_int8}


def pair(kind, inputs=96, outputs=40, bias=True):
    """A quantized layer, and the plain one that has its dequantized weight."""
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias, device=DEVICE)
    frozen = QuantizedLinear(layer, KINDS[kind](layer.weight)).requires_grad_(False).train()
    layer.weight.data = dequantize(frozen.frozen_matrix, torch.float32)
    return frozen, layer.requires_grad_(False)


def gradients(layer, x, run=lambda layer, x: layer(x)):
    x = x.clone().requires_grad_()
    y = run(layer, x)
    y.float().sin().sum().backward()
    return y.detach(), x.grad


def in_autocast(layer, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return layer(x)


def checkpointed(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize("run", [lambda layer, x: layer(x), in_autocast, checkpointed], ids=["plain", "autocast", "ac"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_dequantized_weight(kind, bias, run):
    frozen, plain = pair(kind, bias=bias)
    x = normal(3, 7, 96, seed=1).float().to(DEVICE)
    (y, grad), (expected, true_grad) = gradients(frozen, x, run), gradients(plain, x, run)
    assert y.dtype == expected.dtype
    # The bias is added to a product that is rounded to bfloat16 already: a unit in the last place of numbers near 1.
    tolerance = 2**-7 if run is in_autocast else 1e-6
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(grad, true_grad, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_keep_no_dequantized_weight(kind):
    frozen, _ = pair(kind, inputs=128, outputs=256)
    compiled, kept = torch.compile(nn.Sequential(frozen, nn.SiLU()), fullgraph=True), []
    x = normal(4, 128, seed=2).float().to(DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y, grad = gradients(compiled, x)
    for found, expected in zip((y, grad), gradients(nn.Sequential(frozen, nn.SiLU()), x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not [t for t in kept if t.is_floating_point() and t.numel() >= 128 * 256]


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_round_trip_and_conversions_leave_weights_alone(kind):
    frozen, _ = pair(kind)
    other = QuantizedLinear(nn.Linear(96, 40), KINDS[kind](torch.zeros(40, 96))).to(DEVICE)
    other.load_state_dict(frozen.state_dict())
    x = normal(2, 96, seed=3).float().to(DEVICE)
    assert torch.equal(other.train()(x), frozen(x))
    for changed in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        half = changed.bfloat16()
        assert half.bias.dtype == torch.bfloat16
        for name, tensor in frozen.named_buffers():
            assert torch.equal(half.get_buffer(name), tensor)
            assert half.get_buffer(name).dtype == tensor.dtype


def test_rows_of_integers_in_4_bits_are_not_trained():
    layer = QuantizedLinear(nn.Linear(64, 8), quantize_int4(torch.ones(8, 64)))
    with pytest.raises(ValueError, match="a model with quantized weights cannot be trained"):
        layer(torch.zeros(1, 64))


def test_a_model_in_nf4_is_saved_and_read_back(tmp_path):
    torch.manual_seed(0)
    model = phasor.Transformer(phasor.preset("llama-2", dim=64, num_heads=4, num_layers=2, vocab_size=50)).eval()
    small = phasor.quantize(model, bits="nf4")
    assert small.tokens.weight.dtype == torch.float32
    assert small.decoder.blocks[0].attention.qkv.nested_scales is not None
    phasor.save(small, tmp_path / "small")
    again, tokens = phasor.load(tmp_path / "small", device=DEVICE), torch.randint(50, (2, 9))
    assert torch.equal(again(tokens), small(tokens))
    assert phasor.generate(again, [1, 2, 3], max_new_tokens=5) == phasor.generate(small, [1, 2, 3], max_new_tokens=5)


def test_odd_rows_are_held_in_8_bits():
    assert isinstance(Quantization("nf4").quantize(torch.ones(3, 5)), type(quantize_int8(torch.ones(3, 5))))


@pytest.mark.parametrize("bits", ["fp4", 3, True])
def test_other_bits_are_refused(bits):
    model = phasor.Transformer(phasor.preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    with pytest.raises(ValueError, match='bits must be 8, 4 or "nf4"'):
        phasor.quantize(model, bits=bits)


@pytest.mark.parametrize("bits", ["nf4", 8])
def test_gradients_pass_through_experts(bits):
    torch.manual_seed(0)
    weight, ends = torch.randn(3, 6, 10), torch.tensor([2, 2, 5], dtype=torch.int32)
    stack, x = QuantizedStack(weight, Quantization(bits)), normal(5, 6, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: stack(x, ends), (x,))
    full, expert = dequantize(stack.frozen_matrix, torch.float64).view(3, 6, 10), [0, 0, 2, 2, 2]
    expected = torch.stack([row @ full[e] for row, e in zip(x, expert, strict=True)])
    torch.testing.assert_close(stack(x, ends), expected, rtol=1e-12, atol=1e-12)

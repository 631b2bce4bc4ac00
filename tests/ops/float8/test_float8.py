"""Float8 matrix products against float64 and against their references, and training with them."""

import copy
import os
import signal

import numpy as np
import pytest
import torch
import triton.language as tl
from device import DEVICE
from references import normal, redraw
from safetensors.torch import load_file
from training_runs import Notes, recipe, run
from triton.runtime import interpreter

import phasor
from phasor.ops import dispatch
from phasor.ops.float8 import (
    FLOAT8,
    FLOAT8_MAX,
    FLOAT8_MLP,
    float8_linear,
    float8_linear_backward_ref,
    float8_linear_ref,
    float8_mlp_backward_ref,
    float8_mlp_ref,
    float8_mlp_why_not,
    glu_float8_backward_ref,
    glu_float8_ref,
    kernels,
    quantize_rows,
    quantize_rows_ref,
    transpose,
    transpose_ref,
)
from phasor.ops.float8 import float8 as ops
from phasor.ops.float8.float8 import round_to, weight_gradient
from phasor.ops.glu import GLU_ACTIVATIONS, glu_ref
from phasor.training import loop
from phasor.training.float8 import Float8FeedForward, convert_to_float8
from phasor.training.optimizer import decay_names

HALF_ULP = 2**-4  # of a value with three mantissa bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_every_element_is_rounded_once(dtype, size):
    x = (torch.randn(7, 33) * size).to(dtype)
    values, scale = quantize_rows(x)
    back, exact = values.double() * scale.double(), x.double()
    smallest = scale.double() * 2**-10  # half of the subnormal spacing
    assert ((back - exact).abs() <= exact.abs() * HALF_ULP * 1.001 + smallest).all()


def test_rows_of_zeros_and_rows_that_are_not_finite():
    values, scale = quantize_rows(torch.tensor([[0.0, 0.0], [1.0, float("inf")], [1.0, float("nan")]]))
    back = values.float() * scale
    assert back[0].tolist() == [0.0, 0.0]
    assert not back[1:].isfinite().all(-1).any()


def off(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.fixture
def float8_in_the_interpreter(monkeypatch):
    """Triton's interpreter truncates subnormals, and takes what rounds up to a power of two for half of it."""
    convert = interpreter._convert_float

    def convert_to_nearest(data, old, new, mode):
        if (old, new) != (tl.float32, tl.float8e4nv):
            return convert(data, old, new, mode)
        return torch.from_numpy(np.ascontiguousarray(data)).to(FLOAT8).view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert_to_nearest)


def are_powers_of_two(scale):
    """By their bits: log2 is rounded on a GPU."""
    return bool((torch.frexp(scale).mantissa == 0.5).all())


def all_float8_values():
    """Every finite value of float8, by its bits."""
    values = torch.arange(256, dtype=torch.uint8).view(FLOAT8).double()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_quantize_reference_takes_the_nearest_float8_value(size):
    """Among all there are, of rows divided by the least power of two that brings them into their range."""
    x = (torch.randn(7, 33) * size).double()
    values, scale = quantize_rows_ref(x)
    assert are_powers_of_two(scale)
    largest = (x / scale).abs().amax(-1)
    assert ((largest <= FLOAT8_MAX) & (largest > FLOAT8_MAX / 2)).all()
    nearest = ((x / scale)[..., None] - all_float8_values()).abs().amin(-1)
    torch.testing.assert_close((x / scale - values.double()).abs(), nearest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (3, 1030)], ids=str)
def test_quantize_equals_reference(dtype, shape):
    x = (torch.randn(shape) * torch.exp2(torch.randint(-40, 41, (shape[0], 1)))).to(dtype)
    x[0, 0] = 448.0  # a largest element that is a float8 value, and zeros
    x[-1] *= 0.0
    for found, wanted in zip(quantize_rows(x), quantize_rows_ref(x), strict=True):
        assert torch.equal(found.float(), wanted.float())


def test_linear_references_are_near_float64():
    x, weight, grad = (torch.randn(shape, dtype=torch.float64) for shape in ((37, 48), (32, 48), (37, 32)))
    dx, dw = float8_linear_backward_ref(grad, x, weight)
    pairs = ((float8_linear_ref(x, weight), x @ weight.T), (dx, grad @ weight), (dw, grad.T @ x))
    for found, wanted in pairs:
        assert 0.005 < off(found, wanted) < 0.06


@pytest.mark.parametrize("tokens", [1, 37, 48])
@pytest.mark.parametrize("path", ["reference", "triton"])
def test_linear_equals_reference(tokens, path):
    """Up to float32 sums and one rounding to bfloat16, a 256th of an element at most."""
    x, weight = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((tokens, 48), (32, 48)))
    grad = torch.randn(tokens, 32).bfloat16()
    with dispatch.force_path(path):
        y = float8_linear(x, weight)
        found = y.detach(), *torch.autograd.grad(y, (x, weight), grad)
    wide = [t.detach().double() for t in (grad, x, weight)]
    wanted = float8_linear_ref(*wide[1:]), *float8_linear_backward_ref(*wide)
    for ours, theirs in zip(found, wanted, strict=True):
        # The interpreter truncates subnormal float8 values where the reference rounds them.
        assert off(ours, theirs) < 2**-8


def test_mlp_references_are_near_float64():
    x, up, down, grad = (torch.randn(s, dtype=torch.float64) for s in ((37, 32), (96, 32), (32, 48), (37, 32)))
    twins = [t.clone().requires_grad_() for t in (x, up, down)]
    y = glu_ref(twins[0] @ twins[1].T, "swiglu") @ twins[2].T
    wanted = y.detach(), *torch.autograd.grad(y, twins, grad)
    found = float8_mlp_ref(x, up, down, "swiglu"), *float8_mlp_backward_ref(grad, x, up, down, "swiglu")
    for ours, theirs in zip(found, wanted, strict=True):
        assert 0.005 < off(ours, theirs) < 0.12


@pytest.mark.parametrize("kind", ["swiglu", "geglu-tanh"])
@pytest.mark.usefixtures("float8_in_the_interpreter")
def test_fused_mlp_is_near_its_reference(kind):
    """The output of the up projection is rounded to bfloat16 in between, after which float8 may round to a neighbor."""
    x, up, down = (torch.randn(s).bfloat16().requires_grad_() for s in ((37, 32), (96, 32), (32, 48)))
    grad = torch.randn(37, 32).bfloat16()
    with dispatch.force_path("triton"):
        assert FLOAT8_MLP.explain(x, up, down, kind)[1] == {}
        y = ops.float8_mlp(x, up, down, kind)
        found = y.detach(), *torch.autograd.grad(y, (x, up, down), grad)
    wide = [t.detach().double() for t in (grad, x, up, down)]
    wanted = float8_mlp_ref(*wide[1:], kind), *float8_mlp_backward_ref(*wide, kind)
    for ours, theirs in zip(found, wanted, strict=True):
        assert off(ours, theirs) < 0.03  # the distance of either to float64 is 0.05 and more


@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (3, 1030)], ids=str)
@pytest.mark.usefixtures("float8_in_the_interpreter")
def test_glu_kernels_are_near_their_references(shape):
    rows, half = shape
    x, grad = (4 * normal(rows, 2 * half)).float(), normal(rows, half, seed=1).float()
    pairs = (
        (kernels.glu_float8(x, "swiglu"), glu_float8_ref(x.double(), "swiglu")),
        (kernels.glu_float8_backward(grad, x, "swiglu"), glu_float8_backward_ref(grad.double(), x.double(), "swiglu")),
    )
    for (values, scale), (wanted, wanted_scale) in pairs:
        assert torch.equal(scale.double(), wanted_scale)
        same = (values.double() == wanted.double()).double().mean()
        assert same > 0.999  # float32 may be on the other side of a midpoint


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("path", ["reference", "triton"])
def test_output_and_gradients_are_near_float64(bias, path):
    x = torch.randn(3, 5, 48, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32, 48, dtype=torch.bfloat16, requires_grad=True)
    shift = torch.randn(32, dtype=torch.bfloat16, requires_grad=True) if bias else None
    upstream = torch.randn(3, 5, 32, dtype=torch.bfloat16)
    with dispatch.force_path(path):
        float8_linear(x, weight, shift).backward(upstream)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    y = torch.nn.functional.linear(*exact)
    y.backward(upstream.double())
    output = float8_linear(x, weight).detach()
    wide = [t.detach().double() for t in (x, weight, shift) if t is not None]
    assert off(float8_linear(x, weight, shift).detach(), float8_linear_ref(*wide)) < 2**-8  # rounded once or twice more
    for ours, theirs in ((output, y), (x.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert 0.005 < off(ours, theirs) < 0.06  # rounded, and no more than float8 explains
    if shift is not None:
        assert off(shift.grad, upstream.double().sum((0, 1))) < 0.01


def test_scales_cost_the_weight_gradient_no_precision():
    """Tokens with inputs and gradients of all magnitudes: what counts in the sum keeps its three mantissa bits."""
    sizes = torch.exp2(torch.randint(-20, 21, (2, 64, 1)).float())
    x, grad = torch.randn(64, 48) * sizes[0], torch.randn(64, 32) * sizes[1]
    (values, scale), (x_values, x_scale) = quantize_rows(grad), quantize_rows(x)
    weight = torch.empty(32, 48)
    found = weight_gradient(values, scale, transpose(x_values), x_scale, weight)
    rounded = (values.double() * scale).t() @ (x_values.double() * x_scale)
    assert off(found, rounded) < 0.01
    assert 0.005 < off(found, grad.double().t() @ x.double()) < 0.06


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("path", ["reference", "triton"])
def test_weight_gradient_shows_what_is_not_finite(wrong, where, path):
    x, upstream = torch.randn(20, 32), torch.randn(20, 16)
    (x if where == "input" else upstream)[3, 5] = wrong
    weight = torch.randn(16, 32, requires_grad=True)
    with dispatch.force_path(path):
        float8_linear(x, weight).backward(upstream)
    assert not weight.grad.isfinite().all()


def test_zero_tokens_have_a_gradient_of_zeros():
    x, weight = torch.zeros(0, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    float8_linear(x, weight).sum().backward()
    assert weight.grad.shape == weight.shape
    assert not weight.grad.any()
    _, ours, _ = networks()
    with dispatch.force_path("triton"):
        assert ours(normal(0, 32).bfloat16()).shape == (0, 32)


def test_float8_values_are_contiguous():
    """As matrix products on a GPU need them, for any layout of the input."""
    values, _ = quantize_rows(torch.randn(32, 16).t())
    assert values.is_contiguous()


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_autocast_computes_in_bfloat16_and_gives_float32_gradients(path):
    _, ours, _ = networks()
    ours.float()
    x = normal(7, 32).float().requires_grad_()
    with dispatch.force_path(path), torch.autocast(DEVICE.type, torch.bfloat16):
        for y in (ours(x), float8_linear(x, ours.up.weight)):
            assert y.dtype == torch.bfloat16
            (gradient,) = torch.autograd.grad(y.float().sum(), ours.up.weight)
            assert gradient.dtype == torch.float32


@pytest.mark.cpu_only("Dynamo does not trace Tensor.unflatten under torch.set_default_device")
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_in_float32_and_their_copies_in_bfloat16_give_the_same_bits(compiled):
    linear = torch.compile(float8_linear, fullgraph=True, backend="aot_eager") if compiled else float8_linear
    weight, x = normal(48, 32).float(), normal(7, 32).float().requires_grad_()
    found = []
    for w in (weight.clone().requires_grad_(), weight.bfloat16().requires_grad_()):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = linear(x, w)
        found.append((y, *torch.autograd.grad(y.float().square().sum(), [x, w])))
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(*found, strict=True))


@pytest.mark.cpu_only("rounds the bits of every kind of float32, which a CPU does in the same way")
def test_compiled_code_rounds_bits_as_a_conversion_does():
    compiled = torch.compile(round_to, fullgraph=True, backend="aot_eager")
    bits = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, 10**5).astype(np.int32))
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), torch.finfo(torch.float32).max])
    x = torch.cat((bits.view(torch.float32), torch.tensor([0x7FFFFFFF]).int().view(torch.float32), special))
    assert torch.equal(compiled(x, torch.bfloat16).nan_to_num(7), x.bfloat16().float().nan_to_num(7))


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_evaluation_stays_the_same(path):
    plain, ours, _ = networks()
    x = normal(7, 32).bfloat16()
    with dispatch.force_path(path), torch.no_grad():
        assert torch.equal(ours.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("name", ["up", "down"])
def test_hooks_run(name):
    _, ours, _ = networks()
    called = []
    getattr(ours, name).register_forward_hook(lambda *_: called.append(name))
    with dispatch.force_path("triton"):
        ours(normal(7, 32).bfloat16())
    assert called == [name]


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_frozen_weights_get_no_gradient(path):
    _, ours, _ = networks()
    ours.down.weight.requires_grad_(False)
    with dispatch.force_path(path):
        ours(normal(7, 32).bfloat16().requires_grad_()).float().sum().backward()
    assert ours.down.weight.grad is None
    assert ours.up.weight.grad is not None


def test_weight_decay_has_the_same_weights():
    config = phasor.preset("llama-2", dim=32, hidden_dim=48, num_layers=1, num_heads=2, vocab_size=32)
    model = phasor.Transformer(config)
    before = set(decay_names(model))
    convert_to_float8(model)
    assert set(decay_names(model)) == before


def test_gradients_of_zeros_are_zeros():
    x, weight = torch.zeros(3, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    float8_linear(x, weight).backward(torch.zeros(3, 16))
    assert not x.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("shape", [(1, 1), (16, 3), (17, 130), (150, 33)], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_transpose(shape, weighted):
    values = (torch.randn(shape) * 60).to(FLOAT8)
    factor = torch.exp2(torch.randint(-12, 1, (shape[0], 1)).float()) if weighted else None
    wanted = (values.float() * (1.0 if factor is None else factor)).to(FLOAT8).float().t()
    with dispatch.force_path("reference"):
        reference = transpose(values, factor)
    assert torch.equal(reference.float(), transpose_ref(values, factor).float())
    with dispatch.force_path("triton"):
        kernel = transpose(values, factor)
    for found in (reference, kernel):
        assert found.shape == (shape[1], -(-shape[0] // 16) * 16)
        assert not found[:, shape[0] :].float().any()
    assert torch.equal(reference[:, : shape[0]].float(), wanted)
    away = (kernel[:, : shape[0]].float() - wanted).abs()
    assert (away <= 2**-9).all()  # the interpreter truncates subnormals, which a GPU rounds


@pytest.mark.parametrize("kind", sorted(GLU_ACTIVATIONS))
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (3, 1030)], ids=str)
def test_glu_kernels_are_the_formula_rounded_once(kind, shape):
    rows, half = shape
    x = (4 * normal(rows, 2 * half)).float()
    grad = normal(rows, half, seed=1).float()
    twin = x.double().requires_grad_()
    expected = glu_ref(twin, kind)
    (gradient,) = torch.autograd.grad((expected * grad.double()).sum(), twin)
    for (values, scale), exact in (
        (kernels.glu_float8(x, kind), expected.detach()),
        (kernels.glu_float8_backward(grad, x, kind), gradient),
    ):
        assert are_powers_of_two(scale)
        assert (exact.abs().amax(-1, keepdim=True) <= scale.double() * FLOAT8_MAX * (1 + 1e-6)).all()
        largest = exact.abs().amax(-1, keepdim=True)
        assert ((largest == 0) | (largest * 2.001 >= scale.double() * FLOAT8_MAX)).all()
        away = (values.double() - exact / scale).abs()
        held = rounds_up_to_power_of_two((exact / scale).abs()) | (
            away <= (exact / scale).abs() * HALF_ULP * 1.001 + 2**-9
        )
        assert held.all()


def rounds_up_to_power_of_two(x):
    """Where rounding to float8 goes up to a power of two, which Triton's interpreter takes for half of it."""
    up = x.to(FLOAT8).double()
    return (up > x) & (torch.frexp(up).mantissa == 0.5)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_glu_kernels_show_what_is_not_finite(wrong):
    x = normal(2, 12).float()
    x[1, 7] = wrong
    _, scale = kernels.glu_float8(x, "swiglu")
    assert scale.isfinite().flatten().tolist() == [True, False]
    _, scale = kernels.glu_float8_backward(torch.ones(2, 6), x, "swiglu")
    assert scale.isfinite().flatten().tolist() == [True, False]


def networks(**options):
    """A GLU network in bfloat16, a copy that trains in float8, and a copy in float64."""
    config = phasor.preset("llama-2", dim=32, hidden_dim=48, num_layers=1, num_heads=2, vocab_size=32, **options)
    model = redraw(phasor.Transformer(config), torch.bfloat16)
    twin = copy.deepcopy(model)
    convert_to_float8(twin)
    blocks = [one.decoder.blocks[0].feedforward for one in (model, twin, copy.deepcopy(model).double())]
    return [block.train() for block in blocks]


def test_fused_network_is_near_float64():
    plain, ours, exact = networks()
    x, upstream = normal(7, 32).bfloat16(), normal(7, 32, seed=1)
    found = []
    for network, path in ((plain, "reference"), (ours, "triton"), (ours, "reference"), (exact, "reference")):
        network.zero_grad()
        dtype = network.up.weight.dtype
        given = x.to(dtype, copy=True).requires_grad_()
        with dispatch.force_path(path):
            y = network(given)
            y.backward(upstream.to(dtype))
        assert uses_fused_mlp(y) == (network is ours and path == "triton")
        found.append((y.detach(), given.grad, network.up.weight.grad, network.down.weight.grad))
    for tensors in zip(*found, strict=True):
        wide, one, parts, expected = tensors
        assert off(wide, expected) < 0.01 < off(one, expected) < 0.12
        assert off(parts, expected) < 0.12


def uses_fused_mlp(y):
    """Whether an output comes from the fused operation."""
    return "_MLPFunction" in y.grad_fn.next_functions[0][0].name()


@pytest.mark.parametrize(
    "options",
    [{"dropout": {"feedforward": 0.5}}, {"feedforward": {"bias": True}}, {"feedforward": {"activation": "gelu"}}],
    ids=str,
)
def test_other_networks_take_separate_operations(options):
    _, ours, _ = networks(**options)
    with dispatch.force_path("triton"):
        assert not uses_fused_mlp(ours(normal(7, 32).bfloat16().requires_grad_()))


def test_why_a_network_is_not_one_operation():
    x, up, down = torch.zeros(2, 16), torch.zeros(32, 16), torch.zeros(16, 16)
    assert float8_mlp_why_not(x.cpu(), up, down, "swiglu") == "the tensors are not on a GPU"
    with dispatch.force_path("triton"):
        assert float8_mlp_why_not(x, up, down, "swiglu") is None
        assert float8_mlp_why_not(x, up, down, "gelu") == "'gelu' has no kernel"
        wide = torch.zeros(16, 2**15, device="meta")
        assert float8_mlp_why_not(x, up, wide, "swiglu") == "a hidden dim of 32768 is more than 16384"


@pytest.mark.cpu_only("Dynamo does not trace Tensor.unflatten under torch.set_default_device")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic):
    _, ours, _ = networks()
    x = normal(7, 32).bfloat16().requires_grad_()
    with dispatch.force_path("triton"):
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=dynamic)(x)
        wanted = ours(x)
        assert torch.equal(compiled, wanted)
        gradients = [torch.autograd.grad(y.float().square().sum(), [x, ours.up.weight]) for y in (compiled, wanted)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_long_sums_use_full_accumulation(monkeypatch):
    monkeypatch.setattr(ops, "MAX_FAST_ACCUM", 32)
    taken, multiply = {}, torch._scaled_mm

    def record(a, *others, use_fast_accum, **options):
        taken[a.shape[1]] = use_fast_accum
        return multiply(a, *others, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    x, weight = normal(48, 32).bfloat16().requires_grad_(), normal(16, 32).bfloat16().requires_grad_()
    float8_linear(x, weight).float().sum().backward()
    assert taken == {32: True, 16: True, 48: False}


def test_opcheck():
    values, x, grad = torch.ones(5, 6).to(FLOAT8), normal(4, 6).float(), normal(4, 3).float()
    looked = ("test_autograd_registration", "test_faketensor")  # the others compute with float8 tensors
    torch.library.opcheck(ops._transpose.op, (values, torch.ones(5, 1)), test_utils=looked)
    torch.library.opcheck(ops._glu_float8.op, (x, "swiglu"), test_utils=looked)
    torch.library.opcheck(ops._glu_float8_backward.op, (grad, x, "swiglu"), test_utils=looked)


def test_routers_and_experts_are_not_converted_to_float8():
    experts = {"num_experts": 6, "top_k": 2, "shared_dim": 32, "shared_gate": True}
    _, ours, _ = networks(feedforward={"experts": experts})
    assert [type(layer) for layer in ours.routers] == [torch.nn.Linear] * 2
    assert type(ours.shared) is Float8FeedForward
    ours(normal(1, 7, 32).bfloat16()).float().sum().backward()
    assert all(weight.grad is not None for weight in ours.parameters())


@pytest.mark.cpu_only("its batches are made on the default device, and a run takes them from the host")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.slow
def test_a_run_in_float8_learns_and_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "check_device", lambda *given: None)  # users are told to take a GPU: here it is slow
    options = {"model__dim": 32, "model__num_heads": 2, "model__hidden_dim": 64, "train__precision": "float8"}
    options |= {"train__param_dtype": "bfloat16", "train__steps": 30}
    result = run(recipe(tmp_path / "whole", **options))
    assert result.loss < 2.5  # from log 23 = 3.1
    stop = Notes(each=lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 9 else None)
    assert run(recipe(tmp_path / "stopped", **options), notes=stop).status != "finished"
    run(recipe(tmp_path / "stopped", **options), resume=True)
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "stopped"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}


def test_unsupported_sizes_are_an_error():
    model = phasor.Transformer(phasor.ModelConfig(vocab_size=23, dim=24, num_heads=2, num_layers=1))
    with pytest.raises(ValueError, match=r"float8: a weight \[72, 24\] has a side that is not a multiple of 16"):
        convert_to_float8(model)


def test_ema_needs_float32_weights(tmp_path):
    with pytest.raises(ValueError, match=r"TrainConfig.ema_decay averages in the parameters' dtype"):
        recipe(tmp_path, train__param_dtype="bfloat16", train__ema_decay=0.9)

"""Products in float8 against float64, and training with them."""

import copy
import os
import signal

import pytest
import torch
from device import DEVICE
from plain import normal, redraw
from safetensors.torch import load_file
from training_runs import Notes, recipe, run

import phasor
from phasor.ops import dispatch
from phasor.ops.float8 import float8 as kernels
from phasor.ops.float8 import kernels as ops
from phasor.ops.float8.float8 import (
    EIGHT,
    LARGEST,
    eight_bits,
    feedforward_why_not,
    float8_linear,
    turn,
    weight_gradient,
)
from phasor.ops.glu.glu import GLU_ACTIVATIONS, glu_ref
from phasor.training.float8 import Float8FeedForward, float8_blocks
from phasor.training.optimizer import matrices

HALF_ULP = 2**-4  # of a number with three bits after its first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_every_entry_is_rounded_once_by_the_scale_of_its_row(dtype, size):
    x = (torch.randn(7, 33) * size).to(dtype)
    bits, scale = eight_bits(x)
    back, exact = bits.double() * scale.double(), x.double()
    smallest = scale.double() * 2**-10  # half of the least step, near zero
    assert ((back - exact).abs() <= exact.abs() * HALF_ULP * 1.001 + smallest).all()


def test_rows_of_nothing_and_of_infinities():
    bits, scale = eight_bits(torch.tensor([[0.0, 0.0], [1.0, float("inf")], [1.0, float("nan")]]))
    back = bits.float() * scale
    assert back[0].tolist() == [0.0, 0.0]
    assert not back[1:].isfinite().all(-1).any()


def off(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["reference", "triton"])
def test_output_and_gradients_are_near_those_of_float64(bias, form):
    x = torch.randn(3, 5, 48, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32, 48, dtype=torch.bfloat16, requires_grad=True)
    shift = torch.randn(32, dtype=torch.bfloat16, requires_grad=True) if bias else None
    upstream = torch.randn(3, 5, 32, dtype=torch.bfloat16)
    with dispatch.force_path(form):
        float8_linear(x, weight, shift).backward(upstream)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    y = torch.nn.functional.linear(*exact)
    y.backward(upstream.double())
    made = float8_linear(x, weight).detach()
    for ours, theirs in ((made, y), (x.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert 0.005 < off(ours, theirs) < 0.06  # rounded indeed, and no more than 8 bits explain
    if shift is not None:
        assert off(shift.grad, upstream.double().sum((0, 1))) < 0.01


def test_powers_of_two_cost_a_weight_no_precision():
    """Tokens whose inputs and gradients are of all sizes: what counts in the sum keeps its three bits."""
    sizes = torch.exp2(torch.randint(-20, 21, (2, 64, 1)).float())
    x, grad = torch.randn(64, 48) * sizes[0], torch.randn(64, 32) * sizes[1]
    (bits, scale), (more, more_scale) = eight_bits(grad), eight_bits(x)
    weight = torch.empty(32, 48)
    made = weight_gradient(bits, scale, turn(more), more_scale, weight)
    rounded = (bits.double() * scale).t() @ (more.double() * more_scale)
    assert off(made, rounded) < 0.01
    assert 0.005 < off(made, grad.double().t() @ x.double()) < 0.06


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("form", ["reference", "triton"])
def test_what_is_not_finite_is_seen_in_the_gradient_of_the_weight(wrong, where, form):
    x, upstream = torch.randn(20, 32), torch.randn(20, 16)
    (x if where == "input" else upstream)[3, 5] = wrong
    weight = torch.randn(16, 32, requires_grad=True)
    with dispatch.force_path(form):
        float8_linear(x, weight).backward(upstream)
    assert not weight.grad.isfinite().all()


def test_no_tokens_have_a_gradient_of_zeros():
    x, weight = torch.zeros(0, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    float8_linear(x, weight).sum().backward()
    assert weight.grad.shape == weight.shape
    assert not weight.grad.any()
    _, ours, _ = networks()
    with dispatch.force_path("triton"):
        assert ours(normal(0, 32).bfloat16()).shape == (0, 32)


def test_eight_bits_lie_row_by_row():
    """As products on a GPU want them, however their numbers lay."""
    bits, _ = eight_bits(torch.randn(32, 16).t())
    assert bits.is_contiguous()


@pytest.mark.parametrize("form", ["reference", "triton"])
def test_autocast_makes_16_bits_of_float32_and_gives_float32_gradients(form):
    _, ours, _ = networks()
    ours.float()
    x = normal(7, 32).float().requires_grad_()
    with dispatch.force_path(form), torch.autocast(DEVICE.type, torch.bfloat16):
        for y in (ours(x), float8_linear(x, ours.up.weight)):
            assert y.dtype == torch.bfloat16
            (gradient,) = torch.autograd.grad(y.float().sum(), ours.up.weight)
            assert gradient.dtype == torch.float32


@pytest.mark.parametrize("form", ["reference", "triton"])
def test_out_of_training_all_is_as_it_was(form):
    plain, ours, _ = networks()
    x = normal(7, 32).bfloat16()
    with dispatch.force_path(form), torch.no_grad():
        assert torch.equal(ours.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("name", ["up", "down"])
def test_hooks_are_called(name):
    _, ours, _ = networks()
    called = []
    getattr(ours, name).register_forward_hook(lambda *_: called.append(name))
    with dispatch.force_path("triton"):
        ours(normal(7, 32).bfloat16())
    assert called == [name]


@pytest.mark.parametrize("form", ["reference", "triton"])
def test_weights_that_do_not_learn_get_no_gradient(form):
    _, ours, _ = networks()
    ours.down.weight.requires_grad_(False)
    with dispatch.force_path(form):
        ours(normal(7, 32).bfloat16().requires_grad_()).float().sum().backward()
    assert ours.down.weight.grad is None
    assert ours.up.weight.grad is not None


def test_the_same_weights_decay():
    config = phasor.preset("llama-2", dim=32, hidden_dim=48, num_layers=1, num_heads=2, vocab_size=32)
    model = phasor.Transformer(config)
    before = set(matrices(model))
    float8_blocks(model)
    assert set(matrices(model)) == before


def test_nothing_at_all_has_a_gradient_of_zeros():
    x, weight = torch.zeros(3, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    float8_linear(x, weight).backward(torch.zeros(3, 16))
    assert not x.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("shape", [(1, 1), (16, 3), (17, 130), (150, 33)], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_turned_rows_are_columns(shape, weighted):
    bits = (torch.randn(shape) * 60).to(EIGHT)
    factor = torch.exp2(torch.randint(-12, 1, (shape[0], 1)).float()) if weighted else None
    wanted = (bits.float() * (1.0 if factor is None else factor)).to(EIGHT).float().t()
    with dispatch.force_path("reference"):
        reference = turn(bits, factor)
    with dispatch.force_path("triton"):
        made = turn(bits, factor)
    for found in (reference, made):
        assert found.shape == (shape[1], -(-shape[0] // 16) * 16)
        assert not found[:, shape[0] :].float().any()
    assert torch.equal(reference[:, : shape[0]].float(), wanted)
    away = (made[:, : shape[0]].float() - wanted).abs()
    assert (away <= 2**-9).all()  # the interpreter cuts off where a GPU rounds, below the least normal number


@pytest.mark.parametrize("kind", sorted(GLU_ACTIVATIONS))
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (3, 1030)], ids=str)
def test_gates_in_8_bits_are_their_formula_rounded_once(kind, shape):
    rows, half = shape
    x = (4 * normal(rows, 2 * half)).float()
    grad = normal(rows, half, seed=1).float()
    twin = x.double().requires_grad_()
    truth = glu_ref(twin, kind)
    (gradient,) = torch.autograd.grad((truth * grad.double()).sum(), twin)
    for (bits, scale), exact in ((ops.gated(x, kind), truth.detach()), (ops.gated_backward(grad, x, kind), gradient)):
        assert torch.equal(scale.log2(), scale.log2().round())
        assert (exact.abs().amax(-1, keepdim=True) <= scale.double() * LARGEST * (1 + 1e-6)).all()
        assert (exact.abs().amax(-1, keepdim=True) * 2.001 >= scale.double() * LARGEST).all()
        away = (bits.double() - exact / scale).abs()
        held = carried((exact / scale).abs()) | (away <= (exact / scale).abs() * HALF_ULP * 1.001 + 2**-9)
        assert held.all()


def carried(x):
    """Where rounding to 8 bits goes up to a power of two, which Triton's interpreter takes for half of it."""
    up = x.to(EIGHT).double()
    return (up > x) & (up.log2() == up.log2().round())


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_gates_show_what_is_not_finite(wrong):
    x = normal(2, 12).float()
    x[1, 7] = wrong
    _, scale = ops.gated(x, "swiglu")
    assert scale.isfinite().flatten().tolist() == [True, False]
    _, scale = ops.gated_backward(torch.ones(2, 6), x, "swiglu")
    assert scale.isfinite().flatten().tolist() == [True, False]


def networks(**options):
    """A gated network in bfloat16, another that trains in float8, and the network in float64."""
    config = phasor.preset("llama-2", dim=32, hidden_dim=48, num_layers=1, num_heads=2, vocab_size=32, **options)
    model = redraw(phasor.Transformer(config), torch.bfloat16)
    twin = copy.deepcopy(model)
    float8_blocks(twin)
    blocks = [one.decoder.blocks[0].feedforward for one in (model, twin, copy.deepcopy(model).double())]
    return [block.train() for block in blocks]


def test_the_network_in_one_operation_is_near_float64():
    plain, ours, exact = networks()
    x, upstream = normal(7, 32).bfloat16(), normal(7, 32, seed=1)
    found = []
    for network, form in ((plain, "reference"), (ours, "triton"), (ours, "reference"), (exact, "reference")):
        network.zero_grad()
        dtype = network.up.weight.dtype
        given = x.to(dtype, copy=True).requires_grad_()
        with dispatch.force_path(form):
            y = network(given)
            y.backward(upstream.to(dtype))
        assert in_one(y) == (network is ours and form == "triton")
        found.append((y.detach(), given.grad, network.up.weight.grad, network.down.weight.grad))
    for tensors in zip(*found, strict=True):
        wide, one, parts, truth = tensors
        assert off(wide, truth) < 0.01 < off(one, truth) < 0.12
        assert off(parts, truth) < 0.12


def in_one(y):
    """Whether an output was made by the whole network in one operation."""
    return "_FeedForward" in y.grad_fn.next_functions[0][0].name()


@pytest.mark.parametrize(
    "options",
    [{"dropout": {"feedforward": 0.5}}, {"feedforward": {"bias": True}}, {"feedforward": {"activation": "gelu"}}],
    ids=str,
)
def test_networks_of_other_forms_are_made_of_their_parts(options):
    _, ours, _ = networks(**options)
    with dispatch.force_path("triton"):
        assert not in_one(ours(normal(7, 32).bfloat16().requires_grad_()))


def test_why_a_network_is_made_of_its_parts():
    x = torch.zeros(2, 16)
    assert feedforward_why_not(x.cpu(), 16, "swiglu") == "the tensors are not on a GPU"
    with dispatch.force_path("triton"):
        assert feedforward_why_not(x, 16, "swiglu") is None
        assert feedforward_why_not(x, 16, "gelu") == "'gelu' has no kernel"
        assert feedforward_why_not(x, 2**15, "swiglu") == "32768 features are more than 16384"


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_without_breaks(dynamic):
    _, ours, _ = networks()
    x = normal(7, 32).bfloat16().requires_grad_()
    with dispatch.force_path("triton"):
        made = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=dynamic)(x)
        wanted = ours(x)
        assert torch.equal(made, wanted)
        gradients = [torch.autograd.grad(y.float().square().sum(), [x, ours.up.weight]) for y in (made, wanted)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_long_sums_are_added_up_precisely(monkeypatch):
    monkeypatch.setattr(kernels, "FAST", 32)
    taken, multiply = {}, torch._scaled_mm

    def noted(a, *others, use_fast_accum, **options):
        taken[a.shape[1]] = use_fast_accum
        return multiply(a, *others, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    x, weight = normal(48, 32).bfloat16().requires_grad_(), normal(16, 32).bfloat16().requires_grad_()
    kernels.float8_linear(x, weight).float().sum().backward()
    assert taken == {32: True, 16: True, 48: False}


def test_they_are_well_behaved_ops():
    bits, x, grad = torch.ones(5, 6).to(EIGHT), normal(4, 6).float(), normal(4, 3).float()
    looked = ("test_autograd_registration", "test_faketensor")  # the others multiply what is in float8
    torch.library.opcheck(kernels._turn.op, (bits, torch.ones(5, 1)), test_utils=looked)
    torch.library.opcheck(kernels._gated.op, (x, "swiglu"), test_utils=looked)
    torch.library.opcheck(kernels._gated_backward.op, (grad, x, "swiglu"), test_utils=looked)


def test_routers_and_experts_stay_as_they_are():
    experts = {"num_experts": 6, "top_k": 2, "shared_dim": 32, "shared_gate": True}
    _, ours, _ = networks(feedforward={"experts": experts})
    assert [type(layer) for layer in ours.choosing] == [torch.nn.Linear] * 2
    assert type(ours.shared) is Float8FeedForward
    ours(normal(1, 7, 32).bfloat16()).float().sum().backward()
    assert all(weight.grad is not None for weight in ours.parameters())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_run_in_float8_learns_and_resumes_bit_for_bit(tmp_path):
    options = {"model__dim": 32, "model__num_heads": 2, "model__hidden_dim": 64, "train__precision": "float8"}
    options |= {"train__param_dtype": "bfloat16", "train__steps": 30}
    result = run(recipe(tmp_path / "whole", **options))
    assert result.loss < 2.5  # from log 23 = 3.1
    stop = Notes(each=lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 9 else None)
    assert run(recipe(tmp_path / "stopped", **options), notes=stop).ending != "finished"
    run(recipe(tmp_path / "stopped", **options), resume=True)
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "stopped"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}


def test_what_float8_cannot_train_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"float8: a weight \[72, 24\] has a side that is not a multiple of 16"):
        run(recipe(tmp_path, train__precision="float8"))


def test_averages_need_float32_weights(tmp_path):
    with pytest.raises(ValueError, match=r"TrainConfig.ema_decay averages in the weights' own type"):
        recipe(tmp_path, train__param_dtype="bfloat16", train__ema_decay=0.9)

"""AdamW's kernel against the formula in float64, against its reference, and against torch's own optimizer."""

import copy
import pickle

import pytest
import torch
import training_runs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training_runs import recipe

from phasor import Transformer, preset
from phasor.config.recipe import OptimizerConfig
from phasor.ops import dispatch
from phasor.ops.adamw import ADAMW, AdamW, adamw_step_ref, adamw_why_not, stochastic_round_ref
from phasor.training.build import build_model
from phasor.training.optimizer import build_optimizer
from phasor.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not dispatch.TRITON_INSTALLED, reason="Triton is not installed")

SHAPES = [(3, 5), (1,), (4096,), (), (0, 3), (61, 149)]  # part of a block, none, one full block, and several
LR, BETAS, EPS, DECAYS = 0.02, (0.8, 0.95), 1e-6, (0.3, 0.0, 0.1)
ULP = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # spacing by value, at most

# Half a unit of rounding, a few of float32 arithmetic; and the interpreter truncates to bfloat16.
UNITS = {torch.float32: 4, torch.bfloat16: 1.01, torch.float16: 0.51}


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def build(kind, weights, lr=LR, **options):
    """Three groups with different weight decay."""
    groups = [{"params": weights[i::3], "weight_decay": decay} for i, decay in enumerate(DECAYS)]
    return kind(groups, lr, BETAS, EPS, **{"fused": True} | options)


def set_gradients(weights, step):
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)


def full_state(optimizer, weights):
    """Parameters, averages and step counters."""
    return [x.detach().clone() for w in weights for x in (w, *optimizer.state[w].values())]


def take_steps(optimizer, weights, steps, path="triton"):
    with dispatch.force_path(path):
        for step in steps:
            set_gradients(weights, step)
            assert (optimizer.why_not() is None) == (path == "triton")
            optimizer.step()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", ULP)
def test_step_equals_the_formula_in_float64(dtype, scaled):
    """From the kernel's own state of the step before, so that each element is rounded only once in between."""
    weights = parameters(dtype)
    optimizer = build(AdamW, weights)
    optimizer.scale = torch.tensor(0.37) if scaled else None
    (b1, b2), scale = BETAS, 0.37 if scaled else 1.0
    for t in range(1, 5):
        set_gradients(weights, t)
        expected = []
        for i, weight in enumerate(weights):
            state, decay = optimizer.state[weight], DECAYS[i % 3]
            w, g = weight.detach().double(), weight.grad.double() * scale
            m, v = (state[name].double() if state else torch.zeros_like(w) for name in ("exp_avg", "exp_avg_sq"))
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            w = w - LR * decay * w - LR * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + EPS)
            expected.append((w, m, v))
        kept = [weight.grad.clone() for weight in weights]
        with dispatch.force_path("triton"):
            assert optimizer.why_not() is None
            optimizer.step()
        for weight, gradient, values in zip(weights, kept, expected, strict=True):
            state = optimizer.state[weight]
            assert float(state["step"]) == t
            assert torch.equal(weight.grad, gradient)
            for found, value in zip((weight, state["exp_avg"], state["exp_avg_sq"]), values, strict=True):
                torch.testing.assert_close(found.double(), value, rtol=UNITS[dtype] * ULP[dtype], atol=3e-7)


def reference_step(weight, state, step, decay, scale=1.0, **options):
    """A step of the reference in float64, from the kernel's state before it."""
    w, g = weight.detach().double(), weight.grad.double()
    averages = [state[name].double() if state else torch.zeros_like(w) for name in ("exp_avg", "exp_avg_sq")]
    given = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": decay, "scale": scale} | options
    return adamw_step_ref(w, g, *averages, step, **given)


def test_reference_equals_torch_in_float64():
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    own = build(torch.optim.AdamW, theirs)
    averages = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in ours]
    for step in range(1, 6):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        own.step()
        for i, weight in enumerate(ours):
            given = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAYS[i % 3]}
            weight.data, *averages[i] = adamw_step_ref(weight.data, weight.grad, *averages[i], step, **given)
            state = own.state[theirs[i]]
            wanted = theirs[i], state["exp_avg"], state["exp_avg_sq"]
            for found, value in zip((weight, *averages[i]), wanted, strict=True):
                torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", ULP)
def test_kernel_equals_reference(dtype):
    weights = parameters(dtype)
    optimizer = build(AdamW, weights)
    optimizer.scale = torch.tensor(0.37)
    for step in range(1, 4):
        set_gradients(weights, step)
        states = [optimizer.state[weight] for weight in weights]
        triples = zip(weights, states, (*DECAYS, *DECAYS), strict=True)
        expected = [reference_step(w, state, step, decay, scale=0.37) for w, state, decay in triples]
        with dispatch.force_path("triton"):
            optimizer.step()
        for weight, values in zip(weights, expected, strict=True):
            state = optimizer.state[weight]
            for found, value in zip((weight, state["exp_avg"], state["exp_avg_sq"]), values, strict=True):
                torch.testing.assert_close(found.double(), value, rtol=UNITS[dtype] * ULP[dtype], atol=3e-7)


def test_stochastic_rounding_of_the_kernel_is_the_references_for_some_random_bits():
    """Every parameter of the kernel lies between what the reference makes of the least and the greatest bits."""
    weight = nn.Parameter(torch.randn(5000).bfloat16())
    optimizer = AdamW([weight], LR, BETAS, EPS, weight_decay=0.3, fused=True)
    optimizer.seed = 5
    set_gradients([weight], 0)
    nothing, everything = torch.zeros(5000).long(), torch.full((5000,), 0xFFFF)
    toward_zero, away = (reference_step(weight, {}, 1, 0.3, random_bits=bits)[0] for bits in (nothing, everything))
    exact = reference_step(weight, {}, 1, 0.3)[0].float()
    with dispatch.force_path("triton"):
        optimizer.step()
    found = weight.detach().float()
    assert ((found == toward_zero) | (found == away)).double().mean() > 0.999  # float32 may differ in its last bit
    assert 0.3 < (found == away).double().mean() < 0.7
    assert (found - exact).mean().abs() < 5 * (away - toward_zero).abs().mean() / 5000**0.5


def test_stochastic_rounding_of_the_reference_is_exact_on_average():
    x = torch.cat([torch.randn(20), torch.tensor([0.0, -0.0, 3e38, -3e38, torch.inf])])
    bits = torch.arange(2**16)[:, None]
    mean = torch.stack([stochastic_round_ref(x[i], bits[:, 0]).double().mean() for i in range(len(x))])
    torch.testing.assert_close(mean, x.double(), rtol=1e-12, atol=0)
    rounded = stochastic_round_ref(x, torch.full_like(x, 0x7FFF).long())
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert stochastic_round_ref(torch.tensor(torch.nan), torch.tensor(0xFFFF)).isnan()


def test_dispatch_table_answers_for_fake_tensors():
    """As `phasor.backends()` asks it, for devices that are not there."""
    with FakeTensorMode():
        for device, path in (("cuda", "one Triton kernel for all parameters"), ("cpu", "torch's own AdamW")):
            weight = nn.Parameter(torch.empty(8, device=device))
            weight.grad = torch.empty_like(weight)
            optimizer = AdamW([weight], fused=True)
            name, reasons = ADAMW.explain(optimizer, optimizer.gather())
            assert name == path
            assert set(reasons.values()) == ({"the tensors are not on a GPU"} if device == "cpu" else set())


def test_many_steps_equal_torch():
    ours, theirs = parameters(), parameters()
    mine, own = build(AdamW, ours), build(torch.optim.AdamW, theirs)
    take_steps(mine, ours, range(6))
    for step in range(6):
        set_gradients(theirs, step)
        own.step()
    for found, value in zip(full_state(mine, ours), full_state(own, theirs), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("paths", [("triton", "reference"), ("reference", "triton")])
def test_each_path_continues_from_the_others_state(paths):
    """Through `state_dict`, whose keys and dtypes are torch's."""
    weights, whole = parameters(), parameters()
    first = build(AdamW, weights)
    take_steps(first, weights, range(3), paths[0])
    saved = copy.deepcopy(first.state_dict())
    kind = AdamW if paths[1] == "triton" else torch.optim.AdamW
    second = build(kind, weights, lr=1.0)
    second.load_state_dict(saved)
    assert [list(state) for state in second.state_dict()["state"].values()] == [["step", "exp_avg", "exp_avg_sq"]] * 6
    if kind is AdamW:
        take_steps(second, weights, range(3, 5))
    else:
        for step in range(3, 5):
            set_gradients(weights, step)
            second.step()
    reference = build(AdamW, whole)
    take_steps(reference, whole, range(5), "reference")
    for found, value in zip(full_state(second, weights), full_state(reference, whole), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", ["triton", "reference"])
def test_no_change_where_found_inf_is_set(path):
    weights = parameters()
    optimizer = build(AdamW, weights)
    take_steps(optimizer, weights, range(2), path)
    before = full_state(optimizer, weights)
    optimizer.scale, optimizer.found_inf = torch.tensor(torch.nan), torch.tensor(1.0)
    take_steps(optimizer, weights, [2], path)
    assert all(torch.equal(a, b) for a, b in zip(before, full_state(optimizer, weights), strict=True))
    optimizer.scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    take_steps(optimizer, weights, [3], path)
    assert all(float(optimizer.state[weight]["step"]) == 3 for weight in weights)
    assert not torch.equal(before[0], weights[0])


def test_learning_rate_tensor_is_read_in_every_step():
    ours, theirs = parameters(), parameters()
    lr = torch.tensor(0.5)
    mine, own = build(AdamW, ours, lr, capturable=True), build(AdamW, theirs)
    for step, value in enumerate((0.1, 0.003)):
        lr.fill_(value)
        for group in own.param_groups:
            group["lr"] = value
        take_steps(mine, ours, [step])
        take_steps(own, theirs, [step])
    for found, value in zip(full_state(mine, ours), full_state(own, theirs), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-7)


def test_parameters_without_a_gradient_stay_and_count_no_step():
    ours, theirs = parameters(), parameters()
    mine, own = build(AdamW, ours), build(AdamW, theirs)
    for step, without in enumerate([{0, 3, 5}, set(), {1}, {0, 1, 2, 3, 4}]):
        for optimizer, weights, path in ((mine, ours, "triton"), (own, theirs, "reference")):
            set_gradients(weights, step)
            for index in without:
                weights[index].grad = None
            with dispatch.force_path(path):
                optimizer.step()
    assert [float(mine.state[weight]["step"]) for weight in ours] == [2, 2, 3, 2, 3, 3]
    for found, value in zip(full_state(mine, ours), full_state(own, theirs), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


def test_parameters_may_move_between_steps():
    ours, theirs = parameters(), parameters()
    mine, own = build(AdamW, ours), build(AdamW, theirs)
    for step in range(3):
        for weight in ours:
            weight.data = weight.data.clone()
        take_steps(mine, ours, [step])
        take_steps(own, theirs, [step], "reference")
    for found, value in zip(full_state(mine, ours), full_state(own, theirs), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


def transpose_gradient(weights):
    weights[0].grad = torch.randn(5, 3).T


def misalign_gradient(weights):
    weights[0].grad = torch.randn(16)[1:].view(3, 5)


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({"amsgrad": True}, None, "without amsgrad"),
        ({"fused": False}, None, "only the fused form"),
        ({"maximize": True}, None, "maximize"),
        ({}, transpose_gradient, "not contiguous"),
        ({}, misalign_gradient, "a multiple of 16 bytes"),
    ],
)
@pytest.mark.cpu_only("parameters on the CPU, where there is no kernel")
def test_torchs_own_step_elsewhere(options, change, reason):
    ours, theirs = parameters(), parameters()
    mine, own = build(AdamW, ours, **options), build(torch.optim.AdamW, theirs, **options)
    mine.scale = torch.tensor(0.5)
    set_gradients(ours, 0)
    set_gradients(theirs, 0)
    if change is not None:
        change(ours)
        theirs[0].grad = ours[0].grad.clone()
    for weight in theirs:
        weight.grad *= 0.5
    with dispatch.force_path("triton"):
        assert reason in mine.why_not()
        mine.step()
    own.step()
    assert all(torch.equal(a, b) for a, b in zip(full_state(mine, ours), full_state(own, theirs), strict=True))


def test_why_not_gives_the_reason():
    with dispatch.force_path("triton"):
        assert adamw_why_not(torch.zeros(3)) is None
        assert adamw_why_not(torch.zeros(3, dtype=torch.float64)) == "float64 has no kernel"
        assert "of one dtype" in adamw_why_not(torch.zeros(3), torch.zeros(3).half())
        mixed = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3).bfloat16())]
        set_gradients(mixed, 0)
        assert "of one dtype" in AdamW(mixed, fused=True).why_not()
        optimizer = AdamW(mixed[:1], fused=True)
        optimizer.grad_scale = torch.tensor(2.0)
        assert "GradScaler" in optimizer.why_not()
    with dispatch.force_path("reference"):
        assert adamw_why_not(torch.zeros(3)) == "the reference path is forced"


@pytest.mark.parametrize("path", ["triton", "reference"])
def test_hooks_run_once_and_a_closure_first(path):
    torch.optim.AdamW(parameters(), fused=True)  # from here on torch's own step has hooks around it
    weights, calls = parameters(), []
    optimizer = build(AdamW, weights)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        calls.append("closure")
        set_gradients(weights, 0)
        return 7.0

    with dispatch.force_path(path):
        assert optimizer.step(closure) == 7.0
    assert calls == ["before", "closure", "after"]
    assert float(optimizer.state[weights[0]]["step"]) == 1


def test_stochastic_rounding_keeps_the_mean():
    """Parameters of 1, with neighbors 1/128 above and 1/256 below, less a tenth of the smaller gap in a step."""
    count, wanted = 100_003, 0.1 / 256
    weight = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=wanted, weight_decay=0.0, fused=True)
    optimizer.seed = 5
    with dispatch.force_path("triton"):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        first = weight.detach().float()
        assert set(first.tolist()) == {1.0, 1 - 1 / 256}
        # The fraction below is binomial, with a standard deviation of 0.3 / sqrt(count).
        assert abs((first < 1).double().mean() - 0.1) < 5 * 0.3 / count**0.5
        # Neighbors are rounded independently.
        pairs = ((first[1:] < 1) & (first[:-1] < 1)).double().mean()
        assert abs(pairs - 0.01) < 5 * 0.12 / count**0.5
        weight.data.fill_(1.0)
        optimizer.step()
        assert abs(((weight < 1) & (first < 1)).double().mean() - 0.01) < 5 * 0.1 / count**0.5
    again = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    optimizer = AdamW([again], lr=wanted, weight_decay=0.0, fused=True)
    again.grad = torch.ones_like(again)
    optimizer.step()
    assert torch.equal(again, torch.ones_like(again))  # to nearest, nothing is left of the step


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_continues_as_the_original_would(clone):
    weights = parameters(torch.bfloat16)
    optimizer = build(AdamW, weights, lr=1e-4)
    optimizer.seed = 5
    take_steps(optimizer, weights, range(2))
    other = clone(optimizer)
    theirs = [weight for group in other.param_groups for weight in group["params"]]
    ours = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = full_state(optimizer, ours)
    take_steps(other, theirs, [2])
    assert all(torch.equal(a, b) for a, b in zip(before, full_state(optimizer, ours), strict=True))
    take_steps(optimizer, ours, [2])
    assert all(torch.equal(a, b) for a, b in zip(full_state(other, theirs), full_state(optimizer, ours), strict=True))


def test_stochastic_rounding_keeps_nan_and_the_largest_value():
    largest = torch.finfo(torch.bfloat16).max
    weight = nn.Parameter(torch.tensor([torch.nan, 1.0, largest, -largest], dtype=torch.bfloat16))
    weight.data[:1] = torch.tensor([0x7FFF], dtype=torch.int16).view(torch.bfloat16)
    optimizer = AdamW([weight], lr=1e-3, weight_decay=0.0, fused=True)
    optimizer.seed = 0
    weight.grad = torch.tensor([0.0, torch.nan, 0.0, 0.0], dtype=torch.bfloat16)
    with dispatch.force_path("triton"):
        optimizer.step()
    assert weight[:2].isnan().all()
    assert weight[2:].tolist() == [largest, -largest]


@pytest.mark.cpu_only("parameters on the CPU, where there is no kernel")
def test_stochastic_rounding_is_refused_without_the_kernel():
    model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    config = OptimizerConfig(rounding="stochastic")
    with dispatch.force_path("triton"):
        with pytest.raises(ValueError, match=r"optimizer\.rounding stochastic: it is for bfloat16 weights"):
            build_optimizer(model, config)
        assert build_optimizer(model.bfloat16(), config, seed=3).seed == 3
    with pytest.raises(ValueError, match=r"optimizer\.rounding stochastic: the tensors are not on a GPU"):
        build_optimizer(model.cpu(), config)
    with dispatch.force_path("triton"):
        optimizer = build_optimizer(model, config)
    set_gradients(list(model.parameters()), 0)
    with pytest.raises(ValueError, match="cannot be rounded stochastically: the tensors are not on a GPU"):
        optimizer.step()


def test_optimizer_steps_of_a_model_equal_torch(tmp_path):
    """The same gradients, clipped; the loss of one step in between is not finite."""
    options = recipe(tmp_path, model__dropout={}, train__max_grad_norm=0.1)
    material = training_runs.stand_in(options, None, None)
    trainers = [Trainer(build_model(options, material), options, 9) for _ in range(2)]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    for step in range(4):
        trainers[0].optimizer.zero_grad()
        measured = trainers[0].forward_backward(step, [training_runs.Documents()[step]], 48.0)
        assert float(measured[1]) > 0.1
        if step == 2:
            measured[0] = torch.nan
        for name, weight in trainers[1].parameters.items():
            weight.grad = trainers[0].parameters[name].grad.clone()
        for trainer, path in zip(trainers, ("triton", "reference"), strict=True):
            with dispatch.force_path(path):
                trainer.clip_gradients(measured)
                trainer.optimizer_step(measured)
        for name, weight in trainers[0].parameters.items():
            torch.testing.assert_close(weight, trainers[1].parameters[name], rtol=1e-5, atol=1e-6)
    saved = [trainer.tensors()["optimizer"] for trainer in trainers]
    assert saved[0].keys() == saved[1].keys()
    assert {float(tensor) for name, tensor in saved[0].items() if name.endswith("/step")} == {3.0}

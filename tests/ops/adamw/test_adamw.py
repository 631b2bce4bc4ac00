"""AdamW's kernel against the formula in float64 and against torch's own, whose state and habits it shares."""

import copy
import pickle

import pytest
import torch
import training_runs
from torch import nn
from training_runs import recipe

from phasor import Transformer, preset
from phasor.config.recipe import OptimizerConfig
from phasor.ops import dispatch
from phasor.ops.adamw.adamw import AdamW, why_not
from phasor.training.build import build_model
from phasor.training.optimizer import build_optimizer
from phasor.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not dispatch.TRITON_INSTALLED, reason="Triton is not installed")

SHAPES = [(3, 5), (1,), (4096,), (), (0, 3), (61, 149)]  # less than a block, none, a whole one, and several
RATE, BETAS, EPS, DECAYS = 0.02, (0.8, 0.95), 1e-6, (0.3, 0.0, 0.1)
ULP = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # spacing by value, at most

# Half a unit by rounding, a few in float32 by computing; and the interpreter cuts off what bfloat16 has no room for.
UNITS = {torch.float32: 4, torch.bfloat16: 1.01, torch.float16: 0.51}


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def optimizer_of(kind, weights, rate=RATE, **options):
    """Three groups, each with a decay of its own."""
    groups = [{"params": weights[i::3], "weight_decay": decay} for i, decay in enumerate(DECAYS)]
    return kind(groups, rate, BETAS, EPS, **{"fused": True} | options)


def draw(weights, step):
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)


def everything(optimizer, weights):
    """Weights, averages and counts of steps."""
    return [x.detach().clone() for w in weights for x in (w, *optimizer.state[w].values())]


def steps(optimizer, weights, numbers, form="triton"):
    with dispatch.force_path(form):
        for number in numbers:
            draw(weights, number)
            assert (optimizer.why_not() is None) == (form == "triton")
            optimizer.step()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", ULP)
def test_a_step_is_the_formula_in_float64(dtype, scaled):
    """From what the kernel left at the step before, so that only one rounding of each number is between them."""
    weights = parameters(dtype)
    optimizer = optimizer_of(AdamW, weights)
    optimizer.scale = torch.tensor(0.37) if scaled else None
    (b1, b2), scale = BETAS, 0.37 if scaled else 1.0
    for t in range(1, 5):
        draw(weights, t)
        expected = []
        for i, weight in enumerate(weights):
            state, decay = optimizer.state[weight], DECAYS[i % 3]
            w, g = weight.detach().double(), weight.grad.double() * scale
            m, v = (state[name].double() if state else torch.zeros_like(w) for name in ("exp_avg", "exp_avg_sq"))
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            w = w - RATE * decay * w - RATE * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + EPS)
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


def test_many_steps_are_those_of_torch():
    ours, theirs = parameters(), parameters()
    mine, own = optimizer_of(AdamW, ours), optimizer_of(torch.optim.AdamW, theirs)
    steps(mine, ours, range(6))
    for number in range(6):
        draw(theirs, number)
        own.step()
    for found, value in zip(everything(mine, ours), everything(own, theirs), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("forms", [("triton", "reference"), ("reference", "triton")])
def test_each_goes_on_from_the_others_state(forms):
    """Through `state_dict`, whose keys and types are torch's."""
    weights, whole = parameters(), parameters()
    first = optimizer_of(AdamW, weights)
    steps(first, weights, range(3), forms[0])
    saved = copy.deepcopy(first.state_dict())
    kind = AdamW if forms[1] == "triton" else torch.optim.AdamW
    second = optimizer_of(kind, weights, rate=1.0)
    second.load_state_dict(saved)
    assert [list(state) for state in second.state_dict()["state"].values()] == [["step", "exp_avg", "exp_avg_sq"]] * 6
    if kind is AdamW:
        steps(second, weights, range(3, 5))
    else:
        for number in range(3, 5):
            draw(weights, number)
            second.step()
    reference = optimizer_of(AdamW, whole)
    steps(reference, whole, range(5), "reference")
    for found, value in zip(everything(second, weights), everything(reference, whole), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["triton", "reference"])
def test_nothing_changes_where_something_is_not_finite(form):
    weights = parameters()
    optimizer = optimizer_of(AdamW, weights)
    steps(optimizer, weights, range(2), form)
    before = everything(optimizer, weights)
    optimizer.scale, optimizer.found_inf = torch.tensor(torch.nan), torch.tensor(1.0)
    steps(optimizer, weights, [2], form)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizer, weights), strict=True))
    optimizer.scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    steps(optimizer, weights, [3], form)
    assert all(float(optimizer.state[weight]["step"]) == 3 for weight in weights)
    assert not torch.equal(before[0], weights[0])


def test_a_rate_on_the_device_is_read_at_every_step():
    ours, theirs = parameters(), parameters()
    rate = torch.tensor(0.5)
    mine, own = optimizer_of(AdamW, ours, rate, capturable=True), optimizer_of(AdamW, theirs)
    for number, value in enumerate((0.1, 0.003)):
        rate.fill_(value)
        for group in own.param_groups:
            group["lr"] = value
        steps(mine, ours, [number])
        steps(own, theirs, [number])
    for found, value in zip(everything(mine, ours), everything(own, theirs), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-7)


def test_weights_without_a_gradient_stay_and_count_no_step():
    ours, theirs = parameters(), parameters()
    mine, own = optimizer_of(AdamW, ours), optimizer_of(AdamW, theirs)
    for number, without in enumerate([{0, 3, 5}, set(), {1}, {0, 1, 2, 3, 4}]):
        for optimizer, weights, form in ((mine, ours, "triton"), (own, theirs, "reference")):
            draw(weights, number)
            for index in without:
                weights[index].grad = None
            with dispatch.force_path(form):
                optimizer.step()
    assert [float(mine.state[weight]["step"]) for weight in ours] == [2, 2, 3, 2, 3, 3]
    for found, value in zip(everything(mine, ours), everything(own, theirs), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


def test_weights_that_moved_are_found_where_they_are():
    ours, theirs = parameters(), parameters()
    mine, own = optimizer_of(AdamW, ours), optimizer_of(AdamW, theirs)
    for number in range(3):
        for weight in ours:
            weight.data = weight.data.clone()
        steps(mine, ours, [number])
        steps(own, theirs, [number], "reference")
    for found, value in zip(everything(mine, ours), everything(own, theirs), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


def turned(weights):
    weights[0].grad = torch.randn(5, 3).T


def shifted(weights):
    weights[0].grad = torch.randn(16)[1:].view(3, 5)


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        ({"amsgrad": True}, None, "without amsgrad"),
        ({"fused": False}, None, "only the fused form"),
        ({"maximize": True}, None, "maximize"),
        ({}, turned, "not contiguous"),
        ({}, shifted, "a multiple of 16 bytes"),
    ],
)
def test_elsewhere_the_step_is_torchs_own(options, change, said):
    ours, theirs = parameters(), parameters()
    mine, own = optimizer_of(AdamW, ours, **options), optimizer_of(torch.optim.AdamW, theirs, **options)
    mine.scale = torch.tensor(0.5)
    draw(ours, 0)
    draw(theirs, 0)
    if change is not None:
        change(ours)
        theirs[0].grad = ours[0].grad.clone()
    for weight in theirs:
        weight.grad *= 0.5
    with dispatch.force_path("triton"):
        assert said in mine.why_not()
        mine.step()
    own.step()
    assert all(torch.equal(a, b) for a, b in zip(everything(mine, ours), everything(own, theirs), strict=True))


def test_the_obstacle_is_told_in_a_sentence():
    with dispatch.force_path("triton"):
        assert why_not(torch.zeros(3)) is None
        assert why_not(torch.zeros(3, dtype=torch.float64)) == "float64 has no kernel"
        assert "of one type" in why_not(torch.zeros(3), torch.zeros(3).half())
        mixed = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3).bfloat16())]
        draw(mixed, 0)
        assert "of one type" in AdamW(mixed, fused=True).why_not()
        optimizer = AdamW(mixed[:1], fused=True)
        optimizer.grad_scale = torch.tensor(2.0)
        assert "GradScaler" in optimizer.why_not()
    with dispatch.force_path("reference"):
        assert why_not(torch.zeros(3)) == "the reference path is forced"


@pytest.mark.parametrize("form", ["triton", "reference"])
def test_hooks_run_once_and_a_closure_first(form):
    torch.optim.AdamW(parameters(), fused=True)  # from here on torch's own step has hooks around it
    weights, calls = parameters(), []
    optimizer = optimizer_of(AdamW, weights)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        calls.append("closure")
        draw(weights, 0)
        return 7.0

    with dispatch.force_path(form):
        assert optimizer.step(closure) == 7.0
    assert calls == ["before", "closure", "after"]
    assert float(optimizer.state[weights[0]]["step"]) == 1


def test_rounding_at_random_keeps_the_mean_of_an_update():
    """Weights of 1, whose neighbors are 1/128 above and 1/256 below, less a tenth of the smaller gap at a step."""
    count, wanted = 100_003, 0.1 / 256
    weight = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=wanted, weight_decay=0.0, fused=True)
    optimizer.seed = 5
    with dispatch.force_path("triton"):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        first = weight.detach().float()
        assert set(first.tolist()) == {1.0, 1 - 1 / 256}
        # The share below is binomial: a standard deviation is 0.3 / sqrt(count).
        assert abs((first < 1).double().mean() - 0.1) < 5 * 0.3 / count**0.5
        # Neighbors are drawn apart from each other.
        pairs = ((first[1:] < 1) & (first[:-1] < 1)).double().mean()
        assert abs(pairs - 0.01) < 5 * 0.12 / count**0.5
        weight.data.fill_(1.0)
        optimizer.step()
        assert abs(((weight < 1) & (first < 1)).double().mean() - 0.01) < 5 * 0.1 / count**0.5
    again = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    optimizer = AdamW([again], lr=wanted, weight_decay=0.0, fused=True)
    again.grad = torch.ones_like(again)
    optimizer.step()
    assert torch.equal(again, torch.ones_like(again))  # to the nearest, nothing is left


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_as_the_original_would(copied):
    weights = parameters(torch.bfloat16)
    optimizer = optimizer_of(AdamW, weights, rate=1e-4)
    optimizer.seed = 5
    steps(optimizer, weights, range(2))
    other = copied(optimizer)
    theirs = [weight for group in other.param_groups for weight in group["params"]]
    ours = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = everything(optimizer, ours)
    steps(other, theirs, [2])
    assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizer, ours), strict=True))
    steps(optimizer, ours, [2])
    assert all(torch.equal(a, b) for a, b in zip(everything(other, theirs), everything(optimizer, ours), strict=True))


def test_what_is_not_a_number_is_not_rounded_to_one():
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


def test_rounding_at_random_is_refused_where_it_is_not_done():
    model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    config = OptimizerConfig(rounding="stochastic")
    with dispatch.force_path("triton"):
        with pytest.raises(ValueError, match=r"optimizer\.rounding stochastic: it is for bfloat16 weights"):
            build_optimizer(model, config)
        assert build_optimizer(model.bfloat16(), config, seed=3).seed == 3
    with pytest.raises(ValueError, match=r"optimizer\.rounding stochastic: the tensors are not on a GPU"):
        build_optimizer(model, config)
    with dispatch.force_path("triton"):
        optimizer = build_optimizer(model, config)
    draw(list(model.parameters()), 0)
    with pytest.raises(ValueError, match="cannot be rounded at random: the tensors are not on a GPU"):
        optimizer.step()


def test_updates_of_a_model_are_those_of_torch(tmp_path):
    """The same gradients, clipped; one update in between has a loss that is not finite."""
    made = recipe(tmp_path, model__dropout={}, train__max_grad_norm=0.1)
    material = training_runs.stand_in(made, None, None)
    trainers = [Trainer(build_model(made, material), made, 9) for _ in range(2)]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    for number in range(4):
        trainers[0].optimizer.zero_grad()
        measured = trainers[0].gradients(number, [training_runs.Documents()[number]], 48.0)
        assert float(measured[1]) > 0.1
        if number == 2:
            measured[0] = torch.nan
        for name, weight in trainers[1].named.items():
            weight.grad = trainers[0].named[name].grad.clone()
        for trainer, form in zip(trainers, ("triton", "reference"), strict=True):
            with dispatch.force_path(form):
                trainer.changed(measured)
        for name, weight in trainers[0].named.items():
            torch.testing.assert_close(weight, trainers[1].named[name], rtol=1e-5, atol=1e-6)
    saved = [trainer.tensors()["optimizer"] for trainer in trainers]
    assert saved[0].keys() == saved[1].keys()
    assert {float(tensor) for name, tensor in saved[0].items() if name.endswith("/step")} == {3.0}

"""Muon: torch's own for the matrices of blocks, AdamW for the rest, by one learning rate."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from training_runs import Notes, StopAt, recipe, run

import phasor
from phasor.config.recipe import OptimizerConfig, Recipe
from phasor.training.build import check_model
from phasor.training.optimizer import build_optimizer, set_lr

CONFIG = OptimizerConfig(kind="muon", lr=1e-2, weight_decay=0.1, momentum=0.9)


def small_model():
    torch.manual_seed(0)
    experts = {"experts": {"num_experts": 3, "top_k": 1}}
    return phasor.Transformer(
        phasor.ModelConfig(vocab_size=23, dim=24, num_heads=3, num_layers=2, feedforward=experts, norm="rmsnorm")
    )


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 23, (2, 9), generator=generator)
    model.zero_grad()
    model.loss(tokens[:, :-1], targets=tokens[:, 1:]).total.backward()


def test_steps_are_those_of_torch():
    """Two optimizers of torch over the weights that are listed here by what they are."""
    ours, theirs = small_model(), small_model()
    optimizer = build_optimizer(ours, CONFIG)
    named = dict(theirs.named_parameters())
    matrices = [w for name, w in named.items() if "blocks" in name and w.ndim == 2 and "norm" not in name]
    others = {name: w for name, w in named.items() if all(w is not matrix for matrix in matrices)}
    decayed = [w for name, w in others.items() if w.ndim == 3 or name == "head.weight"]
    plain = [w for w in others.values() if all(w is not each for each in decayed)]
    assert len(matrices) == 2 * 3  # q, k and v; the output; the router
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    for step, lr in enumerate((1e-2, 5e-3, 1e-3)):
        set_lr(optimizer, lr)
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = lr
        backward(ours, step)
        backward(theirs, step)
        optimizer.scale = torch.tensor(0.25)
        torch._foreach_mul_([w.grad for w in named.values() if w.grad is not None], 0.25)
        optimizer.step()
        muon.step()
        adamw.step()
    assert all(torch.equal(w, named[name]) for name, w in ours.named_parameters())


def test_a_step_that_is_not_finite_changes_nothing():
    model = small_model()
    optimizer = build_optimizer(model, CONFIG)
    backward(model, 0)
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(list(optimizer.state.values()))
    backward(model, 1)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    after = list(optimizer.state.values())
    assert all(torch.equal(x[key], y[key]) for x, y in zip(state, after, strict=True) for key in x)


def test_a_run_that_is_stopped_ends_with_the_same_bits(tmp_path):
    whole, parts = (
        recipe(tmp_path / name, optimizer__kind="muon", train__ema_decay=0.9) for name in ("whole", "parts")
    )
    run(whole)
    run(parts, notes=Notes(each=StopAt(5)))
    run(parts, resume=True)
    expected, found = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(expected[name], weight) for name, weight in found.items())


def test_a_run_keeps_its_optimizer(tmp_path):
    run(recipe(tmp_path, optimizer__kind="muon"), notes=Notes(each=StopAt(5)))
    with pytest.raises(ValueError, match='optimizer_kind was "muon" and is "adamw"'):
        run(recipe(tmp_path), resume=True)


def test_what_muon_cannot_do_is_refused():
    with pytest.raises(ValueError, match="'stochastic' is for the kind 'adamw'"):
        OptimizerConfig(kind="muon", rounding="stochastic")
    with pytest.raises(ValueError, match="cuda_graphs does not capture"):
        Recipe.from_dict({"optimizer": {"kind": "muon"}, "train": {"cuda_graphs": True}})
    made = Recipe.from_dict({"model": {"preset": "llama-2"}, "optimizer": {"kind": "muon"}})
    with pytest.raises(ValueError, match=r"takes whole matrices, .* parallel.replicate 2 keeps them whole"):
        check_model(made, processes=2)
    check_model(made.replace(parallel=made.parallel.replace(replicate=2)), processes=2)
    with pytest.raises(ValueError, match="none of them is trained"):
        build_optimizer(torch.nn.Linear(2, 2), CONFIG)

"""Products in float8 against float64, and training with them."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from training_runs import Notes, recipe, run

from phasor.kernels.float8 import eight_bits, float8_linear

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


@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_near_those_of_float64(bias):
    x = torch.randn(3, 5, 48, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32, 48, dtype=torch.bfloat16, requires_grad=True)
    shift = torch.randn(32, dtype=torch.bfloat16, requires_grad=True) if bias else None
    upstream = torch.randn(3, 5, 32, dtype=torch.bfloat16)
    float8_linear(x, weight, shift).backward(upstream)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    y = torch.nn.functional.linear(*exact)
    y.backward(upstream.double())

    def off(ours, theirs):
        return ((ours.double() - theirs).norm() / theirs.norm()).item()

    made = float8_linear(x, weight).detach()
    assert 0.005 < off(made, y) < 0.06  # rounded indeed, and no more than 8 bits explain
    assert 0.005 < off(x.grad, exact[0].grad) < 0.06
    assert off(weight.grad, exact[1].grad) < 0.005  # that one is not in 8 bits
    if shift is not None:
        assert off(shift.grad, upstream.double().sum((0, 1))) < 0.01


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_run_in_float8_learns_and_resumes_bit_for_bit(tmp_path):
    options = {"model__dim": 32, "model__num_heads": 2, "model__hidden_dim": 64, "train__precision": "float8"}
    options |= {"train__weights": "bfloat16", "train__steps": 30}
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
    with pytest.raises(ValueError, match=r"TrainConfig.ema averages in the weights' own type"):
        recipe(tmp_path, train__weights="bfloat16", train__ema=0.9)

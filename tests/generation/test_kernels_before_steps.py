"""The step that compiles kernels without launching them leaves nothing behind, and is left out where it could."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from decode_kernels import bfloat16_in_the_interpreter, large_tiles, on_the_device  # noqa: F401
from decoding import greedy_ref, speaker

import phasor
from phasor.generation.runners import StepSpec, fused, step_runner
from phasor.ops import compile_ahead, dispatch

pytestmark = pytest.mark.usefixtures("large_tiles", "on_the_device")
PROMPT = [5, 9, 2]


def test_the_step_that_only_compiles_leaves_nothing_behind(monkeypatch):
    """Whatever numbers it left in memory, the texts after it are the same."""
    model = speaker()
    expected = greedy_ref(model, PROMPT, 5)
    buffers, seen, read = [], [], []

    @contextmanager
    def garbage():
        yield
        read.append(1)
        for given in buffers:
            given.tokens.fill_(2**31 - 1)
            for tensors in given.cache.layers:
                for x in tensors.values():
                    x.fill_(float("nan"))

    monkeypatch.setattr(compile_ahead, "is_available", lambda: True)
    monkeypatch.setattr(compile_ahead, "compile_ahead", garbage)
    with dispatch.force_path("triton"), torch.no_grad(), step_runner(StepSpec(model, max_length=16)) as runner:
        assert isinstance(runner, fused.FusedRunner)
        buffers.append(runner.buffers)
        read.clear()  # on a GPU a runner compiles kernels when it is built
        runner.compile_kernels(lambda: seen.append(runner.run()))
        assert len(seen) == 1
        assert not runner.buffers.tokens.any()
        assert not runner.buffers.cache.counts.any()
        assert not runner.buffers.cache.next_positions.any()
        logits = runner.prefill([PROMPT])
        assert len(read) == 2
        found = [int(logits.argmax())]
        while len(found) < 5:
            found.append(int(runner.step(torch.tensor(found[-1:])).argmax()))
        runner.prefill([PROMPT])
    assert found == expected
    assert len(read) == 2  # the second prompts are read once


@pytest.mark.parametrize(
    "changes",
    [
        {"feedforward": {"activation": "swiglu", "experts": {"num_experts": 5}}},
        {"position": "cope"},
    ],
)
def test_indices_that_kernels_compute_are_not_made_up(changes, monkeypatch):
    """Of experts that are chosen, and in modules between kernels: nothing is compiled ahead."""
    monkeypatch.setattr(compile_ahead, "is_available", lambda: True)
    monkeypatch.setattr(compile_ahead, "compile_ahead", None)
    changes = dict(changes)
    model = speaker(changes.pop("position", "rotary"), **changes)
    with dispatch.force_path("triton"), torch.no_grad(), step_runner(StepSpec(model, max_length=16)) as runner:
        if isinstance(runner, fused.FusedRunner):
            assert not runner.fused.computes_floats
            runner.compile_kernels(pytest.fail)


def test_dense_models_are_compiled_ahead():
    for changes in ({}, {"attention": phasor.SoftmaxAttentionConfig(window=4)}):
        model = speaker(**changes)
        with dispatch.force_path("triton"), step_runner(StepSpec(model, max_length=16)) as runner:
            assert runner.fused.computes_floats

"""Plans: what they hold, which mesh they suggest, and what they refuse."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from commands import CommandRunner

import phasor
from phasor.config.parameters import parameters_of
from phasor.models.presets import PRESETS
from phasor.parallel import Mesh, ParallelPlan, plan
from phasor.parallel.mesh import mesh_why_not, meshes

LLAMA = phasor.preset("llama-3.1")


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("devices", [1, 6, 16])
def test_every_preset_has_a_plan(name, devices):
    found = plan(phasor.preset(name), devices=devices, context=512)
    assert (found.mesh.devices, found.suggested) == (devices, True)
    assert found.seconds.total > 0
    assert found.memory.peak >= found.memory.weights + found.memory.moments


def test_state_is_sixteen_bytes_per_parameter_and_cut_over_all_devices():
    one = plan(LLAMA, devices=1).memory
    assert (one.weights, one.gradients, one.moments) == tuple(n * 8_030_261_248 for n in (4, 4, 8))
    assert plan(LLAMA, devices=1, param_dtype="bfloat16").memory.weights == 2 * 8_030_261_248
    for mesh in ("shard=64", "shard=8,tensor=8", "context=16,tensor=4", "shard=2,context=4,tensor=8"):
        cut = plan(LLAMA, devices=64, mesh=mesh).memory
        total = cut.weights + cut.gradients + cut.moments
        assert total == pytest.approx(16 * 8_030_261_248 / 64, rel=0.002)  # norms are not cut over tensor
    replicas = plan(LLAMA, devices=64, mesh="replicate=8").memory
    assert replicas.weights == plan(LLAMA, devices=8, mesh="shard=8").memory.weights


def test_experts_follow_the_tensor_axis():
    grok = phasor.preset("grok-1")
    whole, cut = (plan(grok, devices=64, mesh=f"tensor={n}").memory for n in (1, 8))
    assert cut.weights == pytest.approx(whole.weights, rel=0.001)
    counted = parameters_of(grok)
    assert counted.in_blocks < 0.35 * sum(count * sum(w.size for w in block) for block, count in counted.blocks)


def test_bytes_exchanged():
    """By hand: weights in bfloat16 twice, or in float32 once, and gradients in float32 once, 7/8 of all from others."""
    shard = plan(LLAMA, devices=8, mesh="shard=8", context="8k", rows=1, batch_tokens="64k").exchange
    assert shard.shard == pytest.approx(8_030_261_248 * 8 * 7 / 8, rel=1e-6)
    assert shard.total == shard.shard
    half = plan(LLAMA, devices=8, mesh="shard=8", context="8k", rows=1, batch_tokens="64k", param_dtype="bfloat16")
    outside = 2 * 128256 * 4096  # embedding and head: gathered once, and summed in bfloat16 too
    assert half.exchange.shard == pytest.approx((8_030_261_248 * 8 - outside * 4) * 7 / 8, rel=1e-5)
    options = {"devices": 8, "context": "8k", "rows": 1, "batch_tokens": "8k", "activation_checkpointing": False}
    tensor = plan(LLAMA, mesh="shard=1,tensor=8", **options).exchange.tensor
    assert tensor == 8192 * 4096 * 2 * 7 // 8 * (32 * 2 * 2) * 2  # each sub-layer gathers and scatters, twice
    context = plan(LLAMA, mesh="shard=1,context=8", **options).exchange.context
    assert context == 8192 * 2 * 1024 * 2 * 7 // 8 * 32 * 2
    replicate = plan(LLAMA, mesh="replicate=8", **options).exchange
    assert (replicate.replicate, replicate.shard) == (2 * (8_030_261_248 * 7 // 8) * 4, 0)


def test_checkpointing_trades_time_for_memory():
    without, on = (
        plan(LLAMA, devices=64, mesh="shard=64", context="8k", rows=1, activation_checkpointing=on)
        for on in (False, True)
    )
    assert on.memory.activations < 0.3 * without.memory.activations
    assert on.seconds.compute == pytest.approx(4 / 3 * without.seconds.compute, rel=0.05)


def test_gradients_summed_last_are_kept_whole():
    every, last = (
        plan(LLAMA, devices=64, mesh="shard=64", context="8k", rows=1, gradient_sync=sync) for sync in ("every", "last")
    )
    assert every.accumulation == last.accumulation > 1
    assert last.memory.gradients == 4 * 8_030_261_248
    assert last.exchange.shard < every.exchange.shard


def test_windows_take_less_time():
    window = phasor.preset("llama-3.1", attention={"window": 4096})
    narrow, wide = (plan(model, devices=64, context="1m") for model in (window, LLAMA))
    assert narrow.seconds.compute < 0.3 * wide.seconds.compute


def test_suggested_meshes_are_the_fastest_that_fit():
    found = plan(LLAMA, devices=12, context="96k")
    assert found.fits
    for mesh in meshes(12, 8):
        if mesh_why_not(LLAMA, mesh, 96 << 10) is None:
            other = plan(LLAMA, devices=12, context="96k", mesh=mesh)
            assert not other.fits or other.seconds.total > 0.99 * found.seconds.total


def test_more_devices_take_less_time():
    speeds = [plan(LLAMA, devices=8**n, context="8k").tokens_per_second for n in range(1, 4)]
    assert all(more > 1.5 * fewer for fewer, more in pairwise(speeds))


def test_what_does_not_fit_is_bound_by_memory():
    found = plan(LLAMA, devices=64, context="1g")
    assert (found.fits, found.bound_by, found.activation_checkpointing) == (False, "memory", True)
    assert plan(LLAMA, devices=64, context="1m").bound_by == "compute"
    assert plan(LLAMA, devices=64, context="8k", mesh="tensor=8", devices_per_node=2).bound_by == "tensor"


def test_left_over_devices_are_shards():
    assert plan(LLAMA, devices=64, mesh="tensor=4,context=2").mesh == Mesh(shard=8, context=2, tensor=4)
    assert plan(LLAMA, devices=64, mesh=Mesh(replicate=4, shard=16)).mesh.shard == 16


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mesh": "shard=4,tensor=4"}, "mesh shard=4,tensor=4 has 16 devices, and there are 64"),
        ({"mesh": "tensor=3"}, "mesh tensor=3 takes a multiple of 3 devices, and there are 64"),
        ({"mesh": "tensor=16"}, "tensor=16 does not divide the 8 key/value heads: tensor can be 1, 2, 4 or 8"),
        ({"mesh": "tensor=8,context=8", "context": 8200}, "a row of 8,200 tokens is not divisible by 2 x context x"),
        ({"mesh": "pipeline=2"}, "unknown axis of a mesh 'pipeline'; known: replicate, shard, context, tensor"),
        ({"mesh": "tensor=2,tensor=4"}, "mesh names the axis tensor twice"),
        ({"mesh": "tensor"}, "mesh takes axes with their sizes such as shard=16,tensor=4, not 'tensor'"),
        ({"mesh": {"tensor": 0}}, "mesh: tensor must be an integer of at least 1, not 0"),
        ({"mesh": 4}, "mesh takes axes with their sizes such as shard=16,tensor=4, not 4"),
        ({"mesh": {"tensor": "4"}}, "mesh: tensor must be an integer of at least 1, not '4'"),
        ({"activation_checkpointing": "no"}, "activation_checkpointing must be True, False or None, not 'no'"),
        ({"device": ["h200"]}, "unknown device"),
        ({"devices": 0}, "devices must be an integer of at least 1, not 0"),
        ({"devices": 2**40}, "devices can be 1,048,576 at most, not 1,099,511,627,776"),
        ({"devices": 2.0}, "devices must be an integer of at least 1, not 2.0"),
        ({"context": "1t"}, "context is an integer of tokens from 1 on, or one with k, m or g"),
        ({"context": True}, "context is an integer of tokens"),
        ({"batch_tokens": 0}, "batch_tokens is an integer of tokens from 1 on"),
        ({"rows": 0}, "rows must be an integer of at least 1"),
        ({"param_dtype": "float16"}, "unknown param_dtype 'float16' .*; known: float32, bfloat16"),
        ({"gradient_sync": "first"}, "unknown gradient_sync 'first'; known: every, last"),
        ({"device": "h201"}, "unknown device 'h201' \\(did you mean 'h200'\\?\\); known: h200, h100, a100"),
        ({"devices_per_node": 0}, "devices_per_node must be an integer of at least 1"),
    ],
)
def test_mistakes_are_one_sentence(changes, says):
    with pytest.raises(ValueError, match=says):
        plan(LLAMA, **{"devices": 64, **changes})


@pytest.mark.parametrize(
    ("model", "mesh", "says"),
    [
        (phasor.preset("llama-2", hidden_dim=11010), "tensor=4", "tensor=4 does not divide the 11,010 features of the"),
        (
            phasor.preset("grok-1", num_kv_heads=16, num_heads=48),
            "tensor=16",
            "tensor=16 does not divide the 8 experts",
        ),
        (phasor.preset("llama-2", attention={"qk_norm": "whole"}), "tensor=2", "qk_norm 'whole' normalizes all heads"),
        (phasor.preset("palm"), "tensor=2", "does not divide the 1 key/value heads: tensor can be 1"),
        (phasor.preset("gpt-2"), "shard=64", "context 8,192 is more than the 1,024 positions of the model's learned"),
    ],
)
def test_models_that_a_mesh_does_not_cut(model, mesh, says):
    with pytest.raises(ValueError, match=says):
        plan(model, devices=64, context=8192, mesh=mesh)
    with pytest.raises(ValueError, match="plan takes a ModelConfig"):
        plan("preset:llama-2")  # type: ignore[arg-type]


def test_command(run_phasor):
    command = ("plan", "--model", "preset:llama-3.1", "--devices", "64", "--context", "1m")
    shown = run_phasor(*command)
    for line in ("8,030,261,248 parameters on 64 h200", "(suggested)", "bound by compute", "activations", "context"):
        assert line in shown
    given = json.loads(run_phasor(*command, "--json", "--mesh", "tensor=8,context=8", "--param-dtype", "bfloat16"))
    assert given["mesh"] == {"replicate": 1, "shard": 1, "context": 8, "tensor": 8}
    expected = plan(LLAMA, devices=64, context="1m", mesh="tensor=8,context=8", param_dtype="bfloat16")
    assert isinstance(expected, ParallelPlan)
    assert given == json.loads(json.dumps(expected.to_dict()))
    assert "does not fit" in run_phasor("plan", "--model", "preset:llama-3.1", "--context", "16m")


def test_command_mistakes(run_phasor):
    command = ("plan", "--model", "preset:llama-3.1", "--devices", "64")
    assert "--mesh shard=3 has 3 devices" in run_phasor.expect_error(*command, "--mesh", "shard=3")
    assert "takes true or false" in run_phasor.expect_error(*command, "--activation-checkpointing", "maybe")
    assert "--devices must be an integer" in run_phasor.expect_error(*command, "--devices", "-1")
    assert "unknown preset" in run_phasor.expect_error("plan", "--model", "preset:llama-9")
    assert "required: --model" in run_phasor.expect_error("plan")


def test_a_small_model_is_told_that_its_time_is_not_known(run_phasor):
    small = phasor.ModelConfig(vocab_size=256, dim=128, num_layers=4, num_heads=4, max_length=512)
    assert plan(LLAMA).note is None
    assert f"{plan(small).parameters:,} reach less of the peak" in plan(small).note
    assert plan(small).to_dict()["note"] == plan(small).note
    assert "note: times hold for models of a billion" in run_phasor("plan", "--model", "preset:gpt-2")

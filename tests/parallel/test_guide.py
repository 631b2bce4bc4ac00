"""The tables of docs/parallel.md are what `plan` computes."""

from __future__ import annotations

from pathlib import Path

import pytest

import phasor
from phasor.parallel import ParallelPlan, plan
from phasor.parallel.hardware import GIB

GUIDE = Path(__file__).parents[2] / "docs" / "parallel.md"
LLAMA = phasor.preset("llama-3.1")
MODELS = {
    "1B": phasor.preset("llama-3.1", dim=2048, hidden_dim=8192, num_layers=16, embedding={"tied": True}),
    "8B": LLAMA,
    "70B": phasor.preset("llama-3.1", dim=8192, hidden_dim=28672, num_layers=80, num_heads=64, num_kv_heads=8),
}
DEVICES = [1, 8, 64, 512, 4096]
LENGTHS = [(64, "128k"), (64, "1m"), (64, "4m"), (512, "16m"), (4096, "64m"), (4096, "1g")]


def row(first: str, found: ParallelPlan) -> str:
    """A line of a table."""
    recompute = "yes" if found.activation_checkpointing else "no"
    seconds = f"{found.seconds.total:,.2f}" if found.seconds.total < 100 else f"{found.seconds.total:,.0f}"
    cells = [f"{found.mesh.devices:,}", f"`{found.mesh}`", f"{found.rows} x {found.accumulation}", recompute]
    cells += [f"{found.memory.peak / GIB:,.1f}", seconds, f"{found.tokens_per_second:,.0f}", f"{found.mfu:.0%}"]
    return f"| {' | '.join([first, *cells, found.bound_by])} |"


@pytest.mark.sample(8)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_models_by_devices(name, devices):
    assert row(name, plan(MODELS[name], devices=devices, context="8k", batch_tokens="16m")) in lines()


@pytest.mark.parametrize(("devices", "length"), LENGTHS)
def test_lengths(devices, length):
    assert row(length, plan(LLAMA, devices=devices, context=length)) in lines()


def lines() -> list[str]:
    return GUIDE.read_text(encoding="utf-8").splitlines()

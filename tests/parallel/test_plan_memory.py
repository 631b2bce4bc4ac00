"""The memory of plans beside that of phasor's own training steps, as benchmarks/plan_memory.py measured them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phasor
from phasor.ops.dispatch import MIN_ELEMENTS
from phasor.parallel import Mesh, plan
from phasor.parallel.memory import SMALL_NORM
from phasor.parallel.mesh import parse_axes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("plan-memory.json", "plan-memory-bfloat16.json")
KINDS = ("weights", "gradients", "moments", "the rest", "peak")


def load_results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def cases() -> Iterator[Any]:
    """Each measured step: its file's sizes, the step, and a name."""
    for name in FILES:
        sizes = load_results(name)
        for case in sizes.pop("cases"):
            recompute = "recompute" if case["activation_checkpointing"] else "keep"
            yield pytest.param(sizes, case, id=f"{sizes['param_dtype']}-{case['mesh']}-{recompute}")


def plan_kinds(sizes: dict[str, Any], case: dict[str, Any]) -> dict[str, int]:
    """What the plan of a measured step says, by kind."""
    mesh = Mesh(**parse_axes(case["mesh"]))
    memory = plan(
        phasor.preset("llama-2", **sizes["model"], max_length=sizes["length"]),
        devices=mesh.devices,
        context=sizes["length"],
        mesh=mesh,
        rows=sizes["rows"],
        batch_tokens=sizes["rows"] * sizes["length"] * mesh.data * sizes["accumulation"],
        activation_checkpointing=case["activation_checkpointing"],
        param_dtype=sizes["param_dtype"],
    ).memory
    states = {"weights": memory.weights, "gradients": memory.gradients, "moments": memory.moments}
    return states | {"the rest": memory.peak - memory.weights - memory.moments, "peak": memory.peak}


@pytest.mark.parametrize(("sizes", "case"), list(cases()))
def test_plans_are_within_ten_percent_of_training(sizes, case):
    """And as docs/parallel.md says, peaks and what they are above weights and moments within 4 %."""
    found = plan_kinds(sizes, case)
    assert found == pytest.approx({kind: case["measured"][kind] for kind in KINDS}, rel=0.1)
    for kind in ("the rest", "peak"):
        assert found[kind] == pytest.approx(case["measured"][kind], rel=0.04)
    assert found == {kind: case["planned"][kind] for kind in KINDS}


def test_all_meshes_are_measured():
    measured = {(c["mesh"], c["activation_checkpointing"]) for name in FILES for c in load_results(name)["cases"]}
    assert len(measured) == 12
    axes = {axis for mesh, _ in measured for axis in parse_axes(mesh)}
    assert axes == {"replicate", "shard", "context", "tensor"}


def test_small_norms_are_those_without_a_kernel():
    assert MIN_ELEMENTS["norm"] == SMALL_NORM

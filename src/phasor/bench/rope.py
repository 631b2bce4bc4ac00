"""Rotary embedding of queries and keys."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from phasor.bench.checks import max_relative_error
from phasor.bench.peers import is_installed, liger
from phasor.bench.workload import BenchmarkCase, Implementation, Machine, Workload
from phasor.nn.positions.rotary.module import Rotary

# Half a unit in the last place is 2e-3 in bfloat16, and the plain forms round several times. In float32 a table made
# of float32 products is off by 2^-24 of the largest angle, 5e-4 at 8192 tokens.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}

RotateFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # queries and keys [B, H, T, D]


def workloads(machine: Machine, packed: bool) -> Iterator[Workload]:
    """Forward, and forward with backward; `packed` gives every token another position."""
    rows, count, heads, groups, width = machine.sizes.rotary
    positions = torch.arange(count, device=machine.device)
    if packed:
        starts = torch.randint(0, count, (rows, 1), generator=torch.Generator().manual_seed(3)).to(machine.device)
        positions = (positions + starts) % count
    moved = 2 * rows * count * (heads + groups) * width * machine.dtype.itemsize
    about = f"q [{rows}, {count}, {heads}, {width}], k [{rows}, {count}, {groups}, {width}], {machine.dtype_name}"
    name = "positions" if packed else "rotary"
    for backward, passes in ((False, "forward"), (True, "forward and backward")):
        yield Workload(
            name=name,
            title=f"rotary{', one position per token' if packed else ''}, {passes}: {about}",
            unit="ms",
            limit=(2 if backward else 1) * moved / machine.bandwidth,
            limit_basis="copying as many bytes",
            tolerance=TOLERANCE[machine.dtype],
            implementations=implementations(machine, positions, backward, packed),
        )


def implementations(machine: Machine, positions: Tensor, backward: bool, packed: bool) -> list[Implementation]:
    width = machine.sizes.rotary[-1]
    cos, sin = (x.to(machine.dtype) for x in rotary_table(positions, width))
    rope = Rotary(head_dim=width)
    plain = table_rope(cos, sin)
    rotations: dict[str, Callable[[], RotateFn]] = {
        "phasor, exact, no table": lambda: lambda q, k: rope.rotate(q, k, positions),
        "torch, table given": lambda: plain,
    }
    if machine.compiles:
        rotations["torch compiled, table given"] = lambda: torch.compile(plain)
    if is_installed("transformers"):
        rotations["transformers"] = lambda: transformers_rope(positions, machine)
    if machine.on_gpu and is_installed("liger_kernel") and not packed:  # it takes no positions
        rotations["Liger, table given, in place"] = lambda: liger_rope(cos, sin)

    def ready(make: Callable[[], RotateFn]) -> Callable[[], BenchmarkCase]:
        return lambda: benchmark_case(machine, make(), positions, backward)

    return [(name, ready(make)) for name, make in rotations.items()]


def benchmark_case(machine: Machine, rotate: RotateFn, positions: Tensor, backward: bool) -> BenchmarkCase:
    q, k, *grads = inputs(machine, backward)

    def call() -> tuple[Tensor, ...]:
        rotated = rotate(q, k)
        return (*rotated, *torch.autograd.grad(rotated, (q, k), grads)) if backward else rotated

    def check() -> float:
        # Copies: some implementations work in place.
        copies = [x.detach().double() for x in (q, k, *grads)]
        cos, sin = rotary_table(positions, q.shape[-1])
        expected = [rotate_ref(x, cos, sin) for x in copies[:2]]
        expected += [rotate_ref(x, cos, -sin) for x in copies[2:]] if backward else []
        return max_relative_error(call(), expected, tokens=2)

    return BenchmarkCase(check, lambda timer: timer(call))


def inputs(machine: Machine, backward: bool) -> list[Tensor]:
    """Queries and keys as a model has them, `[B, T, H, D]` in memory, and gradients of the rotated ones."""
    rows, count, heads, groups, width = machine.sizes.rotary
    drawn = [
        machine.random(rows, count, h, width, seed=seed).transpose(1, 2)
        for seed, h in enumerate((heads, groups, heads, groups))
    ]
    return [x.requires_grad_(backward) for x in drawn[:2]] + drawn[2:]


def rotary_table(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines in float64, `[T, D]` or `[B, 1, T, D]`, each pair twice."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width)
    angles = positions[..., None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    angles = angles[:, None] if positions.dim() > 1 else angles
    return angles.cos(), angles.sin()


def rotate_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    u, v = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-v, u), dim=-1) * sin


def table_rope(cos: Tensor, sin: Tensor) -> RotateFn:
    return lambda q, k: (rotate_ref(q, cos, sin), rotate_ref(k, cos, sin))


def transformers_rope(positions: Tensor, machine: Machine) -> RotateFn:
    llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    _, count, heads, groups, width = machine.sizes.rotary
    config = importlib.import_module("transformers").LlamaConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=count,
    )
    rope = llama.LlamaRotaryEmbedding(config).to(machine.device)
    rows = positions if positions.dim() > 1 else positions[None]
    return lambda q, k: llama.apply_rotary_pos_emb(q, k, *rope(q, rows))


def liger_rope(cos: Tensor, sin: Tensor) -> RotateFn:
    function = liger("ops.rope", "LigerRopeFunction")
    tables = [x.reshape(-1, *x.shape[-2:]) for x in (cos, sin)]  # [1 or B, T, D]
    return lambda q, k: function.apply(q, k, *tables)

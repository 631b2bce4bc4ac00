"""Rotation of queries and keys by their positions."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from phasor.bench.trial import Contender, Machine, Trial, Work, worst_off
from phasor.nn.positions.rotary.module import Rotary

# Half a unit in the last place is 2e-3 in bfloat16, and the plain forms round several times. In float32 a table made
# of float32 products is off by 2^-24 of the largest angle, 5e-4 at 8192 tokens.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # queries and keys [B, H, T, D]


def works(machine: Machine, packed: bool) -> Iterator[Work]:
    """Forward, and forward with backward; `packed` gives every token a position of its own."""
    rows, count, heads, groups, width = machine.sizes.rotary
    positions = torch.arange(count, device=machine.device)
    if packed:
        starts = torch.randint(0, count, (rows, 1), generator=torch.Generator().manual_seed(3)).to(machine.device)
        positions = (positions + starts) % count
    moved = 2 * rows * count * (heads + groups) * width * machine.dtype.itemsize
    about = f"q [{rows}, {count}, {heads}, {width}], k [{rows}, {count}, {groups}, {width}], {machine.dtype_name}"
    name = "positions" if packed else "rotary"
    for backward, passes in ((False, "forward"), (True, "forward and backward")):
        yield Work(
            name=name,
            title=f"rotary{', a position a token' if packed else ''}, {passes}: {about}",
            unit="ms",
            limit=(2 if backward else 1) * moved / machine.bandwidth,
            limit_is="copying as many bytes",
            tolerance=TOLERANCE[machine.dtype],
            contenders=contenders(machine, positions, backward, packed),
        )


def contenders(machine: Machine, positions: Tensor, backward: bool, packed: bool) -> list[Contender]:
    width = machine.sizes.rotary[-1]
    cos, sin = (x.to(machine.dtype) for x in table(positions, width))
    rope = Rotary(head_dim=width)
    plain = plain_turn(cos, sin)
    turns: dict[str, Callable[[], Turn]] = {
        "phasor, exact, no table": lambda: lambda q, k: rope.rotate(q, k, positions),
        "torch, table given": lambda: plain,
    }
    if machine.compiles:
        turns["torch compiled, table given"] = lambda: torch.compile(plain)
    if importlib.util.find_spec("transformers"):
        turns["transformers"] = lambda: transformers_turn(positions, machine)
    if machine.on_gpu and importlib.util.find_spec("liger_kernel") and not packed:  # it takes no positions
        turns["Liger, table given, in place"] = lambda: liger_turn(cos, sin)

    def ready(make: Callable[[], Turn]) -> Callable[[], Trial]:
        return lambda: trial(machine, make(), positions, backward)

    return [(who, ready(make)) for who, make in turns.items()]


def trial(machine: Machine, turn: Turn, positions: Tensor, backward: bool) -> Trial:
    q, k, *grads = inputs(machine, backward)

    def call() -> tuple[Tensor, ...]:
        made = turn(q, k)
        return (*made, *torch.autograd.grad(made, (q, k), grads)) if backward else made

    def check() -> float:
        # Fresh ones: some write over what they are given.
        fresh = [x.detach().double() for x in (q, k, *grads)]
        cos, sin = table(positions, q.shape[-1])
        truth = [plain_one(x, cos, sin) for x in fresh[:2]]
        truth += [plain_one(x, cos, -sin) for x in fresh[2:]] if backward else []
        return worst_off(call(), truth, tokens=2)

    return Trial(check, lambda timer: timer(call))


def inputs(machine: Machine, backward: bool) -> list[Tensor]:
    """Queries and keys as a model has them, `[B, T, H, D]` in memory, and gradients of their turned ones."""
    rows, count, heads, groups, width = machine.sizes.rotary
    made = [
        machine.random(rows, count, h, width, seed=seed).transpose(1, 2)
        for seed, h in enumerate((heads, groups, heads, groups))
    ]
    return [x.requires_grad_(backward) for x in made[:2]] + made[2:]


def table(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines in float64, `[T, D]` or `[B, 1, T, D]`, every pair's twice."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width)
    angles = positions[..., None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    angles = angles[:, None] if positions.dim() > 1 else angles
    return angles.cos(), angles.sin()


def plain_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    u, v = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-v, u), dim=-1) * sin


def plain_turn(cos: Tensor, sin: Tensor) -> Turn:
    return lambda q, k: (plain_one(q, cos, sin), plain_one(k, cos, sin))


def transformers_turn(positions: Tensor, machine: Machine) -> Turn:
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


def liger_turn(cos: Tensor, sin: Tensor) -> Turn:
    function: Any = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    return lambda q, k: function.apply(q, k, cos[None], sin[None])

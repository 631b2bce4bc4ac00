"""The exact rotary kernel beside other implementations: checked against float64 first, then timed.

On a GPU every call is timed as a CUDA graph, so that the host's speed does not matter, with cold caches between calls
of a large size. The floor is a plain copy of the bytes that have to move. The host's time for a call stands beside it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phasor.bench.peers import is_installed
from phasor.bench.rope import RotateFn, liger_rope, rotary_table, table_rope
from phasor.bench.study import Study
from phasor.config.schema import Config
from phasor.nn.positions.rotary.module import Rotary
from phasor.nn.sequence import SequenceInfo
from phasor.ops.rope import RopeArgs, rope_kernel, rope_qkv_kernel, rope_qkv_ref, rotate_pairs_ref, split_qkv
from phasor.ops.rope.reference import split_pairs
from phasor.ops.rope.rope import rope_qkv_op

Call = Callable[[], Any]


class RotaryKernelSettings(Config):
    """Queries `[rows, tokens, heads, head_dim]`, fewer key heads, and the batches of single tokens."""

    rows: int = 4
    tokens: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batches: tuple[int, ...] = (1, 16, 64, 256)


GPU = RotaryKernelSettings()
TINY = RotaryKernelSettings(rows=2, tokens=3, heads=4, kv_heads=2, head_dim=16, batches=(1,))


def run(study: Study) -> None:
    settings: RotaryKernelSettings = study.settings
    errors = study.result["errors"] = {}
    for shape in (
        (2, min(33, settings.tokens), settings.heads, settings.kv_heads, settings.head_dim),
        (2, min(7, settings.tokens), 6, 2, settings.head_dim * 5 // 8),
    ):
        found = check(study, *shape)
        errors |= {f"{name}, {shape[2]}/{shape[3]} heads": error for name, error in found.items()}
    single, half = (max(x for name, x in errors.items() if ("float32" in name) == wide) for wide in (True, False))
    study.say(
        f"off from float64 by {single:.1e} in float32, by {half:.2f} units in the last place of a pair's norm else"
    )
    KernelTimes(study).run()


def rope_args(rope: Rotary, positions: Tensor) -> RopeArgs:
    prepared = rope.prepare(SequenceInfo(positions, None), torch.empty(1, 1, 1, device=positions.device))
    assert isinstance(prepared, RopeArgs), "the kernel is not taken"
    return prepared


def worst(found: Tensor, expected: Tensor, pairing: str, rotary_dim: int) -> float:
    """The largest error: in itself for float32, and otherwise in units in the last place of the pair's norm."""
    off = (found.double() - expected)[..., :rotary_dim].detach().abs()
    if found.dtype == torch.float32:
        return float(off.max())
    norm = torch.hypot(*split_pairs(expected[..., :rotary_dim].detach(), pairing))
    unit = norm.log2().floor().exp2() * torch.finfo(found.dtype).eps
    return max(float((x / unit).max()) for x in split_pairs(off, pairing))


def check(study: Study, rows: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, float]:
    """The largest errors of results and gradients against float64, at positions up to 2^36."""
    found = {}
    for pairing in ("half", "adjacent"):
        for rotary_dim in (head_dim, 2 * (head_dim // 8)):
            for dtype, allowed in ((torch.float32, 1e-6), (torch.bfloat16, 1.0), (torch.float16, 1.0)):
                name = f"{pairing}, {rotary_dim} of {head_dim}, {str(dtype)[6:]}"
                rope = Rotary(head_dim=head_dim, rotary_dim=rotary_dim, pairing=pairing)
                torch.manual_seed(0)
                args = rope_args(rope, torch.randint(0, 2**36, (rows, tokens), device=study.device))
                shape = (rows, tokens, kv_heads, heads // kv_heads + 2, head_dim)
                error, same = kernel_error(args, pairing, rotary_dim, shape, dtype)
                found[name] = study.check(name, error, allowed)
                if not same:
                    raise ValueError(f"nothing is timed: {name}: what is not rotated is not copied")
    return found


def kernel_error(
    args: RopeArgs, pairing: Any, rotary_dim: int, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[float, bool]:
    """The largest error of all kernels and gradients, and whether features that are not rotated are the same bits."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=args.positions.device).to(dtype).clamp(-2, 2)

    fused = drawn(*shape).requires_grad_()
    rope_qkv_kernel(torch.zeros_like(fused), args, pairing)  # what is checked are launches again
    parts = rope_qkv_kernel(fused, args, pairing)
    grads = [drawn(*x.shape) for x in parts]
    (back,) = torch.autograd.grad(parts, fused, grads)
    exact = fused.detach().double().requires_grad_()
    expected = rope_qkv_ref(exact, args, pairing)
    (expected_back,) = torch.autograd.grad(expected, exact, [x.double() for x in grads])
    q, k, v = split_qkv(fused.detach())
    heads_first = q.flatten(2, 3).transpose(1, 2).contiguous().transpose(1, 2)
    apart = rope_kernel(heads_first, k, args, pairing)
    pairs = [*zip(parts, expected, strict=True), *zip(apart, expected, strict=False), (back, expected_back)]
    error = max(worst(a, b, pairing, rotary_dim) for a, b in pairs if a is not parts[2])
    same = all(torch.equal(a[..., rotary_dim:], b[..., rotary_dim:].to(dtype)) for a, b in pairs)
    return error, same and torch.equal(parts[2], v)


def peers(rope: Rotary, positions: Tensor, head_dim: int, compiles: bool) -> dict[str, RotateFn]:
    """Rotary embeddings of queries and keys `[B, H, T, D]`, phasor's first; the others are given their tables."""
    cos, sin = (x.bfloat16() for x in rotary_table(positions, head_dim))
    found: dict[str, RotateFn] = {"phasor": lambda q, k: rope.rotate(q, k, positions)}
    if compiles and is_installed("liger_kernel"):
        found["Liger"] = liger_rope(cos, sin)
    if compiles:
        found["torch.compile"] = torch.compile(table_rope(cos, sin), dynamic=False)
    if is_installed("transformers"):
        llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
        tables = [x.reshape(-1, *x.shape[-2:]) for x in (cos, sin)]
        found["transformers"] = lambda q, k: llama.apply_rotary_pos_emb(q, k, *tables)
    return found


def forward_backward(rotate: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor]) -> Call:
    inputs = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(rotate(*inputs), inputs, grads)


class KernelTimes:
    """Times by case and implementation; one that fails says so in a line."""

    def __init__(self, study: Study) -> None:
        self.study, self.settings = study, study.settings
        self.cases: dict[str, dict[str, Any]] = {}
        study.result["milliseconds"] = self.cases

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.study.device).bfloat16()

    def floor(self, elements: int, **how: Any) -> float:
        source = torch.zeros(elements, dtype=torch.bfloat16, device=self.study.device)
        target = torch.empty_like(source)
        return self.study.machine.timer.graph_ms(lambda: target.copy_(source), **how)

    def case(self, name: str, least: float, implementations: dict[str, Call], **how: Any) -> dict[str, Any]:
        self.study.say(f"{name}: floor {least:.4f} ms")
        row = self.cases[name] = {"floor": least}
        for peer, call in implementations.items():
            with self.study.noting_failure(row, peer):
                row[peer] = self.study.machine.timer.graph_ms(call, **how)
            took: Any = row[peer]
            shown = took if isinstance(took, str) else f"{took:.4f} ms  {least / took:6.1%} of the floor"
            self.study.say(f"    {peer:24} {shown}")
        self.study.save()
        return row

    def run(self) -> None:
        s, compiles = self.settings, self.study.machine.compiles
        rope, positions = Rotary(head_dim=s.head_dim), torch.arange(s.tokens, device=self.study.device)
        rotations = peers(rope, positions, s.head_dim, compiles)
        q, k = (self.drawn(s.rows, s.tokens, n, s.head_dim).transpose(1, 2) for n in (s.heads, s.kv_heads))
        grads = [self.drawn(*x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k)]
        least = self.floor(q.numel() + k.numel())
        self.case("forward", least, {peer: partial(f, q, k) for peer, f in rotations.items()})
        both = {peer: forward_backward(f, [q, k], grads) for peer, f in rotations.items()}
        self.case("forward and backward", 2 * least, both)
        self.other_forward_passes(rope, positions, q, k, least)
        self.split_and_rotate(rope, positions, rotations, least)
        for rows in s.batches:
            self.single_tokens(rows, rope)

    def other_forward_passes(self, rope: Rotary, positions: Tensor, q: Tensor, k: Tensor, least: float) -> None:
        s = self.settings
        offsets = torch.tensor([0, 2**20, 2**30, 2**36], device=positions.device)
        by_row = positions + offsets.repeat(s.rows)[: s.rows, None]
        few = s.head_dim // 4
        ropes = {
            "one position per token": (rope, by_row),
            "adjacent": (Rotary(head_dim=s.head_dim, pairing="adjacent"), positions),
            f"{few} of {s.head_dim} rotated": (Rotary(head_dim=s.head_dim, rotary_dim=few), positions),
            f"{few} of {s.head_dim} rotated, adjacent": (
                Rotary(head_dim=s.head_dim, rotary_dim=few, pairing="adjacent"),
                positions,
            ),
        }
        calls: dict[str, Call] = {name: partial(f.rotate, q, k, at) for name, (f, at) in ropes.items()}
        contiguous = q.contiguous(), k.contiguous()
        calls["heads before tokens"] = lambda: rope.rotate(*contiguous, positions)
        self.case("phasor, other forward passes", least, calls)

    def split_and_rotate(self, rope: Rotary, positions: Tensor, rotations: dict[str, RotateFn], least: float) -> None:
        """From the fused QKV projection, as models do it."""
        s = self.settings
        fused = self.drawn(s.rows, s.tokens, s.kv_heads, s.heads // s.kv_heads + 2, s.head_dim)
        args, whole = rope_args(rope, positions), self.floor(fused.numel())
        cos, sin = (x[None, :, None] for x in rope.cos_sin(positions))

        def split(projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = split_qkv(projected)
            return q.flatten(2, 3), k, v

        def plain(projected: Tensor) -> tuple[Tensor, ...]:
            q, k, v = split(projected)
            return *(rotate_pairs_ref(x, cos, sin, "half") for x in (q, k)), v.contiguous()

        ways: dict[str, Callable[..., Any]] = {"phasor": lambda x: rope_qkv_op(x, args, False, False)}
        if self.study.machine.compiles:
            ways["torch.compile"] = torch.compile(plain, dynamic=False)
        if "Liger" in rotations:
            ways["split, then Liger"] = lambda x: (
                *rotations["Liger"](*(y.transpose(1, 2) for y in split(x)[:2])),
                split(x)[2].contiguous(),
            )
        self.case("split and rotate", whole, {name: partial(f, fused) for name, f in ways.items()})
        self.case("split and rotate, values a view", least, {"phasor": lambda: rope_qkv_kernel(fused, args, "half")})
        parts = [self.drawn(*x.shape) for x in split(fused)]
        both = {name: forward_backward(f, [fused], parts) for name, f in ways.items() if "Liger" not in name}
        self.case("split and rotate, forward and backward", 2 * whole, both)

    def single_tokens(self, rows: int, rope: Rotary) -> None:
        """One token per row: many calls per graph, warm caches, and the host's own time."""
        s, compiles = self.settings, self.study.machine.compiles
        positions = torch.full((rows, 1), 1000, device=self.study.device)
        q, k = (self.drawn(rows, 1, n, s.head_dim).transpose(1, 2) for n in (s.heads, s.kv_heads))
        fused = self.drawn(rows, 1, s.kv_heads, s.heads // s.kv_heads + 2, s.head_dim)
        args, rotations = rope_args(rope, positions), peers(rope, positions, s.head_dim, compiles)
        calls: dict[str, Call] = {p: partial(f, q, k) for p, f in rotations.items() if p != "transformers"}
        calls["phasor, from projection"] = lambda: rope_qkv_kernel(fused, args, "half")
        how: dict[str, Any] = {"calls": 50, "cold": False}
        row = self.case(f"one token, batch {rows}", self.floor(q.numel() + k.numel(), **how), calls, **how)
        host: dict[str, float] = {}
        count = 200 if self.study.on_gpu else 1
        for peer, call in calls.items():
            if not isinstance(row.get(peer), str):
                host[peer] = self.study.machine.timer.host_us(call, count)
        row["host, us"] = host
        self.study.say("    on the host: " + ", ".join(f"{peer} {took:.0f} us" for peer, took in host.items()))

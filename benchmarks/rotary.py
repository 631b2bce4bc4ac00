"""The exact rotary kernel beside its peers on a GPU: checked against float64 first, then timed.

Every call is timed as a CUDA graph, so that the host's speed does not matter, with cold caches between calls of a large
size. The floor is a plain copy of the bytes that have to move. What the host needs for a call is listed apart.

    python benchmarks/rope.py [--out FILE] [--sweep]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import phasor
from phasor.ops.rope import RopeArgs, rope_kernel, rope_qkv_kernel, rope_qkv_ref, rotate_pairs_ref, split_qkv
from phasor.ops.rope.reference import split_pairs
from phasor.ops.rope.rope import rope_qkv_op

ROWS, TOKENS, HEADS, KEYS, WIDTH = 4, 8192, 32, 8, 128
Call = Callable[[], Any]
FLUSH = 1 << 28  # bytes


def measure(call: Call, repeats: int = 30, calls: int = 1, cold: bool = True) -> float:
    """Median milliseconds of a call, on the device's clock; `calls` of them make one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    flush = torch.empty(FLUSH if cold else 1, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(repeats + 3):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events[3:]) / calls


def on_host(call: Call, calls: int = 200) -> float:
    """Microseconds that the host needs for a call; the device is not waited for."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - begun
    torch.cuda.synchronize()
    return 1e6 * took / calls


def rope_args(rope: phasor.Rotary, positions: Tensor) -> RopeArgs:
    prepared = rope.prepare(
        phasor.nn.sequence.SequenceInfo(positions, None), torch.empty(1, 1, 1, device=positions.device)
    )
    assert isinstance(prepared, RopeArgs), "the kernel is not taken"
    return prepared


def drawn(*shape: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def worst(got: Tensor, true: Tensor, pairing: str, width: int) -> float:
    """The largest error: in itself for float32, and otherwise in units in the last place of the pair's norm."""
    off = (got.double() - true)[..., :width].detach().abs()
    if got.dtype == torch.float32:
        return float(off.max())
    norm = torch.hypot(*split_pairs(true[..., :width].detach(), pairing))
    unit = norm.log2().floor().exp2() * torch.finfo(got.dtype).eps
    return max(float((x / unit).max()) for x in split_pairs(off, pairing))


def check(device: str, rows: int, tokens: int, heads: int, keys: int, width: int) -> dict[str, float]:
    """The largest errors of results and gradients against float64, at positions up to 2^36; ends at a wrong one."""
    found = {}
    for pairing in ("half", "adjacent"):
        for rotary_dim in (width, width // 4):
            for dtype, allowed in ((torch.float32, 1e-6), (torch.bfloat16, 1.0), (torch.float16, 1.0)):
                torch.manual_seed(0)
                rope = phasor.Rotary(head_dim=width, rotary_dim=rotary_dim, pairing=pairing)
                args = rope_args(rope, torch.randint(0, 2**36, (rows, tokens), device=device))
                like: dict[str, Any] = {"device": device, "dtype": dtype}
                fused = drawn(rows, tokens, keys, heads // keys + 2, width, **like).clamp(-2, 2).requires_grad_()
                rope_qkv_kernel(torch.zeros_like(fused), args, pairing)  # what is checked are launches again
                parts = rope_qkv_kernel(fused, args, pairing)
                grads = [drawn(*x.shape, **like).clamp(-2, 2) for x in parts]
                (back,) = torch.autograd.grad(parts, fused, grads)
                exact = fused.detach().double().requires_grad_()
                true = rope_qkv_ref(exact, args, pairing)
                (true_back,) = torch.autograd.grad(true, exact, [x.double() for x in grads])
                q, k, v = split_qkv(fused.detach())
                heads_first = q.flatten(2, 3).transpose(1, 2).contiguous().transpose(1, 2)
                apart = rope_kernel(heads_first, k, args, pairing)
                pairs = [*zip(parts, true, strict=True), *zip(apart, true, strict=False), (back, true_back)]
                error = max(worst(a, b, pairing, rotary_dim) for a, b in pairs if a is not parts[2])
                same = all(torch.equal(a[..., rotary_dim:], b[..., rotary_dim:].to(dtype)) for a, b in pairs)
                same = same and torch.equal(parts[2], v)
                name = f"{pairing}, {rotary_dim} of {width}, {str(dtype)[6:]}"
                found[name] = error
                if not (error <= allowed and same):
                    raise SystemExit(f"wrong: {name}: error {error:.2e} (allowed {allowed}), rest copied: {same}")
    return found


def rotate_half(x: Tensor) -> Tensor:
    u, v = x.chunk(2, dim=-1)
    return torch.cat((-v, u), dim=-1)


def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers does it, on `[B, H, T, D]`."""
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def peers(rope: phasor.Rotary, positions: Tensor) -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """Rotations of queries and keys `[B, H, T, D]`, ours first; the others are given their tables."""
    cos, sin = (torch.cat((x, x), -1).view(-1, *x.shape[-2:-1], 2 * x.shape[-1]) for x in rope.cos_sin(positions))
    table = cos.bfloat16(), sin.bfloat16()
    found: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"phasor": lambda q, k: rope.rotate(q, k, positions)}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.rope import LigerRopeFunction

        found["Liger"] = lambda q, k: LigerRopeFunction.apply(q, k, *table)
    fast = torch.compile(plain, dynamic=False)
    found["torch.compile"] = lambda q, k: fast(q, k, *table)
    if importlib.util.find_spec("transformers"):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        found["transformers"] = lambda q, k: apply_rotary_pos_emb(q, k, *table)
    return found


def back_and_forth(rotate: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor]) -> Call:
    inputs = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(rotate(*inputs), inputs, grads)


def floor(elements: int, times: int = 1, **how: Any) -> float:
    source = torch.zeros(elements, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return times * measure(lambda: target.copy_(source), **how)


class Report:
    """Times by case, printed as they come; a contender that fails says so in one line."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, Any]] = {}

    def case(self, name: str, least: float, contenders: dict[str, Call], **how: Any) -> None:
        print(f"{name}: floor {least:.4f} ms")
        self.cases[name] = {"floor": least}
        for who, call in contenders.items():
            try:
                took = measure(call, **how)
            except Exception as error:
                self.cases[name][who] = str(error).splitlines()[0][:160] if str(error) else repr(error)
                print(f"    {who:24} failed: {self.cases[name][who]}")
                torch.cuda.synchronize()
                continue
            self.cases[name][who] = took
            print(f"    {who:24} {took:.4f} ms  {least / took:6.1%} of the floor", flush=True)


def compare() -> dict[str, Any]:
    report = Report()
    q, k = drawn(ROWS, TOKENS, HEADS, WIDTH), drawn(ROWS, TOKENS, KEYS, WIDTH)
    elements = q.numel() + k.numel()
    least = floor(elements)
    q_t, k_t = q.transpose(1, 2), k.transpose(1, 2)
    grads = [drawn(*x.shape).transpose(1, 2) for x in (q, k)]
    at = torch.arange(TOKENS, device="cuda")
    by_row = at + torch.tensor([[0], [2**20], [2**30], [2**36]], device="cuda")
    half = phasor.Rotary(head_dim=WIDTH)
    rotations = peers(half, at)
    report.case("forward", least, {who: lambda rotate=rotate: rotate(q_t, k_t) for who, rotate in rotations.items()})
    report.case(
        "forward and backward",
        2 * least,
        {who: back_and_forth(rotate, [q_t, k_t], grads) for who, rotate in rotations.items()},
    )
    ropes = {
        "a position a token": (half, by_row),
        "adjacent": (phasor.Rotary(head_dim=WIDTH, pairing="adjacent"), at),
        "32 of 128 rotated": (phasor.Rotary(head_dim=WIDTH, rotary_dim=32), at),
        "32 of 128 rotated, adjacent": (phasor.Rotary(head_dim=WIDTH, rotary_dim=32, pairing="adjacent"), at),
    }
    calls: dict[str, Call] = {
        name: lambda rope=rope, at=at: rope.rotate(q_t, k_t, at) for name, (rope, at) in ropes.items()
    }
    laid = q_t.contiguous(), k_t.contiguous()
    calls["heads before tokens"] = lambda: half.rotate(*laid, at)
    report.case("phasor, other forward passes", least, calls)
    fused = drawn(ROWS, TOKENS, KEYS, HEADS // KEYS + 2, WIDTH)
    whole = floor(fused.numel())
    args = rope_args(half, at)

    def split(projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split_qkv(projected)
        return q.flatten(2, 3), k, v

    cos, sin = half.cos_sin(at)
    compiled = torch.compile(
        lambda x: tuple(
            rotate_pairs_ref(y, cos[None, :, None], sin[None, :, None], "half") if i < 2 else y.contiguous()
            for i, y in enumerate(split(x))
        ),
        dynamic=False,
    )
    ways: dict[str, Callable[..., Any]] = {
        "phasor": lambda x: rope_qkv_op(x, *args, False, False),
        "torch.compile": compiled,
    }
    if "Liger" in rotations:
        ways["split, then Liger"] = lambda x: (
            *rotations["Liger"](*(y.transpose(1, 2) for y in split(x)[:2])),
            split(x)[2].contiguous(),
        )
    report.case("split and rotate", whole, {who: lambda way=way: way(fused) for who, way in ways.items()})
    views = {"phasor": lambda: rope_qkv_kernel(fused, args, "half")}
    report.case("split and rotate, values a view", least, views)
    parts = [drawn(*x.shape) for x in split(fused)]
    both = {who: back_and_forth(way, [fused], parts) for who, way in ways.items() if "Liger" not in who}
    report.case("split and rotate, forward and backward", 2 * whole, both)
    for rows in (1, 16, 64, 256):
        decode(report, rows, half)
    return report.cases


def decode(report: Report, rows: int, rope: phasor.Rotary) -> None:
    """One token a row: many calls a graph, warm caches, and the host's own time."""
    at = torch.full((rows, 1), 1000, device="cuda")
    q, k = (drawn(rows, 1, n, WIDTH).transpose(1, 2) for n in (HEADS, KEYS))
    fused, args = drawn(rows, 1, KEYS, HEADS // KEYS + 2, WIDTH), rope_args(rope, at)
    calls: dict[str, Call] = {
        who: lambda rotate=rotate: rotate(q, k) for who, rotate in peers(rope, at).items() if who != "transformers"
    }
    calls["phasor, from projection"] = lambda: rope_qkv_kernel(fused, args, "half")
    how: dict[str, Any] = {"calls": 50, "cold": False}
    name = f"one token, batch {rows}"
    report.case(name, floor(q.numel() + k.numel(), **how), calls, **how)
    host = {who: on_host(call) for who, call in calls.items() if not isinstance(report.cases[name].get(who), str)}
    report.cases[name]["host, us"] = host
    print("    on the host:", ", ".join(f"{who} {took:.0f} us" for who, took in host.items()))


def sweep() -> None:
    """Programs a token and warps, for large and small sizes."""
    from phasor.ops.rope.kernels import Schedule, launch_rope

    for rows, count, form, rotary_dim in (
        (ROWS, TOKENS, "half", WIDTH),
        (ROWS, TOKENS, "adjacent", WIDTH),
        (ROWS, TOKENS, "half", WIDTH // 4),
        (ROWS, TOKENS, "adjacent", WIDTH // 4),
        (ROWS, TOKENS, "projection", WIDTH),
        (ROWS, TOKENS, "joined", WIDTH),
        (1, 1, "half", WIDTH),
        (16, 1, "half", WIDTH),
        (64, 1, "half", WIDTH),
        (256, 1, "half", WIDTH),
        (2, 512, "half", WIDTH),
    ):
        rope = phasor.Rotary(head_dim=WIDTH, rotary_dim=rotary_dim)
        args = rope_args(rope, torch.arange(count, device="cuda"))
        fused = drawn(rows, count, KEYS, HEADS // KEYS + 2, WIDTH)
        parts = split_qkv(fused)
        into = tuple(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in parts)
        if form in ("half", "adjacent"):
            heads = torch.empty(rows, count, HEADS, WIDTH, dtype=fused.dtype, device="cuda")
            source, target = (heads, into[1]), (torch.empty_like(heads), torch.empty_like(into[1]))
        else:
            source, target = (parts, into) if form == "projection" else (into, parts)
        large = rows * count > 1024
        how: dict[str, Any] = {"repeats": 15} if large else {"calls": 50, "cold": False, "repeats": 10}
        least = floor(sum(x.numel() for x in source), **how)
        print(f"{form}, {rotary_dim} of {WIDTH} rotated, {rows} x {count} tokens: floor {least:.4f} ms")
        for each in (1, 2) if large else (1, 2, 4, 8):
            line = []
            for warps in (1, 2, 4, 8) if large else (1, 2, 4):
                options: dict[str, Any] = {"adjacent": form == "adjacent", "inverse": form == "joined"}
                options["schedule"] = Schedule(each, warps)
                try:
                    took = measure(partial(launch_rope, source, target, *args, **options), **how)
                    line.append(f"{warps} warps {took:.5f} ({least / took:.1%})")
                except Exception as error:
                    line.append(f"{warps} warps failed: {str(error).splitlines()[0][:60]}")
            print(f"    {each} programs a token: " + "   ".join(line), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path)
    options.add_argument("--sweep", action="store_true", help="only check, and time schedules of the kernel")
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    errors: dict[str, float] = {}
    for sizes in ((2, 33, HEADS, KEYS, WIDTH), (2, 7, 6, 2, 80)):
        found = check("cuda", *sizes)
        errors |= {f"{name}, {sizes[2]}/{sizes[3]} heads": error for name, error in found.items()}
    whole, half = (max(v for n, v in errors.items() if ("float32" in n) == single) for single in (True, False))
    print(
        f"equal to float64: off by {whole:.1e} in float32, by {half:.2f} units in the last place of a pair's norm else"
    )
    if given.sweep:
        sweep()
        return
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "errors": errors,
        "milliseconds": compare(),
    }
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The exact rotary kernel compared with other implementations on a GPU: checked against float64 first, then timed.

Every call is timed as a CUDA graph, so that the host's speed does not matter, with cold caches between calls of a large
size. The floor is a plain copy of the bytes that have to move. What the host needs for a call is listed apart.

    python benchmarks/rotary.py [--out FILE] [--sweep]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import phasor
from phasor.bench.rope import liger_rope, rotary_table, table_rope
from phasor.bench.timing import graph_ms, host_us
from phasor.ops.rope import RopeArgs, rope_kernel, rope_qkv_kernel, rope_qkv_ref, rotate_pairs_ref, split_qkv
from phasor.ops.rope.reference import split_pairs
from phasor.ops.rope.rope import rope_qkv_op

ROWS, TOKENS, HEADS, KEYS, WIDTH = 4, 8192, 32, 8, 128
Call = Callable[[], Any]


def rope_args(rope: phasor.Rotary, positions: Tensor) -> RopeArgs:
    prepared = rope.prepare(
        phasor.nn.sequence.SequenceInfo(positions, None), torch.empty(1, 1, 1, device=positions.device)
    )
    assert isinstance(prepared, RopeArgs), "the kernel is not taken"
    return prepared


def random_tensor(*shape: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def worst(got: Tensor, true: Tensor, pairing: str, head_dim: int) -> float:
    """The largest error: in itself for float32, and otherwise in units in the last place of the pair's norm."""
    off = (got.double() - true)[..., :head_dim].detach().abs()
    if got.dtype == torch.float32:
        return float(off.max())
    norm = torch.hypot(*split_pairs(true[..., :head_dim].detach(), pairing))
    unit = norm.log2().floor().exp2() * torch.finfo(got.dtype).eps
    return max(float((x / unit).max()) for x in split_pairs(off, pairing))


def check(device: str, rows: int, tokens: int, heads: int, keys: int, head_dim: int) -> dict[str, float]:
    """The largest errors of results and gradients against float64, at positions up to 2^36; ends at a wrong one."""
    found = {}
    for pairing in ("half", "adjacent"):
        for rotary_dim in (head_dim, head_dim // 4):
            for dtype, allowed in ((torch.float32, 1e-6), (torch.bfloat16, 1.0), (torch.float16, 1.0)):
                torch.manual_seed(0)
                rope = phasor.Rotary(head_dim=head_dim, rotary_dim=rotary_dim, pairing=pairing)
                args = rope_args(rope, torch.randint(0, 2**36, (rows, tokens), device=device))
                like: dict[str, Any] = {"device": device, "dtype": dtype}
                fused = (
                    random_tensor(rows, tokens, keys, heads // keys + 2, head_dim, **like).clamp(-2, 2).requires_grad_()
                )
                rope_qkv_kernel(torch.zeros_like(fused), args, pairing)  # what is checked are launches again
                parts = rope_qkv_kernel(fused, args, pairing)
                grads = [random_tensor(*x.shape, **like).clamp(-2, 2) for x in parts]
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
                name = f"{pairing}, {rotary_dim} of {head_dim}, {str(dtype)[6:]}"
                found[name] = error
                if not (error <= allowed and same):
                    raise SystemExit(f"wrong: {name}: error {error:.2e} (allowed {allowed}), rest copied: {same}")
    return found


def peers(rope: phasor.Rotary, positions: Tensor) -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """Rotary embeddings of queries and keys `[B, H, T, D]`, phasor's first; the others are given their tables."""
    cos, sin = (x.bfloat16() for x in rotary_table(positions, WIDTH))
    found: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"phasor": lambda q, k: rope.rotate(q, k, positions)}
    if importlib.util.find_spec("liger_kernel"):
        found["Liger"] = liger_rope(cos, sin)
    found["torch.compile"] = torch.compile(table_rope(cos, sin), dynamic=False)
    if importlib.util.find_spec("transformers"):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        tables = [x.reshape(-1, *x.shape[-2:]) for x in (cos, sin)]
        found["transformers"] = lambda q, k: apply_rotary_pos_emb(q, k, *tables)
    return found


def forward_backward(rotate: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor]) -> Call:
    inputs = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(rotate(*inputs), inputs, grads)


def floor(elements: int, times: int = 1, **how: Any) -> float:
    source = torch.zeros(elements, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return times * graph_ms(lambda: target.copy_(source), **how)


class Report:
    """Times by case, printed as they come; an implementation that fails says so in one line."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, Any]] = {}

    def case(self, name: str, least: float, implementations: dict[str, Call], **how: Any) -> None:
        print(f"{name}: floor {least:.4f} ms")
        self.cases[name] = {"floor": least}
        for peer, call in implementations.items():
            try:
                took = graph_ms(call, **how)
            except Exception as error:
                self.cases[name][peer] = str(error).splitlines()[0][:160] if str(error) else repr(error)
                print(f"    {peer:24} failed: {self.cases[name][peer]}")
                torch.cuda.synchronize()
                continue
            self.cases[name][peer] = took
            print(f"    {peer:24} {took:.4f} ms  {least / took:6.1%} of the floor", flush=True)


def compare() -> dict[str, Any]:
    report = Report()
    q, k = random_tensor(ROWS, TOKENS, HEADS, WIDTH), random_tensor(ROWS, TOKENS, KEYS, WIDTH)
    elements = q.numel() + k.numel()
    least = floor(elements)
    q_t, k_t = q.transpose(1, 2), k.transpose(1, 2)
    grads = [random_tensor(*x.shape).transpose(1, 2) for x in (q, k)]
    at = torch.arange(TOKENS, device="cuda")
    by_row = at + torch.tensor([[0], [2**20], [2**30], [2**36]], device="cuda")
    half = phasor.Rotary(head_dim=WIDTH)
    rotations = peers(half, at)
    report.case("forward", least, {peer: lambda rotate=rotate: rotate(q_t, k_t) for peer, rotate in rotations.items()})
    report.case(
        "forward and backward",
        2 * least,
        {peer: forward_backward(rotate, [q_t, k_t], grads) for peer, rotate in rotations.items()},
    )
    ropes = {
        "one position per token": (half, by_row),
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
    fused = random_tensor(ROWS, TOKENS, KEYS, HEADS // KEYS + 2, WIDTH)
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
    report.case("split and rotate", whole, {name: lambda way=way: way(fused) for name, way in ways.items()})
    views = {"phasor": lambda: rope_qkv_kernel(fused, args, "half")}
    report.case("split and rotate, values a view", least, views)
    parts = [random_tensor(*x.shape) for x in split(fused)]
    both = {name: forward_backward(way, [fused], parts) for name, way in ways.items() if "Liger" not in name}
    report.case("split and rotate, forward and backward", 2 * whole, both)
    for rows in (1, 16, 64, 256):
        decode(report, rows, half)
    return report.cases


def decode(report: Report, rows: int, rope: phasor.Rotary) -> None:
    """One token per row: many calls per graph, warm caches, and the host's own time."""
    at = torch.full((rows, 1), 1000, device="cuda")
    q, k = (random_tensor(rows, 1, n, WIDTH).transpose(1, 2) for n in (HEADS, KEYS))
    fused, args = random_tensor(rows, 1, KEYS, HEADS // KEYS + 2, WIDTH), rope_args(rope, at)
    calls: dict[str, Call] = {
        peer: lambda rotate=rotate: rotate(q, k) for peer, rotate in peers(rope, at).items() if peer != "transformers"
    }
    calls["phasor, from projection"] = lambda: rope_qkv_kernel(fused, args, "half")
    how: dict[str, Any] = {"calls": 50, "cold": False}
    name = f"one token, batch {rows}"
    report.case(name, floor(q.numel() + k.numel(), **how), calls, **how)
    host = {peer: host_us(call) for peer, call in calls.items() if not isinstance(report.cases[name].get(peer), str)}
    report.cases[name]["host, us"] = host
    print("    on the host:", ", ".join(f"{peer} {took:.0f} us" for peer, took in host.items()))


def sweep() -> None:
    """Programs per token and warps, for large and small sizes."""
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
        fused = random_tensor(rows, count, KEYS, HEADS // KEYS + 2, WIDTH)
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
                    took = graph_ms(partial(launch_rope, source, target, *args, **options), **how)
                    line.append(f"{warps} warps {took:.5f} ({least / took:.1%})")
                except Exception as error:
                    line.append(f"{warps} warps failed: {str(error).splitlines()[0][:60]}")
            print(f"    {each} programs per token: " + "   ".join(line), flush=True)


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

"""Linear cross-entropy, norms, gated activations, float8 and AdamW on a GPU, beside torch, torch.compile and Liger.

Every result is compared with float64 first, and a wrong one gets no time. The floor is what must be read and written
at the speed of a device copy; that of the cross-entropy is its three matrix products by themselves.

    python benchmarks/fused.py [--sweep] [--only cross-entropy ...] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phasor import Transformer
from phasor.bench.timing import Timer, bandwidth, peak_gib
from phasor.ops import cross_entropy, dispatch, float8, glu, norm
from phasor.ops.adamw import AdamW
from phasor.ops.cross_entropy.cross_entropy import linear_cross_entropy_op
from phasor.ops.float8 import kernels

TOKENS, DIM, HIDDEN = 16384, 2048, 8192
VOCABULARIES = (32000, 128256)
BF16 = 2**-8  # one unit in the last place, relative to the power of two below
Call = Callable[[], Any]
ROWS: list[dict[str, Any]] = []


def liger(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.{module}"), name)


def milliseconds(call: Call, reps: int = 20) -> float:
    return 1e3 * Timer(torch.device("cuda"), reps, math.inf)(call)


def max_error(found: Any, expected: Any) -> float:
    """The largest error over all tensors, each relative to the norm of what is expected."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs)


def table(
    title: str,
    variants: dict[str, Call],
    expected: Any,
    allowed: float,
    floor: float,
    reps: int = 20,
    read: Callable[[Any], Any] = tuple,
) -> None:
    """Check and time each variant; `floor` is in milliseconds, and `read` makes of a result what is checked."""
    print(f"\n{title}  (floor {floor:.3f} ms)")
    for name, f in variants.items():
        row: dict[str, Any] = {"workload": title, "name": name, "floor_ms": floor}
        try:
            row["error"] = max_error(read(f()), expected)
            if not row["error"] <= allowed:
                print(f"  {name:28} WRONG: relative error {row['error']:.2e}, allowed {allowed:.1e}")
            else:
                row["ms"], row["gib"] = milliseconds(f, reps), peak_gib(f)
                fraction = f"{100 * floor / row['ms']:5.1f} % of floor"
                print(f"  {name:28}{row['ms']:9.3f} ms {fraction} {row['gib']:7.2f} GiB   error {row['error']:.1e}")
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"  {name:28} {row['failed'][:150]}")
        ROWS.append(row)
        torch.cuda.empty_cache()


def randn(*shape: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype).requires_grad_()


def cross_entropy_float64(h: Tensor, w: Tensor, targets: Tensor) -> list[Tensor]:
    """The mean and its gradients in float64, some rows at a time."""
    h64, w64 = h.detach().double(), w.detach().double()
    loss, dh, dw = torch.zeros((), device="cuda", dtype=torch.float64), [], torch.zeros_like(w64)
    for part in torch.arange(len(h), device="cuda").split(2048):
        logits = h64[part] @ w64.T
        lse = logits.logsumexp(-1, keepdim=True)
        loss += (lse[:, 0] - logits.gather(1, targets[part, None])[:, 0]).sum()
        dlogits = logits.sub_(lse).exp_()
        dlogits.scatter_add_(1, targets[part, None], dlogits.new_full((len(part), 1), -1.0))
        dh.append(dlogits @ w64 / len(h))
        dw += dlogits.T @ h64[part] / len(h)
    return [loss / len(h), torch.cat(dh), dw]


def chunked_cross_entropy(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """What one writes by hand for torch.compile: chunks that are computed again in the backward pass."""

    def some(h: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).float(), targets, reduction="sum")

    parts = zip(h.split(4096), targets.split(4096), strict=True)
    each = [checkpoint(some, *part, use_reentrant=False) for part in parts]
    return torch.stack(each).sum() / len(h)


def matmul_ms(h: Tensor, w: Tensor) -> float:
    """The time of the three matrix products alone, on all rows at once."""
    with torch.no_grad():
        logits = h @ w.T
        return milliseconds(lambda: (torch.mm(h, w.T, out=logits), torch.mm(logits, w), torch.mm(logits.T, h)), 5)


def cross_entropies(bytes_per_ms: float) -> None:
    for vocabulary in VOCABULARIES:
        h, w = randn(TOKENS, DIM), randn(vocabulary, DIM, scale=0.05, seed=1)
        targets = torch.randint(0, vocabulary, (TOKENS,), device="cuda")
        weights = torch.ones(TOKENS, device="cuda")
        compiled = torch.compile(chunked_cross_entropy)

        def with_gradients(f: Callable[[], Tensor], h: Tensor = h, w: Tensor = w) -> Call:
            def run() -> list[Tensor]:
                loss = f()
                return [loss, *torch.autograd.grad(loss, (h, w))]

            return run

        def ours(h: Tensor = h, w: Tensor = w, t: Tensor = targets, weights: Tensor = weights) -> Tensor:
            return cross_entropy.linear_cross_entropy(h, w, t, weights).loss / len(h)

        def theirs(h: Tensor = h, w: Tensor = w, t: Tensor = targets) -> Tensor:
            return liger("transformers.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss")()(w, h, t)

        variants: dict[str, Call] = {
            "phasor": with_gradients(ours),
            "Liger": with_gradients(theirs),
            "torch, logits held": with_gradients(
                lambda h=h, w=w, t=targets: F.cross_entropy(F.linear(h, w).float(), t)
            ),
            "torch.compile, chunked": with_gradients(lambda h=h, w=w, t=targets, f=compiled: f(h, w, t)),
        }
        expected = cross_entropy_float64(h, w, targets)
        title = f"linear cross-entropy {TOKENS} x {DIM} x {vocabulary}, forward and backward"
        # Logits of size 2 are rounded, then their gradient, then the result, each by at most half a unit.
        table(title, variants, expected, 3 * BF16, matmul_ms(h, w), 5)
        no_grad = torch.no_grad()(lambda f=ours: [f()])
        table(f"{title.split(',')[0]}, no gradients", {"phasor": no_grad}, expected[:1], 1e-3, matmul_ms(h, w) / 3, 5)


def options() -> None:
    """Every option and awkward sizes against float64, on this device."""
    worst = {}
    for dtype, allowed in ((torch.float32, 2e-5), (torch.bfloat16, 3 * BF16)):
        for count, dim, vocabulary in ((1, 8, 2), (333, 72, 1009), (4099, 256, 32003)):
            h, w = randn(count, dim, dtype=dtype), randn(vocabulary, dim, scale=dim**-0.5, seed=1, dtype=dtype)
            b, targets = randn(vocabulary, seed=2, dtype=dtype), torch.randint(0, vocabulary, (count,), device="cuda")
            weights = (torch.arange(count, device="cuda") % 3 != 1).float()
            for given in ((0.0, 0.0, 1.0, None), (0.1, 0.01, 0.5, 3.0)):
                wide_inputs = [x.detach().double().requires_grad_() for x in (h, w, b)]
                exact_y = cross_entropy.linear_cross_entropy_ref(*wide_inputs, targets, weights.double(), *given).loss
                out = linear_cross_entropy_op(h, w, b, targets, weights, *given, dtype, [True] * 3, 1024, True)[0]
                found = [out, *torch.autograd.grad(out, (h, w, b))]
                error = max_error(found, [exact_y, *torch.autograd.grad(exact_y, wide_inputs)])
                worst[f"{str(dtype)[6:]} {count} x {dim} x {vocabulary} {given}"] = (error, allowed)
    for name, (error, allowed) in worst.items():
        print(f"  {'right' if error <= allowed else 'WRONG'} {name}: {error:.1e} (allowed {allowed:.1e})")


def norms(bytes_per_ms: float) -> None:
    x, r, weight = randn(TOKENS, DIM), randn(TOKENS, DIM, seed=1), randn(DIM, seed=2)
    dy, ds = randn(TOKENS, DIM, seed=3).detach(), randn(TOKENS, DIM, seed=4).detach()
    size = x.numel() * 2 / bytes_per_ms

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, (DIM,), weight, 1e-5)

    def plain_sum(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x + r, plain(x + r, weight)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return norm.norm(x, weight, None, eps=1e-5)

    def ours_sum(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return norm.add_norm(x, r, weight, None, eps=1e-5)

    def liger_norm(x: Tensor, weight: Tensor) -> Tensor:
        return liger("ops.rms_norm", "LigerRMSNormFunction").apply(x, weight, 1e-5, 0.0, "llama", False)

    def liger_sum(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, s = liger("ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction").apply(x, r, weight, 1e-5)
        return s, y

    wide = [t.detach().double().requires_grad_() for t in (x, r, weight)]
    # One rounding of the result, of the sum before it, or of the direction that comes back.
    single = {"phasor": ours, "Liger": liger_norm, "torch": plain, "torch.compile": torch.compile(plain)}
    forwards(f"rmsnorm {TOKENS} x {DIM}", single, (x, weight), wide[::2], (dy,), 2 * size, 5 * size)
    both = {"phasor": ours_sum, "Liger": liger_sum, "torch": plain_sum, "torch.compile": torch.compile(plain_sum)}
    forwards(f"sum and rmsnorm {TOKENS} x {DIM}", both, (x, r, weight), wide, (ds, dy), 4 * size, 8 * size)
    around(size)


def around(size: float) -> None:
    """Norms on both sides of a residual sum, as Gemma's."""
    inputs = randn(TOKENS, DIM), randn(TOKENS, DIM, seed=1), randn(DIM, seed=2), randn(DIM, seed=3)
    directions = randn(TOKENS, DIM, seed=4).detach(), randn(TOKENS, DIM, seed=5).detach()

    def ours(x: Tensor, branch: Tensor, weight: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        return norm.norm_add_norm(x, branch, weight, None, following, None, eps=1e-5, offset=1.0)

    def apart(x: Tensor, branch: Tensor, weight: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        total = x + norm.norm(branch, weight, None, eps=1e-5, offset=1.0)
        return total, norm.norm(total, following, None, eps=1e-5, offset=1.0)

    def plain(x: Tensor, branch: Tensor, weight: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        return norm.norm_add_norm_ref(x, branch, weight, None, following, None, 1e-5, 1.0)

    variants = {"phasor": ours, "phasor, apart": apart, "torch": plain, "torch.compile": torch.compile(plain)}
    wide = [t.detach().double().requires_grad_() for t in inputs]
    title = f"rmsnorm, sum and rmsnorm {TOKENS} x {DIM}"
    forwards(title, variants, inputs, wide, directions, 4 * size, 10 * size)


def activations(bytes_per_ms: float) -> None:
    x, dy = randn(TOKENS, 2 * HIDDEN), randn(TOKENS, HIDDEN, seed=1).detach()
    size = dy.numel() * 2 / bytes_per_ms

    def plain(x: Tensor) -> Tensor:
        return glu.glu_ref(x, "swiglu")

    def theirs(x: Tensor) -> Tensor:
        return liger("ops.swiglu", "LigerFusedGateUpSiLUMulFunction").apply(x)

    variants = {
        "phasor": lambda x: glu.glu(x, "swiglu"),
        "Liger": theirs,
        "torch": plain,
        "torch.compile": torch.compile(plain),
    }
    wide = [x.detach().double().requires_grad_()]
    forwards(f"swiglu {TOKENS} x {HIDDEN}", variants, (x,), wide, (dy,), 3 * size, 8 * size)
    for kind in glu.GLU_ACTIVATIONS:
        ours, exact_y = glu.glu(x, kind), glu.glu_ref(wide[0], kind)
        error = max_error(
            [ours, *torch.autograd.grad(ours, x, dy)], [exact_y, *torch.autograd.grad(exact_y, wide, dy.double())]
        )
        print(f"  {'right' if error < BF16 else 'WRONG'} {kind}: {error:.1e}")


def float8_kernels(bytes_per_ms: float) -> None:
    """The activation and its gradient as float8 rows, and the transpose of such rows."""
    x, dy = randn(TOKENS, 2 * HIDDEN).detach(), randn(TOKENS, HIDDEN, seed=1).detach()
    wide_x = x.double().requires_grad_()
    exact_y = glu.glu_ref(wide_x, "swiglu")
    (gradient,) = torch.autograd.grad(exact_y, wide_x, dy.double())
    size, rounding = (
        dy.numel() / bytes_per_ms,
        2**-5,
    )  # of a byte for each feature; three bits after the first, on average

    def exact(found: tuple[Tensor, Tensor]) -> list[Tensor]:
        bits, scale = found
        return [bits.double() * scale.double()]

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        return float8.quantize_rows(glu.glu_ref(x, "swiglu"))

    def plain_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.float().chunk(2, -1)
        s = torch.sigmoid(gate)
        return float8.quantize_rows(torch.cat((dy * up * s * (1 + gate * (1 - s)), dy * gate * s), -1).to(x.dtype))

    def plain_transpose(bits: Tensor, factor: Tensor) -> Tensor:
        return (bits.float() * factor).to(float8.FLOAT8).t().contiguous()

    compiled, compiled_backward, compiled_transpose = map(torch.compile, (plain, plain_backward, plain_transpose))
    variants = {"phasor": lambda: kernels.glu_float8(x, "swiglu"), "torch.compile": lambda: compiled(x)}
    title = f"swiglu in float8 {TOKENS} x {HIDDEN}"
    table(title, variants, [exact_y.detach()], rounding, 5 * size, read=exact)
    variants = {
        "phasor": lambda: kernels.glu_float8_backward(dy, x, "swiglu"),
        "torch.compile": lambda: compiled_backward(dy, x),
    }
    table(f"{title}, backward", variants, [gradient], rounding, 8 * size, read=exact)
    bits, scale = kernels.glu_float8_backward(dy, x, "swiglu")
    factor = scale / scale.amax()
    expected = (bits.float() * factor).to(float8.FLOAT8).t()
    variants = {
        "phasor": lambda: float8.transpose(bits, factor),
        "torch.compile": lambda: compiled_transpose(bits, factor),
    }
    table(
        f"float8 transpose {TOKENS} x {2 * HIDDEN}", variants, [expected], 0.0, 4 * size, read=lambda result: [result]
    )
    x[5, 7] = torch.nan
    for found in (kernels.glu_float8(x, "swiglu"), kernels.glu_float8_backward(dy, x, "swiglu")):
        assert found[1].isfinite().logical_not().nonzero().tolist() == [[5, 0]], "what is not finite does not show"


def optimizers(bytes_per_ms: float) -> None:
    """A first step, with gradients so small that the formula's eps shows, over the weights that are trained."""
    from training_gpu import config

    with torch.device("meta"):
        shapes = [weight.shape for weight in Transformer(config(4096)).parameters()]
    fields: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-8, "fused": True}
    half = torch.tensor(0.5, device="cuda")

    def stepping(kind: type[torch.optim.AdamW], clips: bool) -> Call:
        weights = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
        for i, weight in enumerate(weights):
            weight.grad = randn(*weight.shape, scale=2e-8 if clips else 1e-8, seed=100 + i).detach()
        optimizer = kind(weights, **fields)
        gradients = [weight.grad for weight in weights]

        def step() -> list[Tensor]:
            if isinstance(optimizer, AdamW):
                optimizer.scale = half if clips else None
            elif clips:
                torch._foreach_mul_(gradients, half)
            optimizer.step()
            return [weights[0].detach(), weights[-1].detach()]

        return step

    ends = [(0, shapes[0]), (len(shapes) - 1, shapes[-1])]
    expected = []
    for i, shape in ends:
        w, g = randn(*shape, seed=i).detach().double(), randn(*shape, scale=1e-8, seed=100 + i).detach().double()
        expected.append(w - 0.01 * (0.1 * w + g / (g.abs() + 1e-8)))
    count = sum(shape.numel() for shape in shapes)
    for clips in (False, True):
        title = f"AdamW's step, {count / 1e9:.2f} B bfloat16 weights{', clipped' if clips else ''}"
        for name, kind in (("phasor", AdamW), ("torch, fused", torch.optim.AdamW)):
            table(title, {name: stepping(kind, clips)}, expected, BF16, 14 * count / bytes_per_ms)


def forwards(
    title: str,
    variants: dict[str, Callable[..., Any]],
    inputs: tuple[Tensor, ...],
    wide: list[Tensor],
    directions: tuple[Tensor, ...],
    floor: float,
    both_floor: float,
) -> None:
    """Forward alone, then with the backward pass; expected is the plain form in float64."""

    def as_list(y: Any) -> list[Tensor]:
        return list(y) if isinstance(y, tuple) else [y]

    def forward(f: Callable[..., Any]) -> Call:
        return torch.no_grad()(lambda: as_list(f(*inputs)))

    def backward(f: Callable[..., Any]) -> Call:
        def run() -> list[Tensor]:
            ys = as_list(f(*inputs))
            return [*ys, *torch.autograd.grad(ys, inputs, directions)]

        return run

    expected = as_list(variants["torch"](*wide))
    table(f"{title}, forward", {n: forward(f) for n, f in variants.items()}, expected, BF16, floor)
    expected += torch.autograd.grad(expected, wide, [d.double() for d in directions])
    table(f"{title}, forward and backward", {n: backward(f) for n, f in variants.items()}, expected, BF16, both_floor)


def settings(bytes_per_ms: float) -> Iterator[tuple[str, str, Call, float]]:
    """What can be set: the workload, the setting, a call, and its floor."""
    from phasor.ops.cross_entropy import kernels as cross_entropy_kernels
    from phasor.ops.glu import kernels as glu_kernels
    from phasor.ops.norm import kernels as norm_kernels

    weights, targets = torch.ones(4096, device="cuda"), torch.zeros(4096, dtype=torch.int64, device="cuda")
    for vocabulary, count in ((32000, 4096), (128256, 2048)):
        logits = randn(count, vocabulary).detach()
        rest = (targets[:count], weights[:count], 0.0, 0.0, 1.0, None, True)
        for block, warps in product((4096, 8192, 16384, 32768), (8, 16, 32)):
            if block <= 2048 * warps:  # more would not fit into registers
                yield (
                    f"cross-entropy {count} x {vocabulary} (block_v=, num_warps=)",
                    f"{block:6} {warps:3}",
                    lambda logits=logits, rest=rest, b=block, w=warps: cross_entropy_kernels.cross_entropy(
                        logits, *rest, block_v=b, num_warps=w
                    ),
                    2 * logits.numel() * 2 / bytes_per_ms,
                )
    for vocabulary in VOCABULARIES:
        h, w = randn(TOKENS, DIM).detach(), randn(vocabulary, DIM, scale=0.05, seed=1).detach()
        tall = torch.zeros(TOKENS, dtype=torch.int64, device="cuda"), torch.ones(TOKENS, device="cuda")
        limit = matmul_ms(h, w)
        for rows in (1024, 2048, 4096, 8192):
            yield (
                f"linear cross-entropy {vocabulary} (chunk_size)",
                f"{rows:6}",
                lambda h=h, w=w, tall=tall, n=rows: linear_cross_entropy_op(
                    h, w, None, *tall, 0.0, 0.0, 1.0, None, torch.bfloat16, [True, True, False], n, True
                ),
                limit,
            )
    x, r, weight, dy = randn(TOKENS, DIM), randn(TOKENS, DIM), randn(DIM), randn(TOKENS, DIM)
    x, r, weight, dy = (t.detach() for t in (x, r, weight, dy))
    s, _, stats = norm_kernels.norm_forward(x, r, weight, None, 1e-5, 0.0, False, x.dtype)
    size = x.numel() * 2 / bytes_per_ms
    for warps in (2, 4, 8, 16):
        yield (
            "sum and norm, forward (warps=)",
            f"{warps:3}",
            lambda w=warps: norm_kernels.norm_forward(x, r, weight, None, 1e-5, 0.0, False, x.dtype, w),
            4 * size,
        )
        for factor in (1, 2, 4, 8, 16):
            programs = factor * torch.cuda.get_device_properties(0).multi_processor_count
            yield (
                "sum and norm, backward (warps=, programs= times the multiprocessors)",
                f"{warps:3} {factor:3}",
                lambda w=warps, p=programs: norm_kernels.norm_backward(
                    dy, dy, s, weight, None, stats, 0.0, False, weight.dtype, w, p
                ),
                4 * size,
            )
    both, grad = randn(TOKENS, 2 * HIDDEN).detach(), randn(TOKENS, HIDDEN).detach()
    size = grad.numel() * 2 / bytes_per_ms
    for block in (1024, 2048, 4096):
        for warps in (4, 8):
            yield (
                "swiglu, forward (block=, warps=)",
                f"{block:5} {warps:3}",
                lambda b=block, w=warps: glu_kernels.glu_forward(both, "swiglu", b, w),
                3 * size,
            )
            yield (
                "swiglu, backward (block=, warps=)",
                f"{block:5} {warps:3}",
                lambda b=block, w=warps: glu_kernels.glu_backward(grad, both, "swiglu", b, w),
                5 * size,
            )


def sweep(bytes_per_ms: float) -> None:
    """The quickest settings of each workload."""
    found: dict[str, list[tuple[float, str, float]]] = {}
    for workload, setting, f, floor in settings(bytes_per_ms):
        try:
            found.setdefault(workload, []).append((milliseconds(f, 5), setting, floor))
        except Exception as error:
            print(f"  {workload} {setting}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    for workload, times in found.items():
        print(f"\n{workload}, floor {times[0][2]:.3f} ms")
        for ms, setting, floor in sorted(times)[:6]:
            print(f"  {setting}  {ms:8.3f} ms  {100 * floor / ms:5.1f} % of floor")
        ROWS.extend({"sweep": workload, "setting": s, "ms": ms, "floor_ms": floor} for ms, s, floor in times)


WORKLOADS: dict[str, Callable[[float], None]] = {
    "cross-entropy": cross_entropies,
    "norm": norms,
    "gated": activations,
    "float8": float8_kernels,
    "optimizer": optimizers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time block sizes, warps and chunks instead")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=tuple(WORKLOADS), help="some of the workloads")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("these are kernels for a GPU, and there is none here")
    bytes_per_ms = bandwidth(Timer(torch.device("cuda"), 20, math.inf), 2**29) / 1e3
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies {bytes_per_ms / 1e9:.2f} TB/s")
    with dispatch.force_path("triton"):
        options()
        if given.sweep:
            sweep(bytes_per_ms)
        else:
            for workload in given.only:
                WORKLOADS[workload](bytes_per_ms)
    if given.out:
        given.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": ROWS}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Attention on a GPU: torch's SDPA backends, FlexAttention and phasor's kernel over key intervals, in TFLOP/s.

Checks first and times nothing if a result is wrong: every variant against float64 at an odd length, gradients
included, then at the length that is timed a sample of queries against float32.

    python benchmarks/attention.py [--lengths 4096,16384] [--flex 16384] [--head-dim 128] [--out FILE]
    python benchmarks/attention.py --sweep [--head-dim 128]     tilings of our kernels
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import phasor
from phasor.bench.checks import relative_error
from phasor.bench.timing import back_to_back_ms
from phasor.nn.positions.alibi.module import alibi_slopes
from phasor.nn.positions.t5.module import T5Bias
from phasor.ops import dispatch
from phasor.ops.attention import DistanceBias, Mask, ScoreMod, attention_ref, cudnn, flash

NUM_HEADS, NUM_KV_HEADS = 32, 8
TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 2e-5}  # relative to the norm; two roundings of 8 bits, or float32


class Case:
    """Queries, keys and values, with masks and score modifications by name."""

    def __init__(
        self,
        tokens: int,
        head_dim: int,
        num_heads: int = NUM_HEADS,
        num_kv_heads: int = NUM_KV_HEADS,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        shapes = [(1, tokens, n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads)]
        self.inputs = [torch.randn(s, device="cuda", dtype=dtype, generator=generator) for s in shapes]
        self.positions = torch.arange(tokens, device="cuda")[None]
        self.tokens, self.num_heads, self.head_dim = tokens, num_heads, head_dim
        config = phasor.T5PositionConfig(num_buckets=32, max_distance=128)
        self.t5 = T5Bias(config, num_heads=num_heads, bidirectional=False).to("cuda")
        torch.nn.init.normal_(self.t5.weight)
        self.slopes = torch.tensor(alibi_slopes(num_heads), device="cuda")
        self.sinks = torch.randn(num_heads, device="cuda", generator=generator).requires_grad_()

    def grad(self, wanted: bool = True) -> Case:
        for x in self.inputs:
            x.requires_grad_(wanted)
        return self

    def rule(self, name: str) -> tuple[Mask, ScoreMod]:
        score_mod = ScoreMod(scale=self.head_dim**-0.5, query_positions=self.positions, key_positions=self.positions)
        mask = Mask(causal=True)
        if name == "alibi":
            score_mod.bias = DistanceBias(slopes=self.slopes)
        elif name == "t5":
            score_mod.bias = self.t5.on_scores(None)
        elif name == "softcap and sink logits":
            score_mod.softcap, score_mod.sink_logits = 5.0, self.sinks
        elif name.startswith("window"):
            mask = replace(mask, window=int(name.split()[1]), sink_tokens=4 if "sinks" in name else 0)
        elif name == "padded":
            real = torch.ones_like(self.positions, dtype=torch.bool)
            real[:, : self.tokens // 3] = False
            mask = replace(mask, key_mask=real, order=real.cumsum(1) - real.long())
        elif name == "document_ids":
            ids = self.positions // 300
            mask = replace(mask, query_document_ids=ids, key_document_ids=ids)
        return mask, score_mod

    def ours(self, name: str) -> Tensor:
        mask, score_mod = self.rule(name)
        return flash.flash_attention(*self.inputs, mask, score_mod)

    def learned_inputs(self, name: str) -> list[Tensor]:
        extra = {"t5": [self.t5.weight], "softcap and sink logits": [self.sinks]}
        return [*self.inputs, *extra.get(name, [])]


def check(name: str, dtype: torch.dtype, head_dim: int) -> tuple[float, float]:
    """The relative errors of the output and of the worst gradient against float64, at 1,237 tokens."""
    case = Case(1237, head_dim, 4, 2, dtype).grad()
    exact = Case(1237, head_dim, 4, 2, dtype)
    exact.inputs = [x.detach().double() for x in case.inputs]
    exact.t5, exact.sinks = exact.t5.double(), case.sinks.detach().double().requires_grad_()
    exact.t5.weight.data.copy_(case.t5.weight.data)
    exact.slopes = exact.slopes.double()
    exact.grad()
    y, expected = case.ours(name), attention_ref(*exact.inputs, *exact.rule(name))[0]
    direction = torch.randn_like(expected)
    if name == "padded":
        direction[:, : 1237 // 3] = 0
        y, expected = y[:, 1237 // 3 :], expected[:, 1237 // 3 :]
        direction = direction[:, 1237 // 3 :]
    ours = torch.autograd.grad((y * direction.to(dtype)).sum(), case.learned_inputs(name))
    theirs = torch.autograd.grad((expected * direction).sum(), exact.learned_inputs(name))
    return relative_error([y], [expected]), max(relative_error([a], [b]) for a, b in zip(ours, theirs, strict=True))


def sample_error(case: Case, name: str, y: Tensor) -> float:
    """The relative error of sixteen queries of two heads, against float32 on the same inputs."""
    rows = torch.linspace(0, case.tokens - 1, 16, device="cuda").long()
    group_size = case.inputs[0].shape[2] // case.inputs[1].shape[2]
    heads = torch.tensor([0, case.num_heads - 1], device="cuda")
    q = case.inputs[0].detach()[0, rows][:, heads].double()
    k, v = (x.detach()[0][:, heads // group_size].double() for x in case.inputs[1:])
    mask, score_mod = case.rule(name)
    score = torch.einsum("qhd,khd->hqk", q, k) * score_mod.scale
    if score_mod.bias is not None:
        score += score_mod.bias(case.positions[:, rows], case.positions)[0, heads].detach()
    seen = mask.block(rows, case.positions[0])[0]
    score = score.masked_fill(~seen, float("-inf"))
    return relative_error([y.detach()[0, rows][:, heads]], [torch.einsum("hqk,khd->qhd", score.softmax(-1), v)])


def sdpa(case: Case, backend: SDPBackend) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in case.inputs)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def flex(case: Case, name: str) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - case.slopes[h] * (i - j).abs()

    table = case.t5.on_scores(None).table.detach().t().contiguous()
    last = table.shape[1] - 1

    def t5(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, (i - j).clamp(0, last)]

    block_mask = create_block_mask(causal, None, None, case.tokens, case.tokens, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    modify = {"causal": None, "alibi": alibi, "t5": t5}[name]

    def run() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in case.inputs)
        return compiled(q, k, v, score_mod=modify, block_mask=block_mask, enable_gqa=True).transpose(1, 2)

    return run


def forms(case: Case, with_flex: bool) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    """Who, what, and how to run it."""
    yield "SDPA flash", "causal", lambda: sdpa(case, SDPBackend.FLASH_ATTENTION)
    yield "SDPA cuDNN", "causal", lambda: sdpa(case, SDPBackend.CUDNN_ATTENTION)
    yield (
        "phasor cuDNN",
        "causal",
        lambda: cudnn.call_cudnn(*case.inputs, case.head_dim**-0.5, True, case.inputs[0].requires_grad),
    )
    for name in ("causal", "alibi", "t5", "window 1024"):
        yield "phasor", name, lambda name=name: case.ours(name)
    for name in ("causal", "alibi", "t5") if with_flex else ():
        yield "Flex", name, flex(case, name)


def seen_pairs(name: str, tokens: int) -> float:
    window = min(tokens, int(name.split()[1])) if name.startswith("window") else tokens
    return window * (window + 1) / 2 + (tokens - window) * window


def time_forms(case: Case, with_flex: bool) -> Iterator[dict[str, Any]]:
    """A row for every form; at last, ours beside those of plain attention."""
    rows: list[dict[str, Any]] = []
    for who, what, run in forms(case, with_flex):
        row: dict[str, Any] = {"who": who, "what": what, "tokens": case.tokens, "head_dim": case.head_dim}
        try:
            with torch.no_grad():
                off = sample_error(case.grad(False), what, run())
                row["error"] = off
                if off > TOLERANCE[torch.bfloat16]:
                    raise ValueError(f"wrong by {off:.1e}")
                row["forward_ms"] = back_to_back_ms(run)
            flops = 4 * seen_pairs(what, case.tokens) * case.head_dim * case.num_heads
            row["forward_tflops"] = flops / row["forward_ms"] / 1e9
            if who != "Flex":  # whose backward passes take minutes to compile
                case.grad()
                direction = torch.randn_like(case.inputs[0])
                learned = case.learned_inputs(what) if who == "phasor" else case.inputs
                row["both_ms"] = back_to_back_ms(lambda: torch.autograd.grad(run(), learned, direction))  # noqa: B023
                row["both_tflops"] = 3.5 * flops / row["both_ms"] / 1e9
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
        rows.append(row)
        print(format_row(row), flush=True)
        yield row
        torch.cuda.empty_cache()
    plain = {r["who"]: r["forward_ms"] for r in rows if r["what"] == "causal" and "forward_ms" in r}
    for row in rows:
        if row["who"] == "phasor" and "forward_ms" in row and plain:
            row["forward_over"] = {who: row["forward_ms"] / ms for who, ms in plain.items() if who != "phasor"}
            ratios = ", ".join(f"{x:.2f} x {who}" for who, x in row["forward_over"].items())
            print(f"  {row['what']:12} forward: {ratios}")


def format_row(row: dict[str, Any]) -> str:
    head = f"{row['tokens']:7} d{row['head_dim']:<4}{row['who']:13} {row['what']:12}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    both = f"both {row['both_ms']:8.3f} ms {row['both_tflops']:4.0f} TFLOP/s   " if "both_ms" in row else ""
    forward = f"{row['forward_ms']:8.3f} ms {row['forward_tflops']:4.0f} TFLOP/s"
    return f"{head} forward {forward}   {both}error {row['error']:.0e}"


FORWARD = "128 64 8 3, 128 64 8 2, 128 64 8 4, 128 128 8 2, 128 128 8 3, 64 64 4 3, 128 64 4 3, 128 128 4 3, 128 32 4 3"
DQ = "128 64 8 3, 128 64 8 2, 128 32 8 3, 64 64 4 2, 64 64 8 3, 64 128 8 2, 128 32 4 3, 128 128 8 2"
DKDV = "64 128 8 2, 64 128 8 3, 64 64 4 2, 64 64 8 2, 32 128 8 3, 32 128 4 3, 64 128 4 2, 128 64 8 2, 128 128 8 2"
CANDIDATES = {
    kernel: [tuple(int(x) for x in tiling.split()) for tiling in tilings.split(",")]
    for kernel, tilings in (("forward", FORWARD), ("dq", DQ), ("dkdv", DKDV))
}


def sweep(head_dim: int, tokens: int, name: str) -> dict[str, Any]:
    """The time of every kernel by itself under each tiling; a tiling that fails says so in a line."""
    from phasor.ops.attention import flash_launch, flash_tiles
    from phasor.ops.attention.intervals import intervals, query_ranges, shifts

    case = Case(tokens, head_dim)
    mask, score_mod = case.rule(name)
    bias = score_mod.bias
    positions = (None, None) if bias is None else (case.positions, case.positions)
    slopes, table = (None, None) if bias is None else (bias.slopes, bias.table)
    bounds = intervals(mask, tokens, tokens, torch.device("cuda"))
    shift = None if table is None else shifts(mask, case.positions, case.positions)
    table = None if table is None else table.detach()
    args = flash_launch.kernel_args(
        *case.inputs, bounds, None, *positions, shift, slopes, table, 0, score_mod.scale, 0.0
    )
    out, lse = flash_launch.forward(None, None, None, args)
    grad = torch.randn_like(out)
    extra = {
        "do_ptr": grad,
        "lse_ptr": lse,
        "delta_ptr": torch.zeros_like(lse),
        **flash_launch.token_strides(flash_launch.GRAD_STRIDES, grad),
    }
    dq, dk, dv = (torch.empty_like(x) for x in case.inputs)

    def launch(kernel: str, t: tuple[int, ...], warm: bool) -> None:
        tile = {"BLOCK_M": t[0], "BLOCK_N": t[1], "num_warps": t[2], "num_stages": t[3]}
        blocks = -(-tokens // t[0])
        if kernel == "forward":
            jit, grid = flash_launch.forward_kernel, blocks * NUM_HEADS
            rest: dict[str, Any] = {"out_ptr": out, "lse_ptr": lse, "sink_logits_ptr": None, "HAS_SINKS": False}
            rest |= {"sink_q_ptr": None, "sink_pos_ptr": None, "stride_sinkposb": 0, "HAS_SINK_QUERIES": False}
        elif kernel == "dq":
            jit, grid = flash_launch.dq_kernel, blocks * NUM_HEADS
            dtable = torch.zeros(NUM_HEADS * blocks, 0 if table is None else args["num_distances"], device="cuda")
            rest = {**extra, "dq_ptr": dq, "dtable_ptr": dtable, "HAS_TABLE_GRAD": table is not None}
        else:
            jit, grid = flash_launch.dkdv_kernel, -(-tokens // t[1]) * NUM_KV_HEADS
            ranges = query_ranges(bounds, tokens, t[1])
            rest = {**extra, "dk_ptr": dk, "dv_ptr": dv, "ranges_ptr": ranges, "stride_rangesb": 0}
        run = (lambda **a: jit.warmup(grid=(grid,), **a)) if warm else jit[(grid,)]
        run(**args, **rest, **tile)

    jobs = [(kernel, t) for kernel, tilings in CANDIDATES.items() for t in tilings]
    with ThreadPoolExecutor(12) as pool:  # compiles ahead; what fails will fail again, and be reported
        list(pool.map(lambda job: quietly(launch, *job, True), jobs))
    found: dict[str, Any] = {}
    for kernel, t in jobs:
        try:
            found[f"{kernel} {t}"] = back_to_back_ms(lambda: launch(kernel, t, False), 0.1)  # noqa: B023
        except Exception as error:
            print(f"{kernel:8} {t}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
    default = {k: tuple(flash_tiles.tiling(k, case.inputs[0])) for k in CANDIDATES}
    for kernel in CANDIDATES:
        own = sorted((ms, key) for key, ms in found.items() if key.startswith(kernel))
        for ms, key in own:
            print(
                f"d{head_dim} {tokens} {name:7} {key:26} {ms:8.3f} ms {'<- now' if str(default[kernel]) in key else ''}"
            )
    return {"head_dim": head_dim, "tokens": tokens, "what": name, "ms": found}


def quietly(run: Callable[..., None], *about: Any) -> None:
    try:
        run(*about)
    except Exception:
        return


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--lengths", default="4096,16384,32768,131072")
    options.add_argument("--flex", default="16384", help="lengths at which to compile FlexAttention; it takes a while")
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--sweep", action="store_true")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    order = torch._C._get_sdp_priority_order()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(f"torch asks its backends in the order {[SDPBackend(x).name for x in order if x >= 0]}")
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": []}
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    result["matmul_tflops"] = 2 * 8192**3 / back_to_back_ms(lambda: a @ b) / 1e9
    print(f"a matrix product of 8192 x 8192 x 8192 runs at {result['matmul_tflops']:.0f} TFLOP/s")
    wrong = []
    kinds = ("causal", "t5") if given.sweep else ("causal", "alibi", "t5", "window 100 sinks", "padded", "document_ids")
    kinds += () if given.sweep else ("softcap and sink logits",)
    for name in kinds:
        for dtype in (torch.bfloat16,) if given.sweep else (torch.bfloat16, torch.float32):
            try:
                errors = check(name, dtype, given.head_dim if dtype == torch.bfloat16 else 32)
                good = errors[0] < TOLERANCE[dtype] and errors[1] < 2 * TOLERANCE[dtype]
                said = f"output off by {errors[0]:.1e}, gradients by {errors[1]:.1e}"
            except Exception as error:
                good, said = False, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            print(f"{name:24} {str(dtype)[6:]:9} {said} {'' if good else '<- WRONG'}", flush=True)
            result["checks"].append({"what": name, "dtype": str(dtype)[6:], "said": said, "good": good})
            wrong += [] if good else [name]
    if wrong:
        raise SystemExit(f"nothing is timed: {wrong}")
    if given.sweep:
        result["sweep"] = [sweep(given.head_dim, 8192, name) for name in ("causal", "t5")]
    else:
        flexed = {int(x) for x in given.flex.split(",") if x}
        lengths = [int(x) for x in given.lengths.split(",")]
        result["rows"] = []
        for n in lengths:
            for row in time_forms(Case(n, given.head_dim), n in flexed):
                result["rows"].append(row)
                write(result, given.out)
    write(result, given.out)


def write(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    assert dispatch.forced_path() is None
    main()

"""Tilings, warps and chunk sizes of the kernels for training, timed on a GPU.

python benchmarks/tuning/kernels.py [attention sparse rotary cross-entropy norm glu]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import torch
from sweep import DEVICE, TIMER, copy_speed, drawn, rank

from phasor import Rotary
from phasor.bench.attention import forward_backward
from phasor.bench.studies.attention_kernels import VariantInputs
from phasor.bench.studies.rotary_kernels import rope_args
from phasor.bench.studies.sparse import SparseInputs, patterns
from phasor.bench.study import first_line
from phasor.ops.attention import flash_launch, flash_tiles
from phasor.ops.attention.flash_args import FlashArgs
from phasor.ops.attention.flash_tiles import Tiling
from phasor.ops.attention.intervals import intervals, query_ranges, shifts
from phasor.ops.cross_entropy import kernels as cross_entropy_kernels
from phasor.ops.cross_entropy.cross_entropy import CrossEntropyOptions, linear_cross_entropy_op
from phasor.ops.glu import kernels as glu_kernels
from phasor.ops.norm import kernels as norm_kernels
from phasor.ops.rope import split_qkv
from phasor.ops.rope.kernels import Schedule, launch_rope
from phasor.ops.sparse_attention import list_launch, tile_lists

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TOKENS, DIM, HIDDEN = 16384, 2048, 8192
TILINGS = {
    "forward": "128 64 8 3, 128 64 8 2, 128 64 8 4, 128 128 8 2, 128 128 8 3, 64 64 4 3, 128 64 4 3, 128 128 4 3, "
    "128 32 4 3",
    "dq": "128 64 8 3, 128 64 8 2, 128 32 8 3, 64 64 4 2, 64 64 8 3, 64 128 8 2, 128 32 4 3, 128 128 8 2",
    "dkdv": "64 128 8 2, 64 128 8 3, 64 64 4 2, 64 64 8 2, 32 128 8 3, 32 128 4 3, 64 128 4 2, 128 64 8 2, 128 128 8 2",
}
SPARSE_TILINGS = [(64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 4, 2), (128, 128, 8, 2), (64, 64, 4, 2)]


class FlashLaunch:
    """The three kernels of attention over key intervals, each launched by itself with a tiling."""

    def __init__(self, tokens: int, name: str) -> None:
        case = VariantInputs(DEVICE, tokens, HEAD_DIM, HEADS, KV_HEADS, torch.bfloat16)
        mask, score_mod = case.rule(name)
        bias: Any = score_mod.bias
        positions = (None, None) if bias is None else (case.positions, case.positions)
        slopes, table = (None, None) if bias is None else (bias.slopes, bias.table)
        table = None if table is None else table.detach()
        self.tokens, self.q = tokens, case.inputs[0]
        self.bounds = intervals(mask, tokens, tokens, DEVICE)
        shift = None if table is None else shifts(mask, case.positions, case.positions)
        args = FlashArgs(
            *case.inputs, bounds=self.bounds, ranges=None, key_mask=None, query_positions=positions[0],
            key_positions=positions[1], shifts=shift, slopes=slopes, rates=None, powers=None, table=table,
            sink_logits=None, sink_queries=None, sink_positions=None, min_distance=0, scale=score_mod.scale,
            softcap=0.0,
        )  # fmt: skip
        self.out, self.lse = flash_launch.forward(args)
        self.args = flash_launch.for_kernels(args)
        self.layout, self.grad = flash_launch.flash_layout(self.args), torch.randn_like(self.out)
        self.qkv = {"q_ptr": self.args.q, "k_ptr": self.args.k, "v_ptr": self.args.v}
        self.extra = {"do_ptr": self.grad, "lse_ptr": self.lse, "delta_ptr": torch.zeros_like(self.lse)}
        self.dq, self.dk, self.dv = (torch.empty_like(x) for x in case.inputs)

    def launch(self, kernel: str, tiling: tuple[int, ...], warm: bool = False) -> None:
        tiles, layout, strides = Tiling(*tiling), self.layout, self.grad.stride()
        tensors: dict[str, Any] = {**self.qkv, **flash_launch.mask_and_bias(self.args)}
        if kernel == "forward":
            jit = flash_launch.forward_kernel
            grid, scalars = flash_launch.prepare_forward(layout, tiles, 0, False, False)
            tensors |= {"out_ptr": self.out, "lse_ptr": self.lse}
            tensors |= {"sink_logits_ptr": None, "sink_q_ptr": None, "sink_pos_ptr": None}
        elif kernel == "dq":
            jit, has_table = flash_launch.dq_kernel, self.args.table is not None
            grid, scalars = flash_launch.prepare_dq(layout, tiles, strides, has_table, False)
            dtable = torch.zeros(*grid, layout.num_distances, device=DEVICE)
            tensors |= {**self.extra, "dq_ptr": self.dq, "dtable_ptr": dtable, "dcurve_ptr": dtable}
        else:
            jit, ranges = flash_launch.dkdv_kernel, query_ranges(self.bounds, self.tokens, tiles.block_n)
            grid, scalars = flash_launch.prepare_dkdv(layout, tiles, strides, 0)
            tensors |= {**self.extra, "dk_ptr": self.dk, "dv_ptr": self.dv, "ranges_ptr": ranges}
        run = (lambda **a: jit.warmup(grid=grid, **a)) if warm else jit[grid]
        run(**tensors, **scalars)

    def compile(self, kernel: str, tiling: tuple[int, ...]) -> None:
        try:
            self.launch(kernel, tiling, warm=True)
        except Exception as error:
            print(f"  {kernel} {tiling}: {first_line(error, 120)}")


def sweep_attention() -> None:
    for name in ("causal", "t5"):
        flash = FlashLaunch(8192, name)
        tilings = {k: [tuple(map(int, t.split())) for t in text.split(",")] for k, text in TILINGS.items()}
        with ThreadPoolExecutor(12) as pool:
            jobs = [(kernel, tiling) for kernel, each in tilings.items() for tiling in each]
            list(pool.map(flash.compile, *zip(*jobs, strict=True)))
        for kernel, each in tilings.items():
            candidates = {tiling: partial(flash.launch, kernel, tiling) for tiling in each}
            used = tuple(flash_tiles.tiling(kernel, flash.q))
            rank(f"attention, {name}, {kernel}", candidates, partial(TIMER.back_to_back_ms, seconds=0.1), in_use=used)


def sweep_sparse() -> None:
    """Forward and backward of the kernel over lists of key blocks, the same tiling for all of its kernels."""
    case = SparseInputs(DEVICE, 131072, HEAD_DIM, HEADS, KV_HEADS, torch.bfloat16)
    own = list_launch.tiling

    def measure_with(tiling: tuple[int, ...], call: Callable[[], Any]) -> float:
        list_launch.tiling = lambda kernel, q: Tiling(*tiling)
        tile_lists.key_block_lists.cache_clear()
        try:
            return TIMER.back_to_back_ms(call)
        finally:
            list_launch.tiling = own

    for name, pattern in list(patterns(case.tokens, 8).items())[:2]:
        attend = partial(case.sparse, pattern)
        for grad in (False, True):
            case.grad(grad)
            call = forward_backward(attend, case.inputs) if grad else attend
            candidates = {tiling: partial(measure_with, tiling, call) for tiling in SPARSE_TILINGS}
            rank(f"sparse, {name}{', both' if grad else ''}", candidates, lambda measured: measured())
    case.grad(False)


def sweep_rotary() -> None:
    """Programs per token and warps, for large and small sizes."""
    large = [(4, 8192, form, HEAD_DIM) for form in ("half", "adjacent", "projection", "joined")]
    large += [(4, 8192, form, HEAD_DIM // 4) for form in ("half", "adjacent")]
    small = [(rows, count, "half", HEAD_DIM) for rows, count in ((1, 1), (16, 1), (64, 1), (256, 1), (2, 512))]
    for rows, count, form, rotary_dim in large + small:
        rope = Rotary(head_dim=HEAD_DIM, rotary_dim=rotary_dim)
        args = rope_args(rope, torch.arange(count, device=DEVICE))
        fused = drawn(rows, count, KV_HEADS, HEADS // KV_HEADS + 2, HEAD_DIM)
        parts = split_qkv(fused)
        into = tuple(torch.empty(x.shape, dtype=x.dtype, device=DEVICE) for x in parts)
        if form in ("half", "adjacent"):
            heads = drawn(rows, count, HEADS, HEAD_DIM)
            source, target = (heads, into[1]), (torch.empty_like(heads), torch.empty_like(into[1]))
        else:
            source, target = (parts, into) if form == "projection" else (into, parts)
        is_large = rows * count > 1024
        how: dict[str, Any] = {"repeats": 15} if is_large else {"calls": 50, "cold": False, "repeats": 10}
        options = {"adjacent": form == "adjacent", "inverse": form == "joined"}
        candidates = {
            f"{each} programs per token, {warps} warps": partial(
                launch_rope, source, target, *args, **options, schedule=Schedule(each, warps)
            )
            for each, warps in product((1, 2) if is_large else (1, 2, 4, 8), (1, 2, 4, 8) if is_large else (1, 2, 4))
        }
        copied = drawn(sum(x.numel() for x in source))
        limit = TIMER.graph_ms(partial(torch.empty_like(copied).copy_, copied), **how)
        title = f"{form}, {rotary_dim} of {HEAD_DIM} rotated, {rows} x {count} tokens"
        rank(title, candidates, partial(TIMER.graph_ms, **how), limit=limit)


def milliseconds(call: Callable[[], Any]) -> float:
    return 1e3 * TIMER(call)


def sweep_cross_entropy() -> None:
    bytes_per_ms = copy_speed() / 1e3
    for vocabulary, count in ((32000, 4096), (128256, 2048)):
        logits, targets = drawn(count, vocabulary), torch.zeros(count, dtype=torch.int64, device=DEVICE)
        rest = (targets, torch.ones(count, device=DEVICE), 0.0, 0.0, 1.0, None, True)
        candidates = {
            f"block_v={block}, num_warps={warps}": partial(
                cross_entropy_kernels.cross_entropy, logits, *rest, block_v=block, num_warps=warps
            )
            for block, warps in product((4096, 8192, 16384, 32768), (8, 16, 32))
            if block <= 2048 * warps  # more would not fit into registers
        }
        limit = 2 * logits.nbytes / bytes_per_ms
        rank(f"cross-entropy {count} x {vocabulary}", candidates, milliseconds, limit=limit)
        h, w = drawn(TOKENS, DIM), drawn(vocabulary, DIM, scale=0.05)
        rows = torch.zeros(TOKENS, dtype=torch.int64, device=DEVICE), torch.ones(TOKENS, device=DEVICE)
        options = (0.0, 0.0, 1.0, None, torch.bfloat16, [True, True, False])
        candidates = {
            f"chunk_size={size}": partial(
                linear_cross_entropy_op, h, w, None, *rows, CrossEntropyOptions(*options, size, True)
            )
            for size in (1024, 2048, 4096, 8192)
        }
        rank(f"linear cross-entropy {TOKENS} x {DIM} x {vocabulary}", candidates, milliseconds)


def sweep_norm() -> None:
    x, r, weight, dy = drawn(TOKENS, DIM), drawn(TOKENS, DIM), drawn(DIM), drawn(TOKENS, DIM)
    s, _, stats = norm_kernels.norm_forward(x, r, weight, None, 1e-5, 0.0, False, x.dtype)
    limit = 4 * x.nbytes / (copy_speed() / 1e3)
    forward = {
        f"warps={warps}": partial(norm_kernels.norm_forward, x, r, weight, None, 1e-5, 0.0, False, x.dtype, warps)
        for warps in (2, 4, 8, 16)
    }
    rank("sum and norm, forward", forward, milliseconds, limit=limit)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    args = (dy, dy, s, weight, None, stats, 0.0, False, weight.dtype)
    backward = {
        f"warps={warps}, programs={factor} x multiprocessors": partial(
            norm_kernels.norm_backward, *args, warps, factor * multiprocessors
        )
        for warps, factor in product((2, 4, 8, 16), (1, 2, 4, 8, 16))
    }
    rank("sum and norm, backward", backward, milliseconds, limit=limit)


def sweep_glu() -> None:
    both, grad = drawn(TOKENS, 2 * HIDDEN), drawn(TOKENS, HIDDEN)
    size, settings = grad.nbytes / (copy_speed() / 1e3), list(product((1024, 2048, 4096), (4, 8)))
    forward = {f"block={b}, warps={w}": partial(glu_kernels.glu_forward, both, "swiglu", b, w) for b, w in settings}
    rank("swiglu, forward", forward, milliseconds, limit=3 * size)
    backward = {
        f"block={b}, warps={w}": partial(glu_kernels.glu_backward, grad, both, "swiglu", b, w) for b, w in settings
    }
    rank("swiglu, backward", backward, milliseconds, limit=5 * size)


SWEEPS = {
    "attention": sweep_attention,
    "sparse": sweep_sparse,
    "rotary": sweep_rotary,
    "cross-entropy": sweep_cross_entropy,
    "norm": sweep_norm,
    "glu": sweep_glu,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=", ".join(SWEEPS))
    for name in parser.parse_args().sweeps or SWEEPS:
        SWEEPS[name]()

"""Sparse attention beside full attention: cuDNN over all keys, phasor's patterns, and FlexAttention with the same mask.

Checks first and times nothing if a result is wrong: every pattern against float64 at an odd length, gradients included,
then at every length that is timed a sample of queries. One eighth of what full causal attention computes, by default.

    python benchmarks/sparse.py [--lengths 16384,131072] [--flex 16384] [--share 8] [--out FILE]
    python benchmarks/sparse.py --sweep                    tilings of the kernel over lists of key blocks
    python benchmarks/sparse.py --device cpu --lengths 256 --heads 4,2 --head-dim 16      a trial without a GPU
    TRITON_INTERPRET=1 python benchmarks/sparse.py --device cpu --lengths 64 ...          the same with the kernels
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.bench.checks import relative_error
from phasor.bench.timing import back_to_back_ms
from phasor.ops import dispatch
from phasor.ops.attention import Mask, ScoreMod, cudnn
from phasor.ops.sparse_attention import (
    SPARSE_ATTENTION,
    Dilated,
    KeyBlocks,
    Pattern,
    TopBlocks,
    sparse_attention,
    sparse_attention_ref,
)
from phasor.ops.sparse_attention.selection import mean_keys, select_blocks

TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 2e-5}  # relative to the norm; two roundings of 8 bits, or float32
CHECKED = 1237  # tokens of the checks against float64
FIXED_KEYS = 8192  # of the patterns whose work grows with the tokens alone
MAX_BACKWARD = 1 << 17  # tokens up to which gradients are timed
GPU = torch.cuda.is_available()


class Case:
    """Queries, keys and values of one row, and the patterns that are timed on them."""

    def __init__(self, tokens: int, device: str, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.inputs = [
            torch.randn(1, tokens, h, head_dim, device=device, dtype=dtype, generator=generator)
            for h in (heads[0], heads[1], heads[1])
        ]
        self.tokens, self.heads, self.head_dim, self.device = tokens, heads, head_dim, device
        self.score_mod = ScoreMod(scale=head_dim**-0.5)

    def grad(self, wanted: bool) -> Case:
        for x in self.inputs:
            x.requires_grad_(wanted)
        return self

    def patterns(self, share: int, fixed_only: bool = False) -> dict[str, Pattern]:
        """Patterns of a fixed number of keys, and before them those of one in `share` of full attention's pairs."""
        tokens = self.tokens
        block = max(16, 1 << max(0, (tokens // (16 * share)).bit_length() - 1))  # so that 8 of them are the share
        fixed = min(FIXED_KEYS, max(16, tokens // share))
        of_share: dict[str, Pattern] = {
            f"top-k, 1/{share}": TopBlocks(block, 8),
            f"strided, 1/{share}": KeyBlocks(128 if tokens >= 4096 else 16, 1, share),
            f"dilated, 1/{share}": Dilated(share),
            f"chunked, 1/{share}": Dilated(segment=max(1, tokens // share)),
        }
        of_keys: dict[str, Pattern] = {
            f"top-k, {fixed} keys": TopBlocks(max(16, fixed // 16), 16),
            f"chunked, {fixed} keys": Dilated(segment=fixed),
        }
        return of_keys if fixed_only else of_share | of_keys

    def sparse(self, pattern: Pattern) -> Tensor:
        return sparse_attention(*self.inputs, Mask(causal=True, pattern=pattern), self.score_mod)

    def full(self) -> Tensor:
        q, k, v = self.inputs
        if self.device == "cuda":
            return cudnn.call_cudnn(q, k, v, self.score_mod.scale, True, q.requires_grad)
        q, k, v = (x.transpose(1, 2) for x in self.inputs)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def visible_pairs(pattern: Pattern | None, tokens: int) -> float:
    """How many pairs of a query and a key a head computes."""
    if isinstance(pattern, TopBlocks):
        block, index = pattern.block, torch.arange(tokens)
        whole = (index // block).clamp(max=pattern.top_k - 1)
        return float((whole * block + index % block + 1).sum())
    if isinstance(pattern, Dilated):
        segment, r = pattern.segment or tokens, pattern.dilation
        index = torch.arange(tokens) % segment
        return float((index // r + 1).sum())
    if isinstance(pattern, KeyBlocks):
        own, number = torch.arange(-(-tokens // pattern.block)), torch.arange(-(-tokens // pattern.block))
        blocks = sum(
            int((pattern.visible_blocks(part[:, None], number) & (number < part[:, None])).sum())
            for part in own.split(1024)
        )
        return float(blocks * pattern.block**2 + tokens * (pattern.block + 1) / 2)
    return tokens * (tokens + 1) / 2


def check(pattern: Pattern, device: str, dtype: torch.dtype, tokens: int) -> tuple[float, float]:
    """The relative errors of the output and of the worst gradient against float64."""
    case = Case(tokens, device, (4, 2), 64 if device == "cuda" else 16, dtype).grad(True)
    exact = [x.detach().double().requires_grad_() for x in case.inputs]
    mask = Mask(causal=True, pattern=pattern)
    y, expected = case.sparse(pattern), sparse_attention_ref(*exact, mask, case.score_mod)[0]
    direction = torch.randn_like(expected)
    ours = torch.autograd.grad(y, case.inputs, direction.to(dtype))
    theirs = torch.autograd.grad(expected, exact, direction)
    return relative_error([y], [expected]), max(relative_error([a], [b]) for a, b in zip(ours, theirs, strict=True))


def sample_error(case: Case, pattern: Pattern, y: Tensor) -> float:
    """The relative error of sixteen queries of two heads, against float64 on the same inputs."""
    rows = torch.linspace(0, case.tokens - 1, 16, device=case.device).long()
    index = torch.arange(case.tokens, device=case.device)
    heads = torch.tensor([0, case.heads[0] - 1], device=case.device)
    q = case.inputs[0].detach()[0, rows][:, heads].double()
    k, v = (x.detach()[0][:, heads // (case.heads[0] // case.heads[1])].double() for x in case.inputs[1:])
    seen = Mask(causal=True, pattern=pattern).block(rows, index)
    assert seen is not None
    if isinstance(pattern, TopBlocks):
        own = rows[None] // pattern.block
        chosen = select_blocks(q[None], mean_keys(k[None], pattern.block), own, own * 0, pattern.top_k)[0]
        seen = seen & (index // pattern.block == chosen[..., None]).any(2)
    score = torch.einsum("qhd,khd->hqk", q, k) * case.score_mod.scale
    weights = score.masked_fill(~seen, float("-inf")).softmax(-1)
    return relative_error([y.detach()[0, rows][:, heads]], [torch.einsum("hqk,khd->qhd", weights, v)])


def flex(case: Case, pattern: Pattern) -> Callable[[], Tensor]:
    """FlexAttention with the mask of a pattern; blocks of highest score are given to it as chosen."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    on_gpu, head_count = case.device == "cuda", None
    if isinstance(pattern, TopBlocks):
        q, k, _ = (x.detach() for x in case.inputs)
        own = torch.arange(case.tokens, device=case.device)[None] // pattern.block
        chosen = select_blocks(q, mean_keys(k, pattern.block), own, own * 0, pattern.top_k)[0]
        last = -(-case.tokens // pattern.block)
        table = torch.zeros(*chosen.shape[:2], last + 1, dtype=torch.bool, device=case.device)
        table.scatter_(-1, torch.where(chosen < 0, last, chosen), True)
        head_count, block = case.heads[0], pattern.block

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return table[h, i, j // block] & (j <= i)
    else:

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            shown = pattern.visible(i, j)
            return j <= i if shown is None else shown & (j <= i)

    # Compiled it needs no memory for the mask, and takes minutes to compile.
    compiled = on_gpu and case.tokens > 1 << 14
    block_mask = create_block_mask(
        visible, None, head_count, case.tokens, case.tokens, device=case.device, _compile=compiled
    )
    run = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention
    q, k, v = (x.detach().transpose(1, 2) for x in case.inputs)
    return lambda: run(q, k, v, block_mask=block_mask, enable_gqa=True).transpose(1, 2)


def milliseconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        return back_to_back_ms(call)
    begun = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begun)


def time_case(case: Case, share: int, with_full: bool, with_flex: bool) -> list[dict[str, Any]]:
    """A row for full attention and for every pattern; a failure is a row that says so."""
    rows: list[dict[str, Any]] = []
    forms: list[tuple[str, str, Pattern | None, Callable[[], Callable[[], Tensor]]]] = []
    if with_full:
        forms.append(("cuDNN" if case.device == "cuda" else "SDPA", "full", None, lambda: case.full))
    for name, pattern in case.patterns(share, fixed_only=not with_full).items():
        forms.append(("phasor", name, pattern, lambda p=pattern: lambda: case.sparse(p)))
        if with_flex:
            forms.append(("Flex", name, pattern, lambda p=pattern: flex(case, p)))
    full: dict[str, float] = {}
    for who, name, pattern, make in forms:
        pairs = visible_pairs(pattern, case.tokens)
        row: dict[str, Any] = {"who": who, "what": name, "tokens": case.tokens}
        row["share"] = pairs / visible_pairs(None, case.tokens)
        try:
            with torch.no_grad():
                run = make()
                y = run()
                if pattern is not None:
                    row["error"] = sample_error(case, pattern, y)
                    if row["error"] > TOLERANCE[y.dtype]:
                        raise ValueError(f"wrong by {row['error']:.1e}")
                del y
                row["forward_ms"] = milliseconds(run, case.device)
            row["forward_tflops"] = 4 * pairs * case.head_dim * case.heads[0] / row["forward_ms"] / 1e9
            if who == "phasor" and pattern is not None:
                mask = Mask(causal=True, pattern=pattern)
                row["path"] = SPARSE_ATTENTION.explain(*case.inputs, mask, case.score_mod)[0]
            if who != "Flex" and case.tokens <= MAX_BACKWARD:
                case.grad(True)
                direction = torch.randn_like(case.inputs[0])
                both = lambda: torch.autograd.grad(run(), case.inputs, direction)  # noqa: E731, B023
                row["both_ms"] = milliseconds(both, case.device)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
        case.grad(False)
        if pattern is None:
            full = {key: row[key] for key in ("forward_ms", "both_ms") if key in row}
        row["times_full"] = {key: ms / row[key] for key, ms in full.items() if key in row}
        rows.append(row)
        print(format_row(row), flush=True)
        if case.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def format_row(row: dict[str, Any]) -> str:
    head = f"{row['tokens']:8} {row['who']:7}{row['what']:20}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    times, best = row["times_full"], 1 / row["share"]
    fast = f" {times['forward_ms']:5.2f} x full (the limit is {best:.2f})" if "forward_ms" in times else ""
    both = f"   both {row['both_ms']:9.3f} ms" if "both_ms" in row else ""
    both += f" {times['both_ms']:5.2f} x full" if "both_ms" in times and "both_ms" in row else ""
    return f"{head} forward {row['forward_ms']:9.3f} ms {row['forward_tflops']:4.0f} TFLOP/s{fast}{both}"


def time_parts(case: Case, share: int) -> dict[str, float]:
    """Milliseconds of the parts of top-k: mean keys and choice, lists, attention with the merge of slots."""
    from phasor.ops.sparse_attention import block_lists, list_launch, tile_lists

    pattern = next(iter(case.patterns(share).values()))
    assert isinstance(pattern, TopBlocks)
    q, k, v = case.inputs
    heads = block_lists.heads_at_a_time(q, k, pattern.top_k)
    q, k, v = q[:, :, : heads * case.heads[0] // case.heads[1]], k[:, :, :heads], v[:, :, :heads]
    block, count = pattern.block, -(-case.tokens // pattern.block)
    chosen = list_launch.choose_blocks(q, mean_keys(k, block), block, pattern.top_k, 0)
    lists = tile_lists.selected_block_lists(chosen, count, list_launch.tile_queries(q))
    args = list_launch.ListArgs(lists, block, pattern.top_k, 0, True, case.score_mod.scale)
    calls: dict[str, Callable[[], object]] = {
        "mean keys": lambda: mean_keys(k, block),
        "choice": lambda: list_launch.choose_blocks(q, mean_keys(k, block), block, pattern.top_k, 0),
        "lists": lambda: tile_lists.selected_block_lists(chosen, count, list_launch.tile_queries(q)),
        "attention and merge": lambda: list_launch.forward(q, k, v, args),
    }
    parts = {name: milliseconds(call, case.device) * case.heads[1] / heads for name, call in calls.items()}
    print(f"{case.tokens:8} top-k in parts, ms: {', '.join(f'{name} {ms:.3f}' for name, ms in parts.items())}")
    return parts


TILINGS = [(64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 4, 2), (128, 128, 8, 2), (64, 64, 4, 2)]


def sweep(case: Case, share: int) -> list[dict[str, Any]]:
    """Forward and backward of the kernel under each tiling, the same for all of its kernels."""
    from phasor.ops.attention.flash_tiles import Tiling
    from phasor.ops.sparse_attention import list_launch, tile_lists

    found, own = [], list_launch.tiling
    for tiling in TILINGS:
        list_launch.tiling = lambda kernel, q, chosen=tiling: Tiling(*chosen)
        tile_lists.key_block_lists.cache_clear()
        for name, pattern in list(case.patterns(share).items())[:2]:
            row: dict[str, Any] = {"tiling": tiling, "what": name, "tokens": case.tokens}
            try:
                with torch.no_grad():
                    row["forward_ms"] = milliseconds(lambda: case.sparse(pattern), case.device)  # noqa: B023
                case.grad(True)
                direction = torch.randn_like(case.inputs[0])
                both = lambda: torch.autograd.grad(case.sparse(pattern), case.inputs, direction)  # noqa: E731, B023
                row["both_ms"] = milliseconds(both, case.device)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
            case.grad(False)
            found.append(row)
            print(row, flush=True)
    list_launch.tiling = own
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--lengths", default="16384,32768,65536,131072,262144,524288,1048576")
    options.add_argument("--flex", default="16384,131072", help="lengths at which to compile FlexAttention")
    options.add_argument("--full", type=int, default=262144, help="the longest for full attention and shares of it")
    options.add_argument("--share", type=int, default=8, help="one in so many pairs of full causal attention")
    options.add_argument("--heads", default="32,8", help="query heads and key heads")
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--sweep", action="store_true")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    if given.device == "cuda" and not GPU:
        raise SystemExit("this benchmark needs a GPU, or --device cpu for a trial")
    torch.backends.cuda.matmul.allow_tf32 = False
    interpreted = given.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    lengths, flexed = ([int(n) for n in text.split(",") if n] for text in (given.lengths, given.flex))
    query_heads, key_heads = (int(n) for n in given.heads.split(","))
    where = torch.cuda.get_device_name() if given.device == "cuda" else "the CPU"
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    result: dict[str, Any] = {"device": where, "torch": torch.__version__, "checks": [], "rows": []}
    checked = CHECKED if given.device == "cuda" else min(CHECKED, *lengths) - 3
    with dispatch.force_path("triton") if interpreted else nullcontext():
        wrong = []
        for name, pattern in Case(checked, "cpu", (1, 1), 1, dtype).patterns(given.share).items():
            for kind in (torch.bfloat16, torch.float32) if given.device == "cuda" else (torch.float32,):
                errors = check(pattern, given.device, kind, checked)
                good = errors[0] < TOLERANCE[kind] and errors[1] < 2 * TOLERANCE[kind]
                said = f"output off by {errors[0]:.1e}, gradients by {errors[1]:.1e}"
                print(f"{name:20} {str(kind)[6:]:9} {said} {'' if good else '<- WRONG'}", flush=True)
                result["checks"].append({"what": name, "dtype": str(kind)[6:], "said": said, "good": good})
                wrong += [] if good else [name]
        if wrong:
            raise SystemExit(f"nothing is timed: {wrong}")
        for n in lengths[-1:] if given.sweep else lengths:
            case = Case(n, given.device, (query_heads, key_heads), given.head_dim, dtype)
            if given.sweep:
                result["sweep"] = sweep(case, given.share)
            else:
                result["rows"] += time_case(case, given.share, n <= given.full, n in flexed)
                if given.device == "cuda" or interpreted:
                    result.setdefault("parts", {})[n] = time_parts(case, given.share)
            write(result, given.out)
    write(result, given.out)


def write(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

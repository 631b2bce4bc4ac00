"""Sparse attention beside full attention: cuDNN over all keys, phasor's patterns, and FlexAttention with the same mask.

Checks first and times nothing if a result is wrong: every pattern against float64 at an odd length, gradients included,
then at every length that is timed a sample of queries. By default patterns have one eighth of full attention's pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phasor.bench.attention import AttentionInputs, forward_backward, gradient_errors, sample_error
from phasor.bench.peers import flex_attention, sdpa
from phasor.bench.studies.attention_kernels import TOLERANCE, note_errors
from phasor.bench.study import Study, format_field
from phasor.config.schema import Config
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

FIXED_KEYS = 8192  # of the patterns whose work grows with the tokens alone
MAX_BACKWARD = 1 << 17  # tokens up to which gradients are timed


class SparseSettings(Config):
    """Lengths that are timed; those with FlexAttention; the longest for full attention; one in `share` of its pairs."""

    lengths: tuple[int, ...] = (16384, 32768, 65536, 131072, 262144, 524288, 1048576)
    flex: tuple[int, ...] = (16384, 131072)
    full: int = 262144
    share: int = 8
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    checked: int = 1237  # tokens of the checks against float64


GPU = SparseSettings()
CPU = SparseSettings(lengths=(256,), flex=(), heads=4, kv_heads=2, head_dim=16, checked=253)
TINY = CPU.replace(lengths=(64,), flex=(64,), checked=61)


class SparseInputs(AttentionInputs):
    """Queries, keys and values of one row, and attention to them by patterns."""

    @property
    def score_mod(self) -> ScoreMod:
        return ScoreMod(scale=self.head_dim**-0.5)

    def sparse(self, pattern: Pattern) -> Tensor:
        return sparse_attention(*self.inputs, Mask(causal=True, pattern=pattern), self.score_mod)

    def full(self) -> Tensor:
        q, k, v = self.inputs
        if self.device.type == "cuda":
            return cudnn.call_cudnn(q, k, v, self.score_mod.scale, True, q.requires_grad)
        return sdpa(q, k, v)

    def selected_blocks(self, pattern: TopBlocks, q: Tensor, k: Tensor, queries: Tensor) -> Tensor:
        """The blocks that queries choose, `[queries, heads, top_k]`."""
        own = queries[None] // pattern.block
        return select_blocks(q, mean_keys(k, pattern.block), own, own * 0, pattern.top_k)[0]

    def error(self, pattern: Pattern, y: Tensor) -> float:
        index = torch.arange(self.tokens, device=self.device)

        def visible(queries: Tensor, heads: Tensor) -> Tensor:
            seen = Mask(causal=True, pattern=pattern).block(queries, index)
            assert seen is not None
            if isinstance(pattern, TopBlocks):
                q, k = (x.detach().double() for x in self.inputs[:2])
                k = k[:, :, heads // (self.heads // self.kv_heads)]
                chosen = self.selected_blocks(pattern, q[:, queries][:, :, heads], k, queries)
                seen = seen & (index // pattern.block == chosen[..., None]).any(2)
            return seen

        return sample_error(y, self.inputs, visible)


def patterns(tokens: int, share: int, fixed_only: bool = False) -> dict[str, Pattern]:
    """Patterns of a fixed number of keys, and before them those of one in `share` of full attention's pairs."""
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
        number = torch.arange(-(-tokens // pattern.block))
        blocks = sum(
            int((pattern.visible_blocks(part[:, None], number) & (number < part[:, None])).sum())
            for part in number.split(1024)
        )
        return float(blocks * pattern.block**2 + tokens * (pattern.block + 1) / 2)
    return tokens * (tokens + 1) / 2


def run(study: Study) -> None:
    settings: SparseSettings = study.settings
    study.result |= {"checks": [], "rows": []}
    check(study)
    for tokens in settings.lengths:
        sizes = settings.head_dim, settings.heads, settings.kv_heads
        case = SparseInputs(study.device, tokens, *sizes, study.machine.dtype)
        time_patterns(study, case)
        if study.on_gpu:
            study.result.setdefault("parts", {})[tokens] = time_parts(study, case)
        study.save()


def check(study: Study) -> None:
    """Every pattern against float64, gradients included."""
    tokens = study.settings.checked
    for name, pattern in patterns(tokens, study.settings.share).items():
        for dtype in (torch.bfloat16, torch.float32) if study.on_gpu else (torch.float32,):
            case = SparseInputs(study.device, tokens, 64 if study.on_gpu else 16, 4, 2, dtype)
            case.grad()
            q, k, v = exact = [x.detach().double().requires_grad_() for x in case.inputs]
            expected = sparse_attention_ref(q, k, v, Mask(causal=True, pattern=pattern), case.score_mod)[0]
            note_errors(study, name, dtype, gradient_errors(case.sparse(pattern), case.inputs, expected, exact))


def flex(case: SparseInputs, pattern: Pattern) -> Callable[[], Tensor]:
    """FlexAttention with the mask of a pattern; blocks of highest score are given to it as chosen."""
    inputs, long = [x.detach() for x in case.inputs], case.tokens > 1 << 14
    if not isinstance(pattern, TopBlocks):

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            shown = pattern.visible(i, j)
            return j <= i if shown is None else shown & (j <= i)

        return flex_attention(inputs, visible, compile_mask=long)
    chosen = case.selected_blocks(pattern, inputs[0], inputs[1], torch.arange(case.tokens, device=case.device))
    last, block = -(-case.tokens // pattern.block), pattern.block
    table = torch.zeros(*chosen.shape[:2], last + 1, dtype=torch.bool, device=case.device)
    table.scatter_(-1, torch.where(chosen < 0, last, chosen), True)

    def chosen_blocks(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return table[h, i, j // block] & (j <= i)

    return flex_attention(inputs, chosen_blocks, mask_heads=case.heads, compile_mask=long)


def forms(
    study: Study, case: SparseInputs
) -> list[tuple[str, str, Pattern | None, Callable[[], Callable[[], Tensor]]]]:
    """Who, what, its pattern, and how to build the call."""
    settings: SparseSettings = study.settings
    with_full = case.tokens <= settings.full
    found: list[Any] = []
    if with_full:
        found.append(("cuDNN" if study.on_gpu else "SDPA", "full", None, lambda: case.full))
    for name, pattern in patterns(case.tokens, settings.share, fixed_only=not with_full).items():
        found.append(("phasor", name, pattern, lambda p=pattern: lambda: case.sparse(p)))
        if case.tokens in settings.flex:
            found.append(("Flex", name, pattern, lambda p=pattern: flex(case, p)))
    return found


def time_patterns(study: Study, case: SparseInputs) -> None:
    """A row for full attention and for every pattern; a failure is a row that says so."""
    timer, full = study.machine.timer, {}
    for who, name, pattern, build in forms(study, case):
        pairs = visible_pairs(pattern, case.tokens)
        row: dict[str, Any] = {"who": who, "what": name, "tokens": case.tokens}
        row["share"] = pairs / visible_pairs(None, case.tokens)
        with study.noting_failure(row):
            with torch.no_grad():
                call = build()
                if pattern is not None:
                    row["error"] = case.error(pattern, call())
                    study.check(f"{who}, {name}", row["error"], TOLERANCE[study.machine.dtype])
                row["forward_ms"] = timer.back_to_back_ms(call)
            row["forward_tflops"] = 4 * pairs * case.head_dim * case.heads / row["forward_ms"] / 1e9
            if who == "phasor":
                mask = Mask(causal=True, pattern=pattern)
                row["path"] = SPARSE_ATTENTION.explain(*case.inputs, mask, case.score_mod)[0]
            if who != "Flex" and case.tokens <= MAX_BACKWARD:
                case.grad()
                row["both_ms"] = timer.back_to_back_ms(forward_backward(call, case.inputs))
        case.grad(False)
        if pattern is None:
            full = {key: row[key] for key in ("forward_ms", "both_ms") if key in row}
        row["times_full"] = {key: ms / row[key] for key, ms in full.items() if key in row}
        study.add_row(row)


def time_parts(study: Study, case: SparseInputs) -> dict[str, float]:
    """Milliseconds of the parts of the first top-k: mean keys and choice, lists, attention with the merge of slots."""
    from phasor.ops.sparse_attention import block_lists, list_launch

    pattern = next(iter(patterns(case.tokens, study.settings.share, case.tokens > study.settings.full).values()))
    assert isinstance(pattern, TopBlocks)
    q, k, v = case.inputs
    heads = block_lists.heads_at_a_time(q, k, pattern.top_k)
    q, k, v = q[:, :, : heads * case.heads // case.kv_heads], k[:, :, :heads], v[:, :, :heads]
    block, fields = pattern.block, block_lists.TopBlockArgs(pattern.block, pattern.top_k, 0, case.score_mod.scale)
    chosen = list_launch.choose_blocks(q, mean_keys(k, block), block, pattern.top_k, 0)
    args = fields.list_args("forward", q, k, chosen)
    calls: dict[str, Callable[[], object]] = {
        "mean keys": lambda: mean_keys(k, block),
        "choice": lambda: list_launch.choose_blocks(q, mean_keys(k, block), block, pattern.top_k, 0),
        "lists": lambda: fields.list_args("forward", q, k, chosen),
        "attention and merge": lambda: list_launch.forward(q, k, v, args),
    }
    timer = study.machine.timer
    parts = {name: timer.back_to_back_ms(call) * case.kv_heads / heads for name, call in calls.items()}
    study.say(format_field(f"{case.tokens} tokens, top-k in parts, ms", parts))
    return parts

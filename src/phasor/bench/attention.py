"""Causal attention: plain, with a sliding window, and with a bias."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phasor.bench.checks import max_relative_error
from phasor.bench.workload import BenchmarkCase, Implementation, Machine, Workload
from phasor.config import ModelConfig
from phasor.nn.positions import ALiBiConfig, T5PositionConfig
from phasor.nn.positions.base import build_position
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import Bias, Mask, ScoreMod, SumBias, attention

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # sums of some thousand terms, rounded at the end
CHECKED = 64  # queries whose result is compared; a whole reference would be a matrix of queries by keys
LARGEST = 1 << 28  # elements of a mask or bias that a implementation may hold

Call = Callable[[], Tensor]  # gives [1, T, H, D]


def workload(machine: Machine, name: str) -> Workload:
    """One of the workloads "attention", "window", "alibi", "t5" and "prefill"."""
    count, heads, groups, width = machine.sizes.attention
    count = machine.sizes.prefill if name == "prefill" else count
    window = machine.sizes.window if name == "window" else count
    seen = count * window - window * (window - 1) // 2
    what = {"window": f"window of {window}", "alibi": "ALiBi's bias", "t5": "T5's bias"}.get(name)
    return Workload(
        name=name,
        title=f"causal attention{f', {what}' if what else ''}, forward: {count} tokens, {heads}/{groups} heads of "
        f"{width}, {machine.dtype_name}",
        unit="ms",
        limit=4 * heads * width * seen / machine.arithmetic,
        limit_basis="the rate of one large matmul",
        tolerance=TOLERANCE[machine.dtype],
        implementations=implementations(machine, count, window, name),
    )


def implementations(machine: Machine, count: int, window: int, name: str) -> list[Implementation]:
    _, heads, groups, width = machine.sizes.attention
    positions = torch.arange(count, device=machine.device)[None]
    bias = bias_of(machine, name, count) if name in ("alibi", "t5") else None

    @functools.cache
    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        return (
            machine.random(1, count, heads, width, seed=0),
            machine.random(1, count, groups, width, seed=1),
            machine.random(1, count, groups, width, seed=2),
        )

    def case(call: Call, bias: Bias | None = bias) -> BenchmarkCase:
        def check() -> float:
            with torch.no_grad():
                queries = torch.randperm(count, generator=torch.Generator().manual_seed(4))[:CHECKED]
                queries = queries.to(machine.device)
                return max_relative_error(
                    [call()[:, queries]], [attention_rows_ref(*inputs(), queries, window, bias)], tokens=1
                )

        return BenchmarkCase(check, lambda timer: timer(torch.no_grad()(call)))

    def ours() -> BenchmarkCase:
        mask = Mask(causal=True, window=window if window < count else None)
        score_mod = ScoreMod(scale=width**-0.5, bias=bias, query_positions=positions, key_positions=positions)
        return case(lambda: attention(*inputs(), mask, score_mod))

    def sdpa(*backends: SDPBackend) -> BenchmarkCase:
        q, k, v = (x.transpose(1, 2) for x in inputs())
        mask = None
        if window < count or bias is not None:
            mask = dense_mask(positions, window, bias, machine.dtype)
            k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))  # with a mask no kernel shares keys

        def call() -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            ).transpose(1, 2)

        def by_backend() -> Tensor:
            with sdpa_kernel(list(backends)):
                return call()

        return case(by_backend if backends else call)

    found: list[Implementation] = [("phasor", ours)]
    if count * count * (heads if bias is not None else 1) <= LARGEST or (bias is None and window >= count):
        found.append(("torch SDPA", sdpa))
    if machine.on_gpu and bias is None and window >= count:
        found.append(("torch SDPA, flash", lambda: sdpa(SDPBackend.FLASH_ATTENTION)))
        found.append(("torch SDPA, cuDNN", lambda: sdpa(SDPBackend.CUDNN_ATTENTION)))
    if machine.on_gpu and machine.compiles:
        name = "FlexAttention" if bias is None else "FlexAttention, without a bias"
        found.append((name, lambda: case(flex(inputs(), window), None)))
    return found


def bias_of(machine: Machine, name: str, count: int) -> Bias | None:
    _, heads, groups, width = machine.sizes.attention
    scheme = ALiBiConfig() if name == "alibi" else T5PositionConfig()
    config = ModelConfig(
        vocab_size=1, dim=heads * width, num_layers=1, num_heads=heads, num_kv_heads=groups, position=scheme
    )
    torch.manual_seed(0)
    position = build_position(config.position, config, "decoder").to(machine.device).requires_grad_(False)
    for weight in position.parameters():
        torch.nn.init.normal_(weight)
    places = SequenceInfo(torch.arange(count, device=machine.device), count)
    bias = position.on_scores(position.prepare(places, machine.random(1, 1, 1)))
    assert not isinstance(bias, SumBias)
    return bias


def attention_rows_ref(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, window: int, bias: Bias | None) -> Tensor:
    """Attention of some queries, in float64, `[1, queries, H, D]`."""
    shared = q.shape[2] // k.shape[2]
    keys = torch.arange(k.shape[1], device=q.device)
    chosen, k, v = (x.double() for x in (q[:, queries], k, v))
    k, v = (x.repeat_interleave(shared, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", chosen, k) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias(queries[None], keys[None]).double()
    distance = queries[:, None] - keys
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def dense_mask(positions: Tensor, window: int, bias: Bias | None, dtype: torch.dtype) -> Tensor:
    """The dense mask or bias, as torch's SDPA takes it."""
    distance = positions[0][:, None] - positions[0]
    hidden = (distance < 0) | (distance >= window)
    return ~hidden if bias is None else bias(positions, positions).masked_fill(hidden, float("-inf")).to(dtype)


def flex(inputs: tuple[Tensor, Tensor, Tensor], window: int) -> Call:
    from torch.nn.attention import flex_attention as flexible

    def seen(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (query - key < window)

    q, k, v = (x.transpose(1, 2) for x in inputs)
    count = q.shape[2]
    blocks = torch.compile(flexible.create_block_mask)(seen, None, None, count, count, device=str(q.device))
    compiled: Any = torch.compile(flexible.flex_attention)
    return lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=True).transpose(1, 2)

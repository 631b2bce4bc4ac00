"""Causal attention: plain, with a sliding window, and with a bias."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from phasor.bench.checks import max_relative_error, relative_error
from phasor.bench.peers import flex_attention, sdpa
from phasor.bench.workload import BenchmarkCase, Implementation, Machine, Workload
from phasor.config import ModelConfig
from phasor.nn.positions import ALiBiConfig, T5PositionConfig
from phasor.nn.positions.base import build_position
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import Bias, Mask, ScoreMod, TokenBias, attention

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # sums of some thousand terms, rounded at the end
CHECKED = 64  # queries whose result is compared; a whole reference would be a matrix of queries by keys
ROUNDING = 1e-9  # of the largest gradient in float64: what is below it is zero in exact arithmetic
DIRECTIONS = 4  # of gradients that are compared
LARGEST = 1 << 28  # elements of a mask or bias that an implementation may hold

Call = Callable[[], Tensor]  # gives [1, T, H, D]
VisibleFn = Callable[[Tensor, Tensor], Tensor]  # of queries and heads, as `attention_rows_ref` takes it
BiasFn = Callable[[Tensor], Tensor]  # of queries, for all heads


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
                distance = queries[:, None] - positions[0]
                visible = (distance >= 0) & (distance < window)
                added = None if bias is None else bias(queries[None], positions)[0]
                expected = attention_rows_ref(inputs(), queries, visible, added)
                return max_relative_error([call()[0, queries]], [expected], tokens=0)

        return BenchmarkCase(check, lambda timer: timer(torch.no_grad()(call)))

    def ours() -> BenchmarkCase:
        mask = Mask(causal=True, window=window if window < count else None)
        score_mod = ScoreMod(scale=width**-0.5, bias=bias, query_positions=positions, key_positions=positions)
        return case(lambda: attention(*inputs(), mask, score_mod))

    def by_sdpa(*backends: SDPBackend) -> BenchmarkCase:
        q, k, v = inputs()
        mask = None
        if window < count or bias is not None:
            distance = positions[0][:, None] - positions[0]
            mask = (distance >= 0) & (distance < window)
            if bias is not None:
                mask = bias(positions, positions).masked_fill(~mask, float("-inf")).to(machine.dtype)
            k, v = (x.repeat_interleave(heads // groups, dim=2) for x in (k, v))  # with a mask no kernel shares keys
        return case(lambda: sdpa(q, k, v, *backends, mask=mask))

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    found: list[Implementation] = [("phasor", ours)]
    if count * count * (heads if bias is not None else 1) <= LARGEST or (bias is None and window >= count):
        found.append(("torch SDPA", by_sdpa))
    if machine.on_gpu and bias is None and window >= count:
        found.append(("torch SDPA, flash", lambda: by_sdpa(SDPBackend.FLASH_ATTENTION)))
        found.append(("torch SDPA, cuDNN", lambda: by_sdpa(SDPBackend.CUDNN_ATTENTION)))
    if machine.on_gpu and machine.compiles:
        name = "FlexAttention" if bias is None else "FlexAttention, without a bias"
        found.append((name, lambda: case(flex_attention(inputs(), visible, compile_mask=True), None)))
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
    assert not isinstance(bias, TokenBias)
    return bias


class AttentionInputs:
    """Random queries, keys and values of one row, `[1, T, H, D]`."""

    def __init__(
        self, device: torch.device, tokens: int, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype
    ) -> None:
        self.device, self.tokens, self.head_dim, self.heads, self.kv_heads = device, tokens, head_dim, heads, kv_heads
        torch.manual_seed(0)
        shapes = [(1, tokens, n, head_dim) for n in (heads, kv_heads, kv_heads)]
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        self.inputs = q, k, v

    def grad(self, wanted: bool = True) -> None:
        for x in self.inputs:
            x.requires_grad_(wanted)


def forward_backward(call: Call, inputs: Sequence[Tensor]) -> Callable[[], object]:
    """Attention and the gradients of its inputs, for a random gradient of the output."""
    direction = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(call(), inputs, direction)


def attention_rows_ref(
    inputs: Sequence[Tensor],
    queries: Tensor,
    visible: Tensor,
    bias: Tensor | None = None,
    heads: Tensor | None = None,
) -> Tensor:
    """Attention of some queries and heads of one row, in float64, `[queries, heads, D]`.

    `visible` and `bias` are `[queries, keys]` or `[heads, queries, keys]`.
    """
    q, k, v = (x.detach()[0] for x in inputs)
    shared = q.shape[1] // k.shape[1]
    heads = torch.arange(q.shape[1], device=q.device) if heads is None else heads
    q = q[queries][:, heads].double()
    k, v = (x[:, heads // shared].double() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias.double()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


def sample_error(y: Tensor, inputs: Sequence[Tensor], visible: VisibleFn, bias: BiasFn | None = None) -> float:
    """The relative error of sixteen queries of the first and the last head, against float64 on the same inputs."""
    queries = torch.linspace(0, y.shape[1] - 1, 16, device=y.device).long()
    heads = torch.tensor([0, y.shape[2] - 1], device=y.device)
    expected = attention_rows_ref(
        inputs, queries, visible(queries, heads), None if bias is None else bias(queries)[heads], heads
    )
    return relative_error([y.detach()[0, queries][:, heads]], [expected])


def gradient_errors(
    y: Tensor, inputs: Sequence[Tensor], expected: Tensor, exact: Sequence[Tensor], kept: slice = slice(None)
) -> tuple[float, float]:
    """The relative errors of a result and of its worst gradient against float64; `kept` are the tokens that count.

    Gradients of several random directions are compared together, since that of a single learned number may be small in
    one of them by chance. A gradient that is zero but for rounding, as that of a constant added to all scores, is
    compared with the largest.
    """
    y, expected = y[:, kept], expected[:, kept]
    pairs: list[list[tuple[Tensor, Tensor]]] = []
    for _ in range(DIRECTIONS):
        direction = torch.randn_like(expected)
        found = torch.autograd.grad(y, inputs, direction.to(y.dtype), retain_graph=True)
        reference = torch.autograd.grad(expected, exact, direction, retain_graph=True)
        pairs.append(list(zip(found, reference, strict=True)))
    by_input = list(zip(*pairs, strict=True))
    sizes = [float(torch.stack([b for _, b in each]).norm()) for each in by_input]
    scales = [size if size > ROUNDING * max(sizes) else max(sizes) for size in sizes]
    differences = [float(torch.stack([a.double() - b for a, b in each]).norm()) for each in by_input]
    worst = max(difference / scale for difference, scale in zip(differences, scales, strict=True))
    return relative_error([y], [expected]), worst if worst == worst else float("inf")

"""Kernels for training and their gradients at the edges: more elements than int32 can index, and scores far below zero.

    python benchmarks/edges.py [--only scores norm gated rotary attention loss float8 adamw]

Nothing is timed. Of many rows the first and the last are compared with the same rows computed alone, in float32 or
wider, by plain formulas; a sum over all rows with the sum of its parts. It takes a GPU of 80 GiB.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops import dispatch, float8, glu, norm, rope
from phasor.ops.adamw import AdamW
from phasor.ops.attention import Mask, ScoreMod, attention, attention_ref
from phasor.ops.cross_entropy import linear_cross_entropy

DEVICE = "cuda"
ELEMENTS, ENDS, PART = 1 << 31, 16, 1 << 14
ROWS, ATTENTION, FLOAT8 = 1e-2, 2e-2, 8e-2  # how far a result may be off, of the largest


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def parameter(*shape: int) -> Tensor:
    return random_tensor(*shape).requires_grad_()


def size(x: Tensor) -> str:
    return f"{x.numel() / 2**31:.2f} x 2^31 elements"


def ends(x: Tensor) -> Tensor:
    """The first and the last rows."""
    return torch.cat([x.detach()[:ENDS], x.detach()[-ENDS:]])


def compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor], allowed: float = ROWS) -> None:
    off = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(found, expected, strict=True)
    ]
    print(f"{name:78} off by {' '.join(f'{x:.1e}' for x in off)}", flush=True)
    if not all(x <= allowed for x in off):
        raise SystemExit(f"{name} is wrong: of the largest, {allowed} are allowed")


def by_rows(
    name: str, op: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor, allowed: float = ROWS
) -> None:
    """An operation on rows, and the gradients of its inputs."""
    y = op(*inputs)
    direction = random_tensor(*y.shape)
    found = [y, *torch.autograd.grad(y, inputs, direction)]
    alone = [ends(x).float().requires_grad_() for x in inputs]
    y_ref = plain(*alone)
    expected = [y_ref.detach(), *torch.autograd.grad(y_ref, alone, ends(direction).float())]
    compare(f"{name}, {size(inputs[0])}", [ends(x) for x in found], expected, allowed)


@torch.no_grad()
def sum_parts(part: Callable[[slice], Tensor], rows: int) -> Tensor:
    """What some rows make at a time, added up in float64."""
    parts = (part(slice(start, start + PART)).double() for start in range(0, rows, PART))
    return functools.reduce(operator.iadd, parts)


def scores() -> None:
    """Attention where every score of a query is about -120, to keys that fill their last tile, half of it, or less."""
    for queries, keys in ((192, 192), (704, 704), (1088, 1088), (1100, 1100), (300, 1088), (1088, 300), (1, 704)):
        for causal, padded, dropout in itertools.product((False, True), (False, True), (0.0, 0.1)):
            if queries == keys or not causal:
                low_scores(queries, keys, causal, padded, dropout)


def low_scores(queries: int, keys: int, causal: bool, padded: bool, dropout: float) -> None:
    q, k, v = (parameter(2, n, 4, 64) for n in (queries, keys, keys))
    with torch.no_grad():
        q[..., 0], k[..., 0] = 1.0, -960.0
    real = torch.ones(2, keys, dtype=torch.bool, device=DEVICE)
    real[1, keys - 37 :] = False
    mask = Mask(causal=causal, key_mask=real if padded else None, aligned=queries == keys)
    y = attention(q, k, v, mask, ScoreMod(scale=0.125, dropout=dropout))
    seen = real if padded and queries == keys else torch.ones(2, queries, dtype=torch.bool, device=DEVICE)
    direction = random_tensor(*y.shape) * seen[:, :, None, None]  # the output of padding is not defined
    found = [y.detach(), *torch.autograd.grad(y, (q, k, v), direction)]
    if not all(x.isfinite().all() for x in found):
        raise SystemExit(f"not finite: {queries} queries, {keys} keys, {causal=}, {padded=}, {dropout=}")
    if dropout == 0:
        alone = [x.detach().double().requires_grad_() for x in (q, k, v)]
        y_ref = attention_ref(*alone, mask, ScoreMod(scale=0.125))[0]
        expected = [y_ref.detach(), *torch.autograd.grad(y_ref, alone, direction.double())]
        found, expected = ([x[0][seen], x[1][seen][..., 1:], *x[2:]] for x in (found, expected))
        name = f"low scores, {queries} x {keys}{', causal' if causal else ''}{', padded' if padded else ''}"
        compare(name, found, expected, ATTENTION)


def norms() -> None:
    for centered in (False, True):
        norm_of_rows(2 * ELEMENTS // 4096 + 24, 4096, centered)
        norm_weight(2 * ELEMENTS // 4096 + 24, 4096, centered)


def norm_of_rows(rows: int, dim: int, centered: bool) -> None:
    weight, bias = random_tensor(dim), random_tensor(dim) if centered else None
    alone = weight.float(), None if bias is None else bias.float()
    op = partial(norm.add_norm, weight=weight, bias=bias, eps=1e-5, centered=centered)

    def plain(x: Tensor, r: Tensor) -> Tensor:
        return norm.norm_ref(x + r, *alone, eps=1e-5, centered=centered)

    name = "layer norm" if centered else "RMS norm"
    by_rows(
        f"{name} of a sum",
        lambda x, r: op(x, r)[1],
        plain,
        parameter(rows, dim),
        parameter(rows, dim),
    )


def norm_weight(rows: int, dim: int, centered: bool) -> None:
    x, weight, direction = random_tensor(rows, dim), parameter(dim), random_tensor(rows, dim)
    found = torch.autograd.grad(norm.norm(x, weight, None, eps=1e-5, centered=centered), weight, direction)

    def part(chunk: slice) -> Tensor:
        normed = norm.norm_ref(x[chunk].float(), torch.ones(dim, device=DEVICE), None, eps=1e-5, centered=centered)
        return (normed * direction[chunk].float()).sum(0)

    compare(f"its weight, a sum over rows, {size(x)}", found, [sum_parts(part, rows)])


def gated_activations() -> None:
    dim = 16384
    rows = 2 * ELEMENTS // dim + 24
    for kind in ("swiglu", "geglu"):
        by_rows(
            kind,
            partial(glu.glu, activation=kind),
            partial(glu.glu_ref, activation=kind),
            parameter(rows, dim),
        )


def rotations() -> None:
    tokens = 2 * ELEMENTS // 4096 + 24
    positions = torch.arange(tokens, device=DEVICE)
    increments = (10000.0 ** (-torch.arange(64).double() / 64) / (2 * math.pi) * 2.0**64).long().to(DEVICE)
    whole, alone = (rope.RopeArgs(p, increments, torch.ones(1, device=DEVICE)) for p in (positions, ends(positions)))

    def heads(rotate: Callable[..., Any], args: rope.RopeArgs, pairing: str, x: Tensor) -> Tensor:
        return rotate(x[None], x[None, :, :8], args, pairing)[0][0]

    def projection(rotate: Callable[..., Any], args: rope.RopeArgs, pairing: str, x: Tensor) -> Tensor:
        return torch.cat([y[0].flatten(1) for y in rotate(x[None], args, pairing)], dim=1)

    for pairing in ("half", "adjacent"):
        op, plain = (
            partial(heads, rope.rope, whole, pairing),
            partial(heads, rope.rope_ref, alone, pairing),
        )
        by_rows(f"rotation, {pairing}", op, plain, parameter(tokens, 32, 128))
        op = partial(projection, rope.rope_qkv, whole, pairing)
        plain = partial(projection, rope.rope_qkv_ref, alone, pairing)
        by_rows(f"rotation of a projection, {pairing}", op, plain, parameter(tokens, 4, 6, 128))


def attentions() -> None:
    many = ELEMENTS // (1024 * 128)
    sizes = (many // 16, 1024, 32, 8), (1, 1024, many + 4, many // 4 + 1), (2, 1100, many, many)
    for name, rule in {"all": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 200}}.items():
        for of in sizes:
            attention_of(name, Mask(**rule), *of)


def attention_of(name: str, mask: Mask, rows: int, tokens: int, num_heads: int, num_kv_heads: int) -> None:
    """Of the first and the last row, the first and the last heads."""
    q, k, v = (parameter(rows, tokens, n, 128) for n in (num_heads, num_kv_heads, num_kv_heads))
    score_mod = ScoreMod(scale=128**-0.5)
    y = attention(q, k, v, mask, score_mod)
    direction = random_tensor(*y.shape)
    found = [y, *torch.autograd.grad(y, (q, k, v), direction)]
    few, group_size = min(num_kv_heads, 8), num_heads // num_kv_heads
    for first in (0, num_kv_heads - few):

        def some(x: Tensor, first: int = first) -> Tensor:
            by_group = x.detach()[[0, -1]].unflatten(2, (num_kv_heads, -1))
            return by_group[:, :, first : first + few].flatten(2, 3)

        alone = [some(x).double().requires_grad_() for x in (q, k, v)]
        y_ref = attention_ref(*alone, mask, score_mod)[0]
        expected = [y_ref.detach(), *torch.autograd.grad(y_ref, alone, some(direction).double())]
        shape = f"{rows} x {tokens} x {num_kv_heads} x {group_size} x 128"
        compare(f"attention, {name}, {shape}, {size(q)}", [some(x) for x in found], expected, ATTENTION)


def losses() -> None:
    dim, vocabulary = 4096, 1000
    rows = 2 * ELEMENTS // dim + 24
    hidden, table = parameter(rows, dim), (random_tensor(vocabulary, dim) / 64).requires_grad_()
    targets, weights = torch.randint(0, vocabulary, (rows,), device=DEVICE), torch.ones(rows, device=DEVICE)
    loss = linear_cross_entropy(hidden, table, targets, weights).loss
    found = torch.autograd.grad(loss, (hidden, table))

    def logits(chunk: slice) -> Tensor:
        return hidden[chunk].float() @ table.float().T

    def weight_gradient(chunk: slice) -> Tensor:
        return (logits(chunk).softmax(-1) - F.one_hot(targets[chunk], vocabulary)).T @ hidden[chunk].float()

    total = sum_parts(lambda chunk: F.cross_entropy(logits(chunk), targets[chunk], reduction="sum"), rows)
    alone = ends(hidden).float().requires_grad_()
    loss_ref = F.cross_entropy(alone @ table.detach().float().T, ends(targets), reduction="sum")
    expected = [total, *torch.autograd.grad(loss_ref, alone), sum_parts(weight_gradient, rows)]
    compare(f"cross-entropy, {size(hidden)}", [loss.detach(), ends(found[0]), found[1]], expected)


def float8_ops() -> None:
    check_transpose(2 * ELEMENTS // 16384 + 32, 16384)
    float8_layer(2 * ELEMENTS // 4096 + 32, 4096, 64)
    up, down = random_tensor(2 * 8192, 256) / 16, random_tensor(256, 8192) / 90
    by_rows(
        "float8 gated network, 8192 hidden",
        lambda x: float8.float8_mlp(x, up, down, "swiglu"),
        lambda x: glu.glu_ref(x @ up.float().T, "swiglu") @ down.float().T,
        parameter(2 * ELEMENTS // 16384 + 32, 256),
        allowed=3 * FLOAT8,
    )


def check_transpose(rows: int, dim: int) -> None:
    x = random_tensor(rows, dim)
    values, scale = float8.quantize_rows(x)
    compare(f"float8 rows, {size(x)}", [ends(values).float() * ends(scale)], [ends(x)], FLOAT8)
    transposed = float8.transpose(values)
    columns = 0, rows - 1
    found = [transposed[:, i].float() for i in columns]
    expected = [values[i].float() for i in columns]
    compare(f"float8 transpose, {size(x)}", found, expected, 0.0)


def float8_layer(rows: int, inputs: int, outputs: int) -> None:
    x, weight = parameter(rows, inputs), parameter(outputs, inputs)
    y = float8.float8_linear(x, weight)
    direction = random_tensor(*y.shape)
    found = torch.autograd.grad(y, (x, weight), direction)
    wide = weight.detach().float()
    total = sum_parts(lambda chunk: direction[chunk].float().T @ x[chunk].float(), rows)
    expected = [ends(x).float() @ wide.T, ends(direction).float() @ wide, total]
    compare(f"float8 layer, {size(x)}", [ends(y), ends(found[0]), found[1]], expected, FLOAT8)


def steps() -> None:
    count = ELEMENTS + 5000
    weight = torch.nn.Parameter(random_tensor(count))
    weight.grad = random_tensor(count)
    before, grad = ends(weight).float(), ends(weight.grad).float()
    AdamW([weight], lr=0.01, weight_decay=0.1, fused=True).step()
    expected = before * (1 - 0.01 * 0.1) - 0.01 * grad / (grad.abs() + 1e-8)
    compare(f"AdamW, {size(weight)}", [ends(weight)], [expected])


CHECKS = {
    "scores": scores, "norm": norms, "gated": gated_activations, "rotary": rotations, "attention": attentions,
    "loss": losses, "float8": float8_ops, "adamw": steps,
}  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=CHECKS, default=tuple(CHECKS), help="some of the checks")
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("these are kernels for a GPU, and there is none here")
    torch.manual_seed(0)
    with dispatch.force_path("triton"):
        for name in given.only:
            CHECKS[name]()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Tiles of the projections and of the attention of a decoding step, timed on a GPU.

python benchmarks/tuning/decode_layers.py [projections rows attention int8 int8-rows int4 int4-rows]
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sweep import DEVICE, check, copy_speed, drawn, graph_us, rank

from phasor import Rotary
from phasor.bench.sizes import FULL, GPU
from phasor.ops.decode import (
    NormArgs,
    RotaryArgs,
    Tiles,
    decode_attention,
    decode_attention_ref,
    gemv,
    lm_head_argmax,
)
from phasor.ops.quantized import Matrix, dequantize, quantize_int4, quantize_int8

VECTORS = ((2, 1024, 4), (4, 512, 2), (4, 1024, 4), (8, 512, 4), (2, 2048, 4), (4, 2048, 8), (8, 1024, 8), (1, 2048, 4))
MATRICES = ((16, 128, 4, 6), (16, 256, 4, 4), (32, 128, 4, 6), (32, 256, 4, 4))
BYTES = (
    *((1, 2048, 4), (2, 2048, 4), (4, 2048, 4), (8, 2048, 4), (2, 1024, 2)),
    *((4, 1024, 2), (2, 512, 1), (4, 512, 1), (8, 512, 1), (2, 4096, 8), (4, 4096, 8)),
)
BYTE_MATRICES = ((16, 256, 4, 4), (32, 256, 4, 3), (64, 128, 4, 4), (64, 256, 8, 3))
NIBBLES = (
    *((2, 1024, 1), (4, 1024, 1), (8, 1024, 1), (16, 1024, 1), (2, 2048, 2), (4, 2048, 2)),
    *((8, 2048, 2), (2, 4096, 4), (4, 4096, 4), (2, 8192, 8), (4, 8192, 8)),
)
QUANTIZE = {8: quantize_int8, 4: quantize_int4}
CONTEXTS = (64, 128, 256, 512, 2048, 16384, 131072)
KV_TILES = [
    decode_attention.KVTiles(*size)
    for size in ((64, 2, 2), (64, 4, 2), (128, 4, 2), (128, 8, 2), (256, 4, 2), (256, 8, 2), (512, 8, 2))
]


class Projection:
    """One of a layer's projections with many different weights, so that the L2 cache serves none of them."""

    def __init__(self, role: str, rows: int, bits: int = 16) -> None:
        dim, hidden, vocabulary = (FULL.model[name] for name in ("dim", "hidden_dim", "vocab_size"))
        sizes = {"qkv": (dim, 3072), "out": (dim, dim), "up": (dim, 2 * hidden), "down": (hidden, dim)}
        self.role, (self.inputs, self.outputs) = role, (sizes | {"head": (dim, vocabulary)})[role]
        count = max(2, min(128, int(64e8 / bits / self.inputs / self.outputs)))
        weights = (drawn(self.outputs, self.inputs) for _ in range(count))
        self.weights: list[Matrix] = [QUANTIZE[bits](w) if bits in QUANTIZE else w for w in weights]
        first = self.weights[0]
        self.bytes = first.nbytes if isinstance(first, torch.Tensor) else first.values.nbytes + first.scale.nbytes
        self.x, self.y, self.hidden = drawn(rows, self.inputs), drawn(rows, self.outputs), drawn(rows, hidden)
        self.argmax = torch.full((rows,), lm_head_argmax.EMPTY_ARGMAX, device=DEVICE)
        self.norm = None if role in ("out", "down") else NormArgs(drawn(self.inputs), 0.0, 1e-5)
        x = self.x.double()
        x = x if self.norm is None else F.rms_norm(x, (self.inputs,), self.norm.weight.double(), 1e-5)
        self.expected = x @ dequantize(self.weights[0], torch.float64).mT
        if role == "up":
            self.expected = F.silu(self.expected[:, :hidden]) * self.expected[:, hidden:]

    def run(self, weight: Matrix, tiles: Tiles, pdl: bool) -> torch.Tensor:
        given: dict[str, Any] = {"norm": self.norm, "tiles": tiles, "pdl": pdl}
        if self.role == "up":
            return gemv.project_activate(self.x, weight, self.hidden, "silu", glu=True, **given)
        if self.role == "head":
            lm_head_argmax.lm_head_argmax(self.x, weight, self.y, self.argmax, **given)
            return self.y
        return gemv.project(self.x, weight, self.y, **given)

    def microseconds(self, tiles: Tiles, pdl: bool = True) -> float:
        check(self.run(self.weights[0], tiles, pdl), self.expected)
        return graph_us(lambda: [self.run(w, tiles, pdl) for w in self.weights]) / len(self.weights)

    def cublas_microseconds(self) -> float:
        plain = [dequantize(w, torch.bfloat16) for w in self.weights]
        return graph_us(lambda: [F.linear(self.x, w) for w in plain]) / len(plain)


def sweep_projections(sizes: tuple[tuple[int, ...], ...], *rows: int, bits: int = 16) -> None:
    """Every projection over tiles, then the best without pdl, and cuBLAS in bfloat16."""
    speed = copy_speed()
    for count in rows:
        for role in ("qkv", "out", "up", "down", "head"):
            one = Projection(role, count, bits)
            candidates = {tuple(tiles): partial(one.microseconds, tiles) for tiles in (Tiles(*size) for size in sizes)}
            title = f"{role}, {count} rows, {bits} bits: outputs x inputs, warps, stages"
            found = rank(title, candidates, lambda measured: measured(), "us", limit=1e6 * one.bytes / speed)
            alone = one.microseconds(Tiles(*found[0][1]), pdl=False)
            print(f"  the best without pdl {alone:.2f} us; cuBLAS in bfloat16 {one.cublas_microseconds():.2f} us")


class AttentionChain:
    """The attention of layers as a step has it: projections with weights of their own before and after it."""

    def __init__(self, batch: int, context: int, layers: int = 12) -> None:
        size = GPU.families
        self.batch, self.layers, self.head_dim = batch, layers, size.dim // size.heads
        self.group, slots = size.heads // size.kv_heads, 128 * (context // 128 + 1)
        width = (size.heads + 2 * size.kv_heads) * self.head_dim
        torch.manual_seed(0)
        cache_bytes = 4 * batch * slots * size.kv_heads * self.head_dim
        count = max(2, min(layers, 2**31 // cache_bytes))
        self.caches = [drawn(2, batch, slots, size.kv_heads, self.head_dim) for _ in range(count)]
        self.before = [drawn(width, size.dim, scale=size.dim**-0.5) for _ in range(layers)]
        self.after = [drawn(size.dim, size.dim, scale=size.dim**-0.5) for _ in range(layers)]
        self.norm = NormArgs(drawn(size.dim), 0.0, 1e-5)
        self.x, self.y, self.qkv = drawn(batch, size.dim), drawn(batch, size.dim), drawn(batch, width)
        self.out, self.lengths = torch.empty_like(self.x), torch.full((batch,), context, device=DEVICE)
        rope = Rotary(head_dim=self.head_dim)
        self.rope = RotaryArgs(torch.tensor(rope.fixed.increments, device=DEVICE), 1.0, self.head_dim, False)
        self.tiles: decode_attention.KVTiles | None = None
        self.workspace = decode_attention.SplitKWorkspace(batch, size.kv_heads, self.group, self.head_dim, DEVICE)
        gemv.project(self.x, self.before[0], self.qkv, norm=self.norm)
        self.checked = [0, batch - 1]  # rows
        keys, values = self.caches[0][:, self.checked].double()
        given = {"scale": self.head_dim**-0.5, "rope": self.rope}
        counts = self.lengths[self.checked]
        self.expected = decode_attention_ref(self.qkv[self.checked].double(), keys, values, counts, counts, **given)

    def attend(self, layer: int, pdl: bool = True) -> None:
        keys, values = self.caches[layer % len(self.caches)]
        decode_attention.decode_attention(
            self.qkv, keys, values, self.lengths, self.lengths, self.out, self.workspace,
            scale=self.head_dim**-0.5, rope=self.rope, tiles=self.tiles, pdl=pdl,
        )  # fmt: skip

    def run(self, attends: bool = True) -> None:
        for layer in range(self.layers):
            gemv.project(self.x, self.before[layer], self.qkv, norm=self.norm, pdl=True)
            if attends:
                self.attend(layer)
            gemv.project(self.out, self.after[layer], self.y, residual=self.x, pdl=True)

    def microseconds(self, tiles: decode_attention.KVTiles) -> float:
        """Of one layer."""
        self.tiles = tiles
        gemv.project(self.x, self.before[0], self.qkv, norm=self.norm)
        self.attend(0, pdl=False)
        check(self.out[self.checked], self.expected)
        return graph_us(self.run) / self.layers


def sweep_attention() -> None:
    """Microseconds of a layer's two projections with attention between them, by the tiles of keys and the context."""
    for batch in (1, 16):
        used = decode_attention.choose_kv_tiles(64, 2)
        for context in CONTEXTS:
            chain = AttentionChain(batch, context)
            alone = graph_us(partial(chain.run, attends=False)) / chain.layers
            candidates = {tuple(tiles): partial(chain.microseconds, tiles) for tiles in KV_TILES}
            title = f"attention, {batch} rows, context {context}: keys of a tile, warps, stages; {alone:.2f} us without"
            rank(title, candidates, lambda measured: measured(), "us", in_use=tuple(used))
            del chain, candidates
            torch.cuda.empty_cache()


SWEEPS = {
    "projections": partial(sweep_projections, VECTORS, 1),
    "rows": partial(sweep_projections, MATRICES, 16),
    "int8": partial(sweep_projections, BYTES, 1, bits=8),
    "int8-rows": partial(sweep_projections, BYTE_MATRICES, 16, 64, bits=8),
    "int4": partial(sweep_projections, NIBBLES, 1, bits=4),
    "int4-rows": partial(sweep_projections, BYTE_MATRICES, 16, 64, bits=4),
    "attention": sweep_attention,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=", ".join(SWEEPS))
    for name in parser.parse_args().sweeps or SWEEPS:
        SWEEPS[name]()

"""Sizes of the workloads: by device, and for a quick look or the whole benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class FamilySizes:
    """Sizes that models of all families share, and of what is timed with them."""

    dim: int
    layers: int  # Marian has half of them on each side
    heads: int
    kv_heads: int
    vocabulary: int
    window: int
    experts: int
    modernbert_base: bool  # ModernBERT as published, at its own size
    train: tuple[tuple[int, int], ...]  # B, T of the forward and backward passes
    decode: tuple[int, ...]  # B
    prompt: int
    new: int


@dataclass(frozen=True)
class Sizes:
    """Letters as everywhere: `B` rows, `T` tokens, `H` query and `K` key heads, `D` features of a head."""

    rotary: tuple[int, int, int, int, int]  # B, T, H, K, D
    attention: tuple[int, int, int, int]  # T, H, K, D
    window: int
    prefill: int  # T
    model: dict[str, Any]  # fields of the Llama-shaped model
    cpu_model: dict[str, Any]  # and of the one that workloads of a CPU alone compare with transformers
    backward: tuple[int, int]  # B, T
    train: tuple[int, int]  # B, T
    train_long: tuple[int, int]
    decode: tuple[int, int, int]  # B, T of the prompts, new tokens
    decode_batch: tuple[int, int, int]
    families: FamilySizes
    copy_bytes: int  # bytes copied to measure the bandwidth
    matmul_size: int  # side of the square matrices multiplied to measure the rate
    repeats: int
    seconds: float  # after which nothing is repeated any more


def llama_sizes(dim: int, hidden: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "dim": dim,
        "hidden_dim": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "vocab_size": vocabulary,
    }


# Llama 3.1 8B.
LLAMA_8B = llama_sizes(4096, 14336, 32, 32, 8, 128256)
# The model that is compared with transformers on a CPU.
CPU_LLAMA = llama_sizes(512, 1408, 8, 8, 4, 32000)
TINY = Sizes(
    rotary=(2, 9, 4, 2, 16),
    attention=(40, 4, 2, 16),
    window=7,
    prefill=50,
    model=llama_sizes(32, 48, 2, 4, 2, 64),
    cpu_model=llama_sizes(32, 48, 2, 4, 2, 64),
    backward=(2, 12),
    train=(2, 12),
    train_long=(1, 20),
    decode=(1, 5, 6),
    decode_batch=(3, 5, 6),
    families=FamilySizes(32, 2, 4, 2, 64, 4, 4, False, ((2, 12),), (1, 3), 5, 6),
    copy_bytes=1 << 16,
    matmul_size=32,
    repeats=2,
    seconds=0.1,
)
CPU = Sizes(
    rotary=(1, 1024, 8, 4, 64),
    attention=(1024, 8, 4, 64),
    window=128,
    prefill=4096,
    model=llama_sizes(256, 704, 3, 8, 4, 4096),
    cpu_model=CPU_LLAMA,
    backward=(4, 512),
    train=(2, 128),
    train_long=(1, 1024),
    decode=(1, 16, 32),
    decode_batch=(8, 16, 32),
    families=FamilySizes(128, 4, 4, 2, 1024, 32, 4, False, ((2, 64), (4, 64)), (1, 4), 16, 16),
    copy_bytes=1 << 26,
    matmul_size=768,
    repeats=5,
    seconds=1.5,
)
GPU = Sizes(
    rotary=(4, 8192, 32, 8, 128),
    attention=(16384, 32, 8, 128),
    window=1024,
    prefill=32768,
    model=llama_sizes(1024, 4096, 8, 16, 4, 32000),
    cpu_model=CPU_LLAMA,
    backward=(4, 2048),
    train=(4, 2048),
    train_long=(1, 16384),
    decode=(1, 512, 64),
    decode_batch=(64, 512, 64),
    families=FamilySizes(1024, 12, 16, 4, 32000, 512, 8, True, ((4, 1024), (16, 1024)), (1, 16), 64, 64),
    copy_bytes=1 << 30,
    matmul_size=8192,
    repeats=50,
    seconds=4.0,
)
FULL = replace(
    GPU,
    prefill=131072,
    model=llama_sizes(2048, 8192, 16, 32, 8, 32000),  # 1.04 B parameters, the head tied to the token embedding
    train=(4, 4096),
    train_long=(1, 32768),
    decode=(1, 512, 256),
    decode_batch=(64, 512, 128),
    seconds=8.0,
)

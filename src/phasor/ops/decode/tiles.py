"""The tile of a weight matrix that one program of a projection reads at a time, as measured fastest on an H200."""

from __future__ import annotations

from typing import NamedTuple

SMALL_N = 2560  # up to this many outputs, larger tiles would leave parts of the device idle
LARGE_N = 8192
SMALL_K = 1024  # up to this many inputs, one tile has them all
LARGE_K = 4096
MAX_EXPERT_ROWS = 64  # rows of a mixture of experts; for more, grouped matrix products of torch are faster


class Tiles(NamedTuple):
    """Outputs and inputs of a tile, the warps that read it, and the number of tiles in flight."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1


def choose_tiles(rows: int, outputs: int, inputs: int, *, bits: int = 16, glu: bool = False) -> Tiles:
    """The tiles for a weight matrix `[outputs, inputs]`. With a GLU, a tile has two outputs for each of `block_n`.

    For a single row, a warp has 512 inputs of int8 weights and 1024 of int4, so that a thread reads what it multiplies.

    >>> choose_tiles(1, 2048, 2048)
    Tiles(block_n=4, block_k=2048, num_warps=4, num_stages=1)
    >>> choose_tiles(1, 32000, 1024)
    Tiles(block_n=4, block_k=1024, num_warps=1, num_stages=1)
    >>> choose_tiles(1, 32000, 2048, bits=8)
    Tiles(block_n=8, block_k=512, num_warps=1, num_stages=1)
    >>> choose_tiles(1, 32000, 2048, bits=4)
    Tiles(block_n=8, block_k=1024, num_warps=1, num_stages=1)
    """
    small, large = outputs <= SMALL_N, outputs > LARGE_N
    if bits > 8:
        if rows > 1:
            return Tiles(16, 256, 4, 4)
        if glu:
            return Tiles(2, 2048, 4)
        if inputs <= SMALL_K and (small or large):
            return Tiles(4, 1024, 2 if small else 1)
        if small:
            return Tiles(4, 4096, 16) if inputs > LARGE_K else Tiles(4, 2048, 4)
        return Tiles(4 if large else 8, 1024, 4)
    if rows == 1 and bits == 4:
        if large:
            return Tiles(4 if glu else 8, 1024, 1)
        return Tiles(4, 4096, 4) if small and inputs > LARGE_K else Tiles(4, 2048, 2)
    if rows == 1:
        if large:
            return Tiles(4 if glu else 8, 512, 1)
        return Tiles(4, 4096, 8) if small and inputs > LARGE_K else Tiles(4, 2048, 4)
    if rows <= 16:
        return Tiles(32, 256, 4, 3)
    return Tiles(16, 256, 4, 4) if small else Tiles(64, 256, 8, 3) if large else Tiles(32, 256, 4, 3)

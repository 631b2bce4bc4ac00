"""How much of a weight matrix one program of a step's projections reads at a time, as was quickest on an H200."""

from __future__ import annotations

from typing import NamedTuple

FEW, MANY, DEEP = 2560, 8192, 4096  # outputs that larger tiles would leave the device idle for; outputs, and inputs


class Tiles(NamedTuple):
    """Outputs and inputs of a tile, the warps that read it, and how many are on their way at a time."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 1


def tiles_of(rows: int, outputs: int, inputs: int, *, int8: bool = False, gated: bool = False) -> Tiles:
    """The tiles for a matrix of this size. A gated one has two outputs for each of a tile's.

    A single row's of weights in 8 bits have 512 inputs a warp, so that threads read what they multiply.

    >>> tiles_of(1, 2048, 2048), tiles_of(1, 32000, 2048, int8=True)
    (Tiles(outputs=4, inputs=2048, warps=4, stages=1), Tiles(outputs=8, inputs=512, warps=1, stages=1))
    """
    few, many = outputs <= FEW, outputs > MANY
    if not int8:
        if rows > 1:
            return Tiles(16, 256, 4, 4)
        if gated:
            return Tiles(2, 2048, 4)
        if few:
            return Tiles(4, 4096, 16) if inputs > DEEP else Tiles(4, 2048, 4)
        return Tiles(4 if many else 8, 1024, 4)
    if rows == 1:
        if many:
            return Tiles(4 if gated else 8, 512, 1)
        return Tiles(4, 4096, 8) if few and inputs > DEEP else Tiles(4, 2048, 4)
    if rows <= 16:
        return Tiles(32, 256, 4, 3)
    return Tiles(16, 256, 4, 4) if few else Tiles(64, 256, 8, 3) if many else Tiles(32, 256, 4, 3)

"""Weights of quantized folders that stay in 8 or 4 bits, where a kernel takes them as they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phasor.checkpoints.quantized_folders import QuantizedTensors
from phasor.checkpoints.quantized_formats import Grid
from phasor.checkpoints.weight_reader import WeightReader
from phasor.config.schema import name_some
from phasor.nn.quantized import QuantizedLinear
from phasor.ops.quantized import GROUP_SIZES, Int4Matrix, Int8Matrix, QuantizedMatrix
from phasor.quantization import projections
from phasor.transformer import Transformer

NO_PROJECTION = "no projection of attention or of a feed-forward network"
NO_INTEGERS = "not integers times scales"
PARTLY = "a part of a matrix that is not stored so as a whole"
OTHER_GROUPS = f"scales of other groups than {', '.join(map(str, GROUP_SIZES))} neighbors"
TOO_LARGE = "too large for 4 bits without zero points, and for 8 bits with a scale per row"


class KeptWeights(NamedTuple):
    """The tensors of kept weights by our names, why others are dequantized, by the file's, and what reads them."""

    tensors: dict[str, Tensor]
    left: dict[str, str]
    reader: WeightReader

    def read(self, name: str, device: torch.device) -> Tensor:
        """One of our tensors."""
        return self.tensors[name] if name in self.tensors else self.reader.read(name, device)

    def left_note(self) -> str:
        """One sentence on the weights that are dequantized."""
        reasons = {reason: [n for n, why in self.left.items() if why == reason] for reason in self.left.values()}
        shown = "; ".join(f"{name_some(names)} ({reason})" for reason, names in reasons.items())
        return f"weights that cannot be kept as they are stored are dequantized: {shown}"


def keep_stored_weights(model: Transformer, reader: WeightReader) -> KeptWeights:
    """Let projections of a model on the meta device hold their weights as a quantized folder has them."""
    tensors = reader.tensors
    if not isinstance(tensors, QuantizedTensors):
        raise ValueError(f"{tensors.folder} has no quantized weights to keep as they are stored: leave weights out")
    kept = KeptWeights({}, dict.fromkeys(tensors.weights, NO_PROJECTION), reader)
    modules = {module: name for name, module in model.named_modules()}
    for part, name, layer in list(projections(model)):
        path = f"{modules[part]}.{name}"
        sources = reader.sources(f"{path}.weight")
        stored = tensors.weights.keys() & set(sources)
        if not stored:
            continue
        matrix = PARTLY if len(stored) < len(sources) else read_matrix(reader, f"{path}.weight")
        if isinstance(matrix, str):
            kept.left.update(dict.fromkeys(sorted(stored), matrix))
            continue
        empty = matrix._replace(values=matrix.values.to("meta"), scale=matrix.scale.to("meta"))
        setattr(part, name, QuantizedLinear(layer, empty))
        kept.tensors.update({f"{path}.weight": matrix.values, f"{path}.scales": matrix.scale})
        for source in stored:
            del kept.left[source]
        tensors.release()
    if not kept.tensors:
        method, note = tensors.form.method, kept.left_note()
        raise ValueError(f"{tensors.folder}: no weight in {method} can be kept, so leave weights out: {note}")
    return kept


def read_matrix(reader: WeightReader, name: str) -> QuantizedMatrix | str:
    """One of our weights as it is stored, or why it cannot be held so."""
    tensors, shape = reader.tensors, reader.shapes[name].shape
    assert isinstance(tensors, QuantizedTensors)
    grids: dict[str, Grid] = {}
    for source in reader.sources(name):
        grid = tensors.grid(source)
        if grid is None or grid.values.is_floating_point():
            return NO_INTEGERS
        grids[source] = grid
    integers = reader.assemble(name, torch.empty(shape, dtype=torch.int16), lambda n: grids[n].elements())
    scales = reader.assemble(name, torch.empty(shape), lambda n: grids[n].per_element(grids[n].scales))
    return hold_integers(integers, scales)


def hold_integers(integers: Tensor, scales: Tensor) -> QuantizedMatrix | str:
    """A matrix of integers and scales, both `[N, K]`, in as few bits as hold it, or why none do.

    >>> matrix = hold_integers(torch.full((2, 64), -8), torch.full((2, 64), 0.5))
    >>> type(matrix).__name__, tuple(matrix.values.shape), tuple(matrix.scale.shape), matrix.scale.dtype
    ('Int4Matrix', (2, 32), (2, 1), torch.bfloat16)
    """
    low, high = int(integers.min()), int(integers.max())
    if low >= -8 and high <= 7:
        for size in reversed(GROUP_SIZES):
            if integers.shape[1] % size == 0 and is_constant(groups := scales.unflatten(-1, (-1, size))):
                nibbles = (integers + 8).to(torch.uint8)
                return Int4Matrix(nibbles[:, ::2] | nibbles[:, 1::2] << 4, shorten(groups[..., 0]))
    if low >= -128 and high <= 127 and is_constant(scales):
        return Int8Matrix(integers.to(torch.int8), scales[:, 0].contiguous())
    return OTHER_GROUPS if low >= -8 and high <= 7 else TOO_LARGE


def is_constant(groups: Tensor) -> bool:
    """Whether elements along the last dimension are equal."""
    return bool((groups == groups[..., :1]).all())


def shorten(scales: Tensor) -> Tensor:
    """Scales in the shortest dtype that has them exactly."""
    shorter = (scales.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return next((x for x in shorter if torch.equal(x.float(), scales)), scales.contiguous())

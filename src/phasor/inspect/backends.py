"""Which path every operation of a model takes on a device, and why not a faster one.

Nothing is computed, and the device need not be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from phasor.config import ModelConfig
from phasor.config.model import Layer, Side
from phasor.config.schema import quote, unknown
from phasor.device import resolve_device
from phasor.inspect.explain import named, spans
from phasor.inspect.routes import OPS, Case, Op
from phasor.quantization import WEIGHTS

DEFAULT = "preset:llama-3.1"
DEVICES = ("cpu", "cuda")
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Taken:
    """The path one operation takes in some layers; `why_not` says for each faster path why it is not taken."""

    where: str
    op: str
    path: str
    why_not: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        """Why no faster path is taken, in words; nothing where this is the fastest."""
        return "; ".join(f"not {path}: {why}" for path, why in self.why_not)


@dataclass(frozen=True)
class Backends:
    """The paths of a model's operations on a device. It prints as a table."""

    model: str
    device: str
    dtype: str
    length: int
    training: bool
    ops: tuple[Taken, ...]
    weights: str | None = None
    precision: str | None = None

    @property
    def title(self) -> str:
        doing = "training" if self.training else "in use"
        kind = self.dtype if self.weights is None else f"{self.dtype} with weights in {self.weights}"
        kind += "" if self.precision is None else f" with products in {self.precision}"
        return f"{self.model} on {self.device}, {kind}, {self.length:,} tokens, {doing}"

    def __str__(self) -> str:
        rows = [(one.where, one.op, one.path) for one in self.ops]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self.title]
        for row, one in zip(rows, self.ops, strict=True):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            lines += [f"    not {path}: {why}" for path, why in one.why_not]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON."""
        return asdict(self)


def backends(
    config: ModelConfig | str | Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    length: int | None = None,
    training: bool = False,
    weights: str | None = None,
    precision: str | None = None,
) -> Backends:
    """Which path every operation of a model takes on a device, and why not a faster one.

    A model is a `ModelConfig`, "preset:NAME", or the path of a configuration file or model folder; Llama 3.1 where
    none is given. The device is "cpu" or "cuda", which need not be there: by default a GPU where there is one. The
    type is bfloat16 on a GPU and else float32, the length the longest the model is meant for; it is about one row
    without padding. With `training` it is about an update, and otherwise about a forward and about decoding; `weights`
    is "int8" for a model that was quantized, and `precision` "float8" for one that trains with products in 8 bits.

    >>> found = backends("preset:bloom", device="cpu")
    >>> print(str(found).splitlines()[0])
    bloom on cpu, float32, 2,048 tokens, in use
    >>> found.ops[0].where, found.ops[0].op, found.ops[0].path
    ('layers 0-69', 'attention', "torch's fused attention in blocks of queries")
    >>> "the positions add a bias to the scores" in found.ops[0].reason
    True
    """
    name, model = named(DEFAULT if config is None else config)
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ValueError(f"length must be an integer of at least 1, not {quote(length)}")
    if not isinstance(training, bool):
        raise ValueError(f"training must be True or False, not {quote(training)}")
    if weights is not None and (weights not in WEIGHTS or training):
        raise ValueError(f"weights are {' or '.join(WEIGHTS)} where a model was quantized, and it is not trained")
    if precision is not None and (precision != "float8" or not training):
        what = f"precision={quote(precision)}, training={training}"
        raise ValueError(f"precision is float8 with training=True, where a model trains with such products, not {what}")
    where = device_named(device)
    kind = dtype_named(dtype, where)
    planned = model.max_length if length is None else length
    taken = []
    for side, layers in sides(model):
        for layer, indices in layers.items():
            case = Case(model, layer, side, where, kind, planned, training, weights, precision)
            label = spans(tuple(indices))
            label = f"{side} {label}" if model.shape == "encoder-decoder" else label
            taken += [chosen(op, case, label) for op in OPS if not op.whole and op.applies(case)]
    taken += [chosen(op, case, "the model") for op in OPS if op.whole and op.applies(case)]
    return Backends(name, where.type, str(kind)[6:], planned, training, tuple(taken), weights, precision)


def sides(model: ModelConfig) -> Iterator[tuple[Side, dict[Layer, list[int]]]]:
    """The model's encoder and decoder, as far as it has them, each with its distinct layers and where they stand."""
    for side in cast(tuple[Side, ...], ("encoder", "decoder")):
        if model.shape in (side, "encoder-decoder"):
            found: dict[Layer, list[int]] = {}
            for index in range(model.depth(side)):
                found.setdefault(model.layer(index), []).append(index)
            yield side, found


def chosen(op: Op, case: Case, where: str) -> Taken:
    """The first path of an operation that nothing speaks against."""
    against: list[tuple[str, str]] = []
    for route in op.routes:
        why = route.why_not(case)
        if why is None:
            return Taken(where, op.name, route.name, tuple(against))
        if against and against[-1][1] == why:
            against[-1] = (f"{against[-1][0]} or {route.name}", why)
        else:
            against.append((route.name, why))
    raise AssertionError(f"the last path of {op.name} must always apply")


def device_named(device: torch.device | str | None) -> torch.device:
    if device is None:
        return resolve_device("auto")
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    if kind not in DEVICES:
        raise unknown("device", str(device), DEVICES)
    return torch.device(kind)


def dtype_named(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("floating-point type", name, DTYPES)
    return cast(torch.dtype, getattr(torch, name))

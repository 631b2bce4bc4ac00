"""Which path every operation of a model takes on a device, and why not a faster one.

The dispatch tables that choose when the model runs are asked with stand-ins for its tensors. Nothing is computed, and
the device need not be present.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from phasor.config import ModelConfig
from phasor.config.model import Layer, Side
from phasor.config.schema import check_integer, quote, unknown
from phasor.device import resolve_device
from phasor.inspect.case import Case
from phasor.inspect.explain import format_layers, resolve_model
from phasor.inspect.operations import layer_operations, model_operations
from phasor.nn.attention.base import CalledOperation
from phasor.quantization import WEIGHTS

DEFAULT = "preset:llama-3.1"
DEVICES = ("cpu", "cuda")
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class OperationPath:
    """The path one operation takes in some layers; `why_not` says for each faster path why it is not taken."""

    where: str
    op: str
    path: str
    why_not: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        """Why no faster path is taken, in words; empty where this is the fastest."""
        return "; ".join(f"not {path}: {why}" for path, why in self.why_not)


@dataclass(frozen=True)
class Backends:
    """The paths of a model's operations on a device. It prints as a table."""

    model: str
    device: str
    dtype: str
    length: int
    training: bool
    ops: tuple[OperationPath, ...]
    weights: str | None = None
    precision: str | None = None

    @property
    def title(self) -> str:
        mode = "training" if self.training else "inference"
        dtype = self.dtype if self.weights is None else f"{self.dtype} with weights in {self.weights}"
        dtype += "" if self.precision is None else f" with matmuls in {self.precision}"
        return f"{self.model} on {self.device}, {dtype}, {self.length:,} tokens, {mode}"

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
    none is given. The device is "cpu" or "cuda", which need not be present: by default a GPU where there is one. The
    dtype is bfloat16 on a GPU and else float32, the length the model's maximum; the answer is for one row without
    padding. With `training` it is for an optimizer step, and otherwise for a forward pass and for decoding; `weights`
    is "int8" or "int4" for a quantized model, and `precision` "float8" for one that trains with matmuls in float8.

    >>> paths = backends("preset:bloom", device="cpu")
    >>> print(str(paths).splitlines()[0])
    bloom on cpu, float32, 2,048 tokens, inference
    >>> paths.ops[0].where, paths.ops[0].op, paths.ops[0].path
    ('layers 0-69', 'attention', 'SDPA in blocks of queries')
    >>> "the positions add a bias to the scores" in paths.ops[0].reason
    True
    """
    name, model = resolve_model(DEFAULT if config is None else config)
    if length is not None:
        check_integer("length", length, below=1 << 48)
    if not isinstance(training, bool):
        raise ValueError(f"training must be True or False, not {quote(training)}")
    if weights is not None and (weights not in WEIGHTS or training):
        raise ValueError(f"weights are {' or '.join(WEIGHTS)} where a model was quantized, and it is not trained")
    if precision is not None and (precision != "float8" or not training):
        given = f"precision={quote(precision)}, training={training}"
        raise ValueError(f"precision is float8 with training=True, where a model trains with such matmuls, not {given}")
    target = target_device(device)
    torch_dtype = target_dtype(dtype, target)
    tokens = model.max_length if length is None else length
    paths = []
    with torch.set_grad_enabled(training):
        for side, layers in sides(model):
            for layer, indices in layers.items():
                case = Case(
                    model.for_side(side), layer, side, target, torch_dtype, tokens, training, weights, precision
                )
                where = format_layers(tuple(indices))
                where = f"{side} {where}" if model.shape == "encoder-decoder" else where
                paths += [path_of(op, where) for op in layer_operations(case)]
        paths += [path_of(op, "the model") for op in model_operations(case)]
    return Backends(name, target.type, str(torch_dtype)[6:], tokens, training, tuple(paths), weights, precision)


def sides(model: ModelConfig) -> Iterator[tuple[Side, dict[Layer, list[int]]]]:
    """The model's encoder and decoder, as far as it has them, each with its distinct layers and their indices."""
    for side in cast(tuple[Side, ...], ("encoder", "decoder")):
        if model.shape in (side, "encoder-decoder"):
            layers: dict[Layer, list[int]] = {}
            for index in range(model.depth(side)):
                layers.setdefault(model.for_side(side).layer(index), []).append(index)
            yield side, layers


def path_of(op: CalledOperation, where: str) -> OperationPath:
    """The path an operation takes; neighboring paths that are not taken for the same reason are named together."""
    path, reasons = op.table.explain(*op.args)
    why_not: list[tuple[str, str]] = []
    for other, reason in reasons.items():
        if why_not and why_not[-1][1] == reason:
            why_not[-1] = (f"{why_not[-1][0]} or {other}", reason)
        else:
            why_not.append((other, reason))
    return OperationPath(where, op.name, path, tuple(why_not))


def target_device(device: torch.device | str | None) -> torch.device:
    """The device by name, without an index; by default a GPU where there is one."""
    if device is None:
        return resolve_device("auto")
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    if kind not in DEVICES:
        raise unknown("device", str(device), DEVICES)
    return torch.device(kind)


def target_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The dtype by name; by default bfloat16 on a GPU and else float32."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("floating-point type", name, DTYPES)
    return cast(torch.dtype, getattr(torch, name))

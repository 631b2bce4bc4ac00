"""Quantized Hugging Face folders: the tensors that make one weight appear as this weight, to every family alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from phasor.checkpoints.quantized_formats import FORMATS, BitsAndBytes, Format, Grid, StoredWeight
from phasor.checkpoints.tensors import TYPES, Tensors
from phasor.config.schema import name_some
from phasor.models.fields import Fields, json_repr

NAME = "quantization_config"
T = TypeVar("T")


def take_format(data: dict[str, Any], file: Path) -> tuple[dict[str, Any], Format | None]:
    """The fields of a config.json without what they say of quantization, and the format that this is.

    >>> fields, format = take_format({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, Path())
    >>> fields, format.method
    ({'model_type': 'llama'}, 'awq')
    """
    given = Fields(data, file).get(NAME, {})
    if not given:
        return data, None
    method = given.get("quant_method")
    if method is None and (given.get("load_in_8bit") or given.get("load_in_4bit")):
        method = BitsAndBytes.method  # as it was written first
    if not isinstance(method, str) or method not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"{file}: phasor does not honor {NAME} with quant_method {json_repr(method)}; known: {known}")
    rest = {name: value for name, value in data.items() if name != NAME}
    return rest, FORMATS[method](Fields(given, file, prefix=f"{method} {NAME}."))


class QuantizedTensors(Tensors):
    """The tensors of a folder, of which those that make a weight appear as this weight, in `dtype` or their own."""

    def __init__(self, folder: Path, form: Format, dtype: torch.dtype | None = None) -> None:
        super().__init__(folder)
        self.form, self.compute = form, dtype
        self.weights: dict[str, StoredWeight] = {}
        self.described: dict[str, tuple[tuple[int, ...], str]] = {}
        self.hidden = {name for name in self.file_of if name.endswith(form.unused)}
        try:
            self._find_weights()
        except BaseException:
            self.opened.close()
            raise

    def _find_weights(self) -> None:
        """Find which tensors make a weight; one error lists all that do not."""
        groups: dict[str, dict[str, str]] = {}
        for name in self.file_of.keys() - self.hidden:
            end = next((end for end in self.form.ends if name.endswith(end)), None)
            if end is not None:
                groups.setdefault(name.removesuffix(end) + self.form.ends[end], {})[end] = name
                self.hidden.add(name)
        method = self.form.method
        if not groups:
            shown = name_some([f"*{end}" for end in self.form.ends])
            raise ValueError(f"{self.folder}: {NAME} says {method}, but no tensor is named {shown}")
        wrong = []
        for weight, names in sorted(groups.items()):
            parts = StoredWeight(self, names | ({"": weight} if weight in self.file_of else {}))
            needed = self.form.requirements(parts)
            lacking = [weight.removesuffix(self.form.ends.get(end, "")) + end for end in needed if end not in parts]
            try:
                if lacking:
                    raise ValueError(f"{name_some(lacking)} is missing")
                if "" in parts and "" not in needed:
                    raise ValueError(f"{weight} is stored twice, quantized and unquantized")
                self.described[weight] = self.form.describe(parts)
                self.weights[weight] = parts
            except ValueError as error:
                wrong.append(str(error))
        for name in sorted(self.file_of.keys() - self.hidden - groups.keys()):
            if name.endswith(".weight") and self.dtype(name) not in TYPES:
                wrong.append(f"{name} is stored as {self.dtype(name)} and has no scales")
        if wrong:
            raise ValueError(f"{self.folder}: weights in {method} cannot be read: {name_some(wrong, separator='; ')}")
        self.file_of |= {w: self.file_of[next(iter(parts.names.values()))] for w, parts in self.weights.items()}

    @property
    def names(self) -> list[str]:
        return [name for name in self.file_of if name not in self.hidden]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.described[name][0] if name in self.described else super().shape(name)

    def dtype(self, name: str) -> str:
        return self.described[name][1] if name in self.described else super().dtype(name)

    def grid(self, name: str) -> Grid | None:
        """A weight as elements and scales; None where it is stored in another way."""
        return self._unpack(self.form.grid, name)

    def _unpack(self, function: Callable[[StoredWeight], T], name: str) -> T:
        try:
            return function(self.weights[name])
        except ValueError as error:
            raise ValueError(f"{self.file_of[name]}: {error}") from None

    def get(self, name: str) -> Tensor:
        if name not in self.weights:
            return super().get(name)
        weight = self._unpack(self.form.dequantize, name)
        weight = weight.to(TYPES[self.dtype(name)])
        return weight if self.compute is None else weight.to(self.compute)

    def get_adjacent(self, names: list[str]) -> Tensor | None:
        return None if self.weights.keys() & set(names) else super().get_adjacent(names)

    def is_empty_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros of a quantized weight, which some write where the model has none."""
        weight = name.removesuffix(".bias") + ".weight"
        return name.endswith(".bias") and weight in self.weights and not self.get(name).any()

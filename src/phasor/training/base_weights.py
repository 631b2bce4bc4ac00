"""The frozen base of an adapter in 8 bits or in NF4: each projection is quantized as it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from phasor.adapters import DEFAULT, initial_magnitudes, split_rows
from phasor.config.recipe import Recipe
from phasor.nn.quantized import NF4, Quantization, Quantized
from phasor.nn.quantized_experts import QuantizedStack
from phasor.ops.quantized import dequantize
from phasor.quantization import has_quantized_weights
from phasor.transformer import Transformer

QUANTIZATIONS = {"int8": Quantization(8), NF4: Quantization(NF4)}


def base_quantization(recipe: Recipe) -> Quantization | None:
    """How a recipe quantizes its base; None where it does not.

    >>> base_quantization(Recipe()) is None
    True
    """
    chosen = recipe.train.base_weights
    return None if chosen is None else QUANTIZATIONS[chosen]


def check_base(model: Transformer, recipe: Recipe) -> None:
    """Refuse a base of which nothing could be quantized."""
    if not has_quantized_weights(model):
        raise ValueError(
            f"TrainConfig.base_weights {recipe.train.base_weights!r} quantizes projections of attention and of "
            f"feed-forward networks and experts, and {recipe.init_from} has none that can be: leave it out"
        )


def quantize_weights(
    model: Transformer, quantization: Quantization, dtype: torch.dtype, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a base, with the tensors of those layers that a model holds quantized instead of their weights.

    As of a model in memory, they are quantized from `dtype`, and magnitudes of DoRA are those of dequantized weights.
    """
    places = {name: part for name, part in model.named_modules() if isinstance(part, Quantized)}
    held = {name if isinstance(part, QuantizedStack) else f"{name}.weight": name for name, part in places.items()}
    rows = split_rows(model)  # before the model is cut

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if name.endswith(".magnitude") and name.partition(".lora.")[0] in places:
                continue
            if name not in held:
                yield name, weight
                continue
            matrix = quantization.quantize(weight.to(dtype).flatten(0, -2))
            yield from zip((f"{held[name]}.{own}" for own in Quantized.FIXED), matrix, strict=False)
            full = dequantize(matrix, torch.float32).view(weight.shape)
            yield from initial_magnitudes(model, DEFAULT, rows, name, full)

    return read()

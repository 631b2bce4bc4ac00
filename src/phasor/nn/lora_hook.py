"""Linear layers with adapters: what these add to the output of a layer, and the hook that does so for any class.

A layer can be any module with `in_features`, `out_features` and `bias` that multiplies by a matrix; one that holds this
in another form than `weight` gives it by `full_weight()`, which DoRA and merging ask for, and one whose bias is added
elsewhere has `adds_bias` False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from phasor.nn.lora import LoRA


def adapters_of(layer: nn.Module) -> dict[str, LoRA]:
    """The adapters of a layer by name."""
    return cast(dict[str, LoRA], dict(cast(nn.ModuleDict, layer.lora).items())) if "lora" in layer._modules else {}


def active_adapters(layer: nn.Module) -> Iterator[LoRA]:
    """Those of a layer's adapters that are in use."""
    return (lora for lora in adapters_of(layer).values() if lora.strength)


def full_weight(layer: Any) -> Tensor:
    """The matrix `[out, in]` of a linear layer that an adapter updates."""
    weight: Tensor = layer.full_weight() if hasattr(layer, "full_weight") else layer.weight
    return weight


def add_updates(layer: Any, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """A hook on linear layers: the layer's output and what its adapters add to it."""
    given = y
    for lora in active_adapters(layer):
        y = add_update(layer, lora, given, y, partial(lora.project, args[0]))
    return y


def add_update(layer: Any, lora: LoRA, given: Tensor, y: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """`y` and what one adapter adds to the layer's own output, which is given; `multiply` gives `A x`."""
    bias = layer.bias if getattr(layer, "adds_bias", True) else None
    return lora.add(y, multiply, lambda: given if bias is None else given - bias, partial(full_weight, layer))


def has_other_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks besides that of adapters, which may run anything around its forward."""
    return bool(module._forward_pre_hooks) or any(hook is not add_updates for hook in module._forward_hooks.values())

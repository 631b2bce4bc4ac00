"""Layers with adapters: they become a subclass of theirs, or have a hook that adds updates to their output.

An adapter hangs on its layer, in `lora` by the adapter's name. The layer keeps its weights and their names.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from phasor.nn.adapted_linear import AdaptedLinear, LoRALinear
from phasor.nn.embedding import Embedding
from phasor.nn.heads import LogitsHead
from phasor.nn.lora import ExpertsLowRank, LoRA
from phasor.nn.lora_hook import active_adapters, add_updates, full_weight
from phasor.nn.moe import Experts
from phasor.nn.quantized import QuantizedLinear
from phasor.nn.quantized_experts import QuantizedExperts
from phasor.ops.cross_entropy import scale_and_softcap
from phasor.ops.quantized import FrozenMatrix, Matrix, quantized_linear


def effective_weight(layer: nn.Module) -> Tensor:
    """The matrix of a linear layer with what its adapters change."""
    weight = full_weight(layer)
    for delta in [lora.delta(weight) for lora in active_adapters(layer)]:
        weight = weight + delta
    return weight


class LoRAQuantizedLinear(AdaptedLinear, QuantizedLinear):
    """A quantized linear layer with adapters."""

    @property
    def held_matrix(self) -> FrozenMatrix | None:
        return self.frozen_matrix


class LoRAEmbedding(Embedding):
    """A token embedding with adapters; a tied head multiplies by the table without them."""

    def vectors(self, tokens: Tensor) -> Tensor:
        y = given = super().vectors(tokens)
        for lora in active_adapters(self):
            y = lora.add(y, lambda a: F.embedding(tokens, a.t().to(given.dtype)), lambda: given, self.weight.t)
        return y

    def merged_table(self) -> Tensor:
        """The table with what the adapters change."""
        return self.weight + sum(lora.delta(self.weight.t()).t() for lora in active_adapters(self))


class LoRAHead(LogitsHead):
    """A head whose output projection has adapters."""

    def forward(self, h: Tensor, tokens: Matrix) -> Tensor:
        h, table = self.features(h), self.table(tokens)
        products = quantized_linear(h, table, None)
        y = products if self.bias is None else products + self.bias
        for lora in active_adapters(self):
            y = lora.add(y, partial(lora.project, h), lambda: products, lambda: cast(Tensor, table))
        return scale_and_softcap(y, self.multiplier, self.softcap)

    def merged_table(self, tokens: Tensor) -> Tensor:
        """The matrix of the output projection with what the adapters change."""
        table = cast(Tensor, self.table(tokens))
        return table + sum(lora.delta(table) for lora in active_adapters(self))


class LoRAExperts(Experts):
    """Routed experts whose matrices have adapters."""

    def mix_experts(self, tokens: Tensor, logits: Tensor) -> Tensor:
        return self.by_groups(tokens, logits)

    def multiply(self, x: Tensor, name: str, ends: Tensor) -> Tensor:
        y = super().multiply(x, name, ends)
        for lora in active_adapters(self):
            if name in lora:
                y = cast(ExpertsLowRank, lora[name]).add(x, y, ends, lora.strength)
        return y

    def merged_matrices(self, name: str) -> Tensor:
        """The matrices of a projection with what the adapters change."""
        matrices: Tensor = getattr(self, name)
        for lora in active_adapters(self):
            if name in lora:
                matrices = matrices + lora.strength * cast(ExpertsLowRank, lora[name]).matrix().to(matrices.dtype)
        return matrices


class LoRAQuantizedExperts(LoRAExperts, QuantizedExperts):
    """Routed experts over quantized matrices."""


ADAPTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LoRALinear,
    QuantizedLinear: LoRAQuantizedLinear,
    Embedding: LoRAEmbedding,
    LogitsHead: LoRAHead,
    Experts: LoRAExperts,
    QuantizedExperts: LoRAQuantizedExperts,
}


def adapt(layer: nn.Module, name: str, lora: LoRA) -> None:
    """Hang an adapter on a layer."""
    if "lora" not in layer._modules:
        layer.lora = nn.ModuleDict()
        if type(layer) in ADAPTED:
            layer.__class__ = ADAPTED[type(layer)]
        else:
            layer.register_forward_hook(add_updates)
    cast(nn.ModuleDict, layer.lora)[name] = lora


def change_class(layer: nn.Module, kind: type[nn.Module]) -> None:
    """Make a linear layer one of another class, with its adapters."""
    if isinstance(layer, AdaptedLinear):
        layer.register_forward_hook(add_updates)
    layer.__class__ = kind


def strip_adapters(layer: nn.Module) -> None:
    """Leave a layer as it was before `adapt`."""
    if "lora" not in layer._modules:
        return
    del layer.lora
    plain = {adapted: kind for kind, adapted in ADAPTED.items()}
    if type(layer) in plain:
        layer.__class__ = plain[type(layer)]
    for key, hook in list(layer._forward_hooks.items()):
        if hook is add_updates:
            del layer._forward_hooks[key]

"""Put adapters in use by name and weight, use a model without them, and merge them into its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from phasor.config.schema import quote, unknown
from phasor.nn.adapted import (
    LoRAEmbedding,
    LoRAExperts,
    LoRAHead,
    effective_weight,
    strip_adapters,
)
from phasor.nn.heads import LogitsHead
from phasor.nn.lora_hook import adapters_of
from phasor.transformer import Transformer


def set_adapters(model: Transformer, adapters: str | Sequence[str] | Mapping[str, float]) -> None:
    """Put adapters in use, each with a weight that its update is multiplied by; all others are out of use.

    What several adapters change is added up: `W x + w_a s_a B_a A_a x + w_b s_b B_b A_b x`, which is PEFT's
    `add_weighted_adapter` with the combination "cat". Weights that an adapter has whole take the place of the base's.

    >>> from phasor import LoRAConfig, add_adapter, preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> _ = add_adapter(model, LoRAConfig(rank=4), "a"), add_adapter(model, LoRAConfig(rank=8), "b")
    >>> set_adapters(model, {"a": 0.5, "b": 1.0})
    >>> set_adapters(model, "b")
    """
    if not isinstance(adapters, str | Sequence | Mapping):
        raise ValueError(f"adapters are a name, a list of names, or names with weights, not {quote(adapters)}")
    names = [adapters] if isinstance(adapters, str) else list(adapters)
    given = {name: adapters[name] if isinstance(adapters, Mapping) else 1.0 for name in names}
    for name, weight in given.items():
        if name not in model.adapters:
            raise unknown("adapter", name, model.adapters)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"the weight of the adapter {name!r} must be a finite number, not {quote(weight)}")
    weights = {name: float(weight) for name, weight in given.items()}
    owners: dict[str, str] = {}
    for name, weight in weights.items():
        for tensor in model.adapters[name].saved if weight else ():
            if weight != 1.0:
                raise ValueError(
                    f"the adapter {name!r} has {tensor} whole, so it is used with the weight 1 or not at all"
                )
            if tensor in owners:
                raise ValueError(
                    f"the adapters {owners[tensor]!r} and {name!r} both have {tensor} whole: use one of them"
                )
            owners[tensor] = name
    for layer in model.modules():
        for name, lora in adapters_of(layer).items():
            lora.strength = weights.get(name, 0.0)
    held = dict(model.named_parameters())
    for name, adapter in model.adapters.items():
        for tensor, original in adapter.originals.items():
            held[tensor].data = original
        adapter.originals = {}
        if weights.get(name):
            adapter.originals = {tensor: held[tensor].data for tensor in adapter.saved}
            for tensor, own in adapter.saved.items():
                held[tensor].data = own.to(held[tensor])


def used_adapters(model: Transformer) -> dict[str, float]:
    """The adapters of a model that are in use, with their weights."""
    return {
        name: lora.strength for layer in model.modules() for name, lora in adapters_of(layer).items() if lora.strength
    }


@contextmanager
def disable_adapters(model: Transformer) -> Iterator[None]:
    """Use a model without its adapters inside a `with`: it is the base.

    >>> from phasor import LoRAConfig, add_adapter, preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> _ = add_adapter(model, LoRAConfig())
    >>> with disable_adapters(model):
    ...     used_adapters(model)
    {}
    >>> used_adapters(model)
    {'default': 1.0}
    """
    used = used_adapters(model)
    set_adapters(model, [])
    try:
        yield
    finally:
        set_adapters(model, used)


@torch.no_grad()
def merge_adapters(model: Transformer) -> None:
    """Put what a model's adapters in use change into its weights, and leave it without adapters.

    A tied head becomes a separate matrix where an adapter changes it, or changes the table alone.
    """
    tokens, head = model.tokens, model.head
    tied = isinstance(head, LogitsHead) and head.weight is None
    if tied and (adapters_of(tokens) or adapters_of(cast(nn.Module, head))):
        table = head.merged_table(tokens.weight) if isinstance(head, LoRAHead) else tokens.weight.clone()
        cast(LogitsHead, head).weight = nn.Parameter(table)
        model.config = model.config.replace(embedding=model.config.embedding.replace(tied=False))
    elif isinstance(head, LoRAHead):
        cast(nn.Parameter, head.weight).data = head.merged_table(tokens.weight)
    for layer in model.modules():
        if isinstance(layer, LoRAEmbedding):
            layer.weight.data = layer.merged_table()
        elif isinstance(layer, LoRAExperts):
            layer.up.data, layer.down.data = layer.merged_matrices("up"), layer.merged_matrices("down")
        elif adapters_of(layer) and not isinstance(layer, LoRAHead):
            cast(nn.Linear, layer).weight.data = effective_weight(layer)
    for layer in list(model.modules()):
        strip_adapters(layer)
    model.adapters = {}

"""The names of Megatron's blocks, which BLOOM, Falcon and GPT-NeoX kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from phasor.models.layout import Rule, linear


def block(layer: str, attention: str, norms: Iterable[str]) -> Iterator[Rule]:
    """A block whose fused projection lies as ours does, by key/value group; `norms` in the order they run."""
    ours = "decoder.blocks.{i}"
    yield from linear(f"{ours}.attention.qkv", f"{layer}.{attention}.query_key_value")
    yield from linear(f"{ours}.attention.out", f"{layer}.{attention}.dense")
    yield from linear(f"{ours}.feedforward.up", f"{layer}.mlp.dense_h_to_4h")
    yield from linear(f"{ours}.feedforward.down", f"{layer}.mlp.dense_4h_to_h")
    for index, norm in enumerate(norms):
        yield from linear(f"{ours}.residual.norms.{index}", f"{layer}.{norm}")

"""The names of fairseq's decoder blocks, which OPT, XGLM and BioGPT kept."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.layout import Rule, linear, projections


def block(layer: str) -> Iterator[Rule]:
    """A block of a decoder whose queries, keys and values are projected one by one."""
    ours = "decoder.blocks.{i}"
    yield from linear(f"{ours}.residual.norms.0", f"{layer}.self_attn_layer_norm")
    yield from projections(f"{ours}.attention", f"{layer}.self_attn")
    yield from linear(f"{ours}.attention.out", f"{layer}.self_attn.out_proj")
    yield from linear(f"{ours}.residual.norms.1", f"{layer}.final_layer_norm")
    yield from linear(f"{ours}.feedforward.up", f"{layer}.fc1")
    yield from linear(f"{ours}.feedforward.down", f"{layer}.fc2")

"""Rows cut over processes through layers with a state: results and gradients, beside those of one process.

python state_world.py SIZE
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from world_processes import fork_processes

from phasor.config import LayerConfig, ModelConfig
from phasor.config.recipe import MeshConfig
from phasor.parallel.context import cut_rows
from phasor.parallel.exchange import Axis
from phasor.parallel.processes import Processes, join_processes
from phasor.parallel.tokens import own_chunks
from phasor.transformer import Transformer

SAME = 1e-12  # float64, of the largest value: the same sums in another order
LENGTH = 24
SIZES = {"num_heads": 6, "num_key_heads": 2, "key_dim": 6, "value_dim": 7}
KINDS = (
    {"kind": "gated-delta", **SIZES},
    {"kind": "retention", **SIZES},
    {"kind": "retention", "conv_width": 3},
    {"kind": "mamba2", **SIZES, "bias": True},
)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= SAME * expected.abs().max()


def compare(attention: dict, args: dict, processes: Processes) -> None:
    """One layer with a state, one with softmax attention, and another with a state."""
    torch.manual_seed(0)
    layers = (LayerConfig(attention=attention), LayerConfig(), LayerConfig(attention=attention))
    sizes = {"vocab_size": 31, "dim": 32, "num_heads": 4, "num_layers": 3, "position": "rotary", "norm": "rmsnorm"}
    whole = Transformer(ModelConfig(**sizes, layers=layers, init="fan-in")).double()
    part, axis = copy.deepcopy(whole), Axis.of(processes.mesh, "context")
    cut_rows(part, axis)
    tokens = torch.randint(0, 31, (2, LENGTH))
    real = args.get("attention_mask", torch.ones_like(tokens, dtype=torch.bool))
    expected, found = whole(tokens, **args), part(tokens, **args)
    own = own_chunks(real, axis.index, axis.size)
    assert_close(found[own], own_chunks(expected, axis.index, axis.size)[own])
    expected[real].square().sum().backward()
    found[own].square().sum().backward()
    for weight, other in zip(part.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(weight.grad)
        assert_close(weight.grad, other.grad)


def run_cases(size: int) -> None:
    torch.set_num_threads(1)
    between = torch.ones(2, LENGTH, dtype=torch.bool)
    between[0, :7], between[1, 5:12], between[1, -3:] = False, False, False
    documents = torch.tensor([[1] * 6 + [2] * 12 + [3] * 6, [4] * 11 + [5] * 13])  # the first begin between chunks
    with join_processes(MeshConfig(context=size), "cpu") as processes:
        for attention in KINDS:
            for args in ({}, {"document_ids": documents}, {"attention_mask": between}):
                compare(attention, args, processes)
            compare(attention, {"document_ids": documents, "attention_mask": between}, processes)


if __name__ == "__main__":
    size = int(sys.argv[1])
    sys.exit(fork_processes(size, lambda: run_cases(size)))

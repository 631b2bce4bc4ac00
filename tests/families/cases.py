"""What a family's test is made of: a random configuration of transformers, and the pieces most of them share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

TRAINED = 40  # the length the models of these tests count as trained with
EPS = [1e-2, 1e-5]
GATES = ["silu", "gelu_pytorch_tanh", "gelu", "relu"]
WINDOW = 6


@dataclass
class Case:
    """A class of transformers and a configuration for it.

    `length` tokens are compared, more than a window or an original length in the configuration. `crossing` marks
    frequencies that depend on the sequence's length: `transformers` decodes those with the wrong ones, so only
    full forwards of fresh models are compared. `token_types` models take them; `attention` is the implementation
    theirs runs with. Tokens are drawn from `lowest` on. A source of features is drawn by `features`, for some rows, and
    `inputs` gives it, or tokens, under the names that theirs has for it.
    """

    cls: Any
    config: PreTrainedConfig
    length: int = 51
    crossing: bool = False
    token_types: bool = False
    lowest: int = 0
    features: Callable[[int, torch.Generator], Tensor] | None = None
    inputs: Callable[[Tensor], dict[str, Tensor]] = lambda tokens: {"input_ids": tokens}
    attention: str = "sdpa"
    limit_float64: float = 1e-10  # of differences in float64; more where theirs has a constant of fewer digits
    may_differ: tuple[str, ...] = ()  # fields of config.json that come back in another spelling
    older: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # config.json as files of old spell it
    buffers: Callable[[str], bool] = field(default=lambda name: False)  # buffers that are weights, to be redrawn
    touch: Callable[[Any], None] = field(default=lambda model: None)  # what is done to the weights once they are
    patch: Callable[[pytest.MonkeyPatch], None] = field(default=lambda patch: None)  # sets right what theirs has wrong


Cases = dict[str, Callable[[random.Random], Case]]


def llama_sizes(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    """Odd sizes: heads that are not their share of the width, grouped or not."""
    heads = rng.choice([2, 4, 6])
    sizes: dict[str, Any] = {
        "vocab_size": rng.randint(60, 80),
        "hidden_size": heads * rng.choice([8, 12]),
        "intermediate_size": rng.choice([40, 56, 72]),
        "num_hidden_layers": rng.choice([2, 3, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, heads) if heads % n == 0]),
        "head_dim": rng.choice([10, 14, 16]),
        "max_position_embeddings": TRAINED,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return sizes | fixed


def rope(rng: random.Random, kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")) -> dict[str, Any]:
    """Rotary parameters of a random kind, none of which depends on the length."""
    kind = rng.choice(kinds)
    given: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([500.0, 10000.0])}
    if kind == "linear":
        given["factor"] = 3.0
    if kind == "llama3":
        given |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        given["original_max_position_embeddings"] = 20
    if kind == "yarn":
        given |= {"factor": 2.0, "original_max_position_embeddings": 20}
    return given


def redraw(model: torch.nn.Module, buffers: Callable[[str], bool], seed: int = 7) -> None:
    """Every weight anew: matrices keep activations near one; norms, biases and sinks are standard normal."""
    generator = torch.Generator().manual_seed(seed)

    def draw(weight: Tensor) -> None:
        std = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1.0
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                draw(parameter)
        for name, buffer in model.named_buffers():
            if buffers(name):
                draw(buffer)


def coin(rng: random.Random) -> bool:
    return rng.random() < 0.5


def share_sizes(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    """Sizes for families that have no field for the width of a head: named only where it is not the heads' share."""
    sizes = llama_sizes(rng, **fixed)
    if coin(rng):
        del sizes["head_dim"]
    return sizes


def partial_rotary_factor(rng: random.Random, sizes: dict[str, Any]) -> float:
    """The share of a head's features that is rotated, an even number of them."""
    width = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    widths = [w for w in range(4, width + 1, 2) if int(width * (w / width)) == w]
    return rng.choice(widths) / width


def mixed_layer_types(rng: random.Random, layers: int) -> list[str]:
    """Layer types in no order, of both kinds."""
    kinds = [
        "sliding_attention",
        "full_attention",
        *(rng.choice(["sliding_attention", "full_attention"]) for _ in "__"),
    ]
    kinds = kinds[:layers]
    rng.shuffle(kinds)
    return kinds

"""How far cosines, sines and logits are off, for exact angles and for products of floats."""

from __future__ import annotations

import functools
import math
from decimal import Decimal
from typing import cast

import torch
from torch import Tensor

from phasor.config import EmbeddingConfig, FanInInitConfig, ModelConfig, RMSNormConfig
from phasor.lab.float_angles import FloatRotary, RowwiseRotary
from phasor.lab.seeding import use_seed
from phasor.nn.positions.frequencies import PI, high_precision
from phasor.nn.positions.phase import ROTATION, increments
from phasor.nn.positions.rotary.config import RotaryConfig
from phasor.nn.positions.rotary.module import Rotary
from phasor.transformer import Stack, Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
METHODS = ("phasor", *DTYPES)
TOKENS, VOCAB_SIZE = 12, 48  # of the text whose logits are compared


def rope_of(method: str, config: RotaryConfig, head_dim: int) -> Rotary:
    """The rotary module that computes angles in one of the `METHODS`."""
    if method == "phasor":
        return Rotary(config, head_dim=head_dim)
    return FloatRotary(config, head_dim=head_dim, angle_dtype=DTYPES[method])


@high_precision
def increment_remainders(frequencies: list[Decimal], rounded: tuple[int, ...]) -> list[float]:
    """What rounding took from each increment, in units of 2^-64 of a rotation."""
    rotations = [frequency / (2 * PI) for frequency in frequencies]
    rests = [exact - Decimal(inc) / ROTATION for exact, inc in zip(rotations, rounded, strict=True)]
    return [float((rest - rest.to_integral_value()) * ROTATION) for rest in rests]  # full rotations do not count


def exact_cos_sin(config: RotaryConfig, head_dim: int, positions: Tensor) -> Tensor:
    """Cosines and sines in float64 `[T, pairs, 2]`, off by less than 1e-15 up to position 2^36.

    The phase of 64 bits is completed by what rounding took from the increment, times the position.

    >>> cos, sin = exact_cos_sin(RotaryConfig(), 4, torch.tensor([2**36]))[0, 0].tolist()
    >>> abs(cos - math.cos(2**36)) < 1e-15, abs(sin - math.sin(2**36)) < 1e-15  # the first frequency is 1
    (True, True)
    """
    frequencies = config.frequencies(config.rotary_dim_of(head_dim))
    rounded = increments(frequencies)
    remainders = torch.tensor(increment_remainders(frequencies, rounded), dtype=torch.float64)
    phase = (positions[:, None] * torch.tensor(rounded)).double() + positions[:, None] * remainders
    angle = phase * (2 * math.pi / ROTATION)
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def sample_positions(powers: range, samples: int, seed: int) -> Tensor:
    """Random positions above half of each power of two, and at most that power: `[powers, samples]`.

    >>> sample_positions(range(0, 3), 2, seed=0)[0].tolist()
    [1, 1]
    """
    generator = torch.Generator().manual_seed(seed)
    tops = [1 << power for power in powers]
    return torch.stack([torch.randint(top // 2 + 1, top + 1, (samples,), generator=generator) for top in tops])


def angle_errors(config: RotaryConfig, head_dim: int, powers: range, samples: int, seed: int) -> dict[str, Tensor]:
    """The worst error of cosine and sine for each power of two and pair, `[powers, pairs]`, by method.

    >>> errors = angle_errors(RotaryConfig(), 8, range(20, 21), samples=8, seed=0)
    >>> bool(errors["phasor"].max() < 4e-8), bool(errors["float32"].max() > 1e-3)
    (True, True)
    """
    positions = sample_positions(powers, samples, seed).flatten()
    exact = exact_cos_sin(config, head_dim, positions)
    worst = {}
    for method in METHODS:
        values = torch.stack(rope_of(method, config, head_dim).cos_sin(positions), dim=-1).double()
        worst[method] = (values - exact).abs().amax(-1).view(len(powers), samples, -1).amax(1)
    return worst


@functools.lru_cache(maxsize=8)
def small_decoder(head_dim: int, seed: int) -> Transformer:
    """A decoder of two layers with random weights, whose rotary positions `logits_at` exchanges."""
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        dim=64,
        num_layers=2,
        num_heads=2,
        head_dim=head_dim,
        hidden_dim=128,
        position=RotaryConfig(),
        norm=RMSNormConfig(),
        embedding=EmbeddingConfig(tied=False),
        init=FanInInitConfig(),
    )
    with use_seed(seed):
        return Transformer(config).eval()


def logits_at(config: RotaryConfig, head_dim: int, offsets: list[int], seed: int) -> dict[str, Tensor]:
    """The logits of one text that begins at each of the offsets, `[offsets, tokens, vocabulary]`, by method.

    >>> logits = logits_at(RotaryConfig(), 8, [0, 2**36], seed=0)
    >>> {method: bool((there - here).abs().max() < 1e-4) for method, (here, there) in logits.items()}
    {'phasor': True, 'float32': False, 'bfloat16': False}
    """
    tokens = torch.randint(0, VOCAB_SIZE, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    positions = (torch.tensor(offsets)[:, None] + torch.arange(TOKENS)).repeat(len(METHODS), 1)
    rope = RowwiseRotary([rope_of(method, config, head_dim) for method in METHODS])
    with torch.inference_mode():
        model = small_decoder(head_dim, seed)
        schemes = cast(Stack, model.decoder).positions
        schemes[next(i for i, scheme in enumerate(schemes) if isinstance(scheme, Rotary))] = rope
        logits = model(tokens.expand(len(positions), -1), positions=positions)
    return dict(zip(METHODS, logits.chunk(len(METHODS)), strict=True))

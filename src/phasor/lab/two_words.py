"""Two words in one attention head, and their scores: rotated after or before the projections, exactly or in float32."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.lab.float_angles import FloatRotary
from phasor.nn.positions.rotary.config import Pairing, RotaryConfig
from phasor.nn.positions.rotary.module import Rotary
from phasor.ops.rope.reference import split_pairs


class TwoWords(NamedTuple):
    """The query of one word and the key of another, float64 `[D]`: every pair of features is a vector of length 1."""

    query: Tensor
    key: Tensor
    query_angles: Tensor  # of each pair, in radians, before any rotation
    key_angles: Tensor


def make_words(head_dim: int, pairing: Pairing, alike: float, seed: int) -> TwoWords:
    """Two words of random angles. They agree in every pair where `alike` is 1, and have nothing in common at 0.

    >>> words = make_words(8, "half", alike=1.0, seed=0)
    >>> round(float(words.query @ words.key), 12)
    4.0
    """
    generator = torch.Generator().manual_seed(seed)
    angles, apart = torch.rand(2, head_dim // 2, dtype=torch.float64, generator=generator) * 2 * math.pi
    other = angles + (1 - alike) * (apart - math.pi)
    return TwoWords(features_of(angles, pairing), features_of(other, pairing), angles, other)


def features_of(angles: Tensor, pairing: Pairing) -> Tensor:
    """Vectors of length 1 at these angles, laid out as the features of a head.

    >>> [features_of(torch.zeros(2), pairing).tolist() for pairing in ("half", "adjacent")]
    [[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]]
    """
    pair = angles.cos(), angles.sin()
    return torch.cat(pair, dim=-1) if pairing == "half" else torch.stack(pair, dim=-1).flatten(-2)


def pair_features(head_dim: int, pairing: Pairing) -> list[list[int]]:
    """The two features of each pair.

    >>> pair_features(4, "half"), pair_features(4, "adjacent")
    ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    """
    return torch.stack(split_pairs(torch.arange(head_dim), pairing), dim=-1).tolist()


@functools.lru_cache(maxsize=16)
def projections(head_dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two random orthogonal matrices, W_Q and W_K: words that are projected by them keep their length."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(2, head_dim, head_dim, dtype=torch.float64, generator=generator)
    w_q, w_k = torch.linalg.qr(random).Q
    return w_q, w_k


class Head:
    """Two words under one kind of rotation, `rope`: their rotated query and key at any positions.

    With `before` the word's vectors `x` are rotated, and projected then. They are chosen so that `x W_Q` is the query
    and `x W_K` the key: at position 0, where nothing is rotated, both ways agree.

    >>> words = make_words(16, "half", alike=0.5, seed=0)
    >>> at = torch.tensor([0, 1000]), torch.tensor([0, 1000])
    >>> after, before = (Head(words, Rotary(head_dim=16), before, seed=0).scores(*at) for before in (False, True))
    >>> torch.allclose(after[0], after[1]), torch.allclose(after[0], before[0]), torch.allclose(before[0], before[1])
    (True, True, False)
    """

    def __init__(self, words: TwoWords, rope: Rotary, before: bool, seed: int) -> None:
        self.words, self.rope = words, rope
        self.projections = projections(rope.head_dim, seed) if before else None

    def query(self, positions: Tensor) -> Tensor:
        """The query at each position, `[T, D]`."""
        return self._rotate(self.words.query, positions, 0)

    def key(self, positions: Tensor) -> Tensor:
        """The key at each position, `[T, D]`."""
        return self._rotate(self.words.key, positions, 1)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The inner products of queries and keys at these positions, one by one: `[T]`."""
        return (self.query(queries) * self.key(keys)).sum(-1)

    def _rotate(self, vector: Tensor, positions: Tensor, side: int) -> Tensor:
        weight = None if self.projections is None else self.projections[side]
        x = vector if weight is None else vector @ weight.T  # orthogonal: x @ weight is the vector
        rows = x.expand(1, 1, len(positions), -1)
        rotated = self.rope.rotate(rows, rows[:, :0], positions)[0][0, 0]
        return rotated if weight is None else rotated @ weight


def make_heads(
    words: TwoWords, config: RotaryConfig, head_dim: int, before: bool, seed: int
) -> tuple[Head, Head, Head]:
    """The same words with exact angles, with float32 angles, and with their features paired the other way."""
    other = config.replace(pairing="adjacent" if config.pairing == "half" else "half")
    ropes = (
        Rotary(config, head_dim=head_dim),
        FloatRotary(config, head_dim=head_dim, angle_dtype=torch.float32),
        Rotary(other, head_dim=head_dim),
    )
    exact, in_float32, mispaired = (Head(words, rope, before, seed) for rope in ropes)
    return exact, in_float32, mispaired

"""What position schemes give each position, and what can be measured about it: similarity, nearest pair, rotation.

The code of a position is what a scheme adds to the input; for schemes on queries, what becomes of the query that is
(1, 0) in every pair, or 1 in every feature where there are no pairs; for schemes on the scores the bias of every head,
where a row stands for a distance. All of it is the output of the modules that a model is made of, in float64.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phasor.config import PositionConfig
from phasor.config.model import Side
from phasor.lab.schemes import TABLE_LENGTH, plain_model
from phasor.lab.seeding import use_seed
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, build_position
from phasor.nn.positions.phase import cos_sin_of
from phasor.nn.sequence import KeyInfo, SequenceInfo
from phasor.ops.attention import Mask, ScoreMod
from phasor.ops.rope import rotate_pairs
from phasor.ops.running_sums import cumsum_tokens

ROUNDING = 1e-13  # of squared distances, relative to the largest square
GRID_SIDE = 8  # of the grid that schemes of several axes count through


@dataclass(frozen=True)
class EncodingScheme:
    """A position scheme for `dim` features of the input or of a head; `build_scheme` makes it."""

    module: Position
    dim: int
    heads: int = 1

    @property
    def on_scores(self) -> bool:
        """Whether the scheme is a bias on the scores, so that codes belong to distances."""
        return "scores" in self.module.config.acts_on

    @property
    def has_weights(self) -> bool:
        """Whether anything of the scheme is learned."""
        return any(True for _ in self.module.parameters())

    @torch.no_grad()
    def codes(self, positions: Tensor, length: int, *, key: bool = False, text: Tensor | None = None) -> Tensor:
        """The codes `[T, features]` of int64 positions `[T]` in a sequence of some length, or those that keys have.

        Schemes that follow the input read tokens of zeros, or those of a `text` `[length, dim]`; positions are then
        0, 1, 2 and so on.

        >>> from phasor.nn.positions import SinusoidalConfig
        >>> build_scheme(SinusoidalConfig(layout="halves"), 4).codes(torch.arange(1), 1).tolist()
        [[0.0, 0.0, 1.0, 1.0]]
        """
        module = self.module
        if self.on_scores:
            counted = text is not None and module.config.follows_input
            keys = positions if counted else torch.zeros(1, dtype=torch.int64)  # codes are those of the first
            return self.bias(positions, keys, text=text)[:, :, 0].T
        seq = SequenceInfo(grid_positions(positions, module.axes), length)
        if "queries" in module.config.acts_on:
            vector = plain_vector(module, self.dim).expand(1, len(positions), self.heads, -1)
            prepared = self.for_layer(module.prepare(seq, vector), positions, text)
            heads = module.on_query(vector, prepared), module.on_key(vector, prepared)
            score_mod = ScoreMod(1.0, query_positions=seq.rows, key_positions=seq.rows)
            queries, keys, _ = module.on_attention(*heads, Mask(), score_mod, prepared)
            return finite((keys if key else queries)[0, :, 0])
        code = module.code(positions, torch.float64)
        if code is not None:
            return code
        nothing = torch.zeros(1, len(positions), self.dim, dtype=torch.float64)
        return finite(module.on_input(nothing, seq)[0])

    @torch.no_grad()
    def bias(self, queries: Tensor, keys: Tensor, *, text: Tensor | None = None) -> Tensor:
        """What the scheme adds to the scores between positions, `[heads, queries, keys]`.

        Queries and keys are 1 in every feature, for schemes that read them; in a text all keys but the first are its
        tokens.
        """
        module, mask, positions = self.module, Mask(), torch.cat((queries, keys))
        seq = SequenceInfo(positions, len(queries))
        ones = torch.ones((), dtype=torch.float64).expand(1, len(positions), self.heads, self.dim)
        prepared = module.prepare_keys(module.prepare(seq, ones), KeyInfo(seq, mask, seq.rows), ones)
        prepared = self.for_layer(prepared, positions, text)
        k = ones
        if text is not None and module.config.follows_input:
            between = text[positions].index_fill(0, torch.tensor(len(queries)), 1.0)
            k = between[None, :, None].expand_as(ones)
        score_mod = ScoreMod(self.dim**-0.5, None, None, module.on_scores(prepared), seq.rows, seq.rows)
        score_mod = module.on_attention(ones, k, mask, score_mod, prepared)[2]
        first, second = torch.arange(len(queries)), torch.arange(len(keys)) + len(queries)
        bias = score_mod.block_bias(first, second, mask, ones)
        assert bias is not None
        return finite(bias[0].double())

    def for_layer(self, prepared: Any, positions: Tensor, text: Tensor | None = None) -> Any:
        """Positions in a layer whose projections change nothing, and whose input is a text, or all tokens are alike.

        They are zeros, or ones where the scheme multiplies them.
        """
        module = self.module
        if not module.config.follows_input:
            return prepared
        step: LayerStep
        if text is None:
            value = float(module.config.multiplies_input)
            x = torch.full((1, len(positions), self.dim), value, dtype=torch.float64)
            step = EqualTokens(Mask(), positions[None], positions)
        else:
            x, step = text[None, positions], TextTokens(Mask(), positions[None], positions)
        prepared = module.for_layer(x, prepared, module.layer_weights(0), step)
        return module.with_projection(lambda vectors: (vectors[:, None].expand(-1, self.heads, -1),) * 2, prepared)


@dataclass(slots=True, eq=False)
class EqualTokens(LayerStep):
    """Tokens of equal input at any positions `[T]`: the sum up to each of them is a multiple of what one adds."""

    positions: Tensor

    def cumsum(self, x: Tensor) -> Tensor:
        return x * self.positions[None, :, None]

    def sum_from_keys(self, x: Tensor, queries: Tensor, keys: Tensor, mask: Mask) -> Tensor:
        return x * (self.positions[queries, None] - self.positions[keys] + 1).clamp(min=0)


@dataclass(slots=True, eq=False)
class TextTokens(EqualTokens):
    """Tokens of a text at positions `[T]` that count through it first: sums up to each of them."""

    def cumsum(self, x: Tensor) -> Tensor:
        return cumsum_tokens(x[:, : int(self.positions.max()) + 1])[:, self.positions]

    def sum_from_keys(self, x: Tensor, queries: Tensor, keys: Tensor, mask: Mask) -> Tensor:
        seen = self.positions[keys] <= self.positions[queries, None]
        return LayerStep.sum_from_keys(self, x * seen, queries, keys, mask)


@functools.lru_cache(maxsize=64)
def build_scheme(
    position: PositionConfig,
    dim: int,
    *,
    heads: int = 1,
    side: Side = "decoder",
    table_length: int = TABLE_LENGTH,
) -> EncodingScheme:
    """A scheme for `dim` features, with weights drawn from seed 0 where it has any.

    >>> from phasor.nn.positions import ALiBiConfig
    >>> build_scheme(ALiBiConfig(), 8, heads=2).codes(torch.arange(3), 3).tolist()
    [[-0.0, -0.0], [-0.0625, -0.00390625], [-0.125, -0.0078125]]
    """
    model = plain_model(dim, heads, table_length)
    position.check_model(model)
    with use_seed(0):
        module = build_position(position, model.replace(position=position) if position.follows_input else model, side)
        module.reset_parameters(model)
    return EncodingScheme(module.eval(), dim, heads)


def grid_positions(positions: Tensor, axes: int) -> Tensor:
    """Positions for each axis of a scheme: those of a grid that is counted through, the last axis first.

    >>> grid_positions(torch.tensor([0, 1, 8, 9]), 2).tolist()
    [[[0, 0, 1, 1]], [[0, 1, 0, 1]]]
    """
    if axes == 1:
        return positions
    rest = [positions // GRID_SIDE**place % GRID_SIDE for place in range(axes - 1)]
    return torch.stack([positions // GRID_SIDE ** (axes - 1), *reversed(rest)])[:, None]


def plain_vector(module: Position, dim: int) -> Tensor:
    """A head whose features are 1; where a scheme rotates pairs, (1, 0) in every pair, and 0 where nothing is rotated.

    >>> from phasor.nn.positions import RotaryConfig
    >>> plain_vector(build_scheme(RotaryConfig(rotary_dim=4), 6).module, 6).tolist()
    [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    pairing = getattr(module.config, "pairing", None)
    if pairing is None:
        return torch.ones(dim, dtype=torch.float64)
    vector, width = torch.zeros(dim, dtype=torch.float64), getattr(module, "rotary_dim", dim)
    vector[slice(0, width // 2) if pairing == "half" else slice(0, width, 2)] = 1.0
    return vector


def finite(values: Tensor) -> Tensor:
    """The values, refused where they are not finite, since they cannot be drawn."""
    if not bool(values.isfinite().all()):
        raise ValueError("the values of this scheme overflow at these positions: choose smaller ones")
    return values


def similarity(scheme: EncodingScheme, positions: Tensor, length: int) -> dict[str, list[float]]:
    """Inner products of codes by distance, over the mean one at distance 0: least, mean and most over all starts.

    Of schemes on queries and keys it is the score of a query with the same vector as key.

    >>> from phasor.nn.positions import SinusoidalConfig
    >>> curves = similarity(build_scheme(SinusoidalConfig(), 8), torch.arange(16), 16)
    >>> round(curves["mean"][0], 12), max(b - a for a, b in zip(curves["least"], curves["most"])) < 1e-12
    (1.0, True)
    """
    queries = scheme.codes(positions, length)
    keys = scheme.codes(positions, length, key=True) if "keys" in scheme.module.config.acts_on else queries
    products = queries @ keys.T
    size = float(products.diagonal().mean())
    if size > 0:
        products /= size
    diagonals = [products.diagonal(-distance) for distance in range(len(positions))]
    return {
        "least": [float(d.min()) for d in diagonals],
        "mean": [float(d.mean()) for d in diagonals],
        "most": [float(d.max()) for d in diagonals],
    }


def nearest_pair(rows: Tensor) -> dict[str, Any] | None:
    """The two rows that are closest to each other, and how far apart they are; None where there is one row.

    >>> nearest_pair(torch.tensor([[1.0], [5.0], [6.0]]))
    {'a': 1, 'b': 2, 'distance': 1.0, 'relative': 0.25}
    """
    count = len(rows)
    if count < 2:
        return None
    products = rows @ rows.T
    sizes = products.diagonal()
    squares = (sizes[:, None] + sizes - 2 * products).fill_diagonal_(float("inf"))
    # The first of those that are nearest but for rounding.
    a, b = divmod(int((squares <= squares.min() + ROUNDING * sizes.max()).flatten().byte().argmax()), count)
    norm, least = float(sizes.sqrt().mean()), float((rows[a] - rows[b]).norm())
    return {"a": a, "b": b, "distance": least, "relative": least / norm if norm else 0.0}


def rotation_error(scheme: EncodingScheme, start: int, shift: int) -> float:
    """How far the code of `start`, rotated by the angles of `shift`, is from the code of `start + shift`.

    >>> from phasor.nn.positions import SinusoidalConfig
    >>> rotation_error(build_scheme(SinusoidalConfig(), 64), 2**36 - 7, 7) < 1e-15
    True
    """
    module = scheme.module
    codes = scheme.codes(torch.tensor([start, start + shift]), start + shift + 1)
    before, after = torch.cat(module.code_pairs(codes), dim=-1)
    angles = cos_sin_of(torch.tensor([shift]), torch.tensor(module.pair_increments()), torch.float64)
    return float((rotate_pairs(before, *angles, "half") - after).abs().max())

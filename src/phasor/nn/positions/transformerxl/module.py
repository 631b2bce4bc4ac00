"""Transformer-XL's relative positions: sinusoids of the distance, computed from those of both positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, bias_dtype, layers_with, relative_init_std
from phasor.nn.positions.frequencies import geometric_frequencies
from phasor.nn.positions.phase import cos_sin_of, increments
from phasor.nn.positions.transformerxl.config import TransformerXLConfig
from phasor.nn.sequence import KeyInfo, SequenceInfo
from phasor.ops.attention import DistanceRows, Mask, ProductBias, ScoreMod, TokenBias
from phasor.ops.constants import constant
from phasor.ops.dispatch import compute_dtype, no_autocast, triton_why_not

CosSin = tuple[Tensor, Tensor]  # of positions, [B or 1, T, pairs]


@dataclass
class SinusoidBias(TokenBias):
    """Queries `[B, Tq, H, D]` times `weight [H, D, 2 F]` times sines and cosines of the distance, times `scale`.

    A sine or cosine of a difference is a product of those of both angles. So the queries of a block are projected and
    turned by their positions, and multiplied with the codes of the keys, cosines and sines `[B or 1, T, F]`. Where
    positions count tokens, `rows` may list all distances, whose sines and cosines are `row_codes`, `[distances, 2 F]`:
    kernels take their projections.
    """

    q: Tensor
    weight: Tensor
    query_codes: CosSin
    key_codes: CosSin
    scale: float
    rows: DistanceRows | None = None
    row_codes: Tensor | None = None

    @property
    def by_distance(self) -> bool:
        return self.rows is not None

    def as_products(self, k: Tensor) -> ProductBias:
        assert self.rows is not None
        assert self.row_codes is not None
        vectors = linear(self.row_codes.to(self.weight.dtype), self.weight.flatten(0, 1))
        return ProductBias(self.q, k, self.rows, self.scale, vectors.unflatten(-1, self.weight.shape[:2]))

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        return self.q, self.weight

    def map(self, of_queries: Callable[[Tensor], Tensor], of_keys: Callable[[Tensor], Tensor]) -> SinusoidBias:
        def codes(pair: CosSin, rearrange: Callable[[Tensor], Tensor]) -> CosSin:
            cos, sin = (rearrange(x.expand(len(self.q), -1, -1)) for x in pair)
            return cos, sin

        of_q, of_k = codes(self.query_codes, of_queries), codes(self.key_codes, of_keys)
        return replace(self, q=of_queries(self.q), query_codes=of_q, key_codes=of_k, rows=None)

    def block(
        self, queries: Tensor, keys: Tensor, dtype: torch.dtype = torch.float32, mask: Mask | None = None
    ) -> Tensor:
        cos, sin = (x[:, queries, None].to(dtype) for x in self.query_codes)  # [B or 1, Tq, 1, F]
        codes = torch.cat([x[:, keys].to(dtype) for x in self.key_codes], dim=-1)  # [B or 1, Tk, 2 F]
        with no_autocast(self.q):
            q = torch.einsum("bqhd,hdf->bqhf", self.q[:, queries].to(dtype), self.weight.to(dtype))
            of_sine, of_cosine = q.chunk(2, dim=-1)
            turned = torch.cat((of_sine * sin + of_cosine * cos, of_cosine * sin - of_sine * cos), dim=-1)
            return turned.transpose(1, 2) @ codes.mT[:, None] * self.scale


class Prepared(NamedTuple):
    """The codes of queries and keys, and a layer's weights; for kernels the codes of distances from the `least` on.

    Weights are the projection of sinusoids `[H, D, dim]`, and biases `[H, D]` for content and for position.
    """

    query_codes: CosSin
    key_codes: CosSin
    weights: tuple[Tensor, ...] = ()
    least: int = 0
    distance_codes: Tensor | None = None


class TransformerXL(Position, config=TransformerXLConfig):
    """`(q_m + u) k_n + (q_m + v) W r`, with `r` the sines and then the cosines of `m - n`, all times the scale."""

    config: TransformerXLConfig

    def __init__(self, config: TransformerXLConfig, *, layers: int, width: int, head_dim: int, dim: int) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim
        self.increments = increments(geometric_frequencies(config.base, dim))
        biases = 1 if config.share_biases else layers
        self.projection = nn.ParameterList(torch.empty(width, dim) for _ in range(layers))
        self.content_bias = nn.ParameterList(torch.empty(width) for _ in range(biases))
        self.position_bias = nn.ParameterList(torch.empty(width) for _ in range(biases))

    @classmethod
    def build(cls, config: TransformerXLConfig, model: ModelConfig, side: Side) -> Self:
        sizes = {"width": model.num_heads * model.head_dim, "head_dim": model.head_dim, "dim": model.dim}
        return cls(config, layers=layers_with(config, model, side), **sizes)

    def reset_parameters(self, config: ModelConfig) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight, std=relative_init_std(config))

    def layer_weights(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        own = 0 if self.config.share_biases else layer
        return self.projection[layer], self.content_bias[own], self.position_bias[own]

    def codes(self, positions: Tensor, like: Tensor) -> CosSin:
        """The codes of positions `[B or 1, T]`."""
        turns = constant(self.increments, positions.device, torch.int64)
        return cos_sin_of(positions[..., None], turns, bias_dtype(like))

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Prepared:
        codes = self.codes(seq.rows, like)
        return Prepared(codes, codes)

    def prepare_keys(self, prepared: Prepared, keys: KeyInfo, like: Tensor) -> Prepared:
        prepared = prepared._replace(key_codes=self.codes(keys.positions, like))
        queries = keys.seq.rows.shape[1]
        if keys.seq.max_distance is None or queries == 1 or triton_why_not(like) is not None:
            return prepared
        least, most = keys.mask.visible_distances(queries, keys.positions.shape[1])
        cos, sin = self.codes(torch.arange(least, most + 1, device=like.device), like)
        return prepared._replace(least=least, distance_codes=torch.cat((sin, cos), dim=-1).to(compute_dtype(like)))

    def for_layer(self, x: Tensor, prepared: Prepared, weights: tuple[Tensor, ...], step: LayerStep) -> Prepared:
        by_head = (weight.unflatten(0, (-1, self.head_dim)) for weight in weights)
        return prepared._replace(weights=tuple(self.own_heads(x.movedim(0, -1)).movedim(-1, 0) for x in by_head))

    def on_attention(
        self, q: Tensor, k: Tensor, mask: Mask, score_mod: ScoreMod, prepared: Prepared
    ) -> tuple[Tensor, Tensor, ScoreMod]:
        projection, for_content, for_position = (weight.to(q.dtype) for weight in prepared.weights)
        codes = prepared.query_codes, prepared.key_codes
        bias = SinusoidBias(q + for_position, projection, *codes, score_mod.scale)
        queries, keys, by_distance = score_mod.query_positions, score_mod.key_positions, prepared.distance_codes
        if score_mod.counted and queries is not None and keys is not None and by_distance is not None:
            most = prepared.least + len(by_distance) - 1
            rows = DistanceRows(queries, keys, reach=most, least=prepared.least)
            bias = replace(bias, rows=rows, row_codes=by_distance)
        return q + for_content, k, replace(score_mod, bias=bias)

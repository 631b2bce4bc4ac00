"""Encodings: what every position scheme gives each position, and which criteria of an encoding it meets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from phasor.config import ModelConfig, PositionConfig
from phasor.config.model import Side
from phasor.config.schema import by_kind, names
from phasor.lab.endpoints import MAX_HEAD_DIM, MAX_POSITION, FieldError, LabRequest, Matrix, bounded_field, register
from phasor.lab.schemes import plain_model

if TYPE_CHECKING:
    from phasor.lab.codes import EncodingScheme

MAX_LENGTH = 1024
MAX_HEADS = 64
MAX_CARDS = 100  # more than there are schemes

MAX_AXES = 8
MAX_WEIGHTS = 1 << 22  # of a scheme


class SchemeRequest(LabRequest):
    """A position scheme for `dim` features: of the input, or of a head where it acts on queries and keys.

    `heads` and `side` matter to schemes on the scores: an encoder looks ahead as well. Weights, where a scheme has any,
    are as initialized with the seed 0.
    """

    position: PositionConfig = by_kind("sinusoidal")
    dim: int = bounded_field(128, 2, MAX_HEAD_DIM)
    heads: int = bounded_field(8, 1, MAX_HEADS)
    side: Side = "decoder"

    def check(self) -> None:
        super().check()
        for scheme in self.position.parts:
            for name in names(type(scheme)):
                value = getattr(scheme, name)
                if isinstance(value, int) and value > MAX_POSITION:
                    raise FieldError(f"position.{name}", f"{name} must be at most {MAX_POSITION:,} here")
        if self.position.axes > MAX_AXES:
            raise FieldError("position", f"positions must have at most {MAX_AXES} axes here, not {self.position.axes}")
        shapes = self.position.weight_shapes(self.model) + self.position.layer_weight_shapes(self.model)
        weights = sum(map(math.prod, shapes))
        if weights > MAX_WEIGHTS:
            raise FieldError("position", f"a scheme must have at most {MAX_WEIGHTS:,} weights here, not {weights:,}")

    @property
    def model(self) -> ModelConfig:
        return plain_model(self.dim, self.heads)

    def build_scheme(self) -> EncodingScheme:
        from phasor.lab.codes import build_scheme

        return build_scheme(self.position, self.dim, heads=self.heads, side=self.side)


class EncodingRequest(SchemeRequest):
    """The codes of `length` positions from `start` on; of a scheme on the scores, those of one head."""

    length: int = bounded_field(64, 2, MAX_LENGTH)
    start: int = bounded_field(0, 0, MAX_POSITION)
    head: int = bounded_field(0, 0, MAX_HEADS - 1)

    def check(self) -> None:
        super().check()
        if self.head >= self.heads:
            raise FieldError("head", f"head must be below the number of heads, {self.heads}, not {self.head}")
        if self.start + self.length - 1 > MAX_POSITION:
            raise FieldError("start", "start and length must end at a position of at most 2^36")
        most = self.position.resolve(self.model).max_positions if "input" in self.position.acts_on else None
        if most is not None and self.start + self.length > most:
            raise FieldError("start", f"the table of {self.position.kind} positions ends after {most:,} positions")


def matrix(request: EncodingRequest) -> Matrix:
    """The codes of positions, a row each; of a scheme on the scores the bias of one head, queries by keys."""
    import torch

    scheme = request.build_scheme()
    positions = request.start + torch.arange(request.length)
    if scheme.on_scores:
        return Matrix.of(scheme.bias(positions, positions)[request.head])
    return Matrix.of(scheme.codes(positions, request.start + request.length))


def facts(request: EncodingRequest) -> dict[str, Any]:
    """Similarity by distance, and the nearest pair of positions.

    Of a scheme on the scores the curves are the bias by distance, head by head, and the nearest pair is one of
    distances.
    """
    import torch

    from phasor.lab.codes import nearest_pair, similarity

    scheme = request.build_scheme()
    steps = torch.arange(request.length)
    if scheme.on_scores:
        rows = scheme.codes(steps, request.length)
        bucket = getattr(scheme.module, "bucket", None)
        buckets = None if bucket is None else bucket(steps).tolist()
        return {"bias": rows.T.tolist(), "buckets": buckets, "nearest": nearest_pair(rows)}
    positions, length = request.start + steps, request.start + request.length
    rows = scheme.codes(positions, length)
    nearest = nearest_pair(rows)
    if nearest is not None:
        nearest |= {"a": request.start + nearest["a"], "b": request.start + nearest["b"]}
    return {"nearest": nearest, "similarity": similarity(scheme, positions, length)}


class RotationRequest(SchemeRequest):
    """The code of a position, and of the one `shift` after it."""

    start: int = bounded_field(11, 0, MAX_POSITION)
    shift: int = bounded_field(5, 0, MAX_LENGTH)


def rotation(request: RotationRequest) -> dict[str, Any]:
    """The pairs of a scheme, and how far row `start` rotated by the angles of `shift` is from row `start + shift`.

    `increments` are fractions of a full rotation per position, in units of 2^-64, as decimal text: position times
    increment, wrapped to 64 bits, is the exact phase. There are none for schemes without pairs.
    """
    from phasor.lab.codes import rotation_error

    scheme = request.build_scheme()
    increments = scheme.module.pair_increments()
    return {
        "increments": [str(one) for one in increments],
        "error": rotation_error(scheme, request.start, request.shift) if increments else None,
    }


class CriteriaRequest(LabRequest):
    """Sentences of `length` tokens with `dim` features."""

    dim: int = bounded_field(128, 8, MAX_HEAD_DIM)
    length: int = bounded_field(64, 2, MAX_LENGTH)
    first: int = bounded_field(0, 0, MAX_CARDS)
    count: int = bounded_field(MAX_CARDS, 1, MAX_CARDS)

    def check(self) -> None:
        super().check()
        if self.dim % 8:
            raise FieldError("dim", f"dim must be a multiple of 8, not {self.dim}: every scheme takes it")


def criteria(request: CriteriaRequest) -> list[dict[str, Any]]:
    """The score-cards of `count` position schemes with their defaults, from the `first` on.

    A card has four criteria, and what was measured for each.
    """
    from phasor.lab.criteria import score_card

    kinds = list(PositionConfig.kinds.values())[request.first : request.first + request.count]
    return [score_card(cls(), request.dim, request.length) for cls in kinds]


class CombinationRequest(LabRequest):
    """Token vectors of `dim` features with a standard deviation, and codes that are added, or concatenated."""

    base: float = bounded_field(10000.0, 2.0, 1e9)
    dim: int = bounded_field(128, 2, MAX_HEAD_DIM)
    width: int = bounded_field(32, 2, MAX_HEAD_DIM)
    length: int = bounded_field(64, 2, MAX_LENGTH)
    token_std: float = bounded_field(0.5, 0.001, 100.0)

    def scheme(self, **fields: Any) -> PositionConfig:
        """Sinusoidal codes of the base, combined with tokens as fields say."""
        return PositionConfig.from_dict({"kind": "sinusoidal", "base": self.base, "layout": "halves", **fields})


def combination(request: CombinationRequest) -> dict[str, Any]:
    """Positions added to tokens beside positions concatenated to them: widths, parameters, and what can be read back.

    `feature_std` is the standard deviation of every feature of the code over the positions.
    """
    from phasor.lab.criteria import combination

    concat = request.scheme(combine="concat", width=request.width)
    return combination(request.scheme(), concat, request.dim, request.length, request.token_std)


register("encodings", "matrix", EncodingRequest, matrix)
register("encodings", "facts", EncodingRequest, facts)
register("encodings", "rotation", RotationRequest, rotation)
register("encodings", "criteria", CriteriaRequest, criteria)
register("encodings", "combination", CombinationRequest, combination)

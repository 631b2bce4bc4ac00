"""Parts: why scores are divided by sqrt(d), activations and their gates, norms, and where norms are placed."""

from __future__ import annotations

from typing import Any

from phasor.config import ActivationConfig, NormConfig, PlacementConfig
from phasor.config.schema import by_kind
from phasor.lab.endpoints import MAX_HEAD_DIM, FieldError, LabRequest, Matrix, bounded_field, register

HEAD_DIMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ScaleRequest(LabRequest):
    """Random queries and keys of a head: independent features with mean 0 and variance 1."""

    head_dim: int = bounded_field(64, 1, MAX_HEAD_DIM)
    keys: int = bounded_field(32, 2, 256)
    seed: int = bounded_field(0, 0, 1 << 31)


def scale(request: ScaleRequest) -> dict[str, Any]:
    """Variance, softmax and gradient of scores that are divided by sqrt(head_dim), and of scores that are not.

    `curves` has the same for head dimensions from 1 to 512.
    """
    from phasor.lab.parts import QUERIES, score_statistics

    by_dim = [score_statistics(head_dim, request.keys, request.seed) for head_dim in HEAD_DIMS]
    names = ("variance", "largest", "gradient")
    return score_statistics(request.head_dim, request.keys, request.seed) | {
        "queries": QUERIES,
        "curves": {
            "head_dim": list(HEAD_DIMS),
            **{way: {name: [one[way][name] for one in by_dim] for name in names} for way in ("divided", "plain")},
        },
    }


class ActivationCurvesRequest(LabRequest):
    """Activations from -`reach` to `reach`."""

    reach: float = bounded_field(4.0, 0.5, 20.0)
    points: int = bounded_field(161, 2, 1001)


def curves(request: ActivationCurvesRequest) -> dict[str, Any]:
    """Every activation with its derivative; gated ones by their gate, with an up projection of 1."""
    from phasor.lab.parts import activation_curves

    return activation_curves(list(ActivationConfig.kinds), request.reach, request.points)


class GateRequest(LabRequest):
    """A gated activation over gates and up projections from -`reach` to `reach`."""

    activation: ActivationConfig = by_kind("swiglu")
    reach: float = bounded_field(4.0, 0.5, 20.0)
    points: int = bounded_field(129, 2, 513)

    def check(self) -> None:
        super().check()
        if not self.activation.gated:
            gated = ", ".join(kind for kind, cls in ActivationConfig.kinds.items() if cls.gated)
            raise FieldError("activation", f"activation must be a gated one ({gated}), not {self.activation.kind}")


def gate(request: GateRequest) -> Matrix:
    """What a gated activation gives: the gate from left to right, the up projection from bottom to top."""
    from phasor.lab.parts import gate_map

    return Matrix.of(gate_map(request.activation, request.reach, request.points))


class NormRequest(LabRequest):
    """A vector of `dim` features with a mean and a standard deviation, one feature of it raised by `outlier`."""

    dim: int = bounded_field(24, 2, MAX_HEAD_DIM)
    mean: float = bounded_field(2.0, -100.0, 100.0)
    std: float = bounded_field(3.0, 0.0, 100.0)
    outlier: float = bounded_field(0.0, -1000.0, 1000.0)
    seed: int = bounded_field(0, 0, 1 << 31)


def norms(request: NormRequest) -> dict[str, Any]:
    """The vector, and what every norm as initialized makes of it."""
    from phasor.lab.parts import moments, normalize, random_vector

    vector = random_vector(request.dim, request.mean, request.std, request.outlier, request.seed)
    after = {kind: normalize(cls(), vector) for kind, cls in NormConfig.kinds.items()}
    return {
        "vector": vector,
        "moments": moments(vector),
        "norms": {kind: {"vector": values, "moments": moments(values)} for kind, values in after.items()},
    }


class PlacementRequest(LabRequest):
    """Random blocks of two sub-layers, whose matrices keep the size of their input times `gain`."""

    placement: PlacementConfig = by_kind("pre")
    norm: NormConfig = by_kind("rmsnorm")
    num_layers: int = bounded_field(12, 1, 64)
    dim: int = bounded_field(32, 2, 128)
    gain: float = bounded_field(1.0, 0.01, 10.0)
    seed: int = bounded_field(0, 0, 1 << 31)

    def check(self) -> None:
        super().check()
        if not 1e-3 <= self.placement.multiplier <= 1e3:
            raise FieldError("placement.multiplier", "multiplier must be between 0.001 and 1,000 here")


def placement(request: PlacementRequest) -> dict[str, Any]:
    """The size of the residual stream after each block, and of the gradient that reaches it there."""
    from phasor.lab.parts import depth_profile

    return depth_profile(request.placement, request.norm, request.num_layers, request.dim, request.gain, request.seed)


register("parts", "scale", ScaleRequest, scale)
register("parts", "curves", ActivationCurvesRequest, curves)
register("parts", "gate", GateRequest, gate)
register("parts", "norms", NormRequest, norms)
register("parts", "placement", PlacementRequest, placement)

"""Measurements on the parts of a block: scores with and without their scale, activations, norms, placements.

Everything is computed by the functions and modules that a model is made of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phasor.config import ActivationConfig, ModelConfig, NormConfig, PlacementConfig
from phasor.config.schema import summary
from phasor.nn.feed_forward import activate
from phasor.nn.norm import build_norm
from phasor.nn.residual import build_residual, deepnorm_constants
from phasor.ops.attention import ScoreMod
from phasor.ops.attention.reference import attention_weights

QUERIES = 256  # for which scores are drawn
BATCH = 8  # rows whose residual streams are measured


@functools.lru_cache(maxsize=64)
def score_statistics(head_dim: int, keys: int, seed: int) -> dict[str, dict[str, Any]]:
    """Scores of random queries and keys, "divided" by sqrt(head_dim) or "plain": variance, softmax and its gradient.

    All are means over the queries; `weights` are those of the key with the largest weight, the second and so on.

    >>> found = score_statistics(64, 32, 0)
    >>> round(found["divided"]["variance"]), found["plain"]["gradient"] < found["divided"]["gradient"]
    (1, True)
    """
    draws = torch.Generator().manual_seed(seed)
    q = torch.randn(1, QUERIES, 1, head_dim, dtype=torch.float64, generator=draws)
    k = torch.randn(1, keys, 1, head_dim, dtype=torch.float64, generator=draws)
    products = (q[0, :, 0] @ k[0, :, 0].T).flatten()
    found = {}
    for name, scale in (("divided", head_dim**-0.5), ("plain", 1.0)):
        weights = attention_weights(q, k, None, None, ScoreMod(scale=scale))[0, 0]
        scores = products * scale
        found[name] = {
            "variance": float(scores.var(correction=0)),
            "largest": float(weights.amax(dim=-1).mean()),
            "gradient": float(softmax_gradient(weights).mean()),
            "weights": weights.sort(dim=-1, descending=True).values.mean(dim=0).tolist(),
        }
    return found


def softmax_gradient(p: Tensor) -> Tensor:
    """The Frobenius norm of the derivative of a softmax, `diag(p) - p p^T`, for probabilities `[..., keys]`.

    >>> softmax_gradient(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    squares = p.square()
    return (squares.sum(-1) - 2 * (squares * p).sum(-1) + squares.sum(-1).square()).clamp(min=0).sqrt()


def activation_curves(kinds: Sequence[str], reach: float, points: int) -> dict[str, Any]:
    """Plain activations, and gated ones by their gate with an up projection of 1, with their derivatives.

    >>> curves = activation_curves(["relu", "reglu"], 2.0, 5)["curves"]
    >>> curves["relu"]["values"], curves["reglu"]["slopes"]
    ([0.0, 0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 0.0, 1.0, 1.0])
    """
    x = torch.linspace(-reach, reach, points, dtype=torch.float64, requires_grad=True)
    curves = {}
    for kind in kinds:
        activation = ActivationConfig.from_dict({"kind": kind})
        gate = torch.stack((x, torch.ones_like(x)), dim=-1) if activation.gated else x[:, None]
        y = activate(gate, activation)[:, 0]
        (slopes,) = torch.autograd.grad(y.sum(), x)
        curves[kind] = {
            "values": y.tolist(),
            "slopes": slopes.tolist(),
            "gated": activation.gated,
            "line": summary(type(activation)),
        }
    return {"x": x.tolist(), "curves": curves}


@torch.no_grad()
def gate_map(activation: ActivationConfig, reach: float, points: int) -> Tensor:
    """A gated activation over gate (right) and up projection (upwards, so that the first row is the largest).

    >>> from phasor.config.activations import ReGLUConfig
    >>> gate_map(ReGLUConfig(), 1.0, 3).tolist()
    [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [-0.0, -0.0, -1.0]]
    """
    axis = torch.linspace(-reach, reach, points, dtype=torch.float64)
    up, gate = torch.meshgrid(axis.flip(0), axis, indexing="ij")
    return activate(torch.stack((gate, up), dim=-1), activation)[..., 0]


@torch.no_grad()
def normalize(norm: NormConfig, vector: Sequence[float]) -> list[float]:
    """A vector after a norm as initialized.

    >>> from phasor.config import LayerNormConfig
    >>> [round(x, 3) for x in normalize(LayerNormConfig(), [1.0, 2.0, 3.0])]
    [-1.225, 0.0, 1.225]
    """
    x = torch.tensor(vector, dtype=torch.float64)
    return [float(one) for one in build_norm(norm, len(vector)).double()(x)]


def random_vector(dim: int, mean: float, std: float, outlier: float, seed: int) -> list[float]:
    """Normal numbers with exactly this mean and standard deviation, and one feature raised by `outlier`."""
    draws = torch.randn(dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    draws = (draws - draws.mean()) / draws.std(correction=0).clamp(min=1e-12)
    vector = mean + std * draws
    vector[dim // 3] += outlier
    return [float(one) for one in vector]


def moments(vector: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation and root mean square.

    >>> moments([3.0, -3.0])
    {'mean': 0.0, 'std': 3.0, 'rms': 3.0}
    """
    mean = math.fsum(vector) / len(vector)
    rms = math.sqrt(math.fsum(x * x for x in vector) / len(vector))
    return {"mean": mean, "std": math.sqrt(math.fsum((x - mean) ** 2 for x in vector) / len(vector)), "rms": rms}


@functools.lru_cache(maxsize=256)
def depth_profile(
    placement: PlacementConfig, norm: NormConfig, num_layers: int, dim: int, gain: float, seed: int
) -> dict[str, Any]:
    """The residual stream through random blocks: its size after each block, and the gradient that reaches it.

    A sub-layer is a random matrix that keeps the size of its input, times `gain`; DeepNorm shrinks it by its beta, as
    its initialization does. The gradient is that of a random linear function of the output, after the final norm where
    the placement has one.

    >>> from phasor.config import PreConfig, RMSNormConfig
    >>> profile = depth_profile(PreConfig(), RMSNormConfig(), 8, 16, 1.0, 0)
    >>> len(profile["stream"]), profile["stream"][-1] > 2 * profile["stream"][0]
    (9, True)
    """
    config = ModelConfig(
        vocab_size=1, dim=dim, head_dim=dim, num_layers=num_layers, num_heads=1, placement=placement, norm=norm
    )
    beta = deepnorm_constants(config, "decoder")[1] if placement.kind == "deepnorm" else 1.0
    start, matrices, target = random_stack(num_layers, dim, seed)
    first, other = (build_residual(config, "decoder", 2, first=first).double() for first in (True, False))
    streams = [start.clone().requires_grad_()]
    for layer, weights in enumerate(matrices * (gain * beta)):
        block = other if layer else first
        streams.append(block(streams[-1], *(functools.partial(torch.matmul, other=w) for w in weights)))
    last = build_norm(norm, dim).double()(streams[-1]) if placement.final_norm else streams[-1]
    gradients = torch.autograd.grad((last * target).sum(), streams)
    if not all(bool(x.square().isfinite().all()) for x in (*streams, *gradients)):
        raise ValueError("the residual stream overflows: choose fewer layers, a smaller gain or a norm")
    return {
        "kind": placement.kind,
        "stream": [rms(stream.detach()) for stream in streams],
        "gradient": [rms(gradient) for gradient in gradients],
    }


@functools.lru_cache(maxsize=8)
def random_stack(num_layers: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stream `[rows, dim]`, matrices of two sub-layers per block that keep its size, and a direction for each row.

    >>> [list(x.shape) for x in random_stack(3, 4, 0)]
    [[8, 4], [3, 2, 4, 4], [8, 4]]
    """
    draws = torch.Generator().manual_seed(seed)
    start = torch.randn(BATCH, dim, dtype=torch.float64, generator=draws)
    matrices = torch.randn(num_layers, 2, dim, dim, dtype=torch.float64, generator=draws) * dim**-0.5
    return start, matrices, torch.randn(BATCH, dim, dtype=torch.float64, generator=draws)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())

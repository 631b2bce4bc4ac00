"""Activations of feed-forward networks, plain and gated, as configurations."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.schema import Choice, positive


class ActivationConfig(Choice, what="activation"):
    """The nonlinearity of a feed-forward network; a gated one takes gate and up projections side by side."""

    gated: ClassVar[bool] = False
    weights: ClassVar[tuple[str, ...]] = ()  # scalars that each network learns


class ReLUConfig(ActivationConfig, kind="relu"):
    """max(x, 0)"""


class ReLUSquaredConfig(ActivationConfig, kind="relu2"):
    """max(x, 0)^2 (Primer, Nemotron)"""


class SiLUConfig(ActivationConfig, kind="silu"):
    """x sigmoid(x), also called Swish"""


class GELUConfig(ActivationConfig, kind="gelu"):
    """x Phi(x), exact, by erf"""


class GELUTanhConfig(ActivationConfig, kind="gelu-tanh"):
    """x Phi(x), the tanh approximation"""


class XIELUConfig(ActivationConfig, kind="xielu"):
    """alpha_p x^2 + beta x where x > 0, else alpha_n (exp(x) - 1 - x) + beta x, both alphas learned (Apertus)"""

    weights: ClassVar[tuple[str, ...]] = ("alpha_p", "alpha_n")


class GatedActivationConfig(ActivationConfig):
    """A gate's activation times the up projection."""

    gated: ClassVar[bool] = True


class GLUConfig(GatedActivationConfig, kind="glu"):
    """sigmoid(gate) * up"""


class ReGLUConfig(GatedActivationConfig, kind="reglu"):
    """relu(gate) * up"""


class SwiGLUConfig(GatedActivationConfig, kind="swiglu"):
    """silu(gate) * up"""


class SwiGLUClampedConfig(GatedActivationConfig, kind="swiglu-clamped"):
    """clamped gate sigmoid(gain gate) * (clamped up + 1), as in gpt-oss

    The gate is clamped from above at `limit`, the up projection to `[-limit, limit]`.
    """

    limit: float = 7.0
    gain: float = 1.702

    def check(self) -> None:
        positive(self, "limit", "gain")


class GEGLUConfig(GatedActivationConfig, kind="geglu"):
    """gelu(gate) * up"""


class GEGLUTanhConfig(GatedActivationConfig, kind="geglu-tanh"):
    """gelu-tanh(gate) * up"""

"""The preference loss of a recipe, and what it compares with. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from phasor.config.schema import Config, not_negative, positive

PreferenceLoss = Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "simpo", "orpo"]
REFERENCE_FREE = ("simpo", "orpo")
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "simpo")
AVERAGED = ("sigmoid_norm", "ipo", "simpo", "orpo")


class PreferenceConfig(Config):
    """How a preferred reply is told from a rejected one: a loss of their log-probabilities, and its parameters.

    "sigmoid" is DPO, and "hinge", "ipo" and "robust" are other losses of the same difference to a reference;
    "sigmoid_norm" is DPO with log-probabilities per token. "simpo" and "orpo" need no reference. `beta` is the weight
    of the difference, for "orpo" of its term beside the cross-entropy of the preferred reply. `label_smoothing` is the
    share of pairs that are taken to be labeled wrong (for "sigmoid", conservative DPO). `margin` is that of "simpo",
    its gamma. `reference` is a model folder; without it the reference is the model as it is before the first step.

    >>> PreferenceConfig(loss="simpo", beta=2.0, margin=1.0).needs_reference
    False
    """

    loss: PreferenceLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    margin: float = 0.5
    reference: str | None = None

    def check(self) -> None:
        positive(self, "beta")
        not_negative(self, "margin")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"PreferenceConfig.label_smoothing must be in [0, 0.5), not {self.label_smoothing}")
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ValueError(
                f"PreferenceConfig.label_smoothing is for {', '.join(SMOOTHED)}, not for the loss {self.loss!r}"
            )
        if self.reference == "":
            raise ValueError("PreferenceConfig.reference must name a folder, not ''")
        if self.reference is not None and not self.needs_reference:
            raise ValueError(f"the loss {self.loss!r} has no reference: leave PreferenceConfig.reference out")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss not in REFERENCE_FREE

    @property
    def averages(self) -> bool:
        """Whether the loss is of log-probabilities per token."""
        return self.loss in AVERAGED

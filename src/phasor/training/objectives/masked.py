"""Masked language modeling: tokens that are hidden in a text."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.training.objectives.cross_entropy import CrossEntropy


class MaskedModeling(CrossEntropy):
    """`task: mlm`: an encoder predicts masked tokens from all others."""

    shapes = ("encoder",)

    def head(self, given: ModelConfig | None, labels: tuple[str, ...] = ()) -> dict[str, Any]:
        return {} if given is not None and given.has_logits else {"kind": "mlm"}

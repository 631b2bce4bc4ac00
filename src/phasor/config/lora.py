"""Adapters by low-rank updates: which layers get one, and of what kind. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from phasor.config.schema import Config, derived_field, positive

Target = Literal["attention", "feedforward", "experts", "embedding", "head"]
Kind = Literal["lora", "rslora", "dora"]
DEFAULT_TARGETS: tuple[Target, ...] = ("attention", "feedforward")  # of which a model may have one alone


def lora_scale(kind: Kind, rank: int, alpha: float) -> float:
    """What an update B A is multiplied by: `alpha / rank`, or `alpha / sqrt(rank)` in rsLoRA.

    >>> lora_scale("lora", 16, 32.0), lora_scale("rslora", 16, 32.0)
    (2.0, 8.0)
    """
    return alpha / (rank**0.5 if kind == "rslora" else rank)


class LoRAConfig(Config):
    """Low-rank updates of frozen weights, `W + s B A`: their rank, and the layers that have them.

    The scale s is `alpha / rank`, or `alpha / sqrt(rank)` for the kind "rslora"; `alpha` is twice the rank where it
    is left out. "dora" trains the magnitude of each row of `W + s B A` besides (Liu et al. 2024). `targets` are the
    projections of attention, those of feed-forward networks, routed experts, the token embedding and the head;
    those of the first two that a model has, where it is left out. `dropout` acts on what an update multiplies.
    Weights that a pattern of `modules_to_save` matches are trained whole and saved with the adapter.

    >>> LoRAConfig(rank=8).alpha
    16.0
    """

    rank: int = 16
    alpha: float = derived_field(lambda config: 2.0 * config.rank)
    targets: tuple[Target, ...] | None = None
    kind: Kind = "lora"
    dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()

    def check(self) -> None:
        positive(self, "rank", "alpha")
        targets = DEFAULT_TARGETS if self.targets is None else self.targets
        if not targets:
            raise ValueError("LoRAConfig.targets must name one part of the model at least")
        if len(set(targets)) < len(targets):
            raise ValueError(f"LoRAConfig.targets names a part twice: {', '.join(targets)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRAConfig.dropout must be in [0, 1), not {self.dropout}")
        for reason, given in (("DoRA", self.kind == "dora"), ("dropout", self.dropout > 0)):
            if given and "experts" in targets:
                raise ValueError(f"LoRAConfig.targets has experts, whose updates have no {reason}")

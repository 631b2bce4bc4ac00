"""What a student learns from a teacher. Nothing here imports torch."""

from __future__ import annotations

from phasor.config.schema import Config, positive


class DistillConfig(Config):
    """The folder of a `teacher`, and how its predictions count beside the tokens of the text.

    The loss is `alpha` times the cross-entropy of the text's tokens plus `1 - alpha` times `temperature^2` times the
    divergence of the student from the teacher, both at that temperature (Hinton et al. 2015). With `top_k` the teacher
    gives its most likely tokens alone, scaled to a sum of 1.

    >>> DistillConfig(teacher="runs/lm-1", top_k=64).alpha
    0.5
    """

    teacher: str | None = None
    temperature: float = 1.0
    alpha: float = 0.5
    top_k: int | None = None

    def check(self) -> None:
        positive(self, "temperature", "top_k")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"DistillConfig.alpha must be in [0, 1], not {self.alpha}")
        if self.teacher == "":
            raise ValueError("DistillConfig.teacher must name a folder, not ''")

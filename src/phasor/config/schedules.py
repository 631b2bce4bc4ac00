"""Learning-rate schedules, in plain Python."""

from __future__ import annotations

import math

from phasor.config.schema import Choice, not_negative


class ScheduleConfig(Choice, what="schedule"):
    """The learning rate by optimizer step. Steps count from 0; the rate rises linearly over the `warmup` steps."""

    warmup: int = 100

    def check(self) -> None:
        not_negative(self, "warmup")
        for name in ("floor", "decay"):
            if not 0 <= getattr(self, name, 0.0) <= 1:
                raise ValueError(f"{type(self).__name__}.{name} is a fraction, in [0, 1], not {getattr(self, name)}")

    def lr_at(self, step: int, steps: int, peak: float) -> float:
        """The learning rate of optimizer step `step` out of `steps`.

        >>> [round(LinearSchedule(warmup=2).lr_at(step, 6, 1.0), 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        return peak * self.factor(step - self.warmup, max(1, steps - self.warmup))

    def factor(self, step: int, steps: int) -> float:
        """The fraction of the peak learning rate at a step after the warmup, out of `steps` such steps."""
        raise NotImplementedError(f"{type(self).__name__} does not define its shape")


class ConstantSchedule(ScheduleConfig, kind="constant"):
    """A constant learning rate after the warmup."""

    def factor(self, step: int, steps: int) -> float:
        return 1.0


class InverseSqrtSchedule(ScheduleConfig, kind="inverse-sqrt"):
    """Decays with the inverse square root of the step, as in the 2017 Transformer; the peak is at the end of warmup."""

    def factor(self, step: int, steps: int) -> float:
        warmup = max(1, self.warmup)
        return math.sqrt(warmup / (warmup + step + (self.warmup > 0)))


class CosineSchedule(ScheduleConfig, kind="cosine"):
    """Cosine decay to `floor` times the peak."""

    floor: float = 0.1

    def factor(self, step: int, steps: int) -> float:
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


class LinearSchedule(ScheduleConfig, kind="linear"):
    """Linear decay to `floor` times the peak."""

    floor: float = 0.0

    def factor(self, step: int, steps: int) -> float:
        return 1 - (1 - self.floor) * min(1.0, step / steps)


class StableSchedule(ScheduleConfig, kind="wsd"):
    """Warmup, stable, decay (WSD): linear decay to `floor` times the peak over the last `decay` fraction of steps."""

    decay: float = 0.2
    floor: float = 0.0

    def factor(self, step: int, steps: int) -> float:
        decay_steps = max(1, round(self.decay * (steps + self.warmup)))
        left = max(0, steps - step)
        return min(1.0, self.floor + (1 - self.floor) * left / decay_steps)

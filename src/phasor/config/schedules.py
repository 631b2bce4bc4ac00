"""Schedules: how the rate goes from step to step, in plain Python."""

from __future__ import annotations

import math

from phasor.config.schema import Choice, not_negative


class ScheduleConfig(Choice, what="schedule"):
    """How the rate goes from step to step. Updates count from 0; the rate rises linearly over `warmup` of them."""

    warmup: int = 100

    def check(self) -> None:
        not_negative(self, "warmup")
        for name in ("floor", "decay"):
            if not 0 <= getattr(self, name, 0.0) <= 1:
                raise ValueError(f"{type(self).__name__}.{name} is a share, in [0, 1], not {getattr(self, name)}")

    def lr_at(self, step: int, steps: int, peak: float) -> float:
        """The rate of update number `step` out of `steps`.

        >>> [round(LinearSchedule(warmup=2).lr_at(step, 6, 1.0), 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        return peak * self.after(step - self.warmup, max(1, steps - self.warmup))

    def after(self, step: int, steps: int) -> float:
        """The share of the peak at a step after the warm-up, of so many."""
        raise NotImplementedError(f"{type(self).__name__} does not define its shape")


class ConstantSchedule(ScheduleConfig, kind="constant"):
    """The same rate after the warm-up."""

    def after(self, step: int, steps: int) -> float:
        return 1.0


class InverseSqrtSchedule(ScheduleConfig, kind="inverse-sqrt"):
    """Falls with the square root of the step, as in 2017; its peak, at the end of the warm-up, is the rate."""

    def after(self, step: int, steps: int) -> float:
        warmup = max(1, self.warmup)
        return math.sqrt(warmup / (warmup + step + (self.warmup > 0)))


class CosineSchedule(ScheduleConfig, kind="cosine"):
    """Half a cosine down to `floor` of the peak."""

    floor: float = 0.1

    def after(self, step: int, steps: int) -> float:
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


class LinearSchedule(ScheduleConfig, kind="linear"):
    """A straight line down to `floor` of the peak."""

    floor: float = 0.0

    def after(self, step: int, steps: int) -> float:
        return 1 - (1 - self.floor) * min(1.0, step / steps)


class StableSchedule(ScheduleConfig, kind="wsd"):
    """Warm-up, stable, decay: a straight line down to `floor` over the last `decay` of all steps."""

    decay: float = 0.2
    floor: float = 0.0

    def after(self, step: int, steps: int) -> float:
        falling = max(1, round(self.decay * (steps + self.warmup)))
        left = max(0, steps - step)
        return min(1.0, self.floor + (1 - self.floor) * left / falling)

"""Confidence intervals: of means of paired differences, and of shares of successes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

LEVEL = 0.95
MANY = 2000  # degrees of freedom from which an expansion about the normal distribution has 7 digits or more


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval; `count` is how many observations it is from.

    >>> Interval(0.5, 0.2, 0.8, count=9).excludes_zero, str(Interval(0.5, 0.25, 0.75, count=9))
    (True, '0.5 [0.25, 0.75]')
    """

    estimate: float
    low: float
    high: float
    count: int
    level: float = LEVEL

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside of the interval: whether the sign of a difference is shown."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no numbers that are not finite: None in their place."""
        ends = {"estimate": self.estimate, "low": self.low, "high": self.high}
        numbers = {name: value if math.isfinite(value) else None for name, value in ends.items()}
        return {**numbers, "count": self.count, "level": self.level}

    def __str__(self) -> str:
        return f"{self.estimate:.4g} [{self.low:.4g}, {self.high:.4g}]"


def paired_interval(
    differences: Sequence[float], weights: Sequence[float] | None = None, *, level: float = LEVEL
) -> Interval:
    """Student's t interval of the mean of paired differences, one per document or row.

    `differences[i]` is what two models differ by on the same document, so that what makes a document hard for both
    cancels. Documents are taken to be independent. With `weights`, such as the tokens of each document, the mean is the
    weighted one, `sum(w * d) / sum(w)`, and its variance that of a ratio, `n / (n - 1) * sum(w^2 (d - mean)^2) /
    sum(w)^2`; equal weights give the usual interval. Of one observation, the ends are infinite. The interval of a plain
    mean is that of its values.

    >>> interval = paired_interval([1.0, 2.0, 3.0])
    >>> interval.estimate, round(interval.high - 2, 4)  # 4.3027 * sqrt(1 / 3)
    (2.0, 2.4841)
    """
    check_level(level)
    count = len(differences)
    if count == 0:
        raise ValueError("an interval needs at least one observation, and there is none")
    weights = [1.0] * count if weights is None else weights
    if len(weights) != count or not all(weight > 0 for weight in weights):
        raise ValueError(f"weights are positive, one for each of the {count} observations")
    total = math.fsum(weights)
    mean = math.fsum(w * d for w, d in zip(weights, differences, strict=True)) / total
    if count == 1:
        return Interval(mean, -math.inf, math.inf, count, level)
    squares = math.fsum((w * (d - mean)) ** 2 for w, d in zip(weights, differences, strict=True))
    half = student_t(level, count - 1) * math.sqrt(count / (count - 1) * squares) / total
    return Interval(mean, mean - half, mean + half, count, level)


def binomial_interval(successes: int, trials: int, *, level: float = LEVEL) -> Interval:
    """Wilson's score interval of a share of successes; `estimate` is the share itself.

    >>> interval = binomial_interval(10, 10)
    >>> interval.estimate, round(interval.low, 4), interval.high
    (1.0, 0.7225, 1.0)
    """
    check_level(level)
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"successes are between 0 and the number of trials, not {successes} of {trials}")
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    share = successes / trials
    center = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(z2 * (share * (1 - share) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    low = 0.0 if successes == 0 else center - half
    high = 1.0 if successes == trials else center + half
    return Interval(share, low, high, trials, level)


def compare_pairs(values: Mapping[str, ArrayLike], weights: Sequence[float] | None = None) -> list[dict[str, Any]]:
    """Every two of several names, lowest mean first; `values[name][i]` is of the same document for every name.

    An order is shown where the interval of the paired difference excludes 0. Each interval has the level by itself:
    among twenty pairs that do not differ, one is shown on average. Of values `[seeds, documents]` every seed has to
    show the order by itself, and `difference` is that of their means.

    >>> losses = {"linear": [2.1, 2.3, 2.2], "yarn": [2.0, 2.2, 2.1], "window": [2.0, 2.3, 2.0]}
    >>> [pair["statement"] for pair in compare_pairs(losses)]
    ['yarn < window: not shown', 'yarn < linear', 'window < linear: not shown']
    >>> [pair["seeds_shown"] for pair in compare_pairs({"a": [[1.0, 2.0], [1.0, 2.1]], "b": [[2.0, 3.0], [0.0, 3.0]]})]
    [1]
    """
    rows = {name: np.atleast_2d(each) for name, each in values.items()}
    means = {name: paired_interval(each.mean(0).tolist(), weights).estimate for name, each in rows.items()}
    ordered = sorted(rows, key=lambda name: (math.isnan(means[name]), means[name]))
    pairs = []
    for first, second in combinations(ordered, 2):
        differences = rows[first] - rows[second]
        seeds_shown = sum(paired_interval(row.tolist(), weights).high < 0 for row in differences)
        shown = seeds_shown == len(differences)
        pairs.append(
            {
                "first": first,
                "second": second,
                "difference": paired_interval(differences.mean(0).tolist(), weights).to_dict(),
                "shown": shown,
                "seeds_shown": seeds_shown,
                "statement": f"{first} < {second}" + ("" if shown else ": not shown"),
            }
        )
    return pairs


def compare_lengths(
    values: Mapping[tuple[str, int], ArrayLike],
    names: Sequence[str],
    lengths: Iterable[int],
    weights: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """The pairs of names at every length, of values by name and length."""
    return [
        {"length": length, **pair}
        for length in lengths
        for pair in compare_pairs({name: values[name, length] for name in names if (name, length) in values}, weights)
    ]


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval is between 0 and 1, such as {LEVEL}, not {level}")


def student_t(level: float, freedom: int) -> float:
    """The t with `P(|T| < t) = level`, for Student's distribution with an integer number of degrees of freedom.

    >>> round(student_t(0.95, 1), 4), round(student_t(0.95, 30), 4)
    (12.7062, 2.0423)
    """
    if freedom > MANY:
        z = NormalDist().inv_cdf((1 + level) / 2)
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(freedom)
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if central_share(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def central_share(angle: float, freedom: int) -> float:
    """`P(|T| < sqrt(freedom) * tan(angle))`, by the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    cos2 = math.cos(angle) ** 2
    odd = freedom % 2
    term = total = 0.0 if freedom == 1 else math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom, 2):
        term *= (k - 1) / k * cos2
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total

"""Intervals against mpmath, closed formulas and the equations that define them."""

import math
from statistics import NormalDist

import mpmath
import pytest

from phasor.evaluation.intervals import Interval, binomial_interval, compare_pairs, paired_interval, student_t


def test_student_t_has_its_closed_formulas_at_one_and_two_degrees_of_freedom():
    for level in (0.5, 0.9, 0.95, 0.99):
        assert student_t(level, 1) == pytest.approx(math.tan(math.pi * level / 2), rel=1e-12)
        assert student_t(level, 2) == pytest.approx(level * math.sqrt(2 / (1 - level**2)), rel=1e-12)


@pytest.mark.parametrize("freedom", [3, 4, 7, 30, 199, 2000, 2001, 100_000])
def test_student_t_holds_its_level_by_the_incomplete_beta_function(freedom):
    t = student_t(0.95, freedom)
    outside = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + mpmath.mpf(t) ** 2), regularized=True)
    assert float(outside) == pytest.approx(0.05, rel=1e-8)


def test_equal_weights_give_the_usual_interval():
    differences = [0.3, -0.1, 0.4, 0.25, 0.9]
    mean = sum(differences) / 5
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / 4)
    for weights in (None, [7.0] * 5):
        interval = paired_interval(differences, weights)
        assert interval.estimate == pytest.approx(mean)
        assert interval.high - mean == pytest.approx(2.7764451 * deviation / math.sqrt(5), rel=1e-7)
        assert mean - interval.low == pytest.approx(interval.high - mean)
    assert not interval.excludes_zero


def test_weights_are_those_of_the_tokens():
    interval = paired_interval([1.0, 3.0], [300, 100])
    assert interval.estimate == 1.5
    # n / (n - 1) * sum of (w (d - mean))^2 over (sum of w)^2, with t = 12.7062 for one degree of freedom
    assert interval.high - 1.5 == pytest.approx(12.7062047 * math.sqrt(2 * (150**2 + 150**2)) / 400, rel=1e-7)


def test_one_observation_shows_nothing():
    interval = paired_interval([3.0])
    assert (interval.low, interval.high, interval.excludes_zero) == (-math.inf, math.inf, False)
    assert interval.to_dict() == {"estimate": 3.0, "low": None, "high": None, "count": 1, "level": 0.95}


def test_differences_that_are_all_zero_show_no_order():
    assert not paired_interval([0.0, 0.0, 0.0]).excludes_zero


@pytest.mark.parametrize(("successes", "trials"), [(1, 10), (5, 10), (93, 100), (1, 1000)])
def test_wilson_ends_solve_the_score_equation(successes, trials):
    interval = binomial_interval(successes, trials)
    z = NormalDist().inv_cdf(0.975)
    for end in (interval.low, interval.high):
        assert abs(successes / trials - end) == pytest.approx(z * math.sqrt(end * (1 - end) / trials))


def test_wilson_at_the_ends_of_the_scale():
    none, every = binomial_interval(0, 20), binomial_interval(20, 20)
    z2 = NormalDist().inv_cdf(0.975) ** 2
    assert (none.low, every.high) == (0.0, 1.0)
    assert none.high == pytest.approx(z2 / (20 + z2))
    assert every.low == pytest.approx(20 / (20 + z2))


def test_orders_are_stated_only_where_they_are_shown():
    losses = {"a": [1.0, 2.0, 3.0], "b": [1.1, 2.1, 3.1], "c": [0.9, 2.4, 3.0]}
    statements = {pair["statement"] for pair in compare_pairs(losses)}
    assert statements == {"a < b", "a < c: not shown", "b < c: not shown"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: paired_interval([]), "at least one observation"),
        (lambda: paired_interval([1.0], [0.0]), "weights are positive"),
        (lambda: paired_interval([1.0, 2.0], [1.0]), "one for each of the 2"),
        (lambda: paired_interval([1.0], level=95), "between 0 and 1"),
        (lambda: binomial_interval(3, 2), "3 of 2"),
        (lambda: binomial_interval(0, 0), "0 of 0"),
    ],
)
def test_mistakes_are_sentences(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_an_interval_prints_as_a_range():
    assert str(Interval(0.12345, 0.1, 0.15, count=3)) == "0.1235 [0.1, 0.15]"

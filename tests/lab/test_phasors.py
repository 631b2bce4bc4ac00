"""The view "phasors": its scores are the library's at any position, and its findings hold."""

import random
import statistics
import time

import mpmath
import pytest
import torch

import phasor
from phasor.lab.endpoints import ENDPOINTS, FieldError
from phasor.lab.two_words import make_words
from phasor.lab.views.phasors import SPAN, ScoreRequest, WordsRequest, dials, score

LAST = 2**36


def library_score(request):
    """The score of the library alone: both words rotated by `phasor.Rotary` in float64."""
    words = make_words(request.head_dim, request.pairing, request.alike, request.seed)
    rope = phasor.Rotary(head_dim=request.head_dim, base=request.base, pairing=request.pairing)
    rows = [x.expand(1, 1, 2, -1) for x in (words.query, words.key)]
    q, k = rope.rotate(*rows, torch.tensor([request.query, request.key]))
    return float(q[0, 0, 0] @ k[0, 0, 1])


def precise_score(request):
    """The same with 40 digits, from the increments that the page multiplies itself."""
    hands = dials(request)
    with mpmath.workdps(40):
        parts = []
        for inc, a, b in zip(hands["increments"], hands["query_angles"], hands["key_angles"], strict=True):
            phase = int(inc) * (request.query - request.key) % 2**64
            parts.append(mpmath.cos(mpmath.mpf(a) - b + 2 * mpmath.pi * phase / 2**64))
        return float(sum(parts))


def random_request(rng):
    return ScoreRequest(
        head_dim=rng.choice([2, 16, 64, 128]),
        base=rng.choice([10000.0, 500000.0, 37.5]),
        pairing=rng.choice(["half", "adjacent"]),
        alike=rng.random(),
        seed=rng.randrange(100),
        query=rng.randint(0, LAST),
        key=rng.randint(0, LAST),
    )


def test_scores_are_those_of_the_library_at_a_hundred_random_positions():
    rng = random.Random(0)
    for _ in range(100):
        request = random_request(rng)
        answer = score(request)
        assert answer["score"] == pytest.approx(library_score(request), abs=1e-12)
        assert answer["score"] == pytest.approx(precise_score(request), abs=1e-12)
        assert sum(answer["pairs"]) == pytest.approx(answer["score"], abs=1e-12)


def test_hands_are_the_rotated_pairs():
    """The page turns the hands by the increments alone: that is where the library puts them."""
    rng = random.Random(1)
    for _ in range(20):
        request = random_request(rng)
        answer, start = score(request), dials(request)
        for i, (inc, angle) in enumerate(zip(start["increments"], start["query_angles"], strict=True)):
            phase = int(inc) * request.query % 2**64
            with mpmath.workdps(40):
                hand = mpmath.expjpi(2 * mpmath.mpf(phase) / 2**64) * mpmath.expj(angle)
            assert answer["query_hands"][i] == pytest.approx([float(hand.real), float(hand.imag)], abs=1e-12)


def test_moving_both_along_changes_nothing_unless_rotation_comes_before_the_projection():
    for rotate, still in (("after", True), ("before", False)):
        answer = score(ScoreRequest(query=40, key=28, rotate=rotate))
        change = max(abs(s - answer["unmoved_score"]) for s in answer["by_shift"]["scores"])
        assert (change < 1e-5) is still
        assert (change > 1) is not still
    at_zero = [score(ScoreRequest(query=0, key=0, alike=0.3, rotate=rotate))["score"] for rotate in ("after", "before")]
    assert at_zero[0] == pytest.approx(at_zero[1], abs=1e-12)


def test_float32_angles_agree_at_the_beginning_and_not_at_the_end():
    near, far = (score(ScoreRequest(query=at + 40, key=at + 28)) for at in (0, LAST - 40))
    assert near["float32_score"] == pytest.approx(near["score"], abs=1e-3)
    assert abs(far["float32_score"] - far["score"]) > 1
    assert far["by_shift"]["shifts"][0] == 0
    assert far["by_shift"]["shifts"][-1] == LAST - 12


def test_the_curve_by_distance_passes_through_the_score():
    for query, key in ((90, 28), (28, 90)):
        answer = score(ScoreRequest(query=query, key=key, alike=0.4))
        assert len(answer["by_distance"]["scores"]) == SPAN
        assert answer["by_distance"]["scores"][62] == pytest.approx(answer["score"], abs=1e-12)


def test_either_pairing_gives_the_same_score_and_the_wrong_one_another():
    half, adjacent = (score(ScoreRequest(pairing=pairing)) for pairing in ("half", "adjacent"))
    assert half["score"] == pytest.approx(adjacent["score"], abs=1e-12)
    assert abs(half["mispaired_score"] - half["score"]) > 0.1
    assert dials(WordsRequest(head_dim=6, pairing="adjacent"))["features"] == [[0, 1], [2, 3], [4, 5]]


def test_wavelengths_are_those_of_explain():
    config = phasor.ModelConfig(vocab_size=9, dim=64, num_layers=1, num_heads=1, position="rotary")
    pairs = phasor.explain(config).schemes[0].pairs
    assert dials(WordsRequest())["wavelengths"] == pytest.approx([pair.wavelength for pair in pairs], rel=1e-15)


@pytest.mark.parametrize(
    ("body", "field", "sentence"),
    [
        ({"head_dim": 7}, "head_dim", "head_dim must be even, not 7: features rotate in pairs"),
        ({"head_dim": 514}, "head_dim", "head_dim must be at most 512, not 514"),
        ({"query": LAST + 1}, "query", "query must be at most 68,719,476,736, not 68719476737"),
        ({"key": -1}, "key", "key must be at least 0, not -1"),
        ({"alike": 2}, "alike", "alike must be at most 1, not 2.0"),
        ({"rotate": "never"}, "rotate", "rotate must be one of 'after', 'before', not 'never'"),
    ],
)
def test_mistakes_name_their_field(body, field, sentence):
    with pytest.raises(FieldError) as caught:
        ENDPOINTS["/api/phasors/score"].answer(body)
    assert (caught.value.field, str(caught.value)) == (field, sentence)


@pytest.mark.slow
def test_a_request_is_fast():
    """The limit is 30 ms of CPU; the median is far below it."""
    times = []
    for at in range(9):
        start = time.process_time()
        score(ScoreRequest(query=at + 40, key=at + 28))
        dials(WordsRequest(base=10000.0 + at))
        times.append(time.process_time() - start)
    assert statistics.median(times) < 0.030

"""From logits to a token: filters and penalties against their definitions and transformers', draws, seeds."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from decoding import chi_square_tail, distribution_ref, penalized_ref, speaker
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from phasor import GenerationConfig, generate
from phasor.generation.sampling import RandomStream, draw, filter_logits, penalize

NEAR = 1e-9  # closer to a threshold than this, which side of it a token falls on is a matter of rounding
THEIRS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
}


def random_logits(seed: int, size: int, spread: float) -> Tensor:
    return spread * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


some_logits = st.builds(random_logits, st.integers(0, 10**6), st.integers(2, 60), st.floats(0.3, 6.0))
VALUES = {
    "temperature": st.floats(0.05, 5.0),
    "top_k": st.integers(1, 70),
    "top_p": st.floats(0.01, 0.999),
    "min_p": st.floats(0.001, 0.999),
    "typical_p": st.floats(0.01, 0.999),
}


def ours(logits: Tensor, options: dict[str, float]) -> Tensor:
    return filter_logits(logits, GenerationConfig(**options)).softmax(-1)


def theirs(logits: Tensor, options: dict[str, float]) -> Tensor:
    chain = LogitsProcessorList([make(options[name]) for name, make in THEIRS.items() if name in options])
    return chain(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0].softmax(-1)


def assert_same(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a > 0, b > 0)
    assert torch.allclose(a, b, rtol=0, atol=1e-12)  # float64: rounding alone


def compare_with_both(logits: Tensor, options: dict[str, float]) -> None:
    probabilities, margin = distribution_ref(logits.tolist(), options)
    assume(margin > NEAR)
    expected = torch.tensor(probabilities, dtype=torch.float64)
    assert_same(ours(logits, options), expected)
    assert_same(theirs(logits, options), expected)


@pytest.mark.parametrize("name", VALUES)
@given(st.data(), some_logits)
def test_each_filter_is_its_definition_and_theirs(name: str, data: st.DataObject, logits: Tensor) -> None:
    options = {name: data.draw(VALUES[name])}
    compare_with_both(logits, options)


@given(st.fixed_dictionaries({}, optional=VALUES), some_logits)
def test_filters_together(options: dict[str, float], logits: Tensor) -> None:
    compare_with_both(logits, options)


def test_ties_with_the_last_of_the_best_stay() -> None:
    assert filter_logits(torch.tensor([1.0, 3.0, 1.0, 0.0]), GenerationConfig(top_k=2)).tolist() == [1, 3, 1, -math.inf]


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 1e-300}]
)
def test_the_narrowest_filters_leave_the_likeliest_alone(options: dict[str, float]) -> None:
    for dtype in (torch.float32, torch.float64):
        logits = random_logits(3, 50, 2.0).to(dtype)
        assert ours(logits, options).tolist() == [float(t == int(logits.argmax())) for t in range(50)]


@pytest.mark.parametrize("options", [{"top_k": 1000}, {"top_p": 1.0}, {"min_p": 0.0}, {"typical_p": 1.0}])
def test_the_widest_filters_leave_all(options: dict[str, float]) -> None:
    logits = random_logits(3, 50, 2.0)
    assert_same(ours(logits, options), logits.softmax(-1))


@given(st.data(), some_logits, st.floats(0.2, 4.0))
def test_the_repetition_penalty_is_theirs(data: st.DataObject, logits: Tensor, penalty: float) -> None:
    token = st.integers(0, len(logits) - 1)
    prompt, new = data.draw(st.lists(token, min_size=1, max_size=9)), data.draw(st.lists(token, max_size=9))
    found = penalize(logits, GenerationConfig(repetition_penalty=penalty), prompt, new)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + new]), logits[None].clone())[0]
    assert torch.allclose(found, expected, rtol=1e-14, atol=0)


@given(st.data(), some_logits, st.floats(0.2, 4.0), st.floats(-2.0, 2.0), st.floats(-2.0, 2.0))
def test_penalties_are_their_definition(
    data: st.DataObject, logits: Tensor, repetition: float, frequency: float, presence: float
) -> None:
    token = st.integers(0, len(logits) - 1)
    prompt, new = data.draw(st.lists(token, min_size=1, max_size=9)), data.draw(st.lists(token, max_size=9))
    before = logits.clone()
    options = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
    found = penalize(logits, GenerationConfig(**options), prompt, new)
    expected = torch.tensor(penalized_ref(logits.tolist(), prompt, new, options), dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(logits, before)


def test_draws_divide_the_unit_interval_by_the_probabilities() -> None:
    probabilities, points = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0]), 1000
    chances = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    drawn = draw(probabilities.expand(points, -1), chances)
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 200, 0, 500, 300, 0]
    assert drawn.tolist() == sorted(drawn.tolist())


@pytest.mark.parametrize("chance", [0.0, 1 - 2**-53])
def test_the_impossible_is_not_drawn_at_the_ends(chance: float) -> None:
    for seed in range(50):
        p = torch.rand(20, generator=torch.Generator().manual_seed(seed))
        p[:3], p[-3:] = 0, 0
        assert p[draw(p / p.sum(), torch.tensor(chance, dtype=torch.float64))] > 0


def test_draws_with_a_seed_have_the_distribution() -> None:
    stream, p = RandomStream(7), random_logits(5, 9, 1.0).softmax(-1)
    counts = torch.zeros(9)
    for _ in range(20_000):
        counts[draw(p, stream.next())] += 1
    assert chi_square_tail(counts, p) > 1e-3


SAMPLE = {"max_new_tokens": 12, "temperature": 1.0}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [4]]


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 7}, {"top_p": 0.8}, {"prompt_lookup_tokens": 2}, {"repetition_penalty": 1.5}]
)
def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(options: dict[str, float]) -> None:
    model = speaker()
    alone = [generate(model, p, seed=11, **SAMPLE, **options) for p in PROMPTS]
    assert generate(model, PROMPTS, seed=11, **SAMPLE, **options) == alone
    assert generate(model, PROMPTS[::-1], seed=11, **SAMPLE, **options) == alone[::-1]
    assert generate(model, PROMPTS[1:3], seed=11, **SAMPLE, **options) == alone[1:3]
    assert alone[1] == alone[3]


def test_different_seeds_differ_and_none_is_different_each_time() -> None:
    model = speaker()
    for seed in (range(20), [None] * 20):
        found = Counter(tuple(generate(model, [1, 2, 3], seed=s, **SAMPLE)) for s in seed)
        assert len(found) == 20


def test_a_seed_for_every_prompt() -> None:
    model, seeds = speaker(), [3, 1, 4, 1]
    alone = [generate(model, p, seed=s, **SAMPLE) for p, s in zip(PROMPTS, seeds, strict=True)]
    assert generate(model, PROMPTS, seed=seeds, **SAMPLE) == alone
    with pytest.raises(ValueError, match="seed lists 2 seeds for 4 prompts"):
        generate(model, PROMPTS, seed=[1, 2], **SAMPLE)


def test_the_global_generator_is_left_alone() -> None:
    model, before = speaker(), torch.get_rng_state()
    generate(model, [1], seed=1, **SAMPLE)
    generate(model, [1], **SAMPLE)
    assert torch.equal(torch.get_rng_state(), before)

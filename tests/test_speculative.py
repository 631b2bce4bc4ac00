"""Speculative decoding: guesses change how fast tokens come, and nothing about which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from decoding import chi_square_tail, continuations, full_logits, greedy_ref, speaker
from schemes import SCHEMES, VIEWS
from test_sampling import distribution_ref
from torch import Tensor

from phasor import Transformer, generate
from phasor.generation import speculative
from phasor.generation.loop import Job, Row

# Text that repeats itself, so that looking up what came next the last time finds something.
PROMPT = [5, 17, 30, 8, 5, 17, 30, 8, 5, 17]
PROMPTS = [PROMPT, [9], [44, 44, 44], [1, 2, 3, 1, 2, 3, 1]]


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many tokens were guessed and how many accepted at every call of the model."""
    counts: list[tuple[int, int]] = []
    original = speculative.accept

    def counting(job: Job, row: Row, logits: Tensor, guesses: list[int], guessed: list[Tensor]) -> int:
        passed = original(job, row, logits, guesses, guessed)
        counts.append((len(guesses), passed))
        return passed

    monkeypatch.setattr(speculative, "accept", counting)
    return counts


def somewhat_like(model: Transformer, much: float) -> Transformer:
    """A draft that agrees with a model often but not always."""
    draft = Transformer(model.config).eval()
    draft.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(much * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * weight.std())
    return draft


@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_with_a_draft_is_greedy(scheme: str, accepted: list[tuple[int, int]]) -> None:
    model = speaker(scheme)
    draft = somewhat_like(model, 0.2)
    assert generate(model, PROMPT, max_new_tokens=16, draft=draft) == greedy_ref(model, PROMPT, 16)
    guesses, passed = (sum(x) for x in zip(*accepted, strict=True))
    assert 0 < passed < guesses


@pytest.mark.parametrize("view", ["window", "sinks"])
@pytest.mark.parametrize("scheme", ["none", "t5", "alibi", "rotary", "learned", "xpos", "rotary-dynamic-yarn"])
def test_greedy_with_a_draft_around_a_ring(scheme: str, view: str, accepted: list[tuple[int, int]]) -> None:
    """Guesses that are undone leave rings, the model's and the draft's, as they were."""
    model = speaker(scheme, attention=VIEWS[view])
    draft = somewhat_like(model, 0.2)
    expected = generate(model, PROMPTS, max_new_tokens=24)
    assert generate(model, PROMPTS, max_new_tokens=24, draft=draft, draft_tokens=3) == expected
    assert expected[0] == greedy_ref(model, PROMPT, 24)
    guesses, passed = (sum(x) for x in zip(*accepted, strict=True))
    assert 0 < passed < guesses


@pytest.mark.parametrize("ahead", [1, 2, 7, 30])
def test_any_number_of_guesses_by_any_draft(ahead: int, accepted: list[tuple[int, int]]) -> None:
    model = speaker(attention=VIEWS["sinks"])
    other = speaker("learned", seed=5, num_layers=1, max_length=64)
    expected = generate(model, PROMPTS, max_new_tokens=20)
    for draft in (model, somewhat_like(model, 0.1), other):
        assert generate(model, PROMPTS, max_new_tokens=20, draft=draft, draft_tokens=ahead) == expected
    assert max(guesses for guesses, _ in accepted) == min(ahead, 19)


def test_a_draft_that_is_the_model_is_always_right(accepted: list[tuple[int, int]]) -> None:
    model = speaker()
    generate(model, PROMPT, max_new_tokens=20, draft=model, draft_tokens=4)
    assert accepted == [(4, 4)] * 4  # and each time one token more


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["none", "sinusoidal", "t5", "rotary", "rotary-dynamic-ntk", "rotary-longrope"])
def test_greedy_with_lookup_is_greedy(scheme: str, view: str, accepted: list[tuple[int, int]]) -> None:
    model = speaker(scheme, attention=VIEWS[view])
    expected = generate(model, PROMPTS, max_new_tokens=40)
    for longest in (1, 3):
        assert generate(model, PROMPTS, max_new_tokens=40, lookup=longest) == expected
    guesses, passed = (sum(x) for x in zip(*accepted, strict=True))
    assert 0 < passed < guesses


def test_lookup_finds_the_latest_and_longest_match() -> None:
    job = Job(speaker(), speculative_options(lookup=3), [[0]], frozenset())
    guess = speculative.Lookup(job).guess

    def guessed(text: Sequence[int], most: int = 4) -> list[int]:
        return guess(Row(list(text), None), most)[0]

    assert guessed([1, 2, 3, 9, 8, 1, 2, 3]) == [9, 8, 1, 2]
    assert guessed([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3], 2) == [9, 7]  # three tokens before two
    assert guessed([2, 3, 9, 2, 3, 8, 2, 3], 1) == [8]  # the later of two
    assert guessed([1, 2, 3]) == []
    assert guessed([4, 4]) == [4]


def speculative_options(**options: Any) -> Any:
    from phasor import GenerationConfig

    return GenerationConfig(**options)


@pytest.mark.parametrize("guess", ["draft", "lookup"])
def test_stop_tokens_among_the_guesses(guess: str) -> None:
    model = speaker()
    whole = generate(model, PROMPT, max_new_tokens=40)
    options: dict[str, Any] = {"draft": model, "draft_tokens": 6} if guess == "draft" else {"lookup": 2}
    for stop in sorted(set(whole)):
        expected = generate(model, PROMPT, max_new_tokens=40, stop=stop)
        assert generate(model, PROMPT, max_new_tokens=40, stop=stop, **options) == expected
        assert expected[-1] == stop


@pytest.mark.parametrize("guess", ["draft", "lookup"])
def test_penalties_with_guesses(guess: str) -> None:
    model = speaker()
    options: dict[str, Any] = {"draft": somewhat_like(model, 0.1)} if guess == "draft" else {"lookup": 2}
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    expected = generate(model, PROMPTS, max_new_tokens=20, **penalties)
    assert generate(model, PROMPTS, max_new_tokens=20, **penalties, **options) == expected


def penalise(logits: Tensor, text: list[int], new: list[int], options: dict[str, float]) -> list[float]:
    found = logits.double().tolist()
    for token in set(text):
        factor = options.get("repetition_penalty", 1.0)
        found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
    for token in new:
        found[token] -= options.get("frequency_penalty", 0.0)
    return found


def exact(model: Transformer, prompt: list[int], count: int, options: dict[str, float]) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, from full forwards and the definitions of the options."""
    filters = {k: v for k, v in options.items() if k in ("temperature", "top_k", "top_p", "min_p")}
    found = {}
    for text in continuations(model.config.vocab_size, count):
        logits = full_logits(model, prompt + list(text), len(prompt) + count)[len(prompt) - 1 :]
        chance = 1.0
        for i, token in enumerate(text):
            new = list(text[:i])
            chance *= distribution_ref(penalise(logits[i], prompt + new, new, options), filters)[token]
        found[text] = chance
    return found


SMALL = 6
WAYS: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 0.8, "top_k": 4},
    "top_p": {"temperature": 1.1, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("guess", ["plain", "draft", "lookup"])
def test_samples_have_the_distribution_of_the_model(guess: str, way: str, accepted: list[tuple[int, int]]) -> None:
    """Chi-square over seeds against exact probabilities; plain sampling stands beside it, under the same test."""
    seeds, prompt, count = 500, [1, 2, 3, 1, 2, 3, 1], 3
    model = speaker(vocab_size=SMALL, num_layers=1)
    more: dict[str, Any] = {"plain": {}, "draft": {"draft": somewhat_like(model, 0.5)}, "lookup": {"lookup": 2}}[guess]
    expected = exact(model, prompt, count, WAYS[way])
    assert sum(expected.values()) == pytest.approx(1)
    index = {text: i for i, text in enumerate(expected)}
    counts = torch.zeros(len(index))
    found = generate(
        model, [prompt] * seeds, max_new_tokens=count, seed=list(range(seeds)), draft_tokens=2, **WAYS[way], **more
    )
    for text in found:
        counts[index[tuple(text)]] += 1
    assert chi_square_tail(counts, torch.tensor(list(expected.values()))) > 1e-3
    if guess != "plain":
        guesses, passed = (sum(x) for x in zip(*accepted, strict=True))
        assert 0.1 < passed / guesses < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("guess", ["draft", "lookup"])
def test_many_samples_have_the_distribution_of_the_model(guess: str, way: str) -> None:
    model = speaker(vocab_size=SMALL, num_layers=1, attention={"window": 3})
    more: dict[str, Any] = {"draft": {"draft": somewhat_like(model, 0.5)}, "lookup": {"lookup": 2}}[guess]
    prompt = [1, 2, 3, 1, 2, 3, 1]
    expected = exact(model, prompt, 3, WAYS[way])
    index = {text: i for i, text in enumerate(expected)}
    counts, seeds = torch.zeros(len(index)), 5000
    for seed in range(seeds):
        counts[
            index[tuple(generate(model, prompt, max_new_tokens=3, seed=seed, draft_tokens=2, **WAYS[way], **more))]
        ] += 1
    assert chi_square_tail(counts, torch.tensor(list(expected.values()))) > 1e-3

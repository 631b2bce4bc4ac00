"""Speculative decoding changes how fast tokens come, not which."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from decoding import (
    chi_square_tail,
    continuations,
    distribution_ref,
    full_logits,
    greedy_ref,
    penalized_ref,
    speaker,
)
from schemes import SCHEMES, VIEWS
from torch import Tensor

from phasor import Transformer, generate
from phasor.generation import speculative
from phasor.generation.request import GenerationRequest, SequenceState

# Text that repeats itself, so that looking up what came next the last time finds something.
PROMPT = [5, 17, 30, 8, 5, 17, 30, 8, 5, 17]
PROMPTS = [PROMPT, [9], [44, 44, 44], [1, 2, 3, 1, 2, 3, 1]]


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many draft tokens were proposed and accepted at every call of the model."""
    counts: list[tuple[int, int]] = []
    original = speculative.accept

    def count(request: GenerationRequest, row: SequenceState, logits: Tensor, draft: list[int], q: list[Tensor]) -> int:
        num_accepted = original(request, row, logits, draft, q)
        counts.append((len(draft), num_accepted))
        return num_accepted

    monkeypatch.setattr(speculative, "accept", count)
    return counts


def somewhat_like(model: Transformer, much: float) -> Transformer:
    """A draft that agrees with a model often but not always."""
    draft = Transformer(model.config).eval()
    draft.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in (weight for weight in draft.parameters() if weight.numel() > 1):
            noise = torch.randn(weight.shape, generator=torch.Generator("cpu").manual_seed(3), device="cpu")
            weight.add_(much * noise.to(weight.device) * weight.std())
    return draft


@pytest.mark.sample(10)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_with_a_draft_is_greedy(scheme: str, acceptance: list[tuple[int, int]]) -> None:
    model = speaker(scheme)
    draft = somewhat_like(model, 0.2)
    assert generate(model, PROMPT, max_new_tokens=14, draft=draft) == greedy_ref(model, PROMPT, 14)
    drafted, num_accepted = (sum(x) for x in zip(*acceptance, strict=True))
    assert 0 < num_accepted < drafted


@pytest.mark.sample(5)
@pytest.mark.parametrize("view", ["window", "sinks"])
@pytest.mark.parametrize("scheme", ["t5", "rotary", "learned", "xpos", "rotary-dynamic-yarn"])
def test_greedy_with_a_draft_past_a_window(scheme: str, view: str, acceptance: list[tuple[int, int]]) -> None:
    """Rejected draft tokens leave the ring buffers of the model and of the draft as they were."""
    model = speaker(scheme, attention=VIEWS[view])
    draft = somewhat_like(model, 0.2)
    expected = generate(model, PROMPTS[:2], max_new_tokens=20)
    assert generate(model, PROMPTS[:2], max_new_tokens=20, draft=draft, draft_tokens=3) == expected
    drafted, num_accepted = (sum(x) for x in zip(*acceptance, strict=True))
    assert 0 < num_accepted < drafted


@pytest.mark.parametrize("draft_tokens", [1, 3, 30])
def test_any_number_of_draft_tokens_by_any_draft(draft_tokens: int, acceptance: list[tuple[int, int]]) -> None:
    model = speaker(attention=VIEWS["sinks"])
    other = speaker("learned", seed=5, num_layers=1, max_length=64)
    expected = generate(model, PROMPTS[:2], max_new_tokens=20)
    for draft in (model, somewhat_like(model, 0.1), other):
        assert generate(model, PROMPTS[:2], max_new_tokens=20, draft=draft, draft_tokens=draft_tokens) == expected
    assert max(drafted for drafted, _ in acceptance) == min(draft_tokens, 19)


def test_a_draft_that_is_the_model_is_always_right(acceptance: list[tuple[int, int]]) -> None:
    model = speaker()
    generate(model, PROMPT, max_new_tokens=20, draft=model, draft_tokens=4)
    assert acceptance == [(4, 4)] * 4  # and each time one token more


@pytest.mark.sample(6)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["none", "t5", "rotary", "rotary-dynamic-ntk"])
def test_greedy_with_lookup_is_greedy(scheme: str, view: str, acceptance: list[tuple[int, int]]) -> None:
    model = speaker(scheme, attention=VIEWS[view])
    expected = generate(model, PROMPTS, max_new_tokens=30)
    assert generate(model, PROMPTS, max_new_tokens=30, prompt_lookup_tokens=2) == expected
    drafted, num_accepted = (sum(x) for x in zip(*acceptance, strict=True))
    assert 0 < num_accepted < drafted


def test_lookup_finds_the_latest_and_longest_match() -> None:
    lookup = speculative.PromptLookup(3, 50)

    def propose(text: Sequence[int], count: int = 4) -> list[int]:
        return lookup.propose(SequenceState(list(text), None), count)[0]

    assert propose([1, 2, 3, 9, 8, 1, 2, 3]) == [9, 8, 1, 2]
    assert propose([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3], 2) == [9, 7]  # three tokens before two
    assert propose([2, 3, 9, 2, 3, 8, 2, 3], 1) == [8]  # the later of two
    assert propose([1, 2, 3]) == []
    assert propose([4, 4]) == [4]


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
def test_stop_tokens_among_the_draft_tokens(drafter: str) -> None:
    model = speaker()
    whole = generate(model, PROMPT, max_new_tokens=40)
    options: dict[str, Any] = {"draft": model, "draft_tokens": 6} if drafter == "draft" else {"prompt_lookup_tokens": 2}
    for stop in dict.fromkeys(whole[3::5]):
        expected = generate(model, PROMPT, max_new_tokens=40, stop=stop)
        assert generate(model, PROMPT, max_new_tokens=40, stop=stop, **options) == expected
        assert expected[-1] == stop


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
def test_penalties_with_draft_tokens(drafter: str) -> None:
    model = speaker()
    options: dict[str, Any] = (
        {"draft": somewhat_like(model, 0.1)} if drafter == "draft" else {"prompt_lookup_tokens": 2}
    )
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    expected = generate(model, PROMPTS, max_new_tokens=20, **penalties)
    assert generate(model, PROMPTS, max_new_tokens=20, **penalties, **options) == expected


def exact(model: Transformer, prompt: list[int], count: int, options: dict[str, float]) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, from full forwards and the definitions of the options."""
    found = {}
    for text in continuations(model.config.vocab_size, count):
        logits = full_logits(model, prompt + list(text), len(prompt) + count)[len(prompt) - 1 :].tolist()
        chance = 1.0
        for i, token in enumerate(text):
            chance *= distribution_ref(penalized_ref(logits[i], prompt, list(text[:i]), options), options)[0][token]
        found[text] = chance
    return found


class Remembered(Transformer):
    """A model that answers from full forwards made once for every text, so that very many texts can be drawn.

    Its cache is the list of tokens it has read.
    """

    def __init__(self, model: Transformer, length: int) -> None:
        super().__init__(model.config)
        self.logits = functools.cache(lambda text: full_logits(model, text, length)[-1])

    def new_cache(self, *_: Any, **__: Any) -> Read:
        return Read()

    def forward(self, tokens: Tensor, *, cache: Read, **_: Any) -> Tensor:
        found = []
        for token in tokens[0].tolist():
            cache.append(token)
            found.append(self.logits(tuple(cache)))
        return torch.stack(found)[None]


class Read(list[int]):
    states: tuple[()] = ()

    def crop(self, tokens: int) -> None:
        del self[len(self) - tokens :]


SMALL, COUNT = 5, 3
START = [1, 2, 3, 1, 2, 3, 1]
WAYS: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 1.3},
    "filters": {"temperature": 1.1, "top_k": 4, "top_p": 0.85},
    "penalties": {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.5, "frequency_penalty": 0.4},
}


def tail(model: Transformer, fast: Transformer, seeds: int, options: dict[str, Any]) -> float:
    """How likely samples at least as far from the exact distribution of the model are as those of these seeds."""
    expected = exact(model, START, COUNT, options)
    assert sum(expected.values()) == pytest.approx(1)
    index = {text: i for i, text in enumerate(expected)}
    counts = torch.zeros(len(index))
    for seed in range(seeds):
        text = generate(fast, START, max_new_tokens=COUNT, seed=seed, draft_tokens=2, **options)
        counts[index[tuple(text)]] += 1
    return chi_square_tail(counts, torch.tensor(list(expected.values())))


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", ["draft", "lookup"])
def test_samples_have_the_distribution_of_the_model(drafter: str, way: str, acceptance: list[tuple[int, int]]) -> None:
    """Chi-square over seeds against exact probabilities."""
    model = speaker(vocab_size=SMALL, num_layers=1)
    length = len(START) + COUNT
    more = (
        {"draft": Remembered(somewhat_like(model, 0.5), length)} if drafter == "draft" else {"prompt_lookup_tokens": 2}
    )
    assert tail(model, Remembered(model, length), 1000, WAYS[way] | more) > 1e-3
    drafted, num_accepted = (sum(x) for x in zip(*acceptance, strict=True))
    assert 0.02 < num_accepted / drafted < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", ["draft", "lookup", "neither"])
def test_samples_by_way_of_caches_have_the_distribution_of_the_model(drafter: str, way: str) -> None:
    model = speaker(vocab_size=SMALL, num_layers=1, attention={"window": 3})
    more = {"draft": {"draft": somewhat_like(model, 0.5)}, "lookup": {"prompt_lookup_tokens": 2}, "neither": {}}[
        drafter
    ]
    assert tail(model, model, 3000, WAYS[way] | more) > 1e-3

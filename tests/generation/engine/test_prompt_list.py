"""Long lists of prompts are computed by an engine, and the tokens are those of each prompt alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from decoding import byte_tokenizer, greedy_ref, speaker

import phasor
from phasor.generation.engine import Engine, prompt_list
from phasor.generation.engine.prompt_list import MOST_ROWS, engine_why_not
from phasor.generation.request import build_request

draw = random.Random(0)
PROMPTS = [[draw.randrange(60) for _ in range(draw.randint(1, 9))] for _ in range(MOST_ROWS + 3)]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "a seed each": {"temperature": 1.0, "seed": tuple(range(len(PROMPTS)))},
    "samples": {"temperature": 1.0, "seed": 5, "num_return_sequences": 2},
    "stops": {"stop": tuple(range(0, 60, 7)), "repetition_penalty": 1.2},
}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that are created."""
    created: list[Engine] = []

    class Counted(Engine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            created.append(self)

    monkeypatch.setattr(prompt_list, "Engine", Counted)
    return created


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_each_prompt_alone(name: str, engines: list[Engine]) -> None:
    model, options = speaker("rotary"), OPTIONS[name]
    found = phasor.generate(model, PROMPTS, max_new_tokens=6, **options)
    assert [engine.stats().new_tokens > 0 for engine in engines] == [True]
    for i in range(0, len(PROMPTS), 11):
        seed = {"seed": options["seed"][i]} if name == "a seed each" else {}
        assert found[i] == phasor.generate(model, PROMPTS[i], max_new_tokens=6, **options | seed)
    assert name != "greedy" or found[-1] == greedy_ref(model, PROMPTS[-1], 6)
    assert len(engines) == 1  # a short list is a batch


def test_texts_and_details(engines: list[Engine]) -> None:
    model = speaker("rotary", vocab_size=257, seed=3)
    model.tokenizer = byte_tokenizer()
    texts = [f"prompt {i}" for i in range(MOST_ROWS + 1)]
    found = phasor.generate(model, texts, max_new_tokens=8, details=True)
    alone = phasor.generate(model, texts[7], max_new_tokens=8, details=True)
    assert len(engines) == 1
    assert (found[7].tokens, found[7].text, found[7].finish_reason) == (alone.tokens, alone.text, None)
    assert found[7].log_probabilities == pytest.approx(alone.log_probabilities, abs=1e-5)  # float32


@pytest.mark.parametrize("shape", ["decoder", "encoder-decoder"])
def test_other_strategies_are_left_to_batches(shape: str) -> None:
    model = speaker("rotary", shape=shape)
    model.special = phasor.SpecialTokens(start=0)
    assert engine_why_not(build_request(model, PROMPTS, fields={"max_new_tokens": 3})) is None
    beams = build_request(model, PROMPTS, fields={"max_new_tokens": 3, "num_beams": 2})
    assert engine_why_not(beams) == "an engine decodes greedily and samples"

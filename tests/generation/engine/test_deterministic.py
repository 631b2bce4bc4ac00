"""A deterministic engine gives a request the same bits alone and among others, in any order, cached prefix or not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from decoding import speaker
from schemes import VIEWS, VOCAB

import phasor
from phasor import Engine, Generated, Transformer

SIZES = {"max_rows": 64, "page_size": 4, "pages": 2000, "prefill_chunk": 8, "deterministic": True}
OPTIONS = {"max_new_tokens": 6, "logprobs": 2}


def requests(seed: int, count: int) -> list[list[int]]:
    """Prompts of 1 to 40 tokens, half of which begin with the same 20."""
    draw = random.Random(seed)
    begin = [draw.randrange(VOCAB) for _ in range(20)]
    sizes = [draw.randint(1, 20) for _ in range(count)]
    return [[*(begin if n % 2 else []), *(draw.randrange(VOCAB) for _ in range(size))] for n, size in enumerate(sizes)]


def bits(found: Generated) -> tuple[Any, ...]:
    return found.tokens, found.log_probabilities, found.top_log_probabilities


def alone(model: Transformer, prompt: list[int], **fields: Any) -> tuple[Any, ...]:
    with Engine(model, **SIZES) as engine:
        return bits(engine.submit(prompt, **OPTIONS, **fields).result())


MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"scheme": "rotary"},
    "window and sinks": {"scheme": "rotary", "attention": VIEWS["sinks"]},
    "T5": {"scheme": "t5"},
    "forget": {"scheme": "forget"},
    "gated delta": {"scheme": "none", "attention": "gated-delta"},
    "longrope": {"scheme": "rotary-longrope"},
    "encoder-decoder": {"scheme": "t5", "shape": "encoder-decoder"},
    "experts": {"scheme": "rotary", "feedforward": {"activation": "swiglu", "experts": {"num_experts": 4}}},
    "awkward widths": {
        "scheme": "rotary",
        "dim": 36,
        "head_dim": 6,
        "num_heads": 6,
        "num_kv_heads": 3,
        "hidden_dim": 53,
    },
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_alone_and_among_others(name: str) -> None:
    model = speaker(**MODELS[name])
    model.special = phasor.SpecialTokens(start=0) if model.encoder is not None else model.special
    count = 64 if name == "rotary" else 20
    prompts = requests(3, count)
    draw, handles = random.Random(1), {}
    with Engine(model, **SIZES) as engine:
        for number in draw.sample(range(count), count):
            handles[number] = engine.submit(prompts[number], **OPTIONS)
            if draw.random() < 0.2:
                engine.step()
        for number in (0, 1, count // 2 + 1):
            assert bits(handles[number].result()) == alone(model, prompts[number]), f"request {number}"


def test_the_same_bits_beside_longer_sources() -> None:
    """Of a row's source as many vectors are attended to as of the longest one, in heads wide enough to show it."""
    model = speaker("t5", shape="encoder-decoder", head_dim=64)
    model.special = phasor.SpecialTokens(start=0)
    sources = [[(7 * i + j) % VOCAB for j in range(size)] for i, size in enumerate((9, 16, 11, 13))]
    with Engine(model, **SIZES) as engine:
        handles = [engine.submit(source, **OPTIONS) for source in sources]
        found = [bits(handle.result()) for handle in handles]
    assert found == [alone(model, source) for source in sources]


def test_the_same_bits_after_being_set_back() -> None:
    model, prompts = speaker("rotary"), requests(5, 12)
    with Engine(model, **SIZES | {"pages": 13, "page_size": 4}) as engine:
        handles = [engine.submit(prompt, **OPTIONS) for prompt in prompts]
        found = [bits(handle.result()) for handle in handles]
        assert engine.stats().set_back > 0
    for number in range(0, 12, 3):
        assert found[number] == alone(model, prompts[number])


def test_the_same_bits_of_samples() -> None:
    model, prompts = speaker("rotary"), requests(6, 24)
    with Engine(model, **SIZES) as engine:
        handles = [engine.submit(p, temperature=1.0, top_p=0.9, seed=i, **OPTIONS) for i, p in enumerate(prompts)]
        found = [bits(handle.result()) for handle in handles]
    for number in (0, 7, 16):
        assert found[number] == alone(model, prompts[number], temperature=1.0, top_p=0.9, seed=number)


def test_tokens_are_those_of_generate() -> None:
    model, prompts = speaker("rotary"), requests(7, 10)
    with Engine(model, **SIZES) as engine:
        handles = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
        found = [handle.result().tokens for handle in handles]
    assert found == phasor.generate(model, prompts, max_new_tokens=12)


def test_other_sizes_of_a_call_have_other_bits() -> None:
    """What the fixed sizes are for: the bits of a matrix product depend on its number of rows."""
    torch.manual_seed(0)
    weight, x = torch.randn(512, 512), torch.randn(32, 512)
    each = [torch.nn.functional.linear(x[:rows], weight)[0] for rows in (1, 2, 8, 32)]
    assert any(not torch.equal(each[0], other) for other in each[1:])

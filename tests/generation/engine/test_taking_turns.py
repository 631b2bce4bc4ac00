"""A long prompt is read in turns with others: how many steps they take, and how many tokens are read."""

from __future__ import annotations

import pytest
from decoding import speaker

import phasor
from phasor import Engine
from phasor.generation.engine import Handle

CHUNK, CHUNKS = 8, 40


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [1 + (start + 7 * i) % 48 for i in range(length)]


def begin(engine: Engine, prompt: list[int]) -> Handle:
    return engine.submit(prompt, max_new_tokens=2)


def steps_until(engine: Engine, handle: Handle) -> int:
    """Steps until a request has its first token."""
    steps = 0
    while not handle.new_tokens:
        engine.step()
        steps += 1
    return steps


def engine_of(**options: object) -> Engine:
    sizes = {"max_rows": 4, "page_size": 4, "pages": 400, "prefill_chunk": CHUNK}
    return Engine(speaker("rotary"), **{**sizes, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_short_prompt_does_not_wait_for_a_long_one(deterministic: bool) -> None:
    with engine_of(deterministic=deterministic) as engine:
        long = begin(engine, prompt_of(CHUNK * CHUNKS))
        engine.step()
        short = begin(engine, prompt_of(5))
        middle = begin(engine, prompt_of(3 * CHUNK, start=2))
        assert steps_until(engine, short) <= 2
        assert steps_until(engine, middle) <= 2 * 3
        assert steps_until(engine, long) <= CHUNKS
        found = [handle.result().tokens for handle in (long, short, middle)]  # type: ignore[union-attr]
    prompts = [prompt_of(CHUNK * CHUNKS), prompt_of(5), prompt_of(3 * CHUNK, start=2)]
    assert found == [phasor.generate(engine.model, prompt, max_new_tokens=2) for prompt in prompts]


def test_short_prompts_that_keep_coming_do_not_hold_up_a_long_one() -> None:
    with engine_of() as engine:
        long = begin(engine, prompt_of(CHUNK * CHUNKS))
        steps = 0
        while not long.new_tokens:
            for start in range(2):
                begin(engine, prompt_of(CHUNK - 1, start=steps * 2 + start))
            engine.step()
            steps += 1
        assert steps <= 2 * CHUNKS
        assert engine.stats().finished >= steps // 2


def test_prompts_that_begin_like_one_that_is_read_wait_for_what_they_share() -> None:
    document = prompt_of(CHUNK * CHUNKS)
    with engine_of() as engine:
        handles = [begin(engine, document)]
        for _ in range(5):
            engine.step()
        handles += [begin(engine, [*document, 3, 9]), begin(engine, [*document[: CHUNK * 12], 7, 7])]
        short = begin(engine, prompt_of(5, start=3))
        assert steps_until(engine, short) <= 2
        found = [handle.result().tokens for handle in handles]  # type: ignore[union-attr]
        assert engine.stats().prompt_tokens <= len(document) + 3 * CHUNK
    prompts = [document, [*document, 3, 9], [*document[: CHUNK * 12], 7, 7]]
    assert found == [phasor.generate(engine.model, prompt, max_new_tokens=2) for prompt in prompts]

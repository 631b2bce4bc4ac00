"""Which rows read their prompts in one call."""

from __future__ import annotations

from typing import Any

import pytest
from decoding import speaker

import phasor
from phasor import Engine
from phasor.generation.engine import engine as engine_module
from phasor.generation.engine.scheduler import EngineBatch

LENGTHS = [40, 3, 4, 38, 5, 39, 37, 2]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [[1 + (7 * i + j) % 50 for j in range(length)] for i, length in enumerate(lengths)]


@pytest.fixture
def calls(monkeypatch: Any) -> list[list[int]]:
    """How many tokens the rows of each call read, of calls that read prompts."""
    found: list[list[int]] = []
    run = engine_module.run_batch

    def noted(cache: Any, batch: EngineBatch) -> Any:
        if max(batch.new) > 1:
            found.append(batch.new)
        return run(cache, batch)

    monkeypatch.setattr(engine_module, "run_batch", noted)
    return found


def test_a_call_reads_prompts_of_similar_lengths_and_the_oldest_one(calls: list[list[int]]) -> None:
    model, prompts = speaker("rotary"), prompts_of(LENGTHS)
    with Engine(model, max_rows=8, page_size=4, pages=200, prefill_chunk=100) as engine:
        handles = [engine.submit(prompt, max_new_tokens=1) for prompt in prompts]
        found = [handle.result().tokens for handle in handles]
    assert calls == [[40, 39], [3, 4, 2, 5], [38, 37]]
    assert found == phasor.generate(model, prompts, max_new_tokens=1)


def test_rows_that_have_begun_find_what_others_read_before_them(calls: list[list[int]]) -> None:
    model, shared = speaker("rotary"), prompts_of([40])[0]
    prompts = [[*shared, 50 + i, 3] for i in range(5)]
    with Engine(model, max_rows=8, page_size=4, pages=200, prefill_chunk=50) as engine:
        handles = [engine.submit(prompt, max_new_tokens=2) for prompt in prompts]
        found = [handle.result().tokens for handle in handles]
    assert calls[0] == [42]
    assert sum(new for call in calls[1:] for new in call) < 3 * 42, calls
    assert found == phasor.generate(model, prompts, max_new_tokens=2)

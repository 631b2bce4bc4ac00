"""Requests that fit go ahead of one that does not, up to a bound, and all have the tokens of `phasor.generate`."""

from __future__ import annotations

from typing import Any

import pytest
from decoding import speaker

import phasor
from phasor import Engine
from phasor.generation.engine import Handle, scheduler

ROWS = 4
SIZES = {"max_rows": ROWS, "page_size": 4, "pages": 20, "prefill_chunk": 64}


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [1 + (start + 7 * i) % 48 for i in range(length)]


def begun(handle: Handle) -> bool:
    return bool(handle.new_tokens)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("attention", ["softmax", "gated-delta"])
def test_a_small_request_passes_one_that_does_not_fit(attention: Any, deterministic: bool) -> None:
    layers: Any = ({"attention": attention}, {})
    model, prompts = speaker("rotary", layers=layers), [prompt_of(40), prompt_of(50, 2), prompt_of(3, 3)]
    with Engine(model, **SIZES, deterministic=deterministic) as engine:
        running = engine.submit(prompts[0], max_new_tokens=12)
        engine.step()
        large, small = (engine.submit(prompt, max_new_tokens=4) for prompt in prompts[1:])
        while not small.done:
            engine.step()
        assert not begun(large)
        assert not running.done
        found = [handle.result().tokens for handle in (running, large, small)]
    assert found == [
        phasor.generate(model, prompt, max_new_tokens=count) for prompt, count in zip(prompts, (12, 4, 4), strict=True)
    ]


def test_small_requests_that_keep_coming_pass_a_large_one_as_often_as_rows_may_run() -> None:
    model = speaker("rotary")
    with Engine(model, **SIZES) as engine:
        handles = [engine.submit(prompt_of(3, start), max_new_tokens=5) for start in range(ROWS - 1)]
        engine.step()
        large = engine.submit(prompt_of(72, 2), max_new_tokens=4)
        later: list[Handle] = []
        while not begun(large):
            passed_by = sum(map(begun, later))
            later.append(engine.submit(prompt_of(3, 10 + len(later)), max_new_tokens=5))
            engine.step()
            assert len(later) < 10 * ROWS
        assert passed_by == ROWS
        assert large.result().tokens == phasor.generate(model, prompt_of(72, 2), max_new_tokens=4)
        for start, handle in enumerate(handles + later):
            prompt = prompt_of(3, start if start < len(handles) else 10 + start - len(handles))
            assert handle.result().tokens == phasor.generate(model, prompt, max_new_tokens=5)


def test_a_request_that_waits_and_is_cancelled_holds_nobody_up(monkeypatch: Any) -> None:
    monkeypatch.setattr(scheduler, "MOST_TRIED", 8)
    model = speaker("rotary")
    with Engine(model, **SIZES) as engine:
        running = engine.submit(prompt_of(40), max_new_tokens=20)
        engine.step()
        large = [engine.submit(prompt_of(50, start), max_new_tokens=4) for start in range(20)]
        small = engine.submit(prompt_of(3), max_new_tokens=4)
        for _ in range(3):
            engine.step()
        assert not begun(small)  # behind more requests than are looked at in a step
        for handle in large[:15]:
            handle.cancel()
        for _ in range(2):
            engine.step()
        assert begun(small)
        assert small.result().tokens == phasor.generate(model, prompt_of(3), max_new_tokens=4)
        assert running.result().tokens == phasor.generate(model, prompt_of(40), max_new_tokens=20)
        for start, handle in enumerate(large[15:], 15):
            assert handle.result().tokens == phasor.generate(model, prompt_of(50, start), max_new_tokens=4)
        assert engine.stats().pages_held == 0


def test_what_requests_share_is_looked_for_once_in_a_step_where_they_do_not_fit(monkeypatch: Any) -> None:
    model, shared = speaker("rotary"), prompt_of(40)
    with Engine(model, **SIZES | {"pages": 40}) as engine:
        running = engine.submit(shared, max_new_tokens=12)
        engine.step()
        found, find = [], engine._cache.find_prefix
        monkeypatch.setattr(engine._cache, "find_prefix", lambda *args: found.append(args) or find(*args))
        large = [engine.submit([*shared, *prompt_of(115, start)], max_new_tokens=4) for start in range(5)]
        engine.step()
        assert len(found) == 1
        small = engine.submit([*shared, 9], max_new_tokens=2)
        engine.step()
        assert begun(small)
        assert small.cached_tokens == 40
        assert not any(map(begun, large))
        assert small.result().tokens == phasor.generate(model, [*shared, 9], max_new_tokens=2)
        assert running.result().tokens == phasor.generate(model, shared, max_new_tokens=12)


def test_a_row_that_was_set_back_is_not_passed() -> None:
    model, prompts = speaker("rotary"), [prompt_of(30), prompt_of(30, 2), prompt_of(3, 3)]
    with Engine(model, **SIZES) as engine:
        first, second = (engine.submit(prompt, max_new_tokens=30) for prompt in prompts[:2])
        while not engine.stats().set_back:
            engine.step()
        third = engine.submit(prompts[2], max_new_tokens=30)
        while not begun(third):
            assert engine.stats().waiting == (0 if engine.stats().running > 1 else 2)
            engine.step()
        assert first.done
        assert not second.done
        for prompt, handle in zip(prompts, (first, second, third), strict=True):
            assert handle.result().tokens == phasor.generate(model, prompt, max_new_tokens=30)

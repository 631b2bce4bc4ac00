"""The engine gives each request the tokens of `phasor.generate`, whatever runs beside it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from decoding import speaker
from schemes import BY_LENGTH, SCHEMES, VIEWS
from torch import Tensor

import phasor
from phasor import Engine, Generated
from phasor.config import AttentionConfig
from phasor.generation.engine import CancelledError, QueueFullError

PROMPTS = [[9], [7, 3, 3, 58, 12], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [40, 41], [7, 3, 3, 58, 12, 5, 1, 1], [9, 9, 9]]
SMALL = {"max_rows": 3, "page_size": 4, "pages": 48, "prefill_chunk": 4}
KINDS = {
    f"{kind}-{name}": example for kind, cls in AttentionConfig.kinds.items() for name, example in cls.examples().items()
}


def tokens_of(model: phasor.Transformer, prompts: list[list[int]], sizes: dict[str, Any], **fields: Any) -> list[Any]:
    """The new tokens of prompts that are submitted together."""
    with Engine(model, **sizes) as engine:
        handles = [engine.submit(prompt, **fields) for prompt in prompts]
        found = [handle.result() for handle in handles]
    return [[each.tokens for each in x] if isinstance(x, list) else x.tokens for x in found]


@pytest.mark.sample(8)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_tokens_of_every_scheme(scheme: str, view: str) -> None:
    model = speaker(scheme, attention=VIEWS[view])
    assert tokens_of(model, PROMPTS, SMALL, max_new_tokens=14) == phasor.generate(model, PROMPTS, max_new_tokens=14)


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_of_every_kind_of_attention(kind: str) -> None:
    position: Any = "rotary" if KINDS[kind].takes_positions else "none"
    try:
        model = speaker(position, attention=KINDS[kind])
    except ValueError:  # latent attention rotates some of the features
        model = speaker(phasor.RotaryConfig(rotary_dim=4), attention=KINDS[kind])
    assert tokens_of(model, PROMPTS, SMALL, max_new_tokens=14) == phasor.generate(model, PROMPTS, max_new_tokens=14)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.9, "seed": 4},
    "filters": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 1},
    "typical": {"typical_p": 0.8, "seed": 2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "sampled with penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 3},
    "n-grams": {"no_repeat_ngram_size": 2},
    "samples": {"temperature": 1.0, "num_return_sequences": 5, "seed": 7},
    "constraints": {"suppress_tokens": (5, 17), "begin_suppress_tokens": (2,), "bad_words_ids": ((1, 2), (30,))},
    "stop": {"stop": tuple(range(0, 60, 7)), "min_new_tokens": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str) -> None:
    model = speaker("rotary")
    expected = phasor.generate(model, PROMPTS, max_new_tokens=20, **OPTIONS[name])
    assert tokens_of(model, PROMPTS, SMALL, max_new_tokens=20, **OPTIONS[name]) == expected


def test_requests_of_different_options_share_steps() -> None:
    model = speaker("alibi")
    with Engine(model, **SMALL | {"max_rows": 16}) as engine:
        handles = {name: engine.submit(PROMPTS[1], max_new_tokens=9, **given) for name, given in OPTIONS.items()}
        for name, handle in handles.items():
            whole = handle.result()
            found = [x.tokens for x in whole] if isinstance(whole, list) else whole.tokens
            assert found == phasor.generate(model, PROMPTS[1], max_new_tokens=9, **OPTIONS[name]), name


@pytest.mark.sample(4)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", BY_LENGTH)
def test_each_row_has_its_own_planned_length(scheme: str, view: str) -> None:
    model = speaker(scheme, attention=VIEWS[view])
    with Engine(model, **SMALL) as engine:
        handles = [engine.submit(prompt, max_new_tokens=5 * i + 2) for i, prompt in enumerate(PROMPTS)]
        for i, (prompt, handle) in enumerate(zip(PROMPTS, handles, strict=True)):
            assert handle.result().tokens == phasor.generate(model, prompt, max_new_tokens=5 * i + 2)


def test_pieces_add_up_to_the_result() -> None:
    model = speaker("rotary")
    with Engine(model, **SMALL) as engine:
        handle = engine.submit(PROMPTS[1], max_new_tokens=7, logprobs=3)
        pieces, whole = list(handle), handle.result()
        expected = phasor.generate(model, PROMPTS[1], max_new_tokens=7, details=True)
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens == expected.tokens
    assert whole.log_probabilities == pytest.approx(expected.log_probabilities, abs=1e-5)  # float32
    assert [piece.finish_reason for piece in pieces] == [None] * 6 + ["length"]
    for token, value, tops in zip(whole.tokens, whole.log_probabilities, whole.top_log_probabilities, strict=True):
        assert len(tops) == 3
        assert tops[token] == pytest.approx(value, abs=1e-6)  # the greedy token is among the likeliest


def test_rows_that_are_set_back_are_not_lost() -> None:
    model = speaker("rotary")
    sizes = {"max_rows": 4, "page_size": 2, "pages": 20, "prefill_chunk": 3}
    with Engine(model, **sizes) as engine:
        handles = [engine.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
        found = [handle.result().tokens for handle in handles]
        stats = engine.stats()
    assert stats.set_back > 0
    assert stats.pages_held == 0
    assert found == phasor.generate(model, PROMPTS, max_new_tokens=20)


def test_prompts_that_begin_alike_share_pages() -> None:
    model, begin = speaker("rotary"), list(range(20))
    prompts = [[*begin, 50 + n] for n in range(4)]
    with Engine(model, max_rows=4, page_size=4, pages=64) as engine:
        first = engine.submit(prompts[0], max_new_tokens=3).result()
        handles = [engine.submit(prompt, max_new_tokens=3) for prompt in prompts]
        found = [handle.result().tokens for handle in handles]
        assert [handle.cached_tokens for handle in handles] == [20, 20, 20, 20]
        again = engine.submit([*prompts[0], *first.tokens, 4], max_new_tokens=3)
        continued = again.result().tokens
        assert again.cached_tokens == 20  # of 25 tokens, five full pages that were read, and one that was not filled
    assert found == phasor.generate(model, prompts, max_new_tokens=3)
    assert continued == phasor.generate(model, [*prompts[0], *first.tokens, 4], max_new_tokens=3)


def test_pages_are_taken_from_the_end_of_a_prefix() -> None:
    model, prompt = speaker("rotary"), list(range(29))
    with Engine(model, max_rows=2, page_size=4, pages=10) as engine:
        engine.submit(prompt, max_new_tokens=2).result()
        engine.submit([50] * 14, max_new_tokens=2).result()  # takes 4 pages, of which 3 were free
        again = engine.submit(prompt, max_new_tokens=2)
        assert again.result().tokens == phasor.generate(model, prompt, max_new_tokens=2)
        assert again.cached_tokens == 24


def test_cached_tokens_are_not_those_that_samples_find_of_their_own_prompt() -> None:
    model, prompt = speaker("rotary"), list(range(21))
    with Engine(model, max_rows=2, page_size=4, pages=64) as engine:
        samples = engine.submit(prompt, max_new_tokens=3, temperature=1.0, num_return_sequences=5, seed=1)
        samples.result()
        assert samples.cached_tokens == engine.stats().cached_tokens == 0
        assert engine.stats().prompt_tokens == 24  # all of it, and its last token by samples that began later


def test_prompt_tokens_of_encoder_decoders_are_those_of_their_sources() -> None:
    model = speaker("t5", shape="encoder-decoder")
    model.special = phasor.SpecialTokens(start=0)
    with Engine(model, **SMALL) as engine:
        handles = [engine.submit(prompt, max_new_tokens=2) for prompt in PROMPTS]
        for handle in handles:
            handle.result()
        assert engine.stats().prompt_tokens == sum(map(len, PROMPTS))


def test_a_thread_serves_many_callers() -> None:
    model = speaker("rotary")
    expected = phasor.generate(model, PROMPTS, max_new_tokens=12)
    found: dict[int, list[int]] = {}
    with Engine(model, **SMALL) as engine:
        engine.start()

        def ask(number: int) -> None:
            found[number] = [t for piece in engine.submit(PROMPTS[number], max_new_tokens=12) for t in piece.tokens]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert [found[number] for number in range(len(PROMPTS))] == expected


def test_cancelling_frees_the_row_within_a_step() -> None:
    model = speaker("rotary")
    with Engine(model, max_rows=1, page_size=4, pages=32) as engine:
        first, second = engine.submit([1, 2, 3], max_new_tokens=50), engine.submit([4, 5], max_new_tokens=4)
        engine.step()
        assert engine.stats().running == 1
        first.cancel()
        engine.step()
        assert second.new_tokens > 0
        with pytest.raises(CancelledError, match="was cancelled"):
            first.result()
        assert second.result().tokens == phasor.generate(model, [4, 5], max_new_tokens=4)
        assert engine.stats().cancelled == 1


def test_closing_cancels_what_has_not_ended() -> None:
    with Engine(speaker("rotary"), **SMALL) as engine:
        handle = engine.submit([1, 2], max_new_tokens=30)
        engine.step()
    assert handle.done
    with pytest.raises(CancelledError):
        handle.result()
    with pytest.raises(ValueError, match="engine is closed"):
        engine.submit([1])


def test_a_full_queue_refuses() -> None:
    with Engine(speaker("rotary"), max_rows=1, pages=32, max_waiting=2) as engine:
        for _ in range(3):
            engine.submit([1, 2], max_new_tokens=2)
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            engine.submit([1, 2], max_new_tokens=2)


def test_a_request_that_begins_leaves_its_place_to_wait_to_another(monkeypatch) -> None:
    """Also in the moment between its beginning and the end of the engine's step."""
    with Engine(speaker("rotary"), max_rows=1, pages=32, max_waiting=1) as engine:
        admit, handles = engine._scheduler.admit, [engine.submit([1, 2], max_new_tokens=2)]

        def and_submit() -> None:
            admit()
            if len(handles) == 1:
                handles.append(engine.submit([1, 3], max_new_tokens=2))
                with pytest.raises(QueueFullError):
                    engine.submit([1, 4], max_new_tokens=2)

        monkeypatch.setattr(engine._scheduler, "admit", and_submit)
        engine.step()
        assert [len(handle.result().tokens) for handle in handles] == [2, 2]


def test_a_request_without_finite_logits_fails_alone() -> None:
    model = speaker("rotary")
    with torch.no_grad():
        model.tokens.weight[60] = float("nan")  # a token that only one prompt has
    with Engine(model, max_rows=4, pages=8, page_size=4) as engine:
        for _ in range(3):  # pages of the one that failed are taken by others
            handles = [engine.submit(prompt, max_new_tokens=6) for prompt in ([1, 2], [3, 60, 4, 4, 4], [5])]
            with pytest.raises(ValueError, match="largest logit is nan"):
                handles[1].result()
            for prompt, handle in (([1, 2], handles[0]), ([5], handles[2])):
                assert handle.result().tokens == phasor.generate(model, prompt, max_new_tokens=6)


def test_a_logits_processor_and_its_errors_are_of_one_request() -> None:
    model, seen = speaker("rotary"), []

    def only_seven(prompt: list[int], new: list[int], scores: Tensor) -> Tensor:
        seen.append((list(prompt), list(new)))
        return torch.full_like(scores, -torch.inf).index_fill(0, torch.tensor([7]), 0.0)

    def fail(prompt: list[int], new: list[int], scores: Tensor) -> Tensor:
        raise KeyError("grammar")

    with Engine(model, **SMALL) as engine:
        forced = engine.submit([1, 2], max_new_tokens=3, logits_processor=only_seven)
        failing = engine.submit([1, 2], max_new_tokens=3, logits_processor=fail)
        other = engine.submit([1, 2], max_new_tokens=3)
        assert forced.result().tokens == [7, 7, 7]
        assert seen == [([1, 2], []), ([1, 2], [7]), ([1, 2], [7, 7])]
        with pytest.raises(KeyError):
            failing.result()
        assert other.result().tokens == phasor.generate(model, [1, 2], max_new_tokens=3)


@pytest.mark.parametrize("returned", [None, torch.zeros(60), torch.zeros(1, 61)], ids=["nothing", "few", "a batch"])
def test_a_logits_processor_that_returns_no_scores_fails_alone(returned: Any) -> None:
    model = speaker("rotary")
    with Engine(model, **SMALL).start() as engine:
        wrong = engine.submit([1, 2], max_new_tokens=3, temperature=1.0, logits_processor=lambda *_: returned)
        other = engine.submit([1, 2], max_new_tokens=3, logits_processor=lambda prompt, new, scores: scores.double())
        with pytest.raises(ValueError, match=r"a logits_processor must return scores \[61\], not"):
            wrong.result(timeout=60)
        assert other.result(timeout=60).tokens == phasor.generate(model, [1, 2], max_new_tokens=3)


def test_nobody_waits_for_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = speaker("rotary")
    with Engine(model, **SMALL) as engine:
        handles, decode = [engine.submit(prompt, max_new_tokens=30) for prompt in PROMPTS], engine._decode
        monkeypatch.setattr(engine, "_decode", lambda: 1 / 0)
        engine.start()
        for handle in handles:
            with pytest.raises(ZeroDivisionError):
                handle.result(timeout=60)
        monkeypatch.setattr(engine, "_decode", decode)
        assert engine.submit([1, 2], max_new_tokens=3).result(timeout=60).tokens
        assert engine.stats().failed == len(PROMPTS)


def test_pieces_are_handed_to_a_callback() -> None:
    found: list[Generated | None] = []
    with Engine(speaker("rotary"), **SMALL) as engine:
        handle = engine.submit([1, 2], max_new_tokens=3, on_piece=found.append)
        whole = handle.result()
        assert list(handle) == []  # nobody else takes them, and they are not kept
    assert found[-1] is None
    assert [token for piece in found if piece is not None for token in piece.tokens] == whole.tokens


def test_errors_of_a_callback_are_of_one_request() -> None:
    def fail(piece: Generated | None) -> None:
        raise KeyError("callback")

    model = speaker("rotary")
    with Engine(model, **SMALL).start() as engine:
        failing = engine.submit([1, 2], max_new_tokens=3, on_piece=fail)
        with pytest.raises(KeyError):
            failing.result(timeout=60)
        other = engine.submit([1, 2], max_new_tokens=3)
        assert other.result(timeout=60).tokens == phasor.generate(model, [1, 2], max_new_tokens=3)


def test_what_is_not_finite_is_not_left_behind_by_a_row_that_is_set_back() -> None:
    """A row reads its prompt in chunks, and is set back before its last one shows that it fails."""
    model = speaker("rotary")
    with torch.no_grad():
        model.tokens.weight[60] = float("nan")
    sizes = {"max_rows": 3, "page_size": 4, "pages": 12, "prefill_chunk": 4}
    with Engine(model, **sizes) as engine:
        first = engine.submit([1, 2, 3], max_new_tokens=30)
        while first.new_tokens < 9:
            engine.step()
        bad = engine.submit([60] * 29, max_new_tokens=2)
        while engine.stats().set_back == 0 and not bad.done:
            engine.step()
        assert not bad.done
        held = {page for table in engine._cache.tables.values() for page in range(1, 13) if table.pool.references[page]}
        for tensors in engine._cache.layers:
            for x in tensors.values():
                assert all(x[page].isfinite().all() for page in range(13) if page not in held)


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([[1], [2]], {}, "one prompt per request"),
        ([1], {"num_beams": 2}, "num_beams"),
        ([1], {"max_new_tokens": 200}, "the engine has pages for 64 tokens, and prompt and new tokens are 201"),
        ([99], {}, "outside the vocabulary"),
        ([1], {"temperatur": 1.0}, "temperature"),
    ],
)
def test_what_an_engine_refuses(prompt: Any, fields: dict[str, Any], message: str) -> None:
    with Engine(speaker("rotary"), pages=4) as engine, pytest.raises(ValueError, match=message):
        engine.submit(prompt, **fields)

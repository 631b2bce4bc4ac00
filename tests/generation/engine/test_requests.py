"""Encoder-decoders, text, extensions and long runs of requests in the engine."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from decoding import byte_tokenizer, speaker
from schemes import EXTENSIONS

import phasor
from phasor import Engine, Transformer
from phasor.generation.engine import Handle
from phasor.generation.engine.extended import MOST_MODELS

SOURCES = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1], [3, 3], [20, 21, 22, 23], [4] * 7]
SMALL = {"max_rows": 3, "page_size": 4, "pages": 48, "prefill_chunk": 8}


def translator(position: str) -> Transformer:
    model = speaker(position, shape="encoder-decoder")
    model.special = phasor.SpecialTokens(start=0)
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize("position", ["sinusoidal", "learned", "t5", "rotary", "alibi"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3, "num_return_sequences": 3}])
def test_encoder_decoders(position: str, options: dict[str, Any]) -> None:
    model = translator(position)
    expected = phasor.generate(model, SOURCES, max_new_tokens=10, **options)
    for sizes in (SMALL, SMALL | {"pages": 8, "page_size": 2}, SMALL | {"deterministic": True}):
        with Engine(model, **sizes) as engine:
            handles = [engine.submit(source, max_new_tokens=10, **options) for source in SOURCES]
            found = [handle.result() for handle in handles]
        assert [[x.tokens for x in own] if options else own.tokens for own in found] == expected


def test_text_ends_at_a_stop_text() -> None:
    model = speaker("rotary", vocab_size=257, seed=3)
    model.tokenizer = byte_tokenizer()
    prompts = ["abc", "hello", "x"]
    whole = phasor.generate(model, prompts, max_new_tokens=24)
    for stop in {text[4:6] for text in whole}:
        expected = phasor.generate(model, prompts, max_new_tokens=24, stop=(stop,))
        with Engine(model, **SMALL) as engine:
            handles = [engine.submit(prompt, max_new_tokens=24, stop=(stop,)) for prompt in prompts]
            for handle, text in zip(handles, expected, strict=True):
                pieces = list(handle)
                assert "".join(piece.text or "" for piece in pieces) == text == handle.result().text
                assert handle.result().finish_reason == ("stop" if stop in whole[handles.index(handle)] else "length")


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", EXTENSIONS)
def test_an_extension_of_one_request(kind: str) -> None:
    model, extension = speaker("rotary"), EXTENSIONS[kind]
    extended = speaker("rotary")
    extended = Transformer(extended.config.with_extension(extension)).eval()
    extended.load_state_dict(model.state_dict())
    prompts = [[7, 3, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
    with Engine(model, **SMALL | {"max_rows": 4}) as engine:
        for given, reference in ((None, model), (extension, extended), (None, model), (extension, extended)):
            handles = [engine.submit(prompt, max_new_tokens=9, extension=given) for prompt in prompts]
            found = [handle.result().tokens for handle in handles]
            assert found == [phasor.generate(reference, prompt, max_new_tokens=9) for prompt in prompts]


def test_an_extension_by_name_is_for_requests_beyond_the_trained_length() -> None:
    model = speaker("rotary", max_length=32)
    prompts = {10: None, 40: 2.0, 90: 3.0}
    with Engine(model, extension="yarn", **SMALL) as engine:
        handles = {count: engine.submit([1, 2, 3], max_new_tokens=count) for count in prompts}
        for count, factor in prompts.items():
            extension = None if factor is None else phasor.YaRN(factor=factor, original_length=32)
            reference = Transformer(model.config.with_extension(extension)).eval()
            reference.load_state_dict(model.state_dict())
            assert handles[count].result().tokens == phasor.generate(reference, [1, 2, 3], max_new_tokens=count)


def test_models_of_extensions_are_not_kept_without_end() -> None:
    with Engine(speaker("rotary", max_length=32), extension="yarn", **SMALL | {"pages": 150}) as engine:
        for factor in range(2, 30):
            try:
                engine.submit([1, 2], max_new_tokens=32 * factor - 2).cancel()
            except ValueError:  # more tokens than there are pages for
                assert factor > 18
        assert len(engine._models.models) <= MOST_MODELS


@pytest.mark.slow
def test_ten_thousand_requests_leave_memory_as_it_was() -> None:
    run_requests(10_000)


def test_many_requests_leave_memory_as_it_was() -> None:
    run_requests(300)


def run_requests(count: int) -> None:
    """Requests of which some are cancelled; all objects and pages are free afterward."""
    model = speaker("rotary", num_layers=1)
    with Engine(model, max_rows=8, page_size=4, pages=64, max_waiting=64) as engine:
        for _ in range(2):
            before = None
            for number in range(count // 2):
                handle = engine.submit([number % 61, 3, number % 7], max_new_tokens=3)
                if number % 9 == 0:
                    handle.cancel()
                while engine.stats().waiting > 16:
                    engine.step()
            while engine.step():
                pass
            del handle
            gc.collect()
            left = sum(type(x) is Handle for x in gc.get_objects())
            held = engine.stats().pages_held, left, sum(len(t.pool.keys) for t in engine._cache.tables.values()) <= 64
            assert held == (0, 0, True)
            assert before is None or torch.equal(torch.tensor(before), torch.tensor(held))
            before = held

"""Random requests of random engines: each gets the tokens of `phasor.generate`, and everything is free afterward."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any

import pytest
from decoding import speaker
from schemes import EXTENSIONS, VIEWS, VOCAB

import phasor
from phasor import Engine, Transformer
from phasor.generation import runners
from phasor.generation.engine import CancelledError
from phasor.generation.runners.cuda_graph import CudaGraphRunner, spec_why_not
from phasor.ops import dispatch

MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"scheme": "rotary"},
    "sinks": {"scheme": "rotary", "attention": VIEWS["sinks"]},
    "a window beside all keys": {"scheme": "rotary", "layers": ({"attention": VIEWS["window"]}, {})},
    "states beside keys": {"scheme": "rotary", "layers": ({"attention": "gated-delta"}, {})},
    "biases": {"scheme": "alibi"},
    "planned lengths": {"scheme": "rotary-dynamic-ntk"},
    "encoder-decoder": {"scheme": "t5", "shape": "encoder-decoder"},
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"temperature": 1.0, "num_return_sequences": 4, "seed": 5},
    {"repetition_penalty": 1.3},
    {"stop": tuple(range(0, VOCAB, 7))},
]


@cache
def model_of(name: str, extension: str | None = None) -> Transformer:
    model = speaker(**MODELS[name])
    if extension is not None:
        extended = Transformer(model.config.with_extension(EXTENSIONS[extension])).eval()
        extended.load_state_dict(model.state_dict())
        model = extended
    model.special = phasor.SpecialTokens(start=0 if model.encoder is not None else None)
    return model


def graph_steps(monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Any]:
    """Steps as those of CUDA graphs; `generate` runs its own eagerly."""
    path = dispatch.Path("CUDA graph", CudaGraphRunner, spec_why_not)
    monkeypatch.setattr(runners, "STEP_RUNNERS", dispatch.Dispatch(path, runners.STEP_RUNNERS.paths[-1]))
    return dispatch.force_path("reference")


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(60))
def test_random_requests(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    name, steps = draw.choice(list(MODELS)), draw.choice(["eager", "graphs", "deterministic"])
    model, page_size = model_of(name), draw.choice([1, 3, 4, 8])
    begin = [draw.randrange(VOCAB) for _ in range(24)]
    requests = []
    for _ in range(draw.randint(4, 12)):
        prompt = [*begin[: draw.choice([0, 9, 24])], *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 9)))]
        options = draw.choice(OPTIONS) | {"max_new_tokens": draw.choice([1, 2, 7, 12])}
        extension = draw.choice([None, "yarn"]) if name in ("rotary", "sinks") else None
        requests.append((prompt, options, extension))
    longest = max(len(prompt) + options["max_new_tokens"] for prompt, options, _ in requests)
    sizes = {
        "max_rows": draw.choice([1, 2, 3, 8]),
        "page_size": page_size,
        "pages": -(-longest // page_size) + draw.choice([0, 2, 40]),
        "prefill_chunk": draw.choice([1, 3, 8, 64]),
    }
    compared_with = graph_steps(monkeypatch) if steps == "graphs" else nullcontext()
    with Engine(model, **sizes, deterministic=steps == "deterministic") as engine:
        handles = []
        for prompt, options, extension in requests:
            handles.append(engine.submit(prompt, extension=extension and EXTENSIONS[extension], **options))
            for _ in range(draw.choice([0, 0, 1, 3])):
                engine.step()
            if draw.random() < 0.1:
                handles[-1].cancel()
        while engine.step():
            pass
        stats, pools = engine.stats(), [table.pool for table in engine._cache.tables.values()]
    assert (stats.running, stats.waiting, stats.pages_held, stats.failed) == (0, 0, 0, 0)
    assert stats.finished + stats.cancelled == len(requests)
    assert not any(count for pool in pools for count in pool.references)
    with compared_with:
        for (prompt, options, extension), handle in zip(requests, handles, strict=True):
            with suppress(CancelledError):
                found = handle.result()
                tokens = [each.tokens for each in found] if isinstance(found, list) else found.tokens
                assert tokens == phasor.generate(model_of(name, extension), prompt, **options)
                assert handle.cached_tokens < len(prompt)

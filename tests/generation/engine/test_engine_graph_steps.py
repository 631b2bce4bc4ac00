"""The engine's steps over pages that are launched ahead of the host give the tokens of eager steps.

On a GPU they are CUDA graphs. On the CPU the same runners run their steps without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from decode_kernels import bfloat16_in_the_interpreter, large_tiles  # noqa: F401
from decoding import speaker
from schemes import BY_LENGTH, SCHEMES, VIEWS

import phasor
from phasor import Engine, Transformer
from phasor.config import AttentionConfig
from phasor.generation import runners
from phasor.generation.engine import CancelledError
from phasor.generation.engine.graph_steps import LaunchedStep
from phasor.generation.runners.cuda_graph import CudaGraphRunner, spec_why_not
from phasor.generation.runners.fused import FusedRunner
from phasor.generation.runners.protocol import StepSpec
from phasor.ops import dispatch

PROMPTS = [[9], [7, 3, 3, 58, 12], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [40, 41], [7, 3, 3, 58, 12, 5, 1, 1], [9, 9, 9]]
SMALL = {"max_rows": 3, "page_size": 4, "pages": 48, "prefill_chunk": 4}
KINDS = {
    f"{kind}-{name}": example for kind, cls in AttentionConfig.kinds.items() for name, example in cls.examples().items()
}


@contextmanager
def graph_steps(runner: type[CudaGraphRunner] = CudaGraphRunner) -> Iterator[None]:
    """Steps by a runner wherever they could be a CUDA graph."""
    path = dispatch.Path("CUDA graph", runner, spec_why_not)
    before, runners.STEP_RUNNERS = runners.STEP_RUNNERS, dispatch.Dispatch(path, runners.STEP_RUNNERS.paths[-1])
    try:
        yield
    finally:
        runners.STEP_RUNNERS = before


def tokens_of(
    model: Transformer,
    prompts: list[list[int]] = PROMPTS,
    runner: type[CudaGraphRunner] = CudaGraphRunner,
    sizes: dict[str, Any] = SMALL,
    **fields: Any,
) -> list[Any]:
    """The new tokens of prompts that are submitted together; graphs ran some steps."""
    with graph_steps(runner), Engine(model, **sizes) as engine:
        handles = [engine.submit(prompt, **fields) for prompt in prompts]
        found = [handle.result() for handle in handles]
        assert any(engine._graphs.graphs[model].runners.values())
        assert engine.stats().pages_held == 0
    return [[each.tokens for each in x] if isinstance(x, list) else x.tokens for x in found]


def eager(model: Transformer, prompts: list[list[int]] = PROMPTS, **fields: Any) -> list[Any]:
    with dispatch.force_path("reference"):
        return phasor.generate(model, prompts, **fields)


@pytest.mark.sample(6)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - set(BY_LENGTH)))
def test_greedy_tokens_of_every_scheme(scheme: str, view: str) -> None:
    model = speaker(scheme, attention=VIEWS[view])
    assert tokens_of(model, max_new_tokens=14) == eager(model, max_new_tokens=14)


def test_a_capture_keeps_the_tokens_that_are_not_read_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is run before it is captured, while tokens of steps of fewer rows wait for the next one."""
    build = CudaGraphRunner.__init__

    def build_and_run(self: CudaGraphRunner, spec: StepSpec) -> None:
        build(self, spec)
        self.run()

    monkeypatch.setattr(CudaGraphRunner, "__init__", build_and_run)
    model = speaker()
    assert tokens_of(model, max_new_tokens=14) == eager(model, max_new_tokens=14)


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_of_every_kind_of_attention(kind: str) -> None:
    position: Any = "rotary" if KINDS[kind].takes_positions else "none"
    try:
        model = speaker(position, attention=KINDS[kind])
    except ValueError:  # latent attention rotates some of the features
        model = speaker(phasor.RotaryConfig(rotary_dim=4), attention=KINDS[kind])
    assert tokens_of(model, max_new_tokens=14) == eager(model, max_new_tokens=14)


def test_greedy_tokens_of_layers_of_one_sublayer() -> None:
    mixers = [{"attention": kind, "feedforward": {"hidden_dim": 0}} for kind in ("mamba2", "softmax")]
    model = speaker("rotary", num_layers=3, layers=[{"attention": "none"}, *mixers])
    assert tokens_of(model, max_new_tokens=14) == eager(model, max_new_tokens=14)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("view", VIEWS)
def test_tokens_of_the_fused_step(view: str) -> None:
    model = speaker(attention=VIEWS[view], num_layers=1, num_kv_heads=1)
    options = {"max_new_tokens": 7, "stop": (11, 30)}
    assert tokens_of(model, PROMPTS[:4], FusedRunner, **options) == eager(model, PROMPTS[:4], **options)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.keeps_state])
def test_tokens_of_the_fused_step_over_states(kind: str) -> None:
    model = speaker("rotary" if KINDS[kind].takes_positions else "none", attention=KINDS[kind], num_layers=1)
    options = {"max_new_tokens": 7, "stop": (11, 30)}
    assert tokens_of(model, PROMPTS[:4], FusedRunner, **options) == eager(model, PROMPTS[:4], **options)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("kind", ["gated-delta", "mamba2", "retention"])
def test_states_of_rows_that_come_and_go_in_the_fused_step(kind: str) -> None:
    """Rows are begun together by samples, set back, cancelled, and their slots are taken by others."""
    model = speaker("rotary", num_layers=2, layers=({"attention": kind}, {}), num_kv_heads=1)
    sizes, options = {"max_rows": 3, "page_size": 2, "pages": 7, "prefill_chunk": 8}, {"max_new_tokens": 4}
    sampled = options | {"temperature": 1.0, "num_return_sequences": 2, "seed": 7}
    with graph_steps(FusedRunner), Engine(model, **sizes) as engine:
        first, second = (engine.submit(prompt, **options) for prompt in PROMPTS[:2])
        samples, cancelled = engine.submit(PROMPTS[3], **sampled), engine.submit(PROMPTS[4], **options)
        while not cancelled.new_tokens:
            engine.step()
        cancelled.cancel()
        found = [handle.result().tokens for handle in (first, second, engine.submit(PROMPTS[5], **options))]
        assert engine.stats().set_back > 0
        assert any(engine._graphs.graphs[model].runners.values())
    assert found == eager(model, [*PROMPTS[:2], PROMPTS[5]], **options)
    assert [each.tokens for each in samples.result()] == eager(model, PROMPTS[3], **sampled)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "stop": {"stop": tuple(range(0, 60, 7))},
    "temperature": {"temperature": 0.9, "seed": 4},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "samples": {"temperature": 1.0, "num_return_sequences": 5, "seed": 7},
    "constraints": {"suppress_tokens": (5, 17), "bad_words_ids": ((1, 2), (30,))},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str) -> None:
    model, options = speaker("rotary"), {"max_new_tokens": 20, **OPTIONS[name]}
    if name == "one token":  # of which prompts alone give the tokens
        with graph_steps(), Engine(model, **SMALL) as engine:
            found = [handle.result().tokens for handle in [engine.submit(p, **options) for p in PROMPTS]]
    else:
        found = tokens_of(model, **options)
    assert found == eager(model, **options)


def test_requests_of_different_options_share_steps() -> None:
    """Rows that sample come and go among those whose tokens stay on the device."""
    model = speaker("alibi")
    with graph_steps(), Engine(model, **SMALL | {"max_rows": 16}) as engine:
        handles = []
        for i, (name, options) in enumerate([*OPTIONS.items()] * 2):
            fields = {"max_new_tokens": 5 + i, **options}
            handles.append((name, fields, engine.submit(PROMPTS[i % 6], **fields), PROMPTS[i % 6]))
            engine.step()
        found = [handle.result() for _, _, handle, _ in handles]
    for (name, fields, _, prompt), whole in zip(handles, found, strict=True):
        tokens = [x.tokens for x in whole] if isinstance(whole, list) else whole.tokens
        assert tokens == eager(model, prompt, **fields), name


def test_extensions_of_requests_have_graphs_of_their_own() -> None:
    model, extension = speaker("rotary"), phasor.YaRN(factor=4.0, original_length=8)
    extended = Transformer(model.config.with_extension(extension)).eval()
    extended.load_state_dict(model.state_dict())
    with graph_steps(), Engine(model, **SMALL) as engine:
        given = [None, extension] * 3
        handles = [engine.submit(p, max_new_tokens=9, extension=own) for p, own in zip(PROMPTS, given, strict=True)]
        found = [handle.result().tokens for handle in handles]
        assert len(engine._graphs.graphs) == 2
        assert all(graphs.runners for graphs in engine._graphs.graphs.values())
    for own, prompt, tokens in zip(given, PROMPTS, found, strict=True):
        assert tokens == eager(model if own is None else extended, [prompt], max_new_tokens=9)[0]


def test_rows_that_are_set_back_are_not_lost() -> None:
    model = speaker("rotary")
    sizes = {"max_rows": 4, "page_size": 2, "pages": 20, "prefill_chunk": 3}
    with graph_steps(), Engine(model, **sizes) as engine:
        handles = [engine.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
        found = [handle.result().tokens for handle in handles]
        stats = engine.stats()
    assert stats.set_back > 0
    assert stats.pages_held == 0
    assert found == eager(model, max_new_tokens=20)


def test_prompts_that_begin_alike_share_pages() -> None:
    model, begin = speaker("rotary"), list(range(20))
    prompts = [[*begin, 50 + n] for n in range(4)]
    with graph_steps(), Engine(model, max_rows=4, page_size=4, pages=64) as engine:
        first = engine.submit(prompts[0], max_new_tokens=9).result().tokens
        handles = [engine.submit(prompt, max_new_tokens=9) for prompt in prompts]
        found = [handle.result().tokens for handle in handles]
        again = engine.submit([*prompts[0], *first, 4], max_new_tokens=3)
        continued = again.result().tokens
        assert again.cached_tokens == 28  # the full pages of 29 tokens that were read, 8 of them new ones
    assert found == eager(model, prompts, max_new_tokens=9)
    assert continued == eager(model, [*prompts[0], *first, 4], max_new_tokens=3)


@pytest.mark.cpu_only("a graph is launched without the step that it was captured from")
def test_a_step_is_launched_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, events, read = speaker("rotary"), [], LaunchedStep.read
    monkeypatch.setattr(LaunchedStep, "read", lambda step: (events.append("read"), read(step))[1])
    run = CudaGraphRunner.build_step

    def build_step(runner: CudaGraphRunner, model: Transformer, compile: bool) -> Any:
        step = run(runner, model, compile)
        return lambda: (events.append("launch"), step())[1]

    monkeypatch.setattr(CudaGraphRunner, "build_step", build_step)
    with graph_steps(), Engine(model, **SMALL) as engine:
        handle = engine.submit([1, 2, 3], max_new_tokens=6)
        found = handle.result().tokens
    # The prompt gives the first token, which is read as those of steps, and none is launched after the last of these.
    assert events == ["launch", "launch", "read", *["read", "launch"] * 3, "read", "read"]
    assert found == eager(model, [1, 2, 3], max_new_tokens=6)


def test_cancelling_a_row_whose_step_is_launched() -> None:
    model = speaker("rotary")
    with graph_steps(), Engine(model, max_rows=2, page_size=4, pages=32) as engine:
        first, second = (engine.submit([1, 2, n], max_new_tokens=30) for n in (3, 4))
        for _ in range(3):
            engine.step()
        first.cancel()
        found = engine.submit([4, 5], max_new_tokens=4).result().tokens, second.result().tokens
        with pytest.raises(CancelledError):
            first.result()
        assert engine.stats().pages_held == 0
    assert found == (eager(model, [4, 5], max_new_tokens=4), eager(model, [1, 2, 4], max_new_tokens=30))


def test_a_request_without_finite_logits_fails_alone() -> None:
    model = speaker("rotary")
    with torch.no_grad():
        model.tokens.weight[60] = float("nan")  # a token that only one prompt has
        model.head.weight[60] = 0.0
        model.head.weight[60, 0] = 2.0  # and that some rows generate
    plain = speaker("rotary")  # gives the same tokens until the first 60
    with torch.no_grad():
        plain.head.weight.copy_(model.head.weight)
    prompts = [[1, 2], [3, 3, 4], [5], [2, 7], [11, 12], [30]]
    expected = eager(plain, prompts, max_new_tokens=9)
    fails = [60 in tokens[:-1] for tokens in expected]  # the last one is not read
    assert 0 < sum(fails) < len(prompts)
    with graph_steps(), Engine(model, max_rows=4, pages=12, page_size=4) as engine:
        for _ in range(3):  # pages of those that failed are taken by others
            handles = [engine.submit(prompt, max_new_tokens=9) for prompt in prompts]
            for tokens, handle, failed in zip(expected, handles, fails, strict=True):
                if failed:
                    with pytest.raises(ValueError, match="largest logit is nan"):
                        handle.result()
                else:
                    assert handle.result().tokens == tokens
        for tensors in engine._cache.layers:
            assert all(x.isfinite().all() for x in tensors.values())


def test_weights_that_change_between_requests() -> None:
    model = speaker("rotary")
    with graph_steps(), Engine(model, **SMALL) as engine:
        first = engine.submit([1, 2], max_new_tokens=6).result().tokens
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().flip(0).clone())
        second = engine.submit([1, 2], max_new_tokens=6).result().tokens
        assert len(engine._graphs.graphs[model].runners) == 1
    assert first != second == eager(model, [1, 2], max_new_tokens=6)


def test_more_pages_than_a_graph_has() -> None:
    model = speaker("rotary")
    with graph_steps(), Engine(model, max_rows=2, page_size=1, pages=140) as engine:
        found = engine.submit([1, 2, 3], max_new_tokens=70).result().tokens
        assert {blocks for _, blocks in engine._graphs.graphs[model].runners} == {64, 128}
    assert found == eager(model, [1, 2, 3], max_new_tokens=70)


@pytest.mark.parametrize("scheme", BY_LENGTH[:1])
def test_steps_that_stay_eager(scheme: str) -> None:
    model = speaker(scheme)
    with graph_steps(), Engine(model, **SMALL) as engine:
        found = [h.result().tokens for h in [engine.submit(p, max_new_tokens=9) for p in PROMPTS]]
        assert engine._graphs.graphs[model] is None
    assert found == [eager(model, prompt, max_new_tokens=9) for prompt in PROMPTS]
    with graph_steps(), Engine(speaker("rotary"), deterministic=True) as engine:
        assert engine._graphs is None


def test_steps_run_eagerly_where_a_graph_cannot_be_captured(monkeypatch) -> None:
    def fail(spec: StepSpec) -> CudaGraphRunner:
        raise torch.OutOfMemoryError("no memory left")

    model = speaker("rotary")
    monkeypatch.setattr("phasor.generation.engine.graph_steps.new_runner", fail)
    with graph_steps(), Engine(model, **SMALL) as engine, pytest.warns(UserWarning, match="no memory left"):
        found = engine.submit([1, 2, 3], max_new_tokens=6).result().tokens
    assert [found] == eager(model, [[1, 2, 3]], max_new_tokens=6)

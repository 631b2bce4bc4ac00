"""Compiled steps equal eager steps for every scheme and attention pattern, in one graph."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from decoding import speaker
from schemes import BY_LENGTH, FIXED, VIEWS, build, relative_change, tiny, tokens
from torch._dynamo.testing import CompileCounter

import phasor
from phasor.generation.runners import compiled

SAME = 2e-6  # relative, float32: a fixed number of slots is added up in another order
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 4, 6, 2]]
CAPPED = phasor.SoftmaxAttentionConfig(window=4, sink_tokens=2, cap_sinks=True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graph_counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Counts graphs of the step, traced with fullgraph=True; no code is generated, which takes long."""
    counter = CompileCounter()
    backend = functools.partial(compiled.recording_backend, compile_graph=counter)
    graph = torch.compile(compiled.static_step, backend=backend, fullgraph=True, dynamic=False)
    monkeypatch.setattr(compiled, "compiled_step", lambda model: graph)
    return counter


@pytest.mark.sample(12)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", FIXED)
def test_logits_equal_those_of_eager_steps(name, view, monkeypatch):
    monkeypatch.setattr(compiled, "compiled_step", lambda model: compiled.static_step)
    model, ids = build(tiny(name, attention=VIEWS[view])), tokens(3, 20)
    real = torch.ones(3, 6, dtype=torch.bool)
    real[1, :4], real[2, :1] = False, False
    with torch.inference_mode():
        fixed, plain = model.new_cache(3, 40), model.new_cache(3, 40)
        for cache in (fixed, plain):
            model(ids[:, :6], attention_mask=real, cache=cache)
        runner = compiled.CompiledRunner(model, fixed)
        for position in range(6, 20):  # past windows, whose rings come around
            expected = model(ids[:, position : position + 1], cache=plain)[:, 0]
            assert relative_change(runner.step(ids[:, position].tolist()), expected) < SAME


@pytest.mark.sample(2)
@pytest.mark.cpu_only("on a GPU a step is a CUDA graph")
@pytest.mark.parametrize("attention", [VIEWS["whole"], VIEWS["window"], VIEWS["sinks"], CAPPED], ids=str)
@pytest.mark.parametrize("name", ["rotary", "rotary-yarn", "alibi", "t5", "learned", "xpos"])
def test_one_graph_serves_every_step(name, attention, graph_counter):
    if attention.cap_sinks and name == "learned":
        pytest.skip("a capped distance needs positions inside layers")
    model = speaker(name, attention=attention)
    plain = phasor.generate(model, PROMPTS, max_new_tokens=20)
    assert phasor.generate(model, PROMPTS, max_new_tokens=20, compile=True) == plain
    assert phasor.generate(model, PROMPTS, max_new_tokens=17, compile=True) == [text[:17] for text in plain]
    assert graph_counter.frame_count == 1


@pytest.mark.cpu_only("Dynamo does not trace Tensor.unflatten under torch.set_default_device")
def test_encoder_decoders(graph_counter):
    model = speaker("sinusoidal", shape="encoder-decoder")
    options = {"max_new_tokens": 12, "start": 1}
    assert phasor.generate(model, PROMPTS, compile=True, **options) == phasor.generate(model, PROMPTS, **options)
    assert graph_counter.frame_count == 1


def test_sampling_and_streaming(graph_counter):
    model = speaker(attention=VIEWS["window"])
    options = {"max_new_tokens": 15, "temperature": 0.9, "top_p": 0.8, "seed": 4}
    assert phasor.generate(model, PROMPTS, compile=True, **options) == phasor.generate(model, PROMPTS, **options)
    assert list(phasor.stream(model, [1, 2], compile=True, **options)) == phasor.generate(model, [1, 2], **options)


@pytest.mark.parametrize("name", BY_LENGTH)
def test_steps_that_depend_on_the_length_are_not_compiled_at_all(name, graph_counter):
    model = speaker(name)
    options = {"max_new_tokens": 15}
    assert phasor.generate(model, PROMPTS, compile=True, **options) == phasor.generate(model, PROMPTS, **options)
    assert graph_counter.frame_count == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tokens", "head"])
def test_python_around_the_graph_runs_in_every_step(part, monkeypatch):
    backend = functools.partial(compiled.recording_backend, compile_graph=CompileCounter())
    graph = torch.compile(compiled.static_step, backend=backend, dynamic=False)
    monkeypatch.setattr(compiled, "compiled_step", lambda model: graph)
    model, outputs, counts = speaker(), [], [0]
    plain = phasor.generate(model, [1, 2], max_new_tokens=9)
    assert phasor.generate(model, [1, 2], max_new_tokens=9, compile=True) == plain

    def count(*_):
        counts[0] += 1

    for hook, steps in ((count, counts), (lambda *args: outputs.append(args[2]), outputs)):
        handle = getattr(model, part).register_forward_hook(hook)
        phasor.generate(model, [1, 2], max_new_tokens=9, compile=True)
        assert (sum(counts) if steps is counts else len(outputs)) == 9
        handle.remove()
    # What Dynamo does not trace is outside of the only graph that covers the rest.
    handle = getattr(model, part).register_forward_hook(torch._dynamo.disable(lambda *args: args[2].roll(7, -1)))
    other = phasor.generate(model, [1, 2], max_new_tokens=9)
    assert phasor.generate(model, [1, 2], max_new_tokens=9, compile=True) == other != plain
    handle.remove()
    assert phasor.generate(model, [1, 2], max_new_tokens=9, compile=True) == plain


@pytest.mark.cpu_only("on a GPU a step is a CUDA graph")
def test_graphs_are_called_directly_after_the_first_step(graph_counter, monkeypatch):
    steps, model = [0], speaker()
    graph = compiled.compiled_step(model)

    def step(*args):
        steps[0] += 1
        return graph(*args)

    monkeypatch.setattr(compiled, "compiled_step", lambda model: step)
    phasor.generate(model, PROMPTS, max_new_tokens=9, compile=True)
    assert steps == [1]


def test_modules_of_others_run_other_code():
    model = speaker()
    model.decoder.norm = torch.nn.Sequential(model.decoder.norm)
    assert not compiled.runs_other_code(model)
    model.decoder.norm = type("Own", (torch.nn.Identity,), {"__module__": "somewhere"})()
    assert compiled.runs_other_code(model)


@pytest.mark.cpu_only("on a GPU a step is a CUDA graph")
def test_every_model_has_its_own_number_of_graphs(monkeypatch):
    counter, prompt = CompileCounter(), [1, 2]
    backend = functools.partial(compiled.recording_backend, compile_graph=counter)
    monkeypatch.setattr(compiled, "recording_backend", backend)
    models = [speaker(num_layers=layers) for layers in (1, 2, 3)]
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for model in (*models, models[0]):
            plain = phasor.generate(model, prompt, max_new_tokens=4)
            assert phasor.generate(model, prompt, max_new_tokens=4, compile=True) == plain
        assert counter.frame_count == 3
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            phasor.generate(models[0], [prompt, prompt], max_new_tokens=4, compile=True)


def test_the_step_of_a_model_goes_with_it():
    model = speaker()
    step = weakref.ref(compiled.compiled_step(model))
    assert compiled.compiled_step(model) is step()
    del model
    gc.collect()
    assert step() is None


def test_generated_code():
    model = speaker("rotary", attention=VIEWS["sinks"])
    assert phasor.generate(model, PROMPTS, max_new_tokens=12, compile=True) == phasor.generate(
        model, PROMPTS, max_new_tokens=12
    )


@pytest.mark.parametrize("field", [{"num_beams": 2}, {"penalty_alpha": 0.5, "top_k": 3}, {"prompt_lookup_tokens": 3}])
def test_compile_refuses_other_strategies(field):
    with pytest.raises(ValueError, match="compile is for greedy decoding and plain sampling"):
        phasor.generate(speaker(), [1], compile=True, **field)
    with pytest.raises(ValueError, match="or compile"):
        phasor.generate(speaker(), [1], compile=True, draft=speaker(seed=1))

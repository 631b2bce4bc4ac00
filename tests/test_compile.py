"""`torch.compile` with fullgraph=True: the same logits and gradients, and exact phases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mpmath
import pytest
import torch
from schemes import BY_LENGTH, FIXED, SCHEMES, build, relative_change, tiny, tokens
from torch._dynamo.testing import CompileCounterWithBackend

import phasor

FAR = 2**30
SAME = 2e-6  # relative, float32: compilers add and multiply in another order
SHIFTED = 1e-5  # relative, float32: between the same tokens at the start and far along


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_fullgraph(model: Any, backend: Any = "aot_eager") -> Any:
    """One graph or an error. Of the backends, `eager` only traces, `aot_eager` rewrites too, `inductor` makes code."""
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FIXED)
def test_schemes_of_fixed_frequency_are_one_graph(name):
    model, ids, near = build(tiny(name, num_layers=1)), tokens(2, 12), torch.arange(12)
    positions = near + (FAR if SCHEMES[name].shift_invariant else 3)
    with torch.no_grad():
        logits = compile_fullgraph(model, "eager")(ids, positions=positions)
        assert relative_change(logits, model(ids, positions=positions)) < SAME
        if SCHEMES[name].shift_invariant:
            assert relative_change(logits, model(ids)) < SHIFTED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotary-yarn", "t5"])
def test_generated_code_gives_the_same_logits_and_gradients(name):
    model, ids = build(tiny(name, num_layers=1)), tokens(2, 12)
    fast = compile_fullgraph(model, "inductor")
    results = []
    for run in (model, fast):
        logits = run(ids, positions=torch.arange(12) + FAR)
        logits.logsumexp(-1).mean().backward()
        results.append((logits, *(weight.grad for weight in model.parameters())))
        model.zero_grad()
    for expected, got in zip(*results, strict=True):
        assert relative_change(got, expected) < SHIFTED
    assert relative_change(results[1][0], model(ids)) < SHIFTED


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_phases_are_exact_in_compiled_code(backend):
    rope = phasor.Rotary(head_dim=16, extension=phasor.LinearScaling(factor=3.0))
    positions = torch.tensor([1, 2**20 + 7, FAR + 5, 2**36 - 1])
    cos, sin = compile_fullgraph(rope.cos_sin, backend)(positions)
    with mpmath.workdps(50):
        angles = [[p * mpmath.power(10000, mpmath.mpf(-i) / 8) / 3 for i in range(8)] for p in positions.tolist()]
        exact = [[[float(f(angle)) for angle in row] for row in angles] for f in (mpmath.cos, mpmath.sin)]
    error = torch.stack((cos, sin)).double() - torch.tensor(exact, dtype=torch.float64)
    assert error.abs().max() < 4.5e-8


PADDING = torch.arange(12) >= torch.tensor([[0], [5]])
DOCUMENTS = torch.arange(12).expand(2, -1) // 5
GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "attention_mask": {"attention_mask": PADDING},
    "document_ids": {"document_ids": DOCUMENTS},
    "both": {"attention_mask": PADDING, "document_ids": DOCUMENTS},
    "prefix_length": {"prefix_length": 3},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("window", [{}, {"window": 4, "sink_tokens": 1}], ids=["whole", "window"])
def test_masks_are_in_the_graph(window, given):
    model, ids = build(tiny("rotary", num_layers=1, attention=window)), tokens(2, 12)
    with torch.no_grad():
        logits, expected = (run(ids, **GIVEN[given]) for run in (compile_fullgraph(model), model))
    assert relative_change(logits, expected) < SAME


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"attention": {"softcap": 3.0, "sink_logits": True, "qk_norm": "head", "clip": 2.0, "bias": ("q", "out")}},
        {"feedforward": {"activation": "swiglu", "experts": {"num_experts": 4, "shared_dim": 8}}},
        {"layers": ({"attention": {"window": 4}}, {"position": {"kind": "rotary", "base": 1e6}}), "num_layers": 2},
        {"shape": "encoder", "head": "mlm", "placement": "post"},
        {"shape": "encoder-decoder", "placement": "deepnorm", "norm": "layernorm"},
        {"placement": "sandwich", "norm": {"kind": "rmsnorm", "unit_offset": True}},
        {"placement": "parallel", "embedding": {"scale": "sqrt", "norm": True, "token_types": 2}},
    ],
    ids=["score extras", "experts", "local and global", "encoder", "encoder-decoder", "sandwich", "parallel"],
)
def test_other_parts_are_in_the_graph(changes):
    model, ids = build(tiny("rotary", **{"num_layers": 1, **changes})), tokens(2, 12)
    inputs = (ids, ids[:, :7]) if model.config.shape == "encoder-decoder" else (ids,)
    with torch.no_grad():
        assert relative_change(compile_fullgraph(model)(*inputs), model(*inputs)) < SAME


def test_a_training_step_over_several_blocks_is_one_graph():
    """More tokens than one block of queries: blocks whose masks are recomputed in the backward pass."""
    config = tiny("alibi", num_layers=1, attention={"window": 40}, max_length=600)
    model, ids = build(config), tokens(1, 600)
    grads = []
    for run in (model, compile_fullgraph(model)):
        run(ids).logsumexp(-1).mean().backward()
        grads.append([weight.grad for weight in model.parameters()])
        model.zero_grad()
    for expected, got in zip(*grads, strict=True):
        assert relative_change(got, expected) < SHIFTED


def test_sequences_of_new_lengths_are_not_compiled_each():
    model, counter = build(tiny("rotary", num_layers=1)), CompileCounterWithBackend("aot_eager")
    run = compile_fullgraph(model, counter)
    with torch.no_grad():
        for count in (12, 17, 23, 31, 40):
            ids = tokens(2, count)
            assert relative_change(run(ids), model(ids)) < SAME
    assert counter.frame_count == 2  # the first length, then any


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BY_LENGTH)
def test_schemes_that_depend_on_length_give_the_same_in_pieces(name):
    model, ids = build(tiny(name, num_layers=1)), tokens(2, 12)
    with torch.no_grad():
        assert relative_change(torch.compile(model, backend="eager")(ids, length=40), model(ids, length=40)) < SAME

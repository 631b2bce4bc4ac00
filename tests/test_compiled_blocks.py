"""`model.compile()`: one graph for all blocks alike, without a break, equal to eager code, gradients included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device import DEVICE, ON_GPU
from schemes import SCHEMES, build, relative_change, tiny, tokens
from torch._dynamo.testing import CompileCounterWithBackend

# In generated code on a GPU; elsewhere the traced operations run one by one, which takes no compiler of C++.
BACKEND = "inductor" if ON_GPU else "aot_eager"
SAME = 2e-5  # relative, float32: compilers add and multiply in another order


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@contextmanager
def no_default_device() -> Iterator[None]:
    """Under a default device the compiler of torch 2.11 breaks graphs at some calls of torch."""
    torch.set_default_device(None)
    try:
        yield
    finally:
        torch.set_default_device(DEVICE if ON_GPU else None)


def logits_and_gradients(model: Any, *inputs: torch.Tensor, **args: Any) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with no_default_device():
        logits = model(*inputs, **args)
        logits.logsumexp(-1).mean().backward()
    return [logits.detach(), *(w.grad.clone() for w in model.parameters() if w.grad is not None)]


def check(config: Any, count: int = 40, graphs: int = 1, **args: Any) -> None:
    """Compiled and eager blocks give the same, and blocks alike have one graph."""
    model = build(config).to(DEVICE).train()
    ids = tokens(2, count).to(DEVICE)
    inputs = (ids, ids[:, :17]) if config.shape == "encoder-decoder" else (ids,)
    expected = logits_and_gradients(model, *inputs, **args)
    counter = CompileCounterWithBackend(BACKEND)
    model.compile(fullgraph=True, backend=counter)
    found = logits_and_gradients(model, *inputs, **args)
    assert len(found) == len(expected)
    largest = max(float(b.abs().max()) for b in expected[1:])
    for a, b in zip(found, expected, strict=True):  # some gradients are zero, but for rounding: FIRE's last bias
        assert (a - b).abs().max() < SAME * max(float(b.abs().max()), 1e-2 * largest)
    assert counter.frame_count == graphs


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name):
    check(tiny(name, num_layers=3))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_in_a_window(name):
    check(tiny(name, num_layers=3, attention={"window": 8, "sink_tokens": 2}))


PATTERNS: dict[str, dict[str, Any]] = {
    "chunked": {"kind": "chunked", "chunk": 16},
    "dilated": {"kind": "dilated", "dilation": 2, "segment": 16},
    "strided": {"kind": "strided", "block": 16, "local": 1, "stride": 2},
    "top-k": {"kind": "top-k", "block": 16, "top_k": 2},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_sparse_patterns(pattern):
    check(tiny("rotary", num_layers=3, attention={"sparse": PATTERNS[pattern]}))


PADDING = torch.arange(40) >= torch.tensor([[0], [5]])
DOCUMENTS = torch.arange(40).expand(2, -1) // 15


@pytest.mark.sample(1)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("given", ["attention_mask", "document_ids", "prefix_length"])
def test_masks(given, window):
    args = {"attention_mask": PADDING, "document_ids": DOCUMENTS, "prefix_length": 3}
    value = args[given]
    value = value.to(DEVICE) if isinstance(value, torch.Tensor) else value
    check(tiny("rotary", num_layers=3, attention={"window": window}), **{given: value})


PARTS: dict[str, tuple[int, dict[str, Any]]] = {
    "local and global": (2, {"layers": ({"attention": {"window": 8}}, {}), "num_layers": 4}),
    "experts": (1, {"feedforward": {"activation": "swiglu", "experts": {"num_experts": 4, "shared_dim": 8}}}),
    "score extras": (1, {"attention": {"softcap": 3.0, "sink_logits": True, "qk_norm": "head", "bias": ("q", "out")}}),
    "encoder": (1, {"shape": "encoder", "head": "mlm", "placement": "post"}),
    "encoder-decoder": (2, {"shape": "encoder-decoder", "norm": "layernorm"}),
    "sandwich": (1, {"placement": "sandwich"}),
    "parallel": (1, {"placement": "parallel"}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PARTS)
def test_parts(name):
    graphs, changes = PARTS[name]
    check(tiny("rotary", **{"num_layers": 3, **changes}), graphs=graphs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("window", [None, 8])
def test_prompts_and_chunks_through_a_cache(window):
    model = build(tiny("rotary", num_layers=3, attention={"window": window})).to(DEVICE)
    ids = tokens(2, 40).to(DEVICE)
    sizes = (16, 12, 12)
    with torch.no_grad(), no_default_device():
        eager = model.new_cache(2, 40)
        expected = [model(chunk, cache=eager) for chunk in ids.split(sizes, dim=1)]
        model.compile(fullgraph=True, backend=BACKEND)
        cache = model.new_cache(2, 40)
        for chunk, logits in zip(ids.split(sizes, dim=1), expected, strict=True):
            assert relative_change(model(chunk, cache=cache), logits) < SAME


def test_the_router_of_many_layers_is_recorded_by_one_graph():
    experts = {"activation": "swiglu", "experts": {"num_experts": 4, "top_k": 2}}
    model, ids = build(tiny("rotary", num_layers=12, feedforward=experts)).to(DEVICE).train(), tokens(2, 20).to(DEVICE)
    expected = model.loss(ids[:, :-1], targets=ids[:, 1:])
    counter = CompileCounterWithBackend(BACKEND)
    model.compile(fullgraph=True, backend=counter)
    with no_default_device():
        found = model.loss(ids[:, :-1], targets=ids[:, 1:])
    assert relative_change(found.total, expected.total) < SAME
    assert relative_change(found.balance, expected.balance) < SAME
    assert counter.frame_count == 1


def test_hooks_are_called():
    model, ids, seen = build(tiny("rotary")).to(DEVICE), tokens(1, 9).to(DEVICE), []
    model.compile(backend=BACKEND)
    model.decoder.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with no_default_device():
        model(ids)
    assert seen == [(1, 9, 32)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("index", [0, 2])
def test_hooks_inside_one_block_are_called_for_that_block(index):
    """Blocks alike share a graph: the hook must neither be left out nor run in the others, also if it comes later."""
    model, ids, seen = build(tiny("rotary", num_layers=3)).to(DEVICE), tokens(1, 9).to(DEVICE), []
    first = model.decoder.blocks[index].attention
    handle = first.register_forward_hook(lambda module, args, output: seen.append(module is first))
    model.compile(backend=BACKEND)
    with torch.no_grad(), no_default_device():
        plain = model(ids)
        assert torch.equal(model(ids), plain)
        assert seen == [True, True]
        handle.remove()
        last = model.decoder.blocks[2 - index].feedforward
        handle = last.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
        found = model(ids)
        with torch.compiler.set_stance("force_eager"):
            assert relative_change(found, model(ids)) < SAME
        assert relative_change(found, plain) > 1e-3
        handle.remove()
        assert relative_change(model(ids), plain) < SAME
    assert seen == [True, True]


def test_autocast():
    model, ids = build(tiny("rotary", num_layers=2)).to(DEVICE), tokens(1, 20).to(DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16), no_default_device():
        expected = model(ids)
        model.compile(fullgraph=True, backend=BACKEND)
        assert relative_change(model(ids).float(), expected.float()) < 3e-2  # bfloat16 has 8 bits


def test_many_models_of_a_process_stay_compiled():
    with torch._dynamo.config.patch(recompile_limit=8):
        counter = CompileCounterWithBackend("eager")
        for dim in range(8, 48, 4):
            model = build(tiny("rotary", num_layers=2, dim=dim, num_heads=2, head_dim=4)).to(DEVICE)
            model.compile(fullgraph=True, backend=counter, dynamic=False)
            ids = tokens(1, 9)
            with no_default_device():
                model(ids)
        assert counter.frame_count == 10


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
@pytest.mark.filterwarnings("ignore:Unable to hit fast path")  # blocks alike share a function, which torch warns of
@pytest.mark.parametrize("name", ["llama", "experts", "local and global"])
def test_cuda_graphs_of_blocks_in_training(name):
    changes: dict[str, Any] = {"num_layers": 3, **(PARTS[name][1] if name in PARTS else {})}
    models = [build(tiny("rotary", **changes)).to(DEVICE).train() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    models[1].compile(fullgraph=True, mode="reduce-overhead")
    for seed in range(6):
        ids = torch.randint(1, 40, (2, 24), generator=torch.Generator().manual_seed(seed))
        found = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            found.append(logits_and_gradients(model, ids))
            optimizer.step()
        for a, b in zip(*found, strict=True):
            assert (a - b).abs().max() < 1e-4 * max(float(b.abs().max()), 1e-2)

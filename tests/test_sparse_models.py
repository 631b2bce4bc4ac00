"""Models with sparse attention: cached = chunked = full, causality, packing, one graph, mistakes in one sentence."""

from __future__ import annotations

import pytest
import torch
from schemes import SCHEMES, build, tiny, tokens

import phasor
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.attention.softmax.module import build_pattern
from phasor.nn.positions.rotary.config import PiecewiseRotaryConfig
from phasor.ops.attention import Mask, ScoreMod
from phasor.ops.sparse_attention import sparse_attention_ref

SAME = 1e-4  # at logits of order 1
VIEWS = {
    "chunked": {"sparse": {"kind": "chunked", "chunk": 7}},
    "chunked with a window": {"window": 5, "sparse": {"kind": "chunked", "chunk": 7}},
    "strided": {"sparse": {"kind": "strided", "block": 4, "local": 2, "stride": 3, "global_blocks": 1}},
    "dilated": {"sparse": {"kind": "dilated", "dilation": 3}},
    "dilated in segments": {"sparse": {"kind": "dilated", "dilation": 3, "segment": 12}},
    "dilated with a window": {"window": 8, "sparse": {"kind": "dilated", "dilation": 3}},
    "top-k": {"sparse": {"kind": "top-k", "block": 4, "top_k": 3}},
}
COUNT = 41


@torch.no_grad()
def full(model, *args, **named):
    return model(*args, **named)


def feed(model, ids, *chunks):
    """Logits of tokens fed through a cache in chunks of these sizes, over and over."""
    cache, pieces, start = model.new_cache(len(ids), 64), [], 0
    while start < ids.shape[1]:
        size = chunks[len(pieces) % len(chunks)]
        pieces.append(full(model, ids[:, start : start + size], cache=cache))
        start += size
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("view", VIEWS)
def test_cached_and_chunked_equal_full(view):
    model, ids = build(tiny("rotary", attention=VIEWS[view])), tokens(2, COUNT)
    expected, size = full(model, ids), full(model, ids).abs().max()
    assert (expected - full(build(tiny("rotary")), ids)).abs().max() > 0.1 * size
    for chunks in ((1,), (5,), (16, 1, 3), (COUNT,)):
        assert (feed(model, ids, *chunks) - expected).abs().max() < SAME * size
    cache = model.new_cache(2, 64)
    pieces = [full(model, ids[:, :20], cache=cache)]
    static = StaticKVCache(cache)
    pieces += [full(model, ids[:, i : i + 1], cache=static) for i in range(20, COUNT)]
    assert (torch.cat(pieces, dim=1) - expected).abs().max() < SAME * size
    record = phasor.Record("attention")
    assert (full(model, ids, record=record) - expected).abs().max() < SAME * size
    assert (record.attention[0] > 0).float().mean() < 0.45


@pytest.mark.parametrize("clip", [0.5, 0.3])
def test_equal_scores_of_blocks_choose_the_same_blocks_in_every_chunk(clip):
    """Clipped queries and keys have few values, and blocks many equal scores."""
    attention = {"clip": clip, "sparse": {"kind": "top-k", "block": 2, "top_k": 3}}
    model = build(tiny("alibi", attention=attention, init={"kind": "normal", "std": 1.0}))
    ids = tokens(2, 60)
    expected = full(model, ids)
    for logits in (full(model, ids[:, :37]), feed(model, ids, 1), feed(model, ids, 16, 1, 3)):
        assert (logits - expected[:, : logits.shape[1]]).abs().max() < SAME * expected.abs().max()


@pytest.mark.parametrize("length", [5, COUNT, 48])
def test_visible_keys_are_counted_for_plans(length):
    for view in VIEWS.values():
        attention = phasor.SoftmaxAttentionConfig(**view)
        for side in ("decoder", "encoder")[: 1 if attention.sparse.causal_only else 2]:
            mask = Mask(causal=side == "decoder", window=attention.window, pattern=build_pattern(attention.sparse))
            q, k = torch.ones(1, length, 1, 1), torch.ones(1, length, 1, 1)
            weights = sparse_attention_ref(q, k, k, mask, ScoreMod(scale=1.0))[1]
            visible = attention.visible_keys(length, causal=side == "decoder")
            assert visible == pytest.approx(float((weights > 0).sum() / length))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_goes_with_every_pattern(scheme):
    if isinstance(SCHEMES[scheme], PiecewiseRotaryConfig):  # except those whose scores no pattern computes
        with pytest.raises(ValueError, match=r"SoftmaxAttentionConfig\.sparse"):
            tiny(scheme, attention=next(iter(VIEWS.values())))
        return
    for view in VIEWS.values():
        model, ids = build(tiny(scheme, attention=view)), tokens(2, COUNT)
        if model.config.position.axes > 1:
            continue
        expected, cache = full(model, ids), model.new_cache(2, 64, length=COUNT)
        size = expected.abs().max()
        pieces = [full(model, part, cache=cache) for part in ids.split(16, dim=1)]
        assert (torch.cat(pieces, dim=1) - expected).abs().max() < SAME * size
        recorded = full(model, ids, record=phasor.Record("attention"))
        assert (recorded - expected).abs().max() < SAME * size
        packed = full(model, ids, document_ids=torch.tensor([[4] * 13 + [2] * 28, [0] * COUNT]))
        assert (packed[0, 13:] - full(model, ids[:1, 13:])[0]).abs().max() < SAME * size


@pytest.mark.parametrize("view", VIEWS)
def test_later_tokens_padding_and_other_documents_change_nothing(view):
    model, ids = build(tiny("rotary", attention=VIEWS[view])), tokens(2, COUNT)
    expected = full(model, ids)
    size = expected.abs().max()
    changed = ids.clone()
    changed[:, 30:] = tokens(2, 11, seed=5)
    assert (full(model, changed)[:, :30] - expected[:, :30]).abs().max() < SAME * size
    padded = torch.cat((tokens(2, 9, seed=6), ids, tokens(2, 2, seed=7)), dim=1)
    real = torch.zeros(2, COUNT + 11, dtype=torch.bool)
    real[:, 9 : 9 + COUNT] = True
    real[1, 9:12] = False
    alone = full(model, ids[1:, 3:])
    masked = full(model, padded, attention_mask=real)
    assert (masked[0, 9 : 9 + COUNT] - expected[0]).abs().max() < SAME * size
    assert (masked[1, 12 : 9 + COUNT] - alone[0]).abs().max() < SAME * size
    packed = full(model, ids, document_ids=torch.tensor([[4] * 13 + [2] * 28, [0] * COUNT]))
    assert (packed[0, 13:] - full(model, ids[:1, 13:])[0]).abs().max() < SAME * size
    assert (packed[1] - expected[1]).abs().max() < SAME * size
    cache, more = model.new_cache(2, 64), tokens(2, 5, seed=8)
    full(model, padded, attention_mask=real, cache=cache)
    after = torch.cat([full(model, x, cache=cache) for x in (more[:, :4], more[:, 4:])], dim=1)
    together = full(model, torch.cat((ids[1:, 3:], more[1:]), dim=1))
    assert (after[1] - together[0, -5:]).abs().max() < SAME * size


@pytest.mark.parametrize("view", ["chunked", "dilated in segments", "strided"])
def test_encoders_take_patterns_too(view):
    model = build(tiny("rotary", shape="encoder", attention=VIEWS[view]))
    ids, real = tokens(2, COUNT), torch.ones(2, COUNT, dtype=torch.bool)
    real[1, 30:] = False
    expected = full(model, ids[1:, :30])
    assert (full(model, ids, attention_mask=real)[1, :30] - expected[0]).abs().max() < SAME * expected.abs().max()
    plain = full(build(tiny("rotary", shape="encoder")), ids[1:, :30])
    assert (plain - expected).abs().max() > 0.1 * expected.abs().max()


@pytest.mark.cpu_only("Dynamo does not trace Tensor.unflatten under torch.set_default_device")
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_model_of_all_patterns_is_one_graph_with_the_same_gradients(backend):
    torch.compiler.reset()
    views = ("chunked", "strided", "dilated in segments", "top-k")
    layers = [{"attention": VIEWS[view]} for view in views]
    model, ids = build(tiny("rotary", num_layers=len(layers), layers=layers)), tokens(2, 26)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for run in (model, compiled):
        loss = run(ids).logsumexp(-1).mean()
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    torch.compiler.reset()


def test_generation_goes_on_without_end_where_every_layer_has_chunks_alone():
    model = build(tiny("rotary", attention=VIEWS["chunked"]))
    prompt = tokens(1, 9)[0].tolist()
    stream = phasor.stream(model, prompt, max_new_tokens=None)
    ids = prompt + [next(stream) for _ in range(40)]
    greedy = full(model, torch.tensor([ids]))[0, len(prompt) - 1 : -1].argmax(-1)
    assert greedy.tolist() == ids[len(prompt) :]
    strided = build(tiny("rotary", attention=VIEWS["strided"]))
    with pytest.raises(ValueError, match="generating without end"):
        next(phasor.stream(strided, prompt, max_new_tokens=None))


def test_backends_say_which_path_is_taken_and_why():
    def paths(view, **options):
        ops = phasor.backends(tiny("rotary", attention=VIEWS[view]), **options).ops
        return {one.op: one for one in ops if "attention" in one.op}

    assert paths("dilated", device="cpu")["sparse attention"].path.startswith("SDPA in one call")
    assert paths("chunked", device="cuda", length=40)["sparse attention after a cache"].path.startswith("Triton kernel")
    assert paths("strided", device="cpu")["sparse attention"].path == "SDPA in blocks of queries"
    assert "the tensors are not on a GPU" in paths("top-k", device="cpu")["sparse attention"].reason
    blocks = {"sparse": {"kind": "top-k", "block": 64, "top_k": 4}}
    on_gpu = phasor.backends(tiny("rotary", attention=blocks), device="cuda").ops
    assert [one.path for one in on_gpu if "sparse" in one.op] == ["Triton kernel over lists of key blocks"] * 2
    step = phasor.backends(tiny("rotary", attention=VIEWS["top-k"]), device="cuda").ops[-1]
    assert step.path == "fused kernels in one CUDA graph"  # sparse attention as a module between the kernels


MISTAKES = [
    ({"sparse": {"kind": "strided", "local": 0}}, {}, "without its own block a query may be left without a key"),
    ({"sparse": {"kind": "strided", "stride": 1}}, {}, "StridedConfig.stride must be greater than 1"),
    ({"sparse": {"kind": "dilated", "dilation": 4, "segment": 10}}, {}, "is not a multiple of dilation"),
    ({"sparse": {"kind": "top-k", "block": 0}}, {}, "TopKConfig.block must be greater than 0"),
    ({"sparse": {"kind": "top-k"}, "window": 8}, {}, "SoftmaxAttentionConfig.window=8 would hide blocks"),
    ({"sparse": "strided", "window": 8}, {}, "SoftmaxAttentionConfig.window=8 would hide blocks"),
    ({"sparse": "chunked", "window": 8, "sink_tokens": 2}, {}, "is for a window without a pattern"),
    ({"sparse": "top-k"}, {"shape": "encoder"}, "'top-k' is for decoders, and this is an encoder"),
    ({"sparse": "chunks"}, {}, "did you mean 'chunked'"),
]


@pytest.mark.parametrize(("attention", "changes", "message"), MISTAKES)
def test_a_mistake_in_a_pattern_is_one_sentence(attention, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny("rotary", attention=attention, **changes)


def test_what_goes_with_no_pattern_is_refused_in_one_sentence():
    model, ids = build(tiny("rotary", attention=VIEWS["strided"])), tokens(1, 9)
    with pytest.raises(ValueError, match="prefix_length is for models without sparse attention"):
        model(ids, prefix_length=3)
    with pytest.raises(ValueError, match="leave document_ids out"):
        model(ids, document_ids=torch.zeros_like(ids), cache=model.new_cache(1, 16))


@pytest.mark.cpu_only("values on a GPU are not looked at")
def test_padding_between_tokens_is_refused():
    model, ids = build(tiny("rotary", attention=VIEWS["strided"])), tokens(1, 9)
    holes = torch.tensor([[True, False, True] * 3])
    with pytest.raises(ValueError, match="sparse attention padding belongs at the ends"):
        model(ids, attention_mask=holes)

"""Attention where fused kernels would be wrong: more elements than int32 can index, and scores far below zero."""

import pytest
import torch
from device import DEVICE
from mask_rules import CROSS, HEADS, RULES, Rule, compare
from references import normal, plain_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from phasor import backends, preset
from phasor.config import DropoutConfig
from phasor.ops.attention import (
    DistanceBias,
    Mask,
    ScoreMod,
    attention,
    attention_ref,
    blocks,
    cudnn,
    sdpa,
    single_query,
    split_large,
)


def always_true(q):
    return True


@pytest.fixture
def low_limit(monkeypatch):
    """As if kernels could index one head of one row, so that everything is split; returns the sizes of the parts."""
    monkeypatch.setattr(split_large, "MAX_ELEMENTS", 128 * 32)
    monkeypatch.setattr(split_large, "has_int32_kernels", always_true)
    monkeypatch.setattr(blocks, "BLOCK", 16)
    sizes, sdpa_function = [], sdpa.F.scaled_dot_product_attention

    def record_call(q, k, *others, **options):
        sizes.append((q.shape[0], q.shape[1], k.shape[1]))
        return sdpa_function(q, k, *others, **options)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", record_call)
    return sizes


@pytest.mark.sample(16)
@pytest.mark.parametrize("scores", ["plain", "bias", "all"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    "rule", ["everything", "causal", "window-and-sinks", "attention_mask", "causal-padding", "document_ids"]
)
def test_tensors_beyond_int32_are_split(rule, heads, scores, low_limit):
    compare(RULES[rule], scores, heads, attention)
    assert all(size == (1, 1, 1) for size in low_limit)
    assert low_limit or scores == "all"


@pytest.mark.parametrize("rule", CROSS)
def test_cross_attention_is_split_too(rule, low_limit):
    compare(CROSS[rule], "plain", "grouped-query", attention, keys=37)
    assert set(low_limit) == {(1, 1, 1)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["causal", "attention_mask"])
def test_split_attention_compiles_to_one_graph(rule, monkeypatch):
    monkeypatch.setattr(split_large, "MAX_ELEMENTS", 128 * 32)
    monkeypatch.setattr(split_large, "has_int32_kernels", always_true)
    torch.compiler.reset()
    compare(RULES[rule], "plain", "grouped-query", torch.compile(attention, backend="aot_eager", fullgraph=True))


def test_parts_and_their_gradients_are_contiguous(low_limit):
    seen = []

    def attend(q, k, v):
        y = q * 2 + (k + v).sum()
        y.register_hook(lambda grad: seen.append(grad.is_contiguous()))
        seen.extend(x.is_contiguous() for x in (q, k, v))
        return y

    q, k, v = torch.randn(3, 1, 8, 6, 32).requires_grad_()
    y = split_large.attend_in_halves(attend, q, k, v)
    torch.autograd.grad(y, q, torch.randn(1, 6, 8, 32).transpose(1, 2))
    assert seen == [True] * 8


def test_split_attention_under_torch_func(low_limit):
    q, k, v, direction = torch.randn(4, 1, 8, 6, 32)

    def whole(q):
        return (attention(q, k, v, Mask(causal=True), ScoreMod(scale=0.25)) * direction).sum()

    found = torch.func.grad(whole)(q)
    assert set(low_limit) == {(1, 1, 1)}
    q.requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(whole(q), q)[0])


def test_split_attention_where_only_the_bias_has_a_gradient(low_limit):
    q, k, v = torch.randn(3, 2, 8, 6, 32)
    bias = torch.randn(2, 6, 8, 8, requires_grad=True)
    positions = torch.arange(8)[None]
    score_mod = ScoreMod(scale=0.25, bias=lambda *_: bias, query_positions=positions, key_positions=positions)
    attention(q, k, v, Mask(causal=True), score_mod).sum().backward()
    assert set(low_limit) == {(1, 1, 1)}
    assert bias.grad.abs().amax((2, 3)).min() > 0


def test_tensors_with_large_strides_are_made_contiguous(monkeypatch):
    monkeypatch.setattr(split_large, "MAX_ELEMENTS", 1 << 14)
    monkeypatch.setattr(split_large, "has_int32_kernels", always_true)
    projected = normal(1, 96, 3, 2, 64).requires_grad_()
    q, k, v = projected.unbind(2)
    assert not split_large.exceeds_int32(q, k, v)
    assert split_large.make_dense(q).is_contiguous()
    assert not q.is_contiguous()
    assert split_large.make_dense(q[:, :32]).stride() == q.stride()
    layouts, sdpa_function = [], sdpa.F.scaled_dot_product_attention

    def record_call(*heads, **options):
        layouts.extend(x.transpose(1, 2).is_contiguous() for x in heads)
        return sdpa_function(*heads, **options)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", record_call)
    y = attention(q, k, v, Mask(causal=True), ScoreMod(scale=0.25))
    assert layouts == [True] * 3
    expected = attention_ref(q, k, v, Mask(causal=True), ScoreMod(scale=0.25))[0]
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), projected) for x in (y, expected)))


def test_without_gradients_nothing_is_split(low_limit):
    q, k, v = torch.randn(3, 3, 8, 6, 32)
    attention(q, k, v, Mask(causal=True), ScoreMod(scale=0.25))
    assert low_limit == [(3, 6, 6)]


def test_a_head_beyond_int32_is_an_error(low_limit):
    q, k, v = torch.randn(3, 1, 129, 1, 32, requires_grad=True)
    with pytest.raises(ValueError, match=r"a head of 129 tokens with 32 features .*: give the layer a window"):
        attention(q, k, v, Mask(causal=True), ScoreMod(scale=0.25))


def overflow_everywhere(q, k, causal):
    return True


@pytest.mark.parametrize("heads", ["multi-head", "grouped-query"])
@pytest.mark.parametrize("queries", [1, 63])
def test_where_cudnn_overflows_sdpa_chooses_among_other_backends(queries, heads, monkeypatch):
    allowed, sdpa_function = [], sdpa.F.scaled_dot_product_attention

    def record_call(*args, **options):
        of = torch.backends.cuda
        allowed.append((of.cudnn_sdp_enabled(), of.flash_sdp_enabled(), of.math_sdp_enabled()))
        return sdpa_function(*args, **options)

    monkeypatch.setattr(cudnn, "sdpa_may_overflow", overflow_everywhere)
    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", record_call)
    rule = Rule(lambda r, i, j: True, aligned=False)
    compare(rule, "plain", heads, attention, queries=queries)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        compare(rule, "plain", heads, attention, queries=queries)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        compare(rule, "plain", heads, attention, queries=queries)
    with torch.no_grad():
        attention(*torch.randn(3, 1, 63, 2, 8), Mask(), ScoreMod(scale=1.0))
    assert allowed == [(False, True, True), (False, False, True), (False, False, True), (True, True, True)]


def test_compiled_sdpa_chooses_among_other_backends(monkeypatch):
    monkeypatch.setattr(cudnn, "sdpa_may_overflow", overflow_everywhere)
    torch.compiler.reset()
    graphs, aot = [], torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        graphs.append(graph.code)
        return aot(graph, inputs)

    run = torch.compile(attention, backend=backend, fullgraph=True)
    compare(Rule(lambda r, i, j: True, aligned=False), "plain", "multi-head", run)
    assert len(graphs) == 1
    assert "sdpa_kernel" in graphs[0]


def on_gpu(tokens, heads=3):
    return torch.empty(1, tokens, heads, 64, dtype=torch.bfloat16, device="cuda")


def test_when_cudnn_overflows(monkeypatch):
    monkeypatch.setattr(cudnn, "available", lambda: (True, True))
    with FakeTensorMode():
        for queries, keys, causal, wrong in (
            (704, 704, False, True), (704, 704, True, False), (704, 700, False, False), (700, 704, False, True),
            (704, 768, False, False), (1, 700, False, True),
        ):  # fmt: skip
            q, k = on_gpu(queries).transpose(1, 2), on_gpu(keys).transpose(1, 2)
            assert cudnn.sdpa_may_overflow(q, k, causal) == wrong
        assert not cudnn.sdpa_may_overflow(q.cpu(), k.cpu(), causal)
        for tokens, training, causal, wrong in (
            (1088, True, False, True), (1088, True, True, False), (1152, True, False, False),
            (8256, False, False, False),
        ):  # fmt: skip
            q = on_gpu(tokens)
            q.requires_grad_(training)
            reason = cudnn.cudnn_unsupported_reason(q, q, q, Mask(causal=causal), ScoreMod(scale=1.0))
            assert (reason is not None) == wrong, reason
            assert reason is None or "overflow" in reason


@pytest.mark.parametrize("name", ["bert", "llama-2"])
def test_backends_say_when_cudnn_overflows(name, monkeypatch):
    monkeypatch.setattr(cudnn, "available", lambda: (True, True))
    sizes = {"dim": 128, "num_heads": 2, "num_layers": 1, "vocab_size": 50, "dropout": DropoutConfig()}
    config = preset(name, **sizes)

    def mentions_overflow(length):
        found = backends(config, device="cuda", dtype=torch.bfloat16, length=length, training=True)
        return "overflow" in str(found)

    assert mentions_overflow(1088) == (name == "bert")
    assert not mentions_overflow(1152)


@pytest.mark.cpu_only("GPUs have kernels for one query")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_one_query_in_sums(heads, dtype):
    query_heads, kv_heads = HEADS[heads]
    q = normal(3, 1, query_heads, 20, dtype=dtype)
    k, v = (normal(3, 37, kv_heads, 20, dtype=dtype, seed=seed) for seed in (1, 2))
    index = torch.tensor([[36], [11], [0]])
    for mask in (Mask(causal=True, query_index=index), Mask(causal=True, window=5, query_index=index), Mask()):
        how = mask, ScoreMod(scale=0.3)
        found = single_query.attend_in_sums(q, k, v, *how)
        expected = attention_ref(q.double(), k.double(), v.double(), *how)[0]
        assert (found.shape, found.dtype) == (q.shape, dtype)
        # Sums are in float32, and bfloat16 rounds the result alone.
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.cpu_only("GPUs have kernels for one query")
def test_only_a_compiler_takes_sums():
    q, k = normal(1, 1, 2, 8), normal(1, 6, 2, 8)
    how = Mask(causal=True, query_index=torch.tensor([[3]])), ScoreMod(scale=0.5)
    assert single_query.sums_unsupported_reason(q, k, k, *how) == "only a compiler fuses sums"
    taken = []

    def record(gm, inputs):
        taken.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    step = torch.compile(lambda q, k, v: attention(q, k, v, *how), backend=record)
    torch.testing.assert_close(step(q, k, k), attention(q, k, k, *how))
    assert not any("scaled_dot_product" in name for name in taken)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 40), (23, 63), (63, 63)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_bias_is_not_rounded_to_half_precision(dtype, queries, keys, learns, autocast):
    """Biases near 300, where bfloat16 has steps of 2 and float16 of a quarter, against float64."""
    q, k, v = (normal(2, t, h, 16, seed=i).to(dtype) for i, (t, h) in enumerate(((queries, 4), (keys, 2), (keys, 2))))
    table = (300 + 2 * normal(keys, 4, seed=4)).float().requires_grad_(learns)
    positions = torch.arange(keys)[None]
    mask = Mask(causal=True, offset=keys - queries)
    score_mod = ScoreMod(
        scale=0.25,
        bias=DistanceBias(table=table),
        query_positions=positions[:, keys - queries :],
        key_positions=positions,
    )
    inputs = [x.float() if autocast else x for x in (q, k, v)]
    inputs = [x.requires_grad_() for x in inputs]
    with torch.autocast(DEVICE.type, dtype, enabled=autocast):
        ours = attention(*inputs, mask, score_mod)
    assert ours.dtype == dtype
    exact = [x.double().detach().requires_grad_() for x in (q, k, v)]
    distance = (positions[:, keys - queries :].mT - positions).clamp(min=0)
    wide = table.detach().double().requires_grad_()
    expected = plain_attention(
        *exact, torch.ones(queries, keys).tril(keys - queries), 0.25, bias=(wide[distance] - 300).permute(2, 0, 1)[None]
    )
    # Weights and values are rounded to `dtype`, whose unit is 2^-7 or 2^-10; values reach 4.
    close = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), expected, rtol=close, atol=close)
    direction = normal(*expected.shape, seed=9)
    leaves, wide_leaves = (([*own, bias] if learns else own) for own, bias in ((inputs, table), (exact, wide)))
    grads = torch.autograd.grad(ours, leaves, direction.to(dtype))
    for got, right in zip(grads, torch.autograd.grad(expected, wide_leaves, direction), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=2 * close * float(right.abs().max()))

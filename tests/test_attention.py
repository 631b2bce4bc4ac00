"""Attention under every rule against all scores at once, the rules written token by token."""

import functools

import pytest
import torch
from plain import EXACT, SINGLE, assert_same, normal, plain_attention, plain_norm, redraw
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import phasor.kernels.attention as kernel
from phasor import backends, preset
from phasor.config import (
    AttentionConfig,
    DropoutConfig,
    LayerNormConfig,
    ModelConfig,
)
from phasor.kernels import cudnn, large
from phasor.kernels.attention import Scoring, attention, attention_ref
from phasor.kernels.mask import Mask
from phasor.model import Record, Transformer
from phasor.parts.attention import Attention, View
from phasor.parts.positions import Position


class Rule:
    """A mask, and independently of it a function of (row, query, key) that says who sees whom."""

    def __init__(self, sees, **fields):
        self.sees, self.fields = sees, fields

    @functools.cache  # noqa: B019
    def seen(self, queries, keys):
        """`[rows, queries, keys]`; padding tokens see themselves, so that they see something."""
        alone = self.fields.get("aligned", True)
        return torch.tensor(
            [
                [[self.sees(r, i, j) or (alone and i == j) for j in range(keys)] for i in range(queries)]
                for r in range(ROWS)
            ]
        )


TOKENS, ROWS = 63, 3
LEFT = [0, 5, 20]  # padding on the left of each row
RIGHT = [0, 7, 30]  # padding on the right
DOCUMENTS = [[0] * 20 + [1] * 23 + [2] * 20, [4] * 63, [9] * 1 + [3] * 50 + [5] * 12]
PREFIX = [0, 9, 40]


def is_real(row, token):
    return LEFT[row] <= token < TOKENS - RIGHT[row]


@functools.cache
def place(row, token, *, padded, packed):
    """How many real tokens of the same document stand before."""
    return sum(
        (not padded or is_real(row, t)) and (not packed or DOCUMENTS[row][t] == DOCUMENTS[row][token])
        for t in range(token)
    )


def table(value):
    return torch.tensor([[value(row, token) for token in range(TOKENS)] for row in range(ROWS)])


def padded(**fields):
    order = table(lambda r, t: place(r, t, padded=True, packed=False))
    return {"key_padding": table(is_real), "order": order, **fields}


def packed(**fields):
    documents = torch.tensor(DOCUMENTS)
    order = table(lambda r, t: place(r, t, padded=False, packed=True))
    return {"query_documents": documents, "key_documents": documents, "order": order, **fields}


def padded_and_packed(**fields):
    order = table(lambda r, t: place(r, t, padded=True, packed=True))
    return packed() | {"key_padding": table(is_real), "order": order, **fields}


def same_document(r, i, j):
    return DOCUMENTS[r][i] == DOCUMENTS[r][j]


def in_prefix(r, j, **kinds):
    return place(r, j, **{"padded": False, "packed": False} | kinds) < PREFIX[r]


RULES = {
    "everything": Rule(lambda r, i, j: True),
    "causal": Rule(lambda r, i, j: j <= i, causal=True),
    "window": Rule(lambda r, i, j: 0 <= i - j < 11, causal=True, window=11),
    "window-of-one": Rule(lambda r, i, j: i == j, causal=True, window=1),
    "wide-window": Rule(lambda r, i, j: j <= i, causal=True, window=63),
    "window-both-ways": Rule(lambda r, i, j: abs(i - j) < 11, window=11),
    "window-and-sinks": Rule(lambda r, i, j: j <= i and (i - j < 11 or j < 3), causal=True, window=11, sink_tokens=3),
    "window-and-many-sinks": Rule(
        lambda r, i, j: j <= i and (i - j < 5 or j < 20), causal=True, window=5, sink_tokens=20
    ),
    "window-both-ways-and-sinks": Rule(lambda r, i, j: abs(i - j) < 11 or j < 3, window=11, sink_tokens=3),
    "prefix": Rule(lambda r, i, j: j <= i or in_prefix(r, j), causal=True, prefix=torch.tensor(PREFIX)),
    "prefix-and-window": Rule(
        lambda r, i, j: 0 <= i - j < 11 or in_prefix(r, j), causal=True, window=11, prefix=torch.tensor(PREFIX)
    ),
    "prefix-window-sinks": Rule(
        lambda r, i, j: (j <= i and (i - j < 11 or j < 3)) or in_prefix(r, j),
        causal=True,
        window=11,
        sink_tokens=3,
        prefix=torch.tensor(PREFIX),
    ),
    "padding": Rule(lambda r, i, j: is_real(r, j), **padded()),
    "causal-padding": Rule(lambda r, i, j: is_real(r, j) and j <= i, **padded(causal=True)),
    "window-padding": Rule(lambda r, i, j: is_real(r, j) and 0 <= i - j < 11, **padded(causal=True, window=11)),
    "sinks-padding": Rule(
        lambda r, i, j: is_real(r, j) and j <= i and (i - j < 11 or place(r, j, padded=True, packed=False) < 3),
        **padded(causal=True, window=11, sink_tokens=3),
    ),
    "prefix-padding": Rule(
        lambda r, i, j: is_real(r, j) and (j <= i or in_prefix(r, j, padded=True)),
        **padded(causal=True, prefix=torch.tensor(PREFIX)),
    ),
    "documents": Rule(same_document, **packed()),
    "causal-documents": Rule(lambda r, i, j: same_document(r, i, j) and j <= i, **packed(causal=True)),
    "sinks-documents": Rule(
        lambda r, i, j: same_document(r, i, j) and j <= i and (i - j < 5 or place(r, j, padded=False, packed=True) < 2),
        **packed(causal=True, window=5, sink_tokens=2),
    ),
    "prefix-documents": Rule(
        lambda r, i, j: same_document(r, i, j) and (j <= i or in_prefix(r, j, packed=True)),
        **packed(causal=True, prefix=torch.tensor(PREFIX)),
    ),
    "documents-padding": Rule(
        lambda r, i, j: same_document(r, i, j) and is_real(r, j) and j <= i, **padded_and_packed(causal=True)
    ),
}

SCORES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sink-logits": {"sinks": True},
    "bias": {"bias": True},
    "own-scale": {"scale": 1.3},
    "all": {"softcap": 3.0, "sinks": True, "bias": True, "scale": 0.9},
}
HEADS = {"multi-head": (4, 4), "grouped-query": (6, 2), "multi-query": (3, 1), "three groups": (6, 3)}


def slope_bias(queries, keys):
    """Some bias of positions with a sign to it, different for each of six heads."""
    heads = torch.linspace(0.1, 0.6, 6, dtype=torch.float64)[:, None, None]
    return heads * torch.sin(0.1 * (queries[:, None, :, None] - keys[:, None, None, :]).double())


def make_scoring(options, heads, queries, keys, at=0):
    sinks = normal(heads, seed=7).requires_grad_() if options.get("sinks") else None
    biased = options.get("bias")
    positions = [torch.arange(n)[None] + at for n in (queries, keys)]
    scoring = Scoring(
        scale=options.get("scale", 0.25),
        softcap=options.get("softcap"),
        sinks=sinks,
        bias=(lambda a, b: slope_bias(a, b)[:, :heads]) if biased else None,
        query_positions=positions[0] if biased else None,
        key_positions=positions[1] if biased else None,
    )
    return scoring, slope_bias(*positions)[:, :heads] if biased else None


def real_rows(y, rule):
    """What padding tokens get is nobody's business."""
    return y[rule.fields["key_padding"]] if "key_padding" in rule.fields else y


def compare(rule, scores, heads, run, queries=TOKENS, keys=TOKENS, tolerance=EXACT):
    h, groups = HEADS[heads]
    q = normal(ROWS, queries, h, 13, seed=1).requires_grad_()
    k, v = (normal(ROWS, keys, groups, 13, seed=s).requires_grad_() for s in (2, 3))
    scoring, bias = make_scoring(SCORES[scores], h, queries, keys)
    truth = plain_attention(
        q, k, v, rule.seen(q.shape[1], k.shape[1]), scoring.scale, scoring.softcap, scoring.sinks, bias
    )
    inputs = [q, k, v] + ([] if scoring.sinks is None else [scoring.sinks])
    ours = run(q, k, v, Mask(**rule.fields), scoring)
    if rule.fields.get("aligned", True):
        ours, truth = real_rows(ours, rule), real_rows(truth, rule)
    assert_same(ours, truth, inputs, tolerance)


@pytest.fixture
def small_blocks(monkeypatch):
    """Sixteen queries at a time, so that 63 tokens are four blocks and the last is short."""
    monkeypatch.setattr(kernel, "BLOCK", 16)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.usefixtures("small_blocks")
def test_attention_in_blocks_under_every_rule(rule, scores):
    compare(RULES[rule], scores, "grouped-query", attention)


@pytest.mark.parametrize("scores", ["plain", "all"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("run", [attention, lambda *a: attention_ref(*a)[0]], ids=["one-block", "reference"])
def test_attention_in_one_piece_under_every_rule(rule, scores, run):
    compare(RULES[rule], scores, "grouped-query", run)


@pytest.mark.parametrize("scores", ["plain", "all"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rule", ["everything", "causal", "window-and-sinks", "padding"])
@pytest.mark.usefixtures("small_blocks")
def test_attention_with_shared_heads(rule, heads, scores):
    compare(RULES[rule], scores, heads, attention)


def anywhere(q):
    return True


@pytest.fixture
def few_numbers(monkeypatch):
    """As if kernels counted to one head of one row, so that everything is taken in parts; gives the parts' sizes."""
    monkeypatch.setattr(large, "MOST", 128 * 32)
    monkeypatch.setattr(large, "matters", anywhere)
    sizes, take = [], kernel.F.scaled_dot_product_attention

    def noted(q, k, *others, **options):
        sizes.append((q.shape[0], q.shape[1], k.shape[1]))
        return take(q, k, *others, **options)

    monkeypatch.setattr(kernel.F, "scaled_dot_product_attention", noted)
    return sizes


@pytest.mark.parametrize("scores", ["plain", "bias", "all"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rule", ["everything", "causal", "window-and-sinks", "padding", "causal-padding", "documents"])
@pytest.mark.usefixtures("small_blocks")
def test_what_kernels_could_not_count_is_taken_in_parts(rule, heads, scores, few_numbers):
    compare(RULES[rule], scores, heads, attention)
    assert all(size == (1, 1, 1) for size in few_numbers)
    assert few_numbers or scores == "all"


@pytest.mark.parametrize("rule", ["causal", "padding"])
def test_parts_are_one_graph_to_the_compiler(rule, monkeypatch):
    monkeypatch.setattr(large, "MOST", 128 * 32)
    monkeypatch.setattr(large, "matters", anywhere)
    torch.compiler.reset()
    compare(RULES[rule], "plain", "grouped-query", torch.compile(attention, backend="aot_eager", fullgraph=True))


def test_parts_and_their_gradients_lie_side_by_side(few_numbers):
    seen = []

    def attend(q, k, v):
        y = q * 2 + (k + v).sum()
        y.register_hook(lambda grad: seen.append(grad.is_contiguous()))
        seen.extend(x.is_contiguous() for x in (q, k, v))
        return y

    q, k, v = torch.randn(3, 1, 8, 6, 32).requires_grad_()
    y = large.in_halves(attend, q, k, v)
    torch.autograd.grad(y, q, torch.randn(1, 6, 8, 32).transpose(1, 2))
    assert seen == [True] * 8


def test_parts_are_for_torch_func_too(few_numbers):
    q, k, v, direction = torch.randn(4, 1, 8, 6, 32)

    def whole(q):
        return (attention(q, k, v, Mask(causal=True), Scoring(scale=0.25)) * direction).sum()

    found = torch.func.grad(whole)(q)
    assert set(few_numbers) == {(1, 1, 1)}
    q.requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(whole(q), q)[0])


def test_parts_of_a_bias_alone(few_numbers):
    q, k, v = torch.randn(3, 2, 8, 6, 32)
    bias = torch.randn(2, 6, 8, 8, requires_grad=True)
    positions = torch.arange(8)[None]
    given = Scoring(scale=0.25, bias=lambda *_: bias, query_positions=positions, key_positions=positions)
    attention(q, k, v, Mask(causal=True), given).sum().backward()
    assert set(few_numbers) == {(1, 1, 1)}
    assert bias.grad.abs().amax((2, 3)).min() > 0


def test_what_is_scattered_too_far_is_gathered(monkeypatch):
    monkeypatch.setattr(large, "MOST", 1 << 14)
    monkeypatch.setattr(large, "matters", anywhere)
    projected = normal(1, 96, 3, 2, 64).requires_grad_()
    q, k, v = projected.unbind(2)
    assert not large.exceeds(q, k, v)
    assert large.dense(q).is_contiguous()
    assert not q.is_contiguous()
    assert large.dense(q[:, :32]).stride() == q.stride()
    layouts, take = [], kernel.F.scaled_dot_product_attention

    def noted(*heads, **options):
        layouts.extend(x.transpose(1, 2).is_contiguous() for x in heads)
        return take(*heads, **options)

    monkeypatch.setattr(kernel.F, "scaled_dot_product_attention", noted)
    y = attention(q, k, v, Mask(causal=True), Scoring(scale=0.25))
    assert layouts == [True] * 3
    truth = attention_ref(q, k, v, Mask(causal=True), Scoring(scale=0.25))[0]
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), projected) for x in (y, truth)))


def test_without_gradients_nothing_is_taken_apart(few_numbers):
    q, k, v = torch.randn(3, 3, 8, 6, 32)
    attention(q, k, v, Mask(causal=True), Scoring(scale=0.25))
    assert few_numbers == [(3, 6, 6)]


def forced(q, k, causal):
    return True


@pytest.mark.parametrize("heads", ["multi-head", "grouped-query"])
@pytest.mark.parametrize("queries", [1, 63])
def test_where_cudnn_overflows_torch_chooses_among_the_others(queries, heads, monkeypatch):
    allowed, take = [], kernel.F.scaled_dot_product_attention

    def noted(*args, **options):
        of = torch.backends.cuda
        allowed.append((of.cudnn_sdp_enabled(), of.flash_sdp_enabled(), of.math_sdp_enabled()))
        return take(*args, **options)

    monkeypatch.setattr(cudnn, "misleads", forced)
    monkeypatch.setattr(kernel.F, "scaled_dot_product_attention", noted)
    rule = Rule(lambda r, i, j: True, aligned=False)
    compare(rule, "plain", heads, attention, queries=queries)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        compare(rule, "plain", heads, attention, queries=queries)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        compare(rule, "plain", heads, attention, queries=queries)
    with torch.no_grad():
        attention(*torch.randn(3, 1, 63, 2, 8), Mask(), Scoring(scale=1.0))
    assert allowed == [(False, True, True), (False, False, True), (False, False, True), (True, True, True)]


def test_the_compiler_sees_that_torch_chooses_among_the_others(monkeypatch):
    monkeypatch.setattr(cudnn, "misleads", forced)
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
            assert cudnn.misleads(q, k, causal) == wrong
        assert not cudnn.misleads(q.cpu(), k.cpu(), causal)
        for tokens, training, causal, wrong in (
            (1088, True, False, True), (1088, True, True, False), (1152, True, False, False),
            (8256, False, False, False),
        ):  # fmt: skip
            q = on_gpu(tokens)
            reason = cudnn.obstacle(q, q, q, 0.0, training, causal)
            assert (reason is not None) == wrong, reason
            assert reason is None or "overflow" in reason


@pytest.mark.parametrize("name", ["bert", "llama-2"])
def test_backends_say_when_cudnn_overflows(name, monkeypatch):
    monkeypatch.setattr(cudnn, "available", lambda: (True, True))
    sizes = {"dim": 128, "num_heads": 2, "num_layers": 1, "vocab_size": 50, "dropout": DropoutConfig()}
    config = preset(name, **sizes)

    def told(length):
        found = backends(config, device="cuda", dtype=torch.bfloat16, length=length, training=True)
        return "overflow" in str(found)

    assert told(1088) == (name == "bert")
    assert not told(1152)


def test_a_head_that_no_kernel_could_count_is_refused(few_numbers):
    q, k, v = torch.randn(3, 1, 129, 1, 32, requires_grad=True)
    with pytest.raises(ValueError, match=r"a head of 129 tokens with 32 features .*: give the layer a window"):
        attention(q, k, v, Mask(causal=True), Scoring(scale=0.25))


SOURCE_DOCUMENTS = [[0] * 5 + [1] * 20 + [2] * 12, [4] * 37, [9] * 30 + [3] * 4 + [5] * 3]
CROSS = {
    "everything": Rule(lambda r, i, j: True, aligned=False),
    "padding": Rule(
        lambda r, i, j: j >= 6 * r,
        key_padding=torch.tensor([[j >= 6 * r for j in range(37)] for r in range(ROWS)]),
        aligned=False,
    ),
    "documents": Rule(
        lambda r, i, j: DOCUMENTS[r][i] == SOURCE_DOCUMENTS[r][j],
        query_documents=torch.tensor(DOCUMENTS),
        key_documents=torch.tensor(SOURCE_DOCUMENTS),
        aligned=False,
    ),
}


@pytest.mark.parametrize("scores", ["plain", "softcap", "sink-logits", "own-scale"])
@pytest.mark.parametrize("rule", CROSS)
@pytest.mark.usefixtures("small_blocks")
def test_cross_attention(rule, scores):
    compare(CROSS[rule], scores, "grouped-query", attention, keys=37)


@pytest.mark.parametrize("rule", CROSS)
def test_cross_attention_in_parts(rule, few_numbers):
    compare(CROSS[rule], "plain", "grouped-query", attention, keys=37)
    assert set(few_numbers) == {(1, 1, 1)}


@pytest.mark.parametrize("scores", ["plain", "all"])
@pytest.mark.parametrize("rule", ["causal", "window-and-sinks", "causal-padding", "documents"])
@pytest.mark.usefixtures("small_blocks")
def test_attention_in_float32(rule, scores):
    rule, (h, groups) = RULES[rule], HEADS["grouped-query"]
    q, k, v = normal(ROWS, TOKENS, h, 60, seed=1), *(normal(ROWS, TOKENS, groups, 60, seed=s) for s in (2, 3))
    scoring, bias = make_scoring(SCORES[scores], h, TOKENS, TOKENS)
    truth = plain_attention(
        q, k, v, rule.seen(q.shape[1], k.shape[1]), scoring.scale, scoring.softcap, scoring.sinks, bias
    )
    ours = attention(q.float(), k.float(), v.float(), Mask(**rule.fields), scoring)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(real_rows(ours.double(), rule), real_rows(truth, rule), rtol=SINGLE, atol=SINGLE)


def plain_projection(module, x, part):
    """The rows of `q`, `k` or `v` picked out of the fused matrix: by group its queries, its key, its value."""
    share, width = module.shared, module.width
    picked = []
    for group in range(module.groups):
        first = group * (share + 2)
        slots = {"q": range(first, first + share), "k": [first + share], "v": [first + share + 1]}[part]
        picked += [row for slot in slots for row in range(slot * width, (slot + 1) * width)]
    y = x @ module.qkv.weight[picked].T
    if module.qkv.bias is not None:
        y = y + module.qkv.bias[picked]
    y = y.unflatten(-1, (-1, width))
    return y + module.lone_bias[part] if part in module.lone_bias else y


@pytest.mark.parametrize("qk_norm", ["none", "head", "heads", "whole"])
@pytest.mark.parametrize("bias", [(), ("q", "k", "v", "out"), ("q", "v"), ("k",)], ids=str)
@pytest.mark.parametrize("clip", [None, 0.8])
def test_attention_module_is_its_equation(qk_norm, bias, clip):
    norm = LayerNormConfig(eps=1e-3)
    model = ModelConfig(vocab_size=9, dim=21, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=5, norm=norm)
    module = redraw(Attention(AttentionConfig(qk_norm=qk_norm, bias=bias, clip=clip), model))
    x = normal(2, 13, 21).requires_grad_()
    parts = {}
    for part in "qkv":
        y = plain_projection(module, x, part)
        if clip is not None:
            y = torch.where(y > clip, clip, torch.where(y < -clip, -clip, y))
        if qk_norm != "none" and part in "qk":
            own = module.q_norm if part == "q" else module.k_norm
            wide = y.flatten(-2) if qk_norm == "whole" else y
            y = plain_norm(wide, norm, own.weight, own.bias).view(y.shape)
        parts[part] = y
    mixed = plain_attention(*(parts[p] for p in "qkv"), torch.ones(13, 13).tril(), 5**-0.5).flatten(-2)
    truth = mixed @ module.out.weight.T + (module.out.bias if "out" in bias else 0.0)
    ours = module(x, View(Mask(causal=True), Position()))
    assert_same(ours, truth, [x, *module.parameters()], 1e-9)


@pytest.mark.parametrize("qk_norm", ["head", "heads", "whole"])
def test_the_norm_of_queries_and_keys_may_lack_the_bias_that_others_have(qk_norm):
    norm = LayerNormConfig(eps=1e-3)
    model = ModelConfig(vocab_size=9, dim=21, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=5, norm=norm)
    module = redraw(Attention(AttentionConfig(qk_norm=qk_norm, qk_norm_bias=False), model))
    assert [name for name, _ in module.named_parameters() if name.endswith("norm.bias")] == []
    x, parts = normal(2, 13, 21), {}
    for part in "qkv":
        y = parts[part] = plain_projection(module, x, part)
        if part != "v":
            own = module.q_norm if part == "q" else module.k_norm
            parts[part] = plain_norm(y.flatten(-2) if qk_norm == "whole" else y, norm, own.weight, 0.0).view(y.shape)
    mixed = plain_attention(*(parts[p] for p in "qkv"), torch.ones(13, 13).tril(), 5**-0.5).flatten(-2)
    ours = module(x, View(Mask(causal=True), Position()))
    assert_same(ours, mixed @ module.out.weight.T, [*module.parameters()], 1e-9)


@pytest.mark.parametrize("bias", [(), ("q", "k", "v", "out"), ("v", "out"), ("q",)], ids=str)
def test_cross_attention_module_is_its_equation(bias):
    model = ModelConfig(vocab_size=9, dim=21, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=5)
    module = redraw(Attention(AttentionConfig(bias=bias), model, cross=True))
    x, memory = normal(2, 13, 21).requires_grad_(), normal(2, 7, 21, seed=5).requires_grad_()
    q = x @ module.q.weight.T + (module.q.bias if "q" in bias else 0.0)
    rows = module.kv.weight.view(2, 2, 5, 21)  # group, key or value, features, in
    k, v = (memory @ rows[:, which].reshape(10, 21).T for which in (0, 1))
    if module.kv.bias is not None:
        k, v = (y + module.kv.bias.view(2, 2, 5)[:, which].reshape(10) for which, y in enumerate((k, v)))
    elif "v" in bias:
        v = v + module.lone_bias["v"].flatten()
    split = [y.unflatten(-1, (-1, 5)) for y in (q, k, v)]
    mixed = plain_attention(*split, torch.ones(13, 7), 5**-0.5).flatten(-2)
    truth = mixed @ module.out.weight.T + (module.out.bias if "out" in bias else 0.0)
    ours = module(x, View(Mask(aligned=False), Position(), memory=module.remember(memory)))
    assert_same(ours, truth, [x, memory, *module.parameters()], 1e-9)


def small_model(**fields):
    torch.manual_seed(0)
    return Transformer(ModelConfig(**{"vocab_size": 31, "dim": 24, "num_layers": 2, "num_heads": 4} | fields)).double()


MODEL_RULES = {
    "causal": ({}, {}, lambda r, i, j: j <= i),
    "encoder": ({"shape": "encoder"}, {}, lambda r, i, j: True),
    "window": ({"attention": {"window": 4}}, {}, lambda r, i, j: 0 <= i - j < 4),
    "sinks-after-padding": (
        {"attention": {"window": 4, "sink_tokens": 2}},
        {"padding": [[False] * 3 + [True] * 10, [True] * 13]},
        lambda r, i, j: j <= i and (j >= 3 or r == 1) and (i - j < 4 or j < (5 if r == 0 else 2)),
    ),
    "sinks-of-documents": (
        {"attention": {"window": 2, "sink_tokens": 1}},
        {"documents": [[0] * 6 + [1] * 7, [5] * 13]},
        lambda r, i, j: j <= i and (r == 1 or (i < 6) == (j < 6)) and (i - j < 2 or j == 0 or (r == 0 and j == 6)),
    ),
    "prefix": ({}, {"prefix": [5, 0]}, lambda r, i, j: j <= i or (r == 0 and j < 5)),
    "prefix-after-padding": (
        {},
        {"prefix": 5, "padding": [[False] * 3 + [True] * 10, [True] * 13]},
        lambda r, i, j: (j >= 3 or r == 1) and (j <= i or j < (8 if r == 0 else 5)),
    ),
}


@pytest.mark.parametrize("name", MODEL_RULES)
def test_model_hands_its_attention_the_right_rule(name, monkeypatch):
    """The weights are nonzero exactly where the rule says, and attention in blocks gives the same logits."""
    fields, about, sees = MODEL_RULES[name]
    model = small_model(**fields).eval()
    about = {n: torch.tensor(v) if n in ("padding", "documents") else v for n, v in about.items()}
    tokens = torch.randint(0, 31, (2, 13), generator=torch.Generator().manual_seed(3))
    real = about.get("padding", torch.ones(2, 13, dtype=torch.bool))
    record = Record("attention")
    logits = model(tokens, record=record, **about)
    expected = torch.tensor([[[sees(r, i, j) for j in range(13)] for i in range(13)] for r in range(2)])
    for weights in record.attention:
        seen = (weights > 0)[real[:, None, :].expand(2, 4, 13)]
        assert torch.equal(seen, expected[:, None].expand(2, 4, 13, 13)[real[:, None, :].expand(2, 4, 13)])
    monkeypatch.setattr(kernel, "BLOCK", 4)
    torch.testing.assert_close(model(tokens, **about)[real], logits[real], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["fused", "own-softmax"])
def test_padding_of_packed_pairs_harms_nobody(softcap):
    """Padding of the target whose document the source lacks sees nothing at all; real tokens stay as they were."""
    model = small_model(shape="encoder-decoder", attention={"softcap": softcap})
    tokens = torch.arange(12).view(2, 6)
    real = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    source = torch.tensor([[0, 0, 1, 1, 9, 9], [3] * 6])
    target = torch.tensor([[0, 1, 1, 1, 8, 8], [3] * 6])
    both = {"padding": real, "documents": source, "target_padding": real, "target_documents": target}
    for record in (Record(), Record("cross_attention")):
        logits = model(tokens, tokens, **both, record=record)
        grads = torch.autograd.grad(logits[real].square().sum(), list(model.parameters()))
        assert all(grad.isfinite().all() for grad in grads)
        alone = model(tokens[:1, :4], tokens[:1, :4], documents=source[:1, :4], target_documents=target[:1, :4])
        torch.testing.assert_close(logits[:1, :4], alone, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("place", ["embedding", "attention", "residual", "feedforward"])
@pytest.mark.parametrize("experts", [None, {"num_experts": 3}], ids=["dense", "experts"])
def test_dropout_acts_in_training_alone_and_follows_the_seed(place, experts):
    fields = {"feedforward": {"activation": "relu", "experts": experts}}
    model = small_model(dropout={place: 0.3}, **fields)
    without = small_model(**fields)
    tokens = torch.arange(22).view(2, 11)

    def run(seed):
        torch.manual_seed(seed)
        return model(tokens)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    model.eval()
    assert torch.equal(run(1), run(2))
    assert torch.equal(run(1), without.eval()(tokens))


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["fused", "own-softmax"])
@pytest.mark.usefixtures("small_blocks")
def test_blocked_training_repeats_its_dropout_in_the_backward_pass(softcap, monkeypatch):
    """Blocks are computed again for their gradients: what was dropped must be dropped again."""
    mask = Mask(causal=True, window=20)
    scoring = Scoring(scale=0.3, softcap=softcap, dropout=0.4)
    q, k, v = (normal(2, TOKENS, 3, 5, seed=s).requires_grad_() for s in (1, 2, 3))

    def run():
        torch.manual_seed(4)
        y = attention(q, k, v, mask, scoring)
        torch.manual_seed(5)  # what happens in between must not matter
        return y, *torch.autograd.grad((y * normal(*y.shape, seed=6)).sum(), (q, k, v))

    again = run()
    assert all(map(torch.equal, run(), again))
    monkeypatch.setattr(kernel, "checkpoint", lambda f, *args, use_reentrant: f(*args))
    for kept, recomputed in zip(run(), again, strict=True):
        torch.testing.assert_close(recomputed, kept, rtol=EXACT, atol=EXACT)
    undropped = attention(q, k, v, mask, Scoring(scale=0.3, softcap=softcap))
    assert not torch.allclose(undropped, again[0])


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["fused", "own-softmax"])
def test_attention_dropout_drops_whole_weights_and_keeps_the_mean(softcap):
    """With values that are an identity the output is the dropped weights themselves."""
    p, n = 0.25, 16
    q, k = normal(400, n, 1, n, seed=1), normal(400, n, 1, n, seed=2)
    v = torch.eye(n, dtype=torch.float64)[None, :, None].expand(400, n, 1, n)
    kept = attention(q, k, v, Mask(), Scoring(scale=0.1, softcap=softcap))
    torch.manual_seed(0)
    dropped = attention(q, k, v, Mask(), Scoring(scale=0.1, softcap=softcap, dropout=p))
    gone = dropped == 0
    torch.testing.assert_close(dropped[~gone], kept[~gone] / (1 - p))
    # 102,400 weights: five standard deviations of their share is 0.7 %
    assert float(gone.double().mean()) == pytest.approx(p, abs=0.007)

"""Attention under every mask against all scores at once, the masks written token by token."""

import pytest
import torch
from mask_rules import CROSS, HEADS, ROWS, RULES, SCORES, TOKENS, compare, make_score_mod, real_rows
from references import EXACT, SINGLE, assert_same, normal, plain_attention, plain_norm, redraw

from phasor.config import (
    LayerNormConfig,
    ModelConfig,
)
from phasor.nn.attention import SoftmaxAttentionConfig
from phasor.nn.attention.base import AttentionContext
from phasor.nn.attention.softmax.module import SoftmaxAttention
from phasor.nn.layer_step import CrossStep, LayerStep
from phasor.nn.positions.base import Position, build_position
from phasor.nn.record import Record
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import Mask, ScoreMod, attention, attention_ref, blocks
from phasor.transformer import Transformer


@pytest.fixture
def small_blocks(monkeypatch):
    """Sixteen queries at a time, so that 63 tokens are four blocks and the last is short."""
    monkeypatch.setattr(blocks, "BLOCK", 16)


@pytest.mark.sample(60)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.usefixtures("small_blocks")
def test_attention_in_blocks_under_every_rule(rule, scores):
    compare(RULES[rule], scores, "grouped-query", attention)


@pytest.mark.parametrize("scores", ["plain", "all"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("run", [attention, lambda *a: attention_ref(*a)[0]], ids=["one-block", "reference"])
def test_attention_in_one_block_under_every_rule(rule, scores, run):
    compare(RULES[rule], scores, "grouped-query", run)


@pytest.mark.parametrize("scores", ["plain", "all"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rule", ["everything", "causal", "window-and-sinks", "attention_mask"])
@pytest.mark.usefixtures("small_blocks")
def test_attention_with_shared_heads(rule, heads, scores):
    compare(RULES[rule], scores, heads, attention)


@pytest.mark.parametrize("scores", ["plain", "softcap", "sink-logits", "own-scale"])
@pytest.mark.parametrize("rule", CROSS)
@pytest.mark.usefixtures("small_blocks")
def test_cross_attention(rule, scores):
    compare(CROSS[rule], scores, "grouped-query", attention, keys=37)


@pytest.mark.parametrize("scores", ["plain", "all"])
@pytest.mark.parametrize("rule", ["causal", "window-and-sinks", "causal-padding", "document_ids"])
@pytest.mark.usefixtures("small_blocks")
def test_attention_in_float32(rule, scores):
    rule, (h, groups) = RULES[rule], HEADS["grouped-query"]
    q, k, v = normal(ROWS, TOKENS, h, 60, seed=1), *(normal(ROWS, TOKENS, groups, 60, seed=s) for s in (2, 3))
    score_mod, bias = make_score_mod(SCORES[scores], h, TOKENS, TOKENS)
    expected = plain_attention(
        q, k, v, rule.visible(q.shape[1], k.shape[1]), score_mod.scale, score_mod.softcap, score_mod.sink_logits, bias
    )
    ours = attention(q.float(), k.float(), v.float(), Mask(**rule.fields), score_mod)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(real_rows(ours.double(), rule), real_rows(expected, rule), rtol=SINGLE, atol=SINGLE)


def plain_projection(module, x, part):
    """The rows of `q`, `k` or `v` picked out of the fused matrix: by group its queries, its key, its value."""
    share, width = module.queries_per_kv, module.head_dim
    picked = []
    for group in range(module.num_kv_heads):
        first = group * (share + 2)
        slots = {"q": range(first, first + share), "k": [first + share], "v": [first + share + 1]}[part]
        picked += [row for slot in slots for row in range(slot * width, (slot + 1) * width)]
    y = x @ module.qkv.weight[picked].T
    if module.qkv.bias is not None:
        y = y + module.qkv.bias[picked]
    y = y.unflatten(-1, (-1, width))
    return y + module.partial_qkv_bias[part] if part in module.partial_qkv_bias else y


def self_attention_context(mask):
    return AttentionContext(mask, Position(), LayerStep(mask, None))


@pytest.mark.parametrize("qk_norm", ["none", "head", "heads", "whole"])
@pytest.mark.parametrize("bias", [(), ("q", "k", "v", "out"), ("q", "v"), ("k",)], ids=str)
@pytest.mark.parametrize("clip", [None, 0.8])
def test_attention_module_is_its_equation(qk_norm, bias, clip):
    norm = LayerNormConfig(eps=1e-3)
    model = ModelConfig(vocab_size=9, dim=21, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=5, norm=norm)
    module = redraw(SoftmaxAttention(SoftmaxAttentionConfig(qk_norm=qk_norm, bias=bias, clip=clip), model))
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
    expected = mixed @ module.out.weight.T + (module.out.bias if "out" in bias else 0.0)
    ours = module(x, self_attention_context(Mask(causal=True)))
    assert_same(ours, expected, [x, *module.parameters()], 1e-9)


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("qk_norm", ["head", "heads", "whole"])
def test_rotated_queries_and_keys_are_normalized(qk_norm, weight):
    """By the formula of a rotation in float64, which a norm with weights does not commute with."""
    norm = LayerNormConfig(eps=1e-3, bias=False)
    model = ModelConfig(
        vocab_size=9, dim=21, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=6, norm=norm, position="rotary"
    )
    config = SoftmaxAttentionConfig(qk_norm=qk_norm, qk_norm_weight=weight, qk_norm_after_positions=True)
    module = redraw(SoftmaxAttention(config, model))
    assert weight == any("_norm." in name for name, _ in module.named_parameters())
    angles = torch.arange(13.0, dtype=torch.float64)[:, None] * 10000.0 ** -(torch.arange(3, dtype=torch.float64) / 3)
    cos, sin = (turn(angles).repeat(1, 2)[:, None] for turn in (torch.cos, torch.sin))
    x, parts = normal(2, 13, 21), {}
    for part in "qkv":
        y = parts[part] = plain_projection(module, x, part)
        if part != "v":
            y = y * cos + torch.cat((-y[..., 3:], y[..., :3]), -1) * sin
            own = (module.q_norm if part == "q" else module.k_norm).weight if weight else 1.0
            parts[part] = plain_norm(y.flatten(-2) if qk_norm == "whole" else y, norm, own, 0.0).view(y.shape)
    mixed = plain_attention(*(parts[p] for p in "qkv"), torch.ones(13, 13).tril(), 6**-0.5).flatten(-2)
    mask, scheme = Mask(causal=True), build_position(model.position, model, "decoder")
    prepared = scheme.prepare(SequenceInfo(torch.arange(13), 13), x)
    ours = module(x, AttentionContext(mask, scheme, LayerStep(mask, None), prepared))
    assert_same(ours, mixed @ module.out.weight.T, [*module.parameters()], 1e-9)


@pytest.mark.parametrize("qk_norm", ["head", "heads", "whole"])
def test_the_norm_of_queries_and_keys_may_lack_the_bias_that_others_have(qk_norm):
    norm = LayerNormConfig(eps=1e-3)
    model = ModelConfig(vocab_size=9, dim=21, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=5, norm=norm)
    module = redraw(SoftmaxAttention(SoftmaxAttentionConfig(qk_norm=qk_norm, qk_norm_bias=False), model))
    assert [name for name, _ in module.named_parameters() if name.endswith("norm.bias")] == []
    x, parts = normal(2, 13, 21), {}
    for part in "qkv":
        y = parts[part] = plain_projection(module, x, part)
        if part != "v":
            own = module.q_norm if part == "q" else module.k_norm
            parts[part] = plain_norm(y.flatten(-2) if qk_norm == "whole" else y, norm, own.weight, 0.0).view(y.shape)
    mixed = plain_attention(*(parts[p] for p in "qkv"), torch.ones(13, 13).tril(), 5**-0.5).flatten(-2)
    ours = module(x, self_attention_context(Mask(causal=True)))
    assert_same(ours, mixed @ module.out.weight.T, [*module.parameters()], 1e-9)


@pytest.mark.parametrize("bias", [(), ("q", "k", "v", "out"), ("v", "out"), ("q",)], ids=str)
def test_cross_attention_module_is_its_equation(bias):
    model = ModelConfig(vocab_size=9, dim=21, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=5)
    module = redraw(SoftmaxAttention(SoftmaxAttentionConfig(bias=bias), model, cross=True))
    x, memory = normal(2, 13, 21).requires_grad_(), normal(2, 7, 21, seed=5).requires_grad_()
    q = x @ module.q.weight.T + (module.q.bias if "q" in bias else 0.0)
    rows = module.kv.weight.view(2, 2, 5, 21)  # group, key or value, features, in
    k, v = (memory @ rows[:, which].reshape(10, 21).T for which in (0, 1))
    if module.kv.bias is not None:
        k, v = (y + module.kv.bias.view(2, 2, 5)[:, which].reshape(10) for which, y in enumerate((k, v)))
    elif "v" in bias:
        v = v + module.partial_qkv_bias["v"].flatten()
    split = [y.unflatten(-1, (-1, 5)) for y in (q, k, v)]
    mixed = plain_attention(*split, torch.ones(13, 7), 5**-0.5).flatten(-2)
    expected = mixed @ module.out.weight.T + (module.out.bias if "out" in bias else 0.0)
    mask = Mask(aligned=False)
    ours = module(x, AttentionContext(mask, Position(), CrossStep(mask, None, memory)))
    assert_same(ours, expected, [x, memory, *module.parameters()], 1e-9)


def small_model(**fields):
    torch.manual_seed(0)
    return Transformer(ModelConfig(**{"vocab_size": 31, "dim": 24, "num_layers": 2, "num_heads": 4} | fields)).double()


MODEL_RULES = {
    "causal": ({}, {}, lambda r, i, j: j <= i),
    "encoder": ({"shape": "encoder"}, {}, lambda r, i, j: True),
    "window": ({"attention": {"window": 4}}, {}, lambda r, i, j: 0 <= i - j < 4),
    "sinks-after-padding": (
        {"attention": {"window": 4, "sink_tokens": 2}},
        {"attention_mask": [[False] * 3 + [True] * 10, [True] * 13]},
        lambda r, i, j: j <= i and (j >= 3 or r == 1) and (i - j < 4 or j < (5 if r == 0 else 2)),
    ),
    "sinks-of-documents": (
        {"attention": {"window": 2, "sink_tokens": 1}},
        {"document_ids": [[0] * 6 + [1] * 7, [5] * 13]},
        lambda r, i, j: j <= i and (r == 1 or (i < 6) == (j < 6)) and (i - j < 2 or j == 0 or (r == 0 and j == 6)),
    ),
    "prefix_length": ({}, {"prefix_length": [5, 0]}, lambda r, i, j: j <= i or (r == 0 and j < 5)),
    "prefix-after-padding": (
        {},
        {"prefix_length": 5, "attention_mask": [[False] * 3 + [True] * 10, [True] * 13]},
        lambda r, i, j: (j >= 3 or r == 1) and (j <= i or j < (8 if r == 0 else 5)),
    ),
}


@pytest.mark.parametrize("name", MODEL_RULES)
def test_model_gives_its_attention_the_right_mask(name, monkeypatch):
    """The weights are nonzero exactly where the rule says, and attention in blocks gives the same logits."""
    fields, inputs, can_see = MODEL_RULES[name]
    model = small_model(**fields).eval()
    inputs = {n: torch.tensor(v) if n in ("attention_mask", "document_ids") else v for n, v in inputs.items()}
    tokens = torch.randint(0, 31, (2, 13), generator=torch.Generator().manual_seed(3))
    real = inputs.get("attention_mask", torch.ones(2, 13, dtype=torch.bool))
    record = Record("attention")
    logits = model(tokens, record=record, **inputs)
    expected = torch.tensor([[[can_see(r, i, j) for j in range(13)] for i in range(13)] for r in range(2)])
    for weights in record.attention:
        visible = (weights > 0)[real[:, None, :].expand(2, 4, 13)]
        assert torch.equal(visible, expected[:, None].expand(2, 4, 13, 13)[real[:, None, :].expand(2, 4, 13)])
    monkeypatch.setattr(blocks, "BLOCK", 4)
    torch.testing.assert_close(model(tokens, **inputs)[real], logits[real], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["fused", "own-softmax"])
def test_padding_of_packed_pairs_does_not_affect_real_tokens(softcap):
    """Padding of the target whose document the source lacks sees nothing at all; real tokens stay as they were."""
    model = small_model(shape="encoder-decoder", attention={"softcap": softcap})
    tokens = torch.arange(12).view(2, 6)
    real = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    source = torch.tensor([[0, 0, 1, 1, 9, 9], [3] * 6])
    target = torch.tensor([[0, 1, 1, 1, 8, 8], [3] * 6])
    both = {
        "attention_mask": real,
        "document_ids": source,
        "target_attention_mask": real,
        "target_document_ids": target,
    }
    for record in (Record(), Record("cross_attention")):
        logits = model(tokens, tokens, **both, record=record)
        grads = torch.autograd.grad(logits[real].square().sum(), list(model.parameters()))
        assert all(grad.isfinite().all() for grad in grads)
        alone = model(tokens[:1, :4], tokens[:1, :4], document_ids=source[:1, :4], target_document_ids=target[:1, :4])
        torch.testing.assert_close(logits[:1, :4], alone, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("place", ["embedding", "attention", "residual", "feedforward"])
@pytest.mark.parametrize("experts", [None, {"num_experts": 3}], ids=["dense", "experts"])
def test_dropout_acts_only_in_training_and_depends_on_the_seed(place, experts):
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
    """Blocks are recomputed for their gradients, with the same dropout mask."""
    mask = Mask(causal=True, window=20)
    score_mod = ScoreMod(scale=0.3, softcap=softcap, dropout=0.4)
    q, k, v = (normal(2, TOKENS, 3, 5, seed=s).requires_grad_() for s in (1, 2, 3))

    def run():
        torch.manual_seed(4)
        y = attention(q, k, v, mask, score_mod)
        torch.manual_seed(5)  # what happens in between must not matter
        return y, *torch.autograd.grad((y * normal(*y.shape, seed=6)).sum(), (q, k, v))

    again = run()
    assert all(map(torch.equal, run(), again))
    monkeypatch.setattr(blocks, "checkpoint", lambda f, *args, **options: f(*args))
    for kept, recomputed in zip(run(), again, strict=True):
        torch.testing.assert_close(recomputed, kept, rtol=EXACT, atol=EXACT)
    undropped = attention(q, k, v, mask, ScoreMod(scale=0.3, softcap=softcap))
    assert not torch.allclose(undropped, again[0])


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["fused", "own-softmax"])
def test_attention_dropout_drops_whole_weights_and_keeps_the_mean(softcap):
    """With values that are an identity the output is the dropped weights themselves."""
    p, n = 0.25, 16
    q, k = normal(400, n, 1, n, seed=1), normal(400, n, 1, n, seed=2)
    v = torch.eye(n, dtype=torch.float64)[None, :, None].expand(400, n, 1, n)
    kept = attention(q, k, v, Mask(), ScoreMod(scale=0.1, softcap=softcap))
    torch.manual_seed(0)
    dropped = attention(q, k, v, Mask(), ScoreMod(scale=0.1, softcap=softcap, dropout=p))
    gone = dropped == 0
    torch.testing.assert_close(dropped[~gone], kept[~gone] / (1 - p))
    # 102,400 weights: five standard deviations of their share is 0.7 %
    assert float(gone.double().mean()) == pytest.approx(p, abs=0.007)

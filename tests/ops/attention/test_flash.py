"""Attention over key intervals: masks as intervals, and the Triton kernels under the interpreter against float64."""

import functools

import pytest
import torch
from device import DEVICE, ON_GPU
from mask_rules import CROSS, ROWS, RULES, TOKENS
from references import SINGLE, normal, redraw

import phasor
from phasor.nn.positions.t5.module import T5Bias
from phasor.ops import dispatch
from phasor.ops.attention import (
    DistanceBias,
    DistanceRows,
    FIREBias,
    Mask,
    ProductBias,
    RelativeValues,
    ScoreMod,
    ScorePiece,
    SinkQueries,
    Span,
    SumBias,
    attention,
    attention_ref,
    dense_mask,
    flash,
    flash_products,
    intervals,
)
from phasor.ops.attention.flash_args import FlashArgs

tiles = pytest.importorskip("phasor.ops.attention.flash_tiles")
flash_launch = pytest.importorskip("phasor.ops.attention.flash_launch")
flash_products_launch = pytest.importorskip("phasor.ops.attention.flash_products_launch")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of sixteen by sixteen, so that a few dozen tokens are several."""
    for module in (flash_launch, flash_products_launch):
        monkeypatch.setattr(module, "tiling", lambda kernel, q: tiles.Tiling(16, 16, 4, 1))


def visible_of(bounds, keys, attention_mask=None):
    """The dense mask of intervals."""
    column = torch.arange(keys)
    pairs = bounds[:, :, :, None].split(2, dim=1)
    visible = functools.reduce(torch.logical_or, [(column >= p[:, 0]) & (column <= p[:, 1]) for p in pairs])
    return visible if attention_mask is None else visible & attention_mask[:, None]


@pytest.mark.parametrize("name", RULES)
def test_intervals_equal_the_rule(name):
    rule = RULES[name]
    mask = Mask(**rule.fields)
    bounds = intervals.intervals(mask, TOKENS, TOKENS, DEVICE)
    assert bounds.dtype == torch.int32
    visible = visible_of(bounds, TOKENS, mask.key_mask).expand(ROWS, -1, -1)
    real = torch.ones(ROWS, TOKENS, dtype=torch.bool) if mask.key_mask is None else mask.key_mask
    assert torch.equal(visible[real], rule.visible(TOKENS, TOKENS)[real])


@pytest.mark.parametrize("name", CROSS)
def test_intervals_of_cross_attention(name):
    mask = Mask(**CROSS[name].fields)
    visible = visible_of(intervals.intervals(mask, TOKENS, 37, DEVICE), 37, mask.key_mask)
    assert torch.equal(visible.expand(ROWS, -1, -1), CROSS[name].visible(TOKENS, 37))


def test_intervals_of_documents_that_the_source_lacks_or_orders_otherwise():
    mask = Mask(
        query_document_ids=torch.tensor([[7, 7, 2, 9, 4]], dtype=torch.int32),
        key_document_ids=torch.tensor([[2, 4, 4, 4, 7, 7]]),
        aligned=False,
    )
    assert intervals.intervals(mask, 5, 6, DEVICE)[0].tolist() == [[4, 4, 0, 6, 1], [5, 5, 0, -1, 3]]


HOLES = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0, 1, 0], [1, 1, 0, 1, 1, 1, 1, 1, 1, 1]]).bool()
OTHERS = {
    "chunk": (Mask(causal=True, offset=7), 5, 12),
    "chunk-window": (Mask(causal=True, offset=7, window=4), 5, 12),
    "chunk-window-sinks": (Mask(causal=True, offset=7, window=4, sink_tokens=2), 5, 12),
    "rows-apart": (Mask(causal=True, query_index=torch.tensor([[3, 4, 5], [9, 10, 11]])), 3, 12),
    "holes": (Mask(causal=True, key_mask=HOLES, order=HOLES.cumsum(1) - HOLES.long()), 10, 10),
    "holes-prefix": (
        Mask(causal=True, key_mask=HOLES, order=HOLES.cumsum(1) - HOLES.long(), prefix_length=torch.tensor([4, 3])),
        *(10, 10),
    ),
    "chunk-documents": (
        Mask(
            causal=True,
            offset=3,
            query_document_ids=torch.tensor([[5, 5, 8], [5, 5, 5]]),
            key_document_ids=torch.tensor([[1, 5, 5, 5, 5, 8], [5] * 6]),
        ),
        *(3, 6),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_intervals_equal_the_dense_mask(name):
    mask, queries, keys = OTHERS[name]
    visible, expected = (
        visible_of(intervals.intervals(mask, queries, keys, DEVICE), keys, mask.key_mask),
        dense_mask(mask, queries, keys, DEVICE),
    )
    real = torch.ones(1, queries).bool() if mask.key_mask is None else mask.key_mask
    visible, expected, real = torch.broadcast_tensors(visible, expected, real[:, :, None])
    assert torch.equal(visible[real], expected[real])


def test_slots_out_of_order_are_not_intervals():
    mask = Mask(causal=True, query_index=torch.tensor([[4]]), key_index=torch.tensor([[4, 1, 2, 3]]))
    assert "order" in intervals.intervals_unsupported_reason(mask)


@pytest.mark.parametrize("name", [*RULES, *CROSS])
@pytest.mark.parametrize("block", [4, 16])
def test_query_ranges_of_every_block_of_keys(name, block):
    """No query that sees a key of the block is left out, and those said to see the whole block do."""
    across = name in CROSS and name not in RULES
    keys = 37 if across else TOKENS
    mask = Mask(**(CROSS if across else RULES)[name].fields)
    bounds = intervals.intervals(mask, TOKENS, keys, DEVICE)
    visible = visible_of(bounds, keys)
    for b, row in enumerate(intervals.query_ranges(bounds, keys, block).tolist()):
        for start, (first, last, whole_first, whole_last) in zip(range(0, keys, block), row, strict=True):
            part = visible[b, :, start : start + block]
            outside = [i for i in range(TOKENS) if not first <= i < last]
            assert not part[outside].any()
            assert part[whole_first : max(whole_first, whole_last)].all()
    if name == "causal" and block == 16:
        assert intervals.query_ranges(bounds, keys, block)[0, 1].tolist() == [16, 63, 31, 63]


def table_of(heads, bidirectional, seed=5):
    scheme = T5Bias(
        phasor.T5PositionConfig(num_buckets=8, max_distance=9),
        num_heads=heads,
        bidirectional=bidirectional,
    )
    with torch.no_grad():
        scheme.weight.copy_(normal(*scheme.weight.shape, seed=seed))
    return scheme


def sum_bias(rows, offset, queries, keys, heads, start, dtype):
    """Sums of forget gates in multiples of 2^-32 from `start` on, as int64 wraps around; and zeros with gradients."""
    steps = torch.randint(-(2**33), 0, (rows, keys, heads), generator=torch.Generator().manual_seed(7))
    sums = steps.cumsum(1) + start
    own = sums[:, offset : offset + queries]
    zeros = [torch.zeros(x.shape, dtype=dtype).requires_grad_() for x in (own, sums)]
    return SumBias(own, sums, 2.0**-32, *zeros), zeros


def fire_weights(heads, dtype):
    """A network of six units: to either side of their knots, one of them constant, and two that share a knot."""
    up = torch.tensor([0.7, -0.9, 0.0, 1.2, -0.6, 0.5])
    up_bias = torch.tensor([-0.2, 0.5, 0.3, -0.62, 0.31, 0.4])
    others = normal(6, heads, seed=6), normal(heads, seed=7), torch.tensor([0.3]), torch.tensor([12.0])
    return [x.to(dtype).requires_grad_() for x in (up, up_bias, *others)]


# The seeds of tables for keys and for values, or for queries and for keys.
PRODUCTS = {"shaw": (6, 7), "relative_key": (6,), "both": (6, 7), "buckets": (7,), "every distance": (6,)}
CURVES = {"slopes": ["slopes"], "log": ["slopes", "rates"], "power": ["slopes", "powers"]}


def compare(
    mask,
    *,
    queries=37,
    keys=None,
    heads=(2, 1),
    width=16,
    rows=2,
    bias=None,
    positions=None,
    slope=1.0,
    start=0,
    **options,
):
    """Values and all gradients of the kernel in float32 against all scores at once in float64."""
    keys = keys or queries
    inputs = [normal(rows, queries, heads[0], width, seed=1)]
    inputs += [normal(rows, keys, heads[1], width, seed=s) for s in (2, 3)]
    sinks = normal(heads[0], seed=4) if options.pop("sinks", False) else None
    inputs += [] if sinks is None else [sinks]
    if positions is None:
        positions = torch.arange(queries)[None] + mask.offset, torch.arange(keys)[None]
    found = []
    for dtype in (torch.float32, torch.float64):
        own = [x.to(dtype).requires_grad_() for x in inputs]
        module, given, curve = None, None, []
        if bias in CURVES:
            slopes = torch.linspace(0.1, 0.7, heads[0], dtype=dtype) * slope
            curve = [slopes, *([] if bias == "slopes" else [torch.linspace(0.3, 1.4, heads[0], dtype=dtype)])]
            curve = [x.requires_grad_() for x in curve]
            given = DistanceBias(**dict(zip(CURVES[bias], curve, strict=True)))
        elif bias in PRODUCTS:
            curve = [normal(11, heads[1], width, seed=s).to(dtype).requires_grad_() for s in PRODUCTS[bias]]
            by_distance = DistanceRows(*positions, reach=5)
            given = ProductBias(own[0], own[1], by_distance, 0.3, query_table=curve[0])
            if bias in ("buckets", "both"):
                buckets = torch.tensor([-5, -3, -1, 0, 1, 2, 5, 7, 11, 12])
                by_distance = DistanceRows(*positions, reach=12, bounds=buckets, least=-6)
                given = ProductBias(own[0], own[1], by_distance, 0.3, curve[0] if bias == "both" else None, curve[-1])
                options["counted"] = True
            if bias == "every distance":
                own_rows = DistanceRows(*positions, reach=keys - 1)
                curve = [normal(2 * keys - 1, heads[0], width, seed=6).to(dtype).requires_grad_()]
                given, options["counted"] = ProductBias(own[0], own[1], own_rows, 0.3, curve[0]), True
            if bias == "shaw":
                options |= {"relative_values": RelativeValues(by_distance, curve[1]), "counted": True}
        elif bias == "fire":
            curve = fire_weights(heads[0], dtype)
            given = FIREBias(*curve)
        elif bias == "sums":
            given, curve = sum_bias(rows, mask.offset, queries, keys, heads[0], start, dtype)
        elif bias is not None:
            module = table_of(heads[0], bias == "both-ways").to(dtype)
            given = module.on_scores(None)
            assert isinstance(given, DistanceBias)
        score_mod = ScoreMod(
            scale=0.3,
            sink_logits=None if sinks is None else own[3],
            bias=given,
            query_positions=None if bias is None else positions[0],
            key_positions=None if bias is None else positions[1],
            **options,
        )
        if dtype == torch.float32:
            with dispatch.force_path("triton"):
                assert flash.flash_unsupported_reason(*own[:3], mask, score_mod) is None
                y = flash.flash_attention(*own[:3], mask, score_mod)
        else:
            y = attention_ref(*own[:3], mask, score_mod)[0]
        if mask.key_mask is not None and mask.aligned:
            y = y[mask.key_mask]
        learned = [*own, *curve] if module is None else [*own, module.weight]
        grads = torch.autograd.grad((y * normal(*y.shape, seed=9).to(dtype)).sum(), learned)
        found.append([y, *grads])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=SINGLE, atol=SINGLE)


PRODUCT_RULES = ("causal", "everything", "window-both-ways", "window-and-sinks")
PADDED_RULES = ("causal-padding", "attention_mask", "documents-padding", "prefix-and-window", "sinks-documents")


@pytest.mark.sample(5)
@pytest.mark.parametrize("rule", [*PRODUCT_RULES, *PADDED_RULES])
@pytest.mark.parametrize("bias", ["both", "buckets", "every distance"])
def test_kernel_with_products_by_distance(rule, bias, monkeypatch):
    """Of queries, of keys, with one row for several distances, and with more distances than a table of others has."""
    monkeypatch.setattr(flash, "MAX_DISTANCES", 11)
    mask = cut(rule) if rule in PADDED_RULES else Mask(**RULES[rule].fields)
    positions = None if mask.order is None else (mask.order, mask.order)
    compare(mask, queries=37 if rule in PADDED_RULES else 66, bias=bias, positions=positions, sinks=bias == "both")


@pytest.mark.parametrize(("mask", "bias"), [(Mask(causal=True), "every distance"), (Mask(window=30), "both")])
def test_kernel_with_products_for_some_queries_at_a_time(mask, bias, monkeypatch):
    monkeypatch.setattr(flash, "MAX_DISTANCES", 11)
    monkeypatch.setattr(flash_products_launch, "MAX_ENTRIES", 1)
    monkeypatch.setattr(flash_products_launch, "PART", 32)
    compare(mask, queries=41, bias=bias, rows=1, heads=(2, 1))


def test_operation_with_products_passes_opcheck():
    q, table = normal(1, 9, 2, 16, dtype=torch.float32, seed=1), normal(17, 2, 16, dtype=torch.float32, seed=2)
    q, table = q.requires_grad_(), table.requires_grad_()
    positions = torch.arange(9)[None]
    near = DistanceRows(positions, positions, reach=8)
    score_mod = ScoreMod(scale=0.3, bias=ProductBias(q, q, near, 0.3, table, table), counted=True)
    args = flash_products.product_args(q, q, q, Mask(causal=True), score_mod, score_mod.bias)
    every = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(flash_products.product_attention.op, tuple(args), test_utils=every)


def cut(name, tokens=37, rows=2):
    """A rule of `tokens` tokens and few rows: the first of 63 and the last of three."""
    fields = RULES[name].fields

    def part(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x[-rows:] if x.dim() == 1 else x[-rows:, -tokens:]

    shorter = {n: part(x) for n, x in fields.items()}
    if "order" in shorter:
        shorter["order"] = phasor.nn.sequence.token_order(shorter.get("key_mask"), shorter.get("key_document_ids"))
    return Mask(**shorter)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("everything", {"heads": (3, 3), "width": 40, "queries": 19, "rows": 1}),
        ("causal", {"heads": (4, 2), "queries": 45, "rows": 1, "softcap": 2.0, "sinks": True}),
        ("causal", {"queries": 17, "width": 64, "rows": 1, "bias": "slopes"}),
        ("causal", {"queries": 64, "rows": 1, "bias": "behind", "heads": (1, 1)}),
        ("causal", {"queries": 1, "sinks": True}),
        ("window", {"sinks": True, "rows": 1, "bias": "slopes"}),
        ("causal", {"queries": 33, "heads": (4, 2), "rows": 1, "bias": "log", "sinks": True}),
        ("window-both-ways", {"bias": "power", "rows": 1, "softcap": 3.0}),
        ("causal", {"queries": 66, "heads": (4, 2), "rows": 1, "bias": "fire", "softcap": 3.0, "sinks": True}),
        ("window-and-sinks", {"queries": 50, "rows": 1, "bias": "fire"}),
        ("causal", {"queries": 66, "heads": (4, 2), "rows": 1, "bias": "shaw", "softcap": 3.0, "sinks": True}),
        ("window-and-sinks", {"queries": 50, "rows": 1, "bias": "shaw"}),
        ("everything", {"queries": 45, "bias": "shaw"}),
        ("window-both-ways", {"bias": "relative_key"}),
        ("everything", {"queries": 45, "rows": 1, "bias": "fire"}),
        ("window-both-ways", {"bias": "both-ways", "rows": 1, "softcap": 3.0}),
        ("window-and-sinks", {"queries": 50, "rows": 1, "heads": (1, 1), "bias": "behind"}),
        ("everything", {"queries": 66, "rows": 1, "heads": (1, 1), "bias": "both-ways"}),
    ],
)
def test_kernel_under_masks_by_index(rule, options):
    compare(Mask(**RULES[rule].fields), **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("prefix_length", {"sinks": True}),
        ("prefix-and-window", {}),
        ("causal-padding", {"softcap": 2.0}),
        ("attention_mask", {"bias": "both-ways"}),
        ("sinks-padding", {}),
        ("causal-documents", {"bias": "behind"}),
        ("sinks-documents", {"bias": "slopes"}),
        ("causal-padding", {"bias": "power"}),
        ("causal-padding", {"bias": "fire"}),
        ("causal-padding", {"bias": "shaw"}),
        ("attention_mask", {"bias": "shaw"}),
        ("documents-padding", {"bias": "shaw", "sinks": True}),
        ("prefix-and-window", {"bias": "shaw"}),
        ("sinks-documents", {"bias": "fire"}),
        ("prefix_length", {"bias": "fire"}),
        ("sinks-documents", {"bias": "log"}),
        ("documents-padding", {"sinks": True, "bias": "behind"}),
    ],
)
def test_kernel_under_masks_that_differ_by_row(rule, options):
    mask = cut(rule)
    positions = (mask.order, mask.order) if "bias" in options and mask.order is not None else None
    compare(mask, positions=positions, **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("start", [0, -(2**52) - 5, 2**63 - 2**35])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("causal", {"heads": (4, 2), "softcap": 2.0}),
        ("causal", {"queries": 64, "sinks": True}),
        ("window-both-ways", {}),
        ("causal-padding", {"heads": (2, 2)}),
        ("sinks-documents", {}),
        ("everything", {"queries": 19}),
    ],
)
def test_kernel_with_differences_of_sums(rule, options, start):
    """Forget gates, whose sums wrap around in 64 bits."""
    mask = cut(rule) if "-" in rule and rule != "window-both-ways" else Mask(**RULES[rule].fields)
    compare(mask, bias="sums", start=start, **options)


def test_kernel_with_differences_of_sums_in_a_chunk_after_a_cache():
    compare(Mask(causal=True, offset=23, window=12), queries=18, keys=41, heads=(2, 1), bias="sums", rows=1)


SPANS = {  # near pairs, and those with other queries and keys
    "window": (Span(-4, 4), Span(5, None), Span(None, -5)),
    "chunks": (Span(0, 0, 6), Span(1, 1, 6), Span(2, None, 6), Span(-1, -1, 6), Span(None, -2, 6)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("causal", {"sinks": True}),
        ("window-and-sinks", {}),
        ("everything", {"bias": True}),
        ("causal-padding", {"softcap": 2.0}),
        ("prefix_length", {}),
        ("sinks-documents", {"bias": True}),
        ("documents-padding", {}),
    ],
)
def test_kernel_with_other_queries_and_keys_for_some_distances(rule, options, spans):
    mask = cut(rule) if "-" in rule or rule == "prefix_length" else Mask(**RULES[rule].fields)
    positions = torch.arange(37)[None] if mask.order is None else mask.order
    near, *others = SPANS[spans]
    inputs = [normal(2, 37, 2, 16, seed=s) for s in range(len(SPANS[spans]))]
    inputs += [normal(2, 37, 1, 16, seed=s + 20) for s in range(len(SPANS[spans]) + 1)]
    inputs += [normal(2, seed=4)] if "sinks" in options else []
    found = []
    for dtype in (torch.float32, torch.float64):
        own = [x.to(dtype).requires_grad_() for x in inputs]
        qs, ks = own[: len(SPANS[spans])], own[len(SPANS[spans]) :]
        pieces = [ScorePiece(q, k, span) for q, k, span in zip(qs[1:], ks[1:], others, strict=False)]
        score_mod = ScoreMod(
            scale=0.3,
            softcap=options.get("softcap"),
            sink_logits=own[-1] if "sinks" in options else None,
            bias=DistanceBias(slopes=torch.tensor([0.1, 0.7], dtype=dtype)) if "bias" in options else None,
            query_positions=positions,
            key_positions=positions,
            pieces=tuple(pieces),
            near=near,
            counted=True,
        )
        inner = qs[0], ks[0], ks[len(SPANS[spans])]
        if dtype == torch.float32:
            with dispatch.force_path("triton"):
                assert flash.flash_unsupported_reason(*inner, mask, score_mod) is None
                y = flash.flash_attention(*inner, mask, score_mod)
        else:
            y = attention_ref(*inner, mask, score_mod)[0]
        y = y if mask.key_mask is None else y[mask.key_mask]
        grads = torch.autograd.grad((y * normal(*y.shape, seed=9).to(dtype)).sum(), own, allow_unused=True)
        found.append([y, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, own, strict=True))])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize(
    ("fields", "keys", "apart"),
    [
        ({}, 20, True),
        ({}, 19, False),
        ({"window": 19}, 64, False),
        ({"window": 20}, 64, True),
        ({"causal": False}, 64, False),
    ],
)
def test_far_keys_are_attended_to_apart(fields, keys, apart, monkeypatch):
    """Where queries have a row of a table each, the last entry of which most keys share: reach 5, so 20 keys."""
    calls = []
    kernels = flash.interval_attention
    monkeypatch.setattr(flash, "interval_attention", lambda args: calls.append(args.table is None) or kernels(args))
    q, k, v = (normal(1, keys, 2, 16, seed=seed).float() for seed in range(3))
    positions = torch.arange(keys)[None]
    bias = ProductBias(
        q, k, DistanceRows(positions, positions, reach=5), 0.3, query_table=normal(11, 1, 16, seed=4).float()
    )
    score_mod = ScoreMod(scale=0.3, bias=bias, counted=True)
    mask = Mask(**({"causal": True} | fields))
    with dispatch.force_path("triton"):
        y = flash.flash_attention(q, k, v, mask, score_mod)
    assert calls == ([False, True] if apart else [False])
    torch.testing.assert_close(y, attention_ref(q, k, v, mask, score_mod)[0], rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize("bias", ["behind", "fire", "shaw", "both"])
def test_kernel_of_a_chunk_after_a_cache(bias):
    compare(Mask(causal=True, offset=23, window=12), queries=18, heads=(1, 1), keys=41, bias=bias, rows=1)


def test_kernel_of_cross_attention_whose_padding_sees_nothing():
    mask = Mask(
        query_document_ids=torch.tensor([[0] * 9 + [1] * 9, [2] * 10 + [9] * 8]),
        key_document_ids=torch.tensor([[0] * 15 + [1] * 6, [2] * 21]),
        key_mask=torch.tensor([[True] * 20 + [False], [True] * 11 + [False] * 10]),
        aligned=False,
    )
    q, k, v = (normal(2, n, 2, 16, dtype=torch.float32, seed=n).requires_grad_() for n in (18, 21, 21))
    score_mod = ScoreMod(scale=0.3)
    with dispatch.force_path("triton"):
        y = flash.flash_attention(q, k, v, mask, score_mod)
    expected = attention_ref(q.double(), k.double(), v.double(), mask, score_mod)[0]
    sees_some_key = torch.tensor([[True] * 18, [True] * 10 + [False] * 8])
    torch.testing.assert_close(y[sees_some_key].double(), expected[sees_some_key], rtol=SINGLE, atol=SINGLE)
    assert torch.equal(y[~sees_some_key], torch.zeros_like(y[~sees_some_key]))
    ours = torch.autograd.grad(y[sees_some_key].square().sum(), (q, k, v))
    theirs = torch.autograd.grad(expected[sees_some_key].square().sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * SINGLE, atol=10 * SINGLE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bias", ["slopes", "behind", "fire", "relative_key"])
def test_bias_with_gaps_between_positions_and_at_large_positions(bias):
    """Distances by position and not by index, exact at any position."""
    starts = torch.tensor([0, 2**40, 2**49 + 3 * 2**23 + 1, 2**61 + 3 * 2**35 + 1])
    positions = torch.arange(37)[None] * torch.tensor([3, 1, 1, 1])[:, None] + starts[:, None]
    positions[1:, 20:] += 5
    assert (intervals.shifts(Mask(causal=True), positions, positions) == intervals.NON_CONTIGUOUS).all()
    compare(Mask(causal=True), positions=(positions, positions), bias=bias, rows=4)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("bias", "slope"), [("slopes", 1.0), ("slopes", 2.0**-34), ("behind", 1.0)])
@pytest.mark.parametrize("far", [2**31 + 5, 2**36 + 3])
def test_bias_of_sinks_far_away(bias, slope, far):
    """The keys of a stream: three sinks, then a window and a chunk that are billions of tokens later."""
    positions = torch.cat((torch.arange(3), torch.arange(38) + far))[None]
    mask = Mask(causal=True, offset=14, window=12, sink_tokens=3)
    if bias == "behind":
        assert intervals.shifts(mask, positions[:, 14:], positions).tolist() == [14]
    queries = positions[:, 14:]
    compare(mask, queries=27, keys=41, rows=1, positions=(queries, positions), bias=bias, slope=slope)


@pytest.mark.sample(4)
@pytest.mark.parametrize("bias", ["slopes", "behind", "fire"])
@pytest.mark.parametrize("gap", [2**35 + 1, 2**61 + 3 * 2**35 + 1])
def test_bias_across_a_gap_of_billions(bias, gap):
    """Positions that jump within a tile, for queries and keys alike."""
    positions = torch.arange(37)[None] + torch.where(torch.arange(37) < 6, 0, gap)
    compare(Mask(causal=True), positions=(positions, positions), bias=bias, rows=1)


CAPPED = {
    "rows": (Mask(causal=True, window=12, sink_tokens=3), 50),
    "narrow-window": (Mask(causal=True, window=2, sink_tokens=20), 50),
    "stream": (Mask(causal=True, offset=14, window=12, sink_tokens=3), 41),
    "both-ways": (Mask(window=7, sink_tokens=4), 37),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("bias", [None, "slopes", "behind"])
@pytest.mark.parametrize("name", [*CAPPED, "documents"])
def test_kernel_with_other_queries_for_sink_tokens(name, bias):
    """In rows without a gap after the sinks, and with a wide one."""
    mask, keys = CAPPED[name] if name in CAPPED else (cut("sinks-documents"), 37)
    rows = 3 if name in CAPPED else 2
    gaps = torch.tensor([0, 2**61 + 3 * 2**35 + 1, 2**33])[:rows, None]
    positions = torch.arange(keys) + torch.where(torch.arange(keys) < 8, 0, gaps)
    q, sink_q = (normal(rows, keys - mask.offset, 2, 16, seed=s) for s in (1, 6))
    k, v = (normal(rows, keys, 1, 16, seed=s) for s in (2, 3))
    given = DistanceBias(slopes=torch.tensor([0.1, 0.7])) if bias == "slopes" else None
    if bias == "behind":
        given = table_of(2, False).float().on_scores(None)

    def score_mod(dtype):
        return ScoreMod(
            scale=0.3,
            softcap=4.0,
            sink_logits=torch.tensor([0.2, -1.0], dtype=dtype),
            bias=given,
            query_positions=positions[:, mask.offset :],
            key_positions=positions,
            sink_queries=SinkQueries(sink_q.to(dtype), positions[:, mask.offset :].clamp(max=9)),
        )

    with dispatch.force_path("triton"), torch.no_grad():
        assert flash.flash_unsupported_reason(q.float(), k.float(), v.float(), mask, score_mod(torch.float32)) is None
        ours = flash.flash_attention(q.float(), k.float(), v.float(), mask, score_mod(torch.float32))
        expected = attention_ref(q, k, v, mask, score_mod(torch.float64))[0]
    torch.testing.assert_close(ours.double(), expected, rtol=SINGLE, atol=SINGLE)


def test_shifts_of_rows_with_contiguous_positions():
    positions = torch.arange(6)[None]
    assert intervals.shifts(Mask(causal=True), positions, positions).tolist() == [0]
    assert intervals.shifts(Mask(causal=True, offset=4), positions[:, 4:] + 9, positions + 9).tolist() == [4]
    assert intervals.shifts(Mask(causal=True, offset=4), positions[:, 4:] + 8, positions + 9).tolist() == [
        intervals.NON_CONTIGUOUS
    ]
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    restarted = torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = Mask(causal=True, query_document_ids=ids, key_document_ids=ids)
    assert intervals.shifts(packed, restarted, restarted).tolist() == [0]
    left, hole = (torch.tensor([x]).bool() for x in ([0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1]))
    for attention_mask, straight in ((left, True), (hole, False)):
        order = attention_mask.cumsum(1) - attention_mask.long()
        found = intervals.shifts(Mask(causal=True, key_mask=attention_mask), order, order)
        assert (found == 0).all() if straight else (found == intervals.NON_CONTIGUOUS).all()


def test_views_of_a_fused_projection_and_gradients_of_any_stride():
    fused = normal(1, 21, 2, 4, 16, dtype=torch.float32).requires_grad_()  # by group two queries, a key, a value
    expected = fused.detach().double().requires_grad_()
    found = []
    for x, run in ((fused, attention), (expected, lambda *a: attention_ref(*a)[0])):
        q, k, v = x[..., :2, :].flatten(2, 3), x[..., 2, :], x[..., 3, :]
        with dispatch.force_path("triton"):
            y = run(q, k, v, Mask(causal=True, window=5), ScoreMod(scale=0.25))
        found.append((y, *torch.autograd.grad(y.sum(), x)))  # a gradient with strides of zero
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=SINGLE, atol=SINGLE)


def test_half_precision_is_as_accurate_as_rounding_allows():
    """Half precision, since the interpreter cannot multiply bfloat16."""
    q, k, v = (normal(1, 40, heads, 24, seed=s).half() for s, heads in ((1, 2), (2, 1), (3, 1)))
    mask, score_mod = Mask(causal=True, window=20), ScoreMod(scale=0.2, softcap=5.0)
    with dispatch.force_path("triton"):
        ours = attention(q, k, v, mask, score_mod)
    assert ours.dtype == torch.half
    expected = attention_ref(q.double(), k.double(), v.double(), mask, score_mod)[0]
    # Weights and outputs are rounded once each, to half a unit in the last of 11 bits; values are of size up to 3. The
    # instruction that a GPU takes for a soft-cap leaves scores off by up to 2^-11 of it.
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3 * 2.0**-12 + (5 * 2.0**-11 if ON_GPU else 0.0))


def test_why_not_gives_the_reason():
    q = torch.zeros(1, 5, 2, 16)
    mask, plain = Mask(causal=True, window=2), ScoreMod(scale=1.0)
    near, wide = DistanceRows(torch.arange(5)[None], torch.arange(5)[None], reach=600), torch.zeros(1201, 1, 16)
    learned, capped = wide.clone().requires_grad_(), SinkQueries(q, None)
    assert flash.flash_unsupported_reason(q.cpu(), q, q, mask, plain) == "the tensors are not on a GPU"
    cases = {
        "dropped": ((q, q, q), ScoreMod(scale=1.0, dropout=0.1)),
        "DistanceBias": ((q, q, q), ScoreMod(scale=1.0, bias=lambda a, b: a)),
        "stored by distance": ((q, q, q), ScoreMod(scale=1.0, bias=ProductBias(q, q, near, 1.0, None, learned))),
        "capped": ((q, q, q), ScoreMod(scale=1.0, bias=ProductBias(q, q, near, 1.0, wide), sink_queries=capped)),
        "repeat": ((q, q, q), ScoreMod(scale=1.0, relative_values=RelativeValues(near, wide))),
        "backward": ((q, q, q), ScoreMod(scale=1.0, sink_queries=SinkQueries(q.clone().requires_grad_(), None))),
        "float64": ((q.double(),) * 3, plain),
        "one dtype": ((q, q.bfloat16(), q), plain),
        "256 features": ((torch.zeros(1, 5, 2, 300),) * 3, plain),
    }
    with dispatch.force_path("triton"):
        for word, (tensors, score_mod) in cases.items():
            assert word in flash.flash_unsupported_reason(*tensors, mask, score_mod)


def test_operation_passes_opcheck_and_compiles():
    q = normal(1, 9, 2, 16, dtype=torch.float32).requires_grad_()
    shapes = (5, 2), (2,), (6, 2), (1, 9), (1, 2, 9, 3)
    table, sinks, lines, spans, rows = (normal(*s, dtype=torch.float32).requires_grad_() for s in shapes)
    mask, positions = Mask(causal=True), torch.arange(9)[None]
    bounds, shifts = intervals.intervals(mask, 9, 9, DEVICE), intervals.shifts(mask, positions, positions)
    slopes, rates = (normal(2, dtype=torch.float32).abs().requires_grad_() for _ in range(2))
    every = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    sums, zeros = torch.arange(18).view(1, 2, 9), torch.zeros(1, 9, 2, requires_grad=True)
    args = FlashArgs(q, q, q, bounds, sink_logits=sinks, one_sided=True, scale=0.3)
    args = args._replace(query_positions=positions, key_positions=positions)
    of_sums = {"query_positions": sums, "key_positions": sums, "query_zeros": zeros, "key_zeros": zeros}
    for bias, checks in (
        ({"table": table, "shifts": shifts}, every),
        ({"slopes": slopes, "rates": rates, "shifts": shifts}, every[:3]),
        ({"slopes": slopes.detach(), **of_sums}, every[:3]),
        ({"table": rows, "shifts": shifts, "min_distance": -1, "sum_weights": True}, every[:3]),
        ({"table": lines, "rates": rates, "inverse_spans": spans, "knots": torch.tensor([0.2, 0.5])}, every[:3]),
    ):
        torch.library.opcheck(flash.interval_attention.op, tuple(args._replace(**bias)), test_utils=checks)

    def run(q):
        return attention(q, q, q, Mask(causal=True, window=4), ScoreMod(scale=0.3))

    with dispatch.force_path("triton"):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q), run(q))
        for a, b in zip(*(torch.autograd.grad(f(q).square().sum(), q) for f in (compiled, run)), strict=True):
            torch.testing.assert_close(a, b)


SIZES = {"vocab_size": 31, "dim": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16}
DEBERTA = {"kind": "disentangled", "position_buckets": 6, "max_relative_positions": 9}
MODELS = {
    "t5": {"shape": "encoder-decoder", "position": "t5"},
    "bloom": {"position": "alibi"},
    "shaw": {"position": {"kind": "shaw", "max_distance": 4}, "num_kv_heads": 1},
    "shaw encoder": {"position": {"kind": "shaw", "max_distance": 3}, "shape": "encoder", "head": "lm"},
    "transformer-xl": {"position": "transformerxl", "num_kv_heads": 1},
    "xlnet": {"position": "transformerxl", "shape": "encoder", "head": "lm"},
    "deberta": {"position": {**DEBERTA, "share_att_key": True}, "shape": "encoder", "head": "lm"},
    "disentangled": {"position": {**DEBERTA, "pos_att_type": ("p2c",)}, "num_kv_heads": 1},
    "shaw of keys": {"position": {"kind": "shaw", "max_distance": 4, "values": False, "key_products": True}},
    "fire": {"position": {"kind": "fire", "threshold": 6.0}},
    "forget gates": {"position": "forget", "num_kv_heads": 1},
    "Self-Extend": {"position": {"kind": "selfextend", "window": 4, "group": 3}, "num_kv_heads": 1},
    "dual chunk": {"position": {"kind": "dualchunk", "chunk_length": 5, "trained_length": 8}},
    "gpt-oss": {
        "num_kv_heads": 1,
        "position": "rotary",
        "layers": [{"attention": {"window": 6, "sink_logits": True}}, {"attention": {"sink_logits": True}}],
    },
    "gemma": {"num_kv_heads": 1, "position": "rotary", "attention": {"softcap": 2.0, "window": 12}},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_their_reference(name):
    config = phasor.ModelConfig(**SIZES, **MODELS[name])
    model = redraw(phasor.Transformer(config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.3
    tokens = torch.randint(0, 31, (2, 19), generator=torch.Generator().manual_seed(3))
    attention_mask = torch.ones_like(tokens, dtype=torch.bool)
    attention_mask[1, :4] = False
    batch = (tokens, tokens[:, :9]) if config.shape == "encoder-decoder" else (tokens,)
    real = attention_mask if len(batch) == 1 else torch.ones_like(batch[1], dtype=torch.bool)
    found = []
    for form, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        with dispatch.force_path(form):
            model = model.to(dtype)
            logits = model(*batch, attention_mask=attention_mask)[real]
            loss = (logits * normal(*logits.shape, seed=8).to(dtype)).sum()
            found.append([logits, *torch.autograd.grad(loss, list(model.parameters()))])
    for ours, expected in zip(*found, strict=True):
        # Relative to the largest entry: sums of a few hundred terms in float32, several layers deep.
        torch.testing.assert_close(
            ours.double(), expected, rtol=0, atol=1e-5 * max(1.0, float(expected.detach().abs().max()))
        )


def test_ranges_of_the_backward_pass_are_found_once_for_all_layers(monkeypatch):
    calls = []
    ranges = flash_launch.query_ranges
    monkeypatch.setattr(flash_launch, "query_ranges", lambda *args: calls.append(args) or ranges(*args))
    window = phasor.SoftmaxAttentionConfig(window=3)
    sizes = {"vocab_size": 9, "dim": 16, "num_layers": 3, "num_heads": 1}
    model = phasor.Transformer(phasor.ModelConfig(attention=window, **sizes)).to(DEVICE)
    with dispatch.force_path("triton"):
        model(torch.zeros(1, 6, dtype=torch.int64, device=DEVICE)).sum().backward()
    assert len(calls) == 1

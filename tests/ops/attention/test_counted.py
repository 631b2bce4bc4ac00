"""Attention with a bias of counted keys: the Triton kernels under the interpreter against float64."""

import pytest
import torch
from device import ON_GPU
from mask_rules import RULES
from references import SINGLE, normal

from phasor.nn.layer_step import LayerStep
from phasor.nn.sequence import token_order
from phasor.ops import dispatch
from phasor.ops.attention import ATTENTION, CountBias, Mask, ScoreMod, attention_ref, counted, intervals
from phasor.ops.attention.mask import SEES_ALL

counted_launch = pytest.importorskip("phasor.ops.attention.counted_launch")
flash_launch = pytest.importorskip("phasor.ops.attention.flash_launch")

NAME = "Triton kernels over counted keys"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of sixteen by sixteen, so that a few dozen tokens are several."""
    for module in (flash_launch, counted_launch):
        monkeypatch.setattr(module, "tiling", lambda kernel, q: counted_launch.Tiling(16, 16, 4, 1))


def case(dtype, *, queries, keys=None, heads=(2, 1), width=16, rows=2, most=4, shift=0.0, sinks=False):
    """Queries, keys, values, the table, and sink logits; `shift` of the first feature opens or shuts gates."""
    keys = keys or queries
    q, table = normal(rows, queries, heads[0], width, seed=1), normal(most + 1, width, seed=4)
    k, v = (normal(rows, keys, heads[1], width, seed=s) for s in (2, 3))
    q[..., 0], k[..., 0] = 2.0, k[..., 0] + shift
    inputs = [q, k, v, table, *([normal(heads[0], seed=5)] if sinks else [])]
    return [x.to(dtype).requires_grad_() for x in inputs]


def compare(mask, *, softcap=None, **options):
    """Values and all gradients of the kernels in float32 against all scores at once in float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        own = case(dtype, **options)
        q, k, v, table = own[:4]
        bias = CountBias(q, k, table, 0.3, LayerStep(mask, None))
        score_mod = ScoreMod(scale=0.3, softcap=softcap, sink_logits=own[4] if len(own) > 4 else None, bias=bias)
        if dtype == torch.float32:
            with dispatch.force_path("triton"):
                assert ATTENTION.explain(q, k, v, mask, score_mod)[0] == NAME
                y = ATTENTION(q, k, v, mask, score_mod)
        else:
            y = attention_ref(q, k, v, mask, score_mod)[0]
        y = y if mask.key_mask is None else y[mask.key_mask]
        grads = torch.autograd.grad((y * normal(*y.shape, seed=9).to(dtype)).sum(), own)
        found.append([y, *grads])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=2 * SINGLE, atol=2 * SINGLE)


def rule(name, tokens=37, rows=2):
    """A rule of few tokens and rows."""

    def part(x):
        return x if not isinstance(x, torch.Tensor) else x[-rows:] if x.dim() == 1 else x[-rows:, -tokens:]

    fields = {n: part(x) for n, x in RULES[name].fields.items()}
    if "order" in fields:
        fields["order"] = token_order(fields.get("key_mask"), fields.get("key_document_ids"))
    return Mask(**fields)


NEVER = {"shift": -9.0, "most": 30}  # gates of nearly zero


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("causal", {"queries": 70, "rows": 1, "heads": (4, 2)}),
        ("causal", {"queries": 37, "rows": 2, "heads": (2, 2), "most": 12, "sinks": True, "softcap": 2.0}),
        ("causal", {"queries": 45, "rows": 1, **NEVER}),
        ("causal", {"queries": 33, "rows": 1, "most": 1, "shift": 9.0, "width": 40}),
        ("everything", {"queries": 50, "rows": 1, "heads": (3, 1), "most": 7}),
        ("window", {"queries": 45, "rows": 1, "most": 3}),
        ("window-both-ways", {"queries": 37, "rows": 1, "most": 30}),
    ],
)
def test_kernels_under_masks_by_index(name, options):
    compare(Mask(**RULES[name].fields), **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("causal-padding", {"sinks": True}),
        ("attention_mask", {"heads": (2, 2)}),
        ("causal-documents", {"most": 3}),
        ("documents-padding", {"softcap": 2.0}),
        ("prefix_length", {}),
    ],
)
def test_kernels_under_masks_that_differ_by_row(name, options):
    compare(rule(name), queries=37, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16])
def test_sums_in_half_precision_have_no_more_error_than_products(dtype):
    """Gates and the gradients of counts are summed in two parts; the interpreter does not multiply bfloat16."""
    inputs, mask, found = [x.detach().to(dtype) for x in case(torch.float64, queries=50, most=9)], Mask(causal=True), []
    for kind in (dtype, torch.float64):
        q, k, v, table = own = [x.to(kind).requires_grad_(ON_GPU) for x in inputs]
        score_mod = ScoreMod(scale=0.3, bias=CountBias(q, k, table, 0.3, LayerStep(mask, None)))
        with dispatch.force_path("triton" if kind == dtype else "reference"):
            y = ATTENTION(q, k, v, mask, score_mod)
        grads = torch.autograd.grad((y * normal(*y.shape, seed=9).to(kind)).sum(), own) if ON_GPU else []
        found.append([y, *grads])
    for ours, expected in zip(*found, strict=True):
        assert (ours.double() - expected).norm() < 4 * torch.finfo(dtype).eps * expected.norm()


def test_kernels_of_a_chunk_after_a_cache():
    compare(Mask(causal=True, offset=23), queries=18, keys=41, heads=(4, 2), most=6)


@pytest.mark.parametrize("shift", [0.0, 9.0])
def test_far_keys_are_those_that_have_the_largest_count(shift):
    """Sums of a block of queries stop at the first tile from which on all of them have it."""
    q, k, _, table = case(torch.float32, queries=80, heads=(1, 1), rows=1, shift=shift)
    mask = Mask(causal=True)
    bounds = intervals.intervals(mask, 80, 80, q.device)
    _, _, ends = counted.count_keys(q, k, table, bounds, None, 0.3)
    gates = torch.sigmoid(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3).tril()[0, 0]
    counts = gates.flip(-1).cumsum(-1).flip(-1)
    for block in range(5):
        reach = [16 * t for t in range(6) if (counts[16 * block : 16 * block + 16, : 16 * t] >= len(table) - 1).all()]
        assert ends[0, 0, 16 * block : 16 * block + 16].unique().tolist() == [max(reach)]


REFUSED = {
    "another order": ({"key_index": torch.arange(6)[None], "query_index": torch.arange(6)[None]}, {}),
    "two intervals": ({"window": 3, "sink_tokens": 1}, {}),
    "dropped out": ({}, {"dropout": 0.1}),
    "not those": ({}, {"scale": 0.4}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_do_not_take_is_computed_otherwise(name):
    fields, changes = REFUSED[name]
    q, k, v, table = (x.detach() for x in case(torch.float32, queries=6))
    mask = Mask(causal=True, **fields)
    score_mod = ScoreMod(**{"scale": 0.3, "bias": CountBias(q, k, table, 0.3, LayerStep(mask, None)), **changes})
    with dispatch.force_path("triton"):
        path, reasons = ATTENTION.explain(q, k, v, mask, score_mod)
        assert path != NAME
        assert reasons[NAME] is not None
        if not score_mod.dropout:
            expected = attention_ref(q, k, v, mask, score_mod)[0]
            torch.testing.assert_close(ATTENTION(q, k, v, mask, score_mod), expected, rtol=SINGLE, atol=SINGLE)


def test_deterministic_gradients_are_computed_otherwise():
    q, k, v, table = case(torch.float32, queries=6)
    score_mod = ScoreMod(scale=0.3, bias=CountBias(q, k, table, 0.3, LayerStep(SEES_ALL, None)))
    with dispatch.force_path("triton"):
        assert ATTENTION.explain(q, k, v, SEES_ALL, score_mod)[0] == NAME
        torch.use_deterministic_algorithms(True)
        try:
            assert "deterministic" in ATTENTION.explain(q, k, v, SEES_ALL, score_mod)[1][NAME]
        finally:
            torch.use_deterministic_algorithms(False)


def test_second_derivatives_are_refused_only_where_they_are_asked_for():
    q, k, v, table = inputs = case(torch.float32, queries=19)
    score_mod = ScoreMod(scale=0.3, bias=CountBias(q, k, table, 0.3, LayerStep(SEES_ALL, None)))
    with dispatch.force_path("triton"):
        y = ATTENTION(q, k, v, Mask(causal=True), score_mod).square().sum()
        expected = torch.autograd.grad(y, inputs, retain_graph=True)
        grads = torch.autograd.grad(y, inputs, create_graph=True)
        for ours, theirs in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=SINGLE, atol=SINGLE)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(sum(x.square().sum() for x in grads), inputs)


def test_operations_pass_opcheck_and_compile():
    q, k, v, table = case(torch.float32, queries=19, heads=(2, 1))
    bounds = intervals.intervals(Mask(causal=True), 19, 19, q.device).expand(2, -1, -1).contiguous()
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(counted.count_keys.op, (q, k, table, bounds, None, 0.3), test_utils=checks)
    by_row, _, ends = counted.count_keys(q.detach(), k.detach(), table.detach(), bounds, None, 0.3)
    args = counted.NearArgs(q, k, v, by_row.requires_grad_(), ends.amin(1), ends, bounds, None, None, 5, 0.3, 0.0)
    torch.library.opcheck(counted.near_attention.op, tuple(args), test_utils=checks)

    def run(q, k, v, table):
        bias = CountBias(q, k, table, 0.3, LayerStep(SEES_ALL, None))
        return ATTENTION(q, k, v, Mask(causal=True), ScoreMod(scale=0.3, bias=bias))

    with dispatch.force_path("triton"):
        compiled, inputs = torch.compile(run, fullgraph=True, backend="aot_eager"), (q, k, v, table)
        torch.testing.assert_close(compiled(*inputs), run(*inputs))
        found = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (compiled, run))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)

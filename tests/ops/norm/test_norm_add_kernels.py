"""The kernels of norms around residual sums against float64 formulas: forward, gradients, awkward sizes, rounding."""

import pytest
import torch
from device import DEVICE
from norm_formulas import EPS, KINDS, SHAPES, formula, gradients, near, to_float64
from references import normal

from phasor import ModelConfig, Transformer
from phasor.ops import dispatch
from phasor.ops import norm as ops
from phasor.ops.norm.norm_add import norm_add_norm_op, norm_add_norm_why_not, norm_add_op, norm_add_why_not


def random_inputs(shape, kind, dtype=torch.float32, branch_dtype=None):
    """`x` and a branch with another mean, weight and bias of both norms; and the flags."""
    centered, offset, weighted, biased = KINDS[kind]
    x = normal(*shape).to(dtype).requires_grad_()
    branch = (3 * normal(*shape, seed=1) + 1).to(branch_dtype or dtype).requires_grad_()
    weights = [
        normal(shape[-1], seed=2 + i).to(dtype).requires_grad_() if given else None
        for i, given in enumerate((weighted, biased, weighted, biased))
    ]
    return (x, branch, *weights), {"eps": EPS, "offset": offset, "centered": centered}


def sums_and_norms(x, branch, weight, bias, next_weight, next_bias, **options):
    total = x + formula(branch, weight, bias, **options)
    return total, formula(total, next_weight, next_bias, **options)


@pytest.mark.sample(12)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_add_norm_is_its_formula(kind, shape):
    inputs, options = random_inputs(shape, kind)
    with dispatch.force_path("triton"):
        outputs = ops.norm_add_norm(*inputs, **options)
        assert outputs[1].grad_fn.name().startswith("phasor_norm_add_norm")
        ours = gradients(outputs, inputs)
    twins = to_float64(*inputs)
    expected = sums_and_norms(*twins, **options)
    # Some tens of roundings of 6e-8; one feature of LayerNorm is 0 / sqrt(eps), which amplifies them by 1 / sqrt(eps).
    near([*outputs, *ours], [*expected, *gradients(expected, twins)], 1e-4 if shape[-1] == 1 else 5e-6)


@pytest.mark.sample(12)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_add_is_its_formula(kind, shape):
    (*inputs, _, _), options = random_inputs(shape, kind)
    with dispatch.force_path("triton"):
        total = ops.norm_add(*inputs, **options)
        assert total.grad_fn.name().startswith("phasor_norm_add")
        ours = gradients([total], inputs)
    x, branch, weight, bias = twins = to_float64(*inputs)
    expected = x + formula(branch, weight, bias, **options)
    near([total, *ours], [expected, *gradients([expected], twins)], 3e-6)  # some tens of roundings of 6e-8


@pytest.mark.parametrize("kind", KINDS)
def test_the_references_are_their_formulas(kind):
    inputs, options = random_inputs((5, 3, 37), kind, torch.float64)
    expected = sums_and_norms(*inputs, **options)
    near(ops.norm_add_norm_ref(*inputs, **options), expected, 1e-14)
    near([ops.norm_add_ref(*inputs[:4], **options)], expected[:1], 1e-14)
    near(ops.norm_add_norm(*inputs, **options), expected, 1e-14)  # float64 has no kernel
    near([ops.norm_add(*inputs[:4], **options)], expected[:1], 1e-14)


@pytest.mark.parametrize("kind", ["unit offset", "layernorm"])
@pytest.mark.parametrize("used", [0, 1])
def test_either_output_may_be_without_gradient(kind, used):
    inputs, options = random_inputs((5, 37), kind)
    needed = inputs[: 4 if used == 0 else 6]
    with dispatch.force_path("triton"):
        ours = gradients([ops.norm_add_norm(*inputs, **options)[used]], needed)
    twins = to_float64(*inputs)
    near(ours, gradients([sums_and_norms(*twins, **options)[used]], twins[: len(needed)]), 5e-6)


@pytest.mark.parametrize("kind", ["unit offset", "layernorm"])
def test_bfloat16_rounds_the_sum_and_its_norm(kind):
    inputs, options = random_inputs((23, 60), kind, torch.bfloat16)
    with dispatch.force_path("triton"):
        total, y = ops.norm_add_norm(*inputs, **options)
        alone = ops.norm_add(*inputs[:4], **options)
        ours = gradients([total, y], inputs)
    assert torch.equal(alone, total)
    # The interpreter cuts off where a GPU rounds, so it is off by a whole unit in the last place, 2^-7 relative.
    twins = to_float64(*inputs)
    exact = sums_and_norms(*twins, **options)[0].detach()
    assert ((total.detach().double() - exact).abs() <= 2**-7 * exact.abs() + 1e-5).all()
    stored = formula(total.detach().double(), *twins[4:], **options)
    assert ((y.detach().double() - stored).abs() <= 2**-7 * stored.abs() + 1e-5).all()
    assert all(a.dtype == torch.bfloat16 for a in ours)
    # The directions that come back, and the stored sum, are rounded to bfloat16 as well.
    near(ours, gradients(sums_and_norms(*twins, **options), twins), 3 * 2**-7)


def test_a_float32_stream_takes_bfloat16_branches():
    (x, branch, weight, *_), options = random_inputs((5, 37), "unit offset", torch.float32, torch.bfloat16)
    with dispatch.force_path("triton"):
        total, y = ops.norm_add_norm(x, branch, weight, None, weight, None, **options)
        dx, dbranch = gradients([total, y], (x, branch))
    assert (total.dtype, y.dtype, dx.dtype, dbranch.dtype) == (torch.float32,) * 3 + (torch.bfloat16,)


@pytest.mark.parametrize("kind", ["unit offset", "layernorm"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_autocast_gives_what_it_gives_on_a_gpu(kind, stream):
    """Torch's own norms, which have no offset, return float32 there; on the CPU they do not."""
    (x, _, *weights), options = random_inputs((5, 37), kind, torch.float32)
    x, branch = x.to(stream), x.bfloat16()
    results = []
    for form in ("reference", "triton"):
        with dispatch.force_path(form), torch.autocast(DEVICE.type, torch.bfloat16):
            results.append(
                [*ops.norm_add_norm(x, branch, *weights, **options), ops.norm_add(x, branch, *weights[:2], **options)]
            )
    dtype = stream if kind == "unit offset" else torch.float32
    assert [y.dtype for y in results[1]] == [dtype] * 3
    near(results[1], [y.double() for y in results[0]], 2**-6)  # norm and sum are rounded to bfloat16 in the reference


def test_non_contiguous_inputs():
    (x, branch, weight, *_), options = random_inputs((5, 3, 37), "unit offset")
    both = normal(37, 2).float()
    with dispatch.force_path("triton"):
        apart = ops.norm_add_norm(
            x.transpose(0, 1),
            torch.stack((branch, branch), -1)[..., 0].transpose(0, 1),
            weight,
            None,
            both[:, 1],
            None,
            **options,
        )
        together = ops.norm_add_norm(x, branch, weight, None, both[:, 1].contiguous(), None, **options)
        in_both = gradients([y.transpose(0, 1) for y in apart], (x, branch)), gradients(together, (x, branch))
    for a, b in zip(apart, together, strict=True):
        assert torch.equal(a.transpose(0, 1), b)
    for a, b in zip(*in_both, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["unit offset", "layernorm", "layernorm without weights"])
def test_they_are_well_behaved_ops(kind):
    (x, branch, *weights), options = random_inputs((4, 5), kind)
    rest = (options["eps"], options["offset"], options["centered"], torch.float32)
    torch.library.opcheck(norm_add_op.op, (x, branch, *weights[:2], *rest))
    torch.library.opcheck(norm_add_norm_op.op, (x, branch, *weights, *rest))


def test_no_rows():
    inputs, options = random_inputs((0, 37), "unit offset")
    with dispatch.force_path("triton"):
        outputs = ops.norm_add_norm(*inputs, **options)
        grads = gradients(outputs, inputs)
    assert [y.shape for y in outputs] == [(0, 37)] * 2
    assert all(not g.any() for g in grads)


def test_why_not():
    (x, branch, weight, *_), _ = random_inputs((5, 37), "rmsnorm")
    assert norm_add_why_not(x.cpu(), branch.cpu(), weight, None) == "the tensors are not on a GPU"
    with dispatch.force_path("triton"):
        assert norm_add_norm_why_not(x, branch, weight, None, weight, None) is None
        assert norm_add_why_not(x, branch[:1], weight, None) == "the summands have different shapes"
        assert norm_add_why_not(x, branch.double(), weight, None) == "float64 has no kernel"
        several = weight.expand(2, -1)
        assert norm_add_norm_why_not(x, branch, weight, None, several, None) == "each head has its own weights"
        reason = norm_add_norm_why_not(x, branch, weight, None, None, None)
        assert reason == "only one of the norms has a weight, or a bias"


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", ["sandwich", "output"])
@pytest.mark.parametrize("norm", [{"kind": "rmsnorm", "unit_offset": True}, {"kind": "layernorm"}])
def test_a_model_is_the_same_with_kernels(placement, norm):
    config = ModelConfig(
        vocab_size=31, dim=24, num_heads=3, num_layers=2, position="rotary", norm=norm, placement=placement
    )
    model, tokens = Transformer(config), torch.randint(0, 31, (2, 9))
    results = []
    for form in ("reference", "triton"):
        with dispatch.force_path(form):
            logits = model(tokens)
            results.append((logits, *torch.autograd.grad(logits.logsumexp(-1).sum(), model.parameters())))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-4, atol=2e-5)  # float32 through two layers


def test_torch_func_gets_the_reference():
    x, weight = normal(3, 5, 12).float(), normal(12).float()

    def loss(row):
        return sum(ops.norm_add_norm(row, row.sin(), weight, None, weight, None, eps=1e-6)).sin().sum()

    expected = torch.func.vmap(torch.func.grad(loss))(x)
    with dispatch.force_path("triton"):
        assert torch.equal(torch.func.vmap(torch.func.grad(loss))(x), expected)

"""Linear cross-entropy in chunks against a float64 formula, and the loss of every head against that of its logits."""

import pytest
import torch
import torch.nn.functional as F
from device import DEVICE
from references import normal

from phasor import ModelConfig, Transformer
from phasor.data.batch import Batch
from phasor.nn.heads import LogitsHead
from phasor.ops import cross_entropy as ops
from phasor.ops import dispatch
from phasor.ops.cross_entropy import cross_entropy as module

# A CPU without bfloat16 matmuls warns once, and takes a slower path.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

FORMS = ("reference", "triton")
OPTIONS = {
    "plain": (0.0, 0.0, 1.0, None),
    "smoothed": (0.1, 0.0, 1.0, None),
    "z-loss": (0.0, 0.03, 1.0, None),
    "softcap": (0.0, 0.0, 1.0, 2.5),
    "all": (0.37, 0.01, 0.4, 1.7),
}


def rows(count, width, vocabulary, dtype=torch.float32):
    """Hidden states, table and bias with logits of size one, targets, and weights of which some are 0."""
    hidden, table, bias = normal(count, width), normal(vocabulary, width, seed=1), normal(vocabulary, seed=2)
    inputs = [x.to(dtype).requires_grad_() for x in (hidden / width**0.5, table, bias)]
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, vocabulary, (count,), generator=generator)
    weights = torch.rand(count, generator=generator) * (torch.rand(count, generator=generator) < 0.7)
    return inputs, targets, weights


def formula(inputs, targets, weights, smoothing, z_loss, multiplier, softcap):
    """The sums written out in float64, and the gradients of the loss."""
    hidden, table, bias = (x.detach().double().requires_grad_() for x in inputs)
    z = multiplier * (hidden @ table.T + bias)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    lse = z.exp().sum(-1).log()
    q = (1 - smoothing) * F.one_hot(targets, len(table)) + smoothing / len(table)
    each, w = (q * (lse[:, None] - z)).sum(-1), weights.double()
    nats, square = (each * w).sum(), (lse**2 * w).sum() if z_loss else torch.zeros(())
    loss = nats + z_loss * square
    return (loss, nats, square), torch.autograd.grad(loss, (hidden, table, bias))


def use_kernel():
    return dispatch.forced_path() == "triton"


def in_chunks(inputs, targets, weights, given, dtype=torch.float32, rows=5):
    options = module.CrossEntropyOptions(*given, dtype, [True] * 3, rows, use_kernel())
    return module.linear_cross_entropy_op(*inputs, targets, weights, options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("count", "width", "vocabulary"), [(13, 7, 37), (1, 1, 2), (11, 16, 64)])
def test_sums_and_gradients_are_the_formulas(form, given, count, width, vocabulary):
    inputs, targets, weights = rows(count, width, vocabulary)
    sums, gradients = formula(inputs, targets, weights, *given)
    with dispatch.force_path(form):
        ours = in_chunks(inputs, targets, weights, given)
    # float32: sums of some hundred terms of size one, each off by 6e-8
    for a, b in zip(ours[:3], sums, strict=True):
        torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=5e-6, atol=5e-6)
    for a, b in zip(torch.autograd.grad(3 * ours[0], inputs), gradients, strict=True):
        torch.testing.assert_close(a.double(), 3 * b, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_16_bit_dtypes_are_rounded_where_they_must_be(form, dtype):
    """Logits and their gradient have the dtype of the matmul, all sums are in float32."""
    inputs, targets, weights = rows(29, 12, 41, dtype)
    sums, gradients = formula(inputs, targets, weights, *OPTIONS["all"])
    with dispatch.force_path(form):
        ours = in_chunks(inputs, targets, weights, OPTIONS["all"], dtype)
    unit = torch.finfo(dtype).eps / 2  # of a rounding to nearest, relative
    assert ours[0].dtype == torch.float32
    # A logit of size up to 8 is off by 8 units at most, and so is the loss of a row; roundings do not all agree.
    assert abs(float(ours[0].detach()) - float(sums[0].detach())) < 8 * unit * float(weights.sum())
    for a, b in zip(torch.autograd.grad(ours[0], inputs), gradients, strict=True):
        assert a.dtype == dtype
        # the gradient's norm: each term is a product with two or three roundings, after a logit that was off
        assert float((a.double() - b).norm()) < 12 * unit * float(b.norm())


@pytest.mark.parametrize("form", FORMS)
def test_chunks_add_up_in_float32(form):
    """The table's gradient over many chunks is no further off than over one: 1 + 1/512 is not 1."""
    count = 33
    hidden = torch.ones(count, 1, dtype=torch.bfloat16, requires_grad=True)
    table = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.full((count,), 2**-8)
    weights[0] = 2.0
    with dispatch.force_path(form):
        inputs = (hidden, table, None)
        needed = [True, True, False]
        out = module.linear_cross_entropy_op(
            *inputs,
            torch.zeros(count).long(),
            weights,
            module.CrossEntropyOptions(*OPTIONS["plain"], torch.bfloat16, needed, 1, use_kernel()),
        )
    (gradient,) = torch.autograd.grad(out[0], table)
    # (2 + 32/256) / 2; summed up in bfloat16 it would stay at 1
    assert gradient.tolist() == [[-1.0625], [1.0625]]


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_weight_0_count_for_nothing_even_if_they_are_not_finite(form):
    inputs, _, _ = rows(4, 3, 9)
    hidden, table, bias = inputs
    with torch.no_grad():
        hidden[2] = torch.nan
    targets, weights = torch.tensor([1, 8, 0, 3]), torch.tensor([1.0, 0.5, 0.0, 0.0])
    with dispatch.force_path(form):
        out = in_chunks(inputs, targets, weights, OPTIONS["all"], rows=3)
        gradients = torch.autograd.grad(out[0], inputs)
    assert bool(out[0].isfinite())
    assert not gradients[0][2:].any()
    kept = [hidden[:2].detach().requires_grad_(), table, bias]
    with dispatch.force_path(form):
        alone = in_chunks(kept, targets[:2], weights[:2], OPTIONS["all"])
    torch.testing.assert_close(out[0], alone[0])
    with dispatch.force_path(form):
        none = in_chunks(inputs, targets, torch.zeros(4), OPTIONS["all"])
    assert float(none[0].detach()) == 0.0
    assert all(not g.any() for g in torch.autograd.grad(none[0], (hidden, bias)))


@pytest.mark.parametrize("form", FORMS)
def test_no_rows_at_all(form):
    inputs, targets, weights = rows(0, 3, 5)
    with dispatch.force_path(form):
        out = in_chunks(inputs, targets, weights, OPTIONS["all"])
    assert float(out[0].detach()) == 0.0
    assert all(not g.any() for g in torch.autograd.grad(out[0], inputs))


@pytest.mark.parametrize("form", FORMS)
def test_autocast_sets_the_dtype_of_logits_and_gradients_are_float32(form):
    inputs, targets, weights = rows(19, 12, 41)
    halves = [x.detach().bfloat16() for x in inputs]
    sums, gradients = formula(halves, targets, weights, *OPTIONS["all"])
    with dispatch.force_path(form), torch.autocast(DEVICE.type, torch.bfloat16):
        assert module.logits_dtype(inputs[0], inputs[1]) == torch.bfloat16
        out = in_chunks(inputs, targets, weights, OPTIONS["all"], torch.bfloat16)
    assert abs(float(out[0].detach()) - float(sums[0].detach())) < 8 * 2**-9 * float(weights.sum())
    for a, b in zip(torch.autograd.grad(out[0], inputs), gradients, strict=True):
        assert a.dtype == torch.float32
        assert float((a.double() - b).norm()) < 12 * 2**-9 * float(b.norm())


def test_without_gradients_none_are_computed():
    inputs, targets, weights = rows(9, 4, 17)
    with dispatch.force_path("triton"), torch.no_grad():
        sums = ops.linear_cross_entropy(inputs[0], inputs[1], targets, weights)
        options = module.CrossEntropyOptions(*OPTIONS["plain"], torch.float32, [False] * 3, None, True)
        out = module.linear_cross_entropy_op(inputs[0], inputs[1], None, targets, weights, options)
    assert not sums.loss.requires_grad
    assert [x.numel() for x in out[3:]] == [0, 0, 0]
    torch.testing.assert_close(sums.loss, out[0])


def test_a_frozen_table_gets_no_gradient():
    inputs, targets, weights = rows(9, 4, 17)
    hidden, table = inputs[0], inputs[1].detach()
    with dispatch.force_path("triton"):
        (ours,) = torch.autograd.grad(ops.linear_cross_entropy(hidden, table, targets, weights).loss, hidden)
    plain = ops.linear_cross_entropy_ref(hidden, table, None, targets, weights).loss
    torch.testing.assert_close(ours, torch.autograd.grad(plain, hidden)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_non_contiguous_rows(form):
    """Views with strides, as slices of a larger tensor are."""
    inputs, targets, weights = rows(13, 7, 37)
    apart = [torch.stack((x, x), -1)[..., 0] for x in (*inputs, targets, weights)]
    with dispatch.force_path(form):
        a = in_chunks(apart[:3], apart[3], apart[4], OPTIONS["all"])
        b = in_chunks(inputs, targets, weights, OPTIONS["all"])
    torch.testing.assert_close(a[0], b[0])
    for x, y in zip(torch.autograd.grad(a[0], inputs), torch.autograd.grad(b[0], inputs), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_a_well_behaved_op(form, biased):
    inputs, targets, weights = rows(6, 3, 9)
    inputs = (inputs[0], inputs[1], inputs[2] if biased else None, targets, weights, *OPTIONS["all"], torch.float32)
    with dispatch.force_path(form):
        torch.library.opcheck(module.linear_cross_entropy_op.op, (*inputs, [True, True, biased], 4, use_kernel()))
    torch.library.opcheck(module.scale_op.op, (inputs[0].detach(), torch.tensor(2.0), torch.bfloat16))


def test_it_compiles_into_one_graph():
    inputs, targets, weights = rows(6, 3, 9)

    def loss(hidden, table, bias):
        return ops.linear_cross_entropy(hidden, table, targets, weights, bias=bias, z_loss=0.1).loss

    with dispatch.force_path("triton"):
        ours = torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs)
        ours_gradients = torch.autograd.grad(ours, inputs)
    plain = loss(*inputs)
    torch.testing.assert_close(ours, plain)
    for a, b in zip(ours_gradients, torch.autograd.grad(plain, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.cpu_only("on a GPU a kernel runs for few logits too")
def test_many_logits_are_chunked_on_any_device_and_few_where_a_kernel_runs(monkeypatch):
    inputs, targets, weights = rows(9, 4, 17)
    called = []
    op = module.linear_cross_entropy_op
    monkeypatch.setattr(module, "linear_cross_entropy_op", lambda *given: called.append(given) or op(*given))
    few = ops.linear_cross_entropy(*inputs[:2], targets, weights).loss
    assert not called
    monkeypatch.setattr(module, "MAX_LOGITS_AT_ONCE", 9 * 17)
    many = ops.linear_cross_entropy(*inputs[:2], targets, weights).loss
    assert called
    torch.testing.assert_close(few, many)


SMALL = {"vocab_size": 23, "dim": 24, "num_heads": 3, "num_layers": 1, "position": "rotary", "norm": "rmsnorm"}
HEADS = {
    "tied": {},
    "own table": {"embedding": {"tied": False}},
    "bias": {"head": {"kind": "lm", "bias": True}},
    "multiplier": {"head": {"kind": "lm", "multiplier": "rsqrt"}},
    "softcap": {"head": {"kind": "lm", "multiplier": 0.5, "softcap": 0.8}},
    "narrow table": {"embedding": {"width": 10}},
    "masked": {"shape": "encoder", "head": "mlm"},
    "masked narrow": {"shape": "encoder", "head": "mlm", "embedding": {"width": 10}},
    "encoder-decoder": {"shape": "encoder-decoder"},
}


def batch_for(model):
    generator = torch.Generator().manual_seed(4)
    tokens, targets = torch.randint(0, 23, (2, 3, 11), generator=generator)
    weights = (torch.rand(3, 11, generator=generator) < 0.6).float()
    source = torch.randint(0, 23, (3, 7), generator=generator) if model.config.shape == "encoder-decoder" else None
    return Batch(tokens=tokens, targets=targets, weights=weights, source=source)


def loss_of(model, batch, **terms):
    return model.loss(*batch.inputs, targets=batch.targets, weights=batch.weights, **terms)


def plain_loss(model, batch, smoothing, z_loss):
    """From the logits that the model returns."""
    given = [x for x in (batch.source, batch.tokens) if x is not None]
    logits = model(*given)
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    each = -(1 - smoothing) * log_p.gather(-1, batch.targets[..., None])[..., 0] - smoothing * log_p.mean(-1)
    z = logits.exp().sum(-1).log() ** 2
    return ((each + z_loss * z) * batch.weights).sum() / batch.weights.sum()


@pytest.mark.sample(6)
@pytest.mark.parametrize("form", ["at once", *FORMS])
@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)
def test_the_loss_of_every_head_is_the_plain_one(changes, form, monkeypatch):
    torch.manual_seed(1)
    model = Transformer(ModelConfig(**SMALL | changes))
    model.to(torch.float32 if form == "triton" else torch.float64)
    with torch.no_grad():
        for weight in model.head.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)  # no bias of 0 and no norm of 1 hides a mistake
    if form == "reference":
        monkeypatch.setattr(module, "MAX_LOGITS_AT_ONCE", 0)
    monkeypatch.setattr(module, "chunk_size", lambda *_: 8)
    # float64: the order of sums; float32: some hundred terms of size one through a block and its gradient
    close = {"rtol": 2e-4, "atol": 2e-5} if form == "triton" else {"rtol": 1e-6, "atol": 1e-9}
    batch = batch_for(model)
    with dispatch.force_path("triton" if form == "triton" else "reference"):
        loss = loss_of(model, batch, label_smoothing=0.1, z_loss=0.01)
        loss.total.backward()
    ours = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    plain = plain_loss(model, batch, 0.1, 0.01)
    plain.backward()
    torch.testing.assert_close(loss.total, plain, check_dtype=False, **close)
    torch.testing.assert_close(loss.total, loss.cross_entropy + 0.01 * loss.z, check_dtype=False, **close)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(ours[name], weight.grad, **close, msg=lambda text, name=name: f"{name}: {text}")


def test_validation_holds_no_logits(monkeypatch):
    model = Transformer(ModelConfig(**SMALL))
    monkeypatch.setattr(module, "MAX_LOGITS_AT_ONCE", 0)
    monkeypatch.setattr(LogitsHead, "forward", None)
    with torch.no_grad():
        loss = loss_of(model, batch_for(model))
    assert bool(loss.total.isfinite())


def test_a_model_without_logits_has_no_loss():
    model = Transformer(ModelConfig(**SMALL, head="none"))
    with pytest.raises(ValueError, match="needs logits, and this model's head is 'none'"):
        loss_of(model, batch_for(model))


def test_torch_func_gets_the_reference(monkeypatch):
    inputs, targets, weights = rows(6, 4, 9)
    hidden, weight = inputs[0].detach(), inputs[1].detach()

    def loss(row):
        return ops.linear_cross_entropy(row, weight, targets, weights).loss

    expected = torch.func.vmap(torch.func.grad(loss))(hidden[None])
    monkeypatch.setattr(module, "MAX_LOGITS_AT_ONCE", 0)
    with dispatch.force_path("triton"):
        assert torch.equal(torch.func.vmap(torch.func.grad(loss))(hidden[None]), expected)


class Doubling(LogitsHead):
    def forward(self, h, table):
        return 2 * super().forward(h, table)


@pytest.mark.parametrize("how", ["class", "forward", "hook", "other"])
def test_another_head_has_the_loss_of_its_own_logits(how):
    model = Transformer(ModelConfig(vocab_size=30, dim=16, num_layers=1, num_heads=2))
    batch = batch_for(model)
    head = model.head
    if how == "class":
        head.__class__ = Doubling
    elif how == "forward":
        old = head.forward
        head.forward = lambda h, table: 2 * old(h, table)
    elif how == "hook":
        head.register_forward_hook(lambda part, given, logits: 2 * logits)
    else:
        model.head = torch.nn.Module()
        model.head.inner, model.head.forward = head, lambda h, table: 2 * head(h, table)
    logits = model(batch.tokens, document_ids=batch.document_ids).flatten(0, 1)
    each = F.cross_entropy(logits, batch.targets.flatten(), reduction="none")
    expected = (each * batch.weights.flatten()).sum() / batch.weights.sum()
    torch.testing.assert_close(loss_of(model, batch).total, expected)

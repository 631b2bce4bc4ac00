"""The loss against torch's own cross-entropy in float64 and against formulas written out."""

import dataclasses
import math

import pytest
import torch
from training_runs import SMALL, Documents

from phasor import LayerConfig, ModelConfig, Record, Transformer, balancing_loss
from phasor.data.batch import Batch
from phasor.nn.heads import BALANCE_WEIGHT
from phasor.ops.cross_entropy import linear_cross_entropy_ref, weighted_sum

# A CPU without bfloat16 products says so once, and takes another way.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def make_model(**changes):
    torch.manual_seed(1)
    return Transformer(ModelConfig(**{"vocab_size": 23, **SMALL} | changes)).double()


def loss_of(model, batch, **terms):
    return model.loss(*batch.inputs, targets=batch.targets, weights=batch.weights, **batch.sequence_args, **terms)


def cross_entropy(logits, targets, weights, smoothing=0.0):
    """The mean by logits: those of a table that changes nothing."""
    table = torch.eye(logits.shape[-1], dtype=logits.dtype)
    flat = (logits.flatten(0, -2), table, None, targets.flatten(), weights.flatten())
    return linear_cross_entropy_ref(*flat, smoothing).loss / weights.sum()


def awkward(rows=3, length=17, vocabulary=23):
    logits = torch.randn(rows, length, vocabulary, dtype=torch.float64, requires_grad=True) * 3
    targets = torch.randint(0, vocabulary, (rows, length))
    weights = (torch.rand(rows, length) < 0.7).double()
    return logits, targets, weights


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.37])
def test_cross_entropy_is_torchs_where_tokens_count(smoothing):
    logits, targets, weights = awkward()
    theirs = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.masked_fill(weights == 0, -100).flatten(), label_smoothing=smoothing
    )
    torch.testing.assert_close(cross_entropy(logits, targets, weights, smoothing), theirs)


def test_smoothing_is_the_mixture_of_target_and_uniform():
    """`-sum_v q_v log p_v` with `q = (1 - s) [v = target] + s / V`, gradient included."""
    logits, targets, weights = awkward()
    logits = logits.detach().requires_grad_()
    q = 0.9 * torch.nn.functional.one_hot(targets, 23) + 0.1 / 23
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    plain = (-(q * p.log()).sum(-1) * weights).sum() / weights.sum()
    ours = cross_entropy(logits, targets, weights, 0.1)
    torch.testing.assert_close(ours, plain)
    (by_us,) = torch.autograd.grad(ours, logits, retain_graph=True)
    torch.testing.assert_close(by_us, (p - q) * weights[..., None] / weights.sum())


def test_z_loss_is_the_squared_log_of_the_partition():
    model, batch = make_model(), Documents()[0]
    loss = loss_of(model, batch, z_loss=0.01)
    logits = model(batch.tokens, document_ids=batch.document_ids)
    z = ((logits.exp().sum(-1).log() ** 2) * batch.weights).sum() / batch.weights.sum()
    torch.testing.assert_close(loss.z, z, check_dtype=False)
    torch.testing.assert_close(loss.total, loss.cross_entropy + 0.01 * z, check_dtype=False)


def test_experts_add_their_balancing_loss():
    feedforward = {"activation": "swiglu", "experts": {"num_experts": 4, "top_k": 2}}
    model, batch = make_model(feedforward=feedforward), Documents()[0]
    loss = loss_of(model, batch)
    record = Record("router")
    model(batch.tokens, document_ids=batch.document_ids, record=record)
    torch.testing.assert_close(loss.balance, balancing_loss(record.router, 2))
    torch.testing.assert_close(loss.total, loss.cross_entropy + BALANCE_WEIGHT * loss.balance, check_dtype=False)
    loss.total.backward()
    assert all(block.feedforward.router.weight.grad.abs().sum() > 0 for block in model.decoder.blocks)


def test_layers_with_different_numbers_of_experts_train():
    def layer(count, top_k):
        experts = None if count is None else {"num_experts": count, "top_k": top_k}
        return LayerConfig(feedforward={"activation": "swiglu", "experts": experts})

    layers = (layer(2, 1), layer(6, 4), layer(None, None))
    model, batch = make_model(num_layers=4, layers=layers), Documents()[0]
    loss = loss_of(model, batch)
    record = Record("router")
    model(batch.tokens, document_ids=batch.document_ids, record=record)
    separate = [balancing_loss([x], k) for x, k in zip(record.router, (1, 4, 1), strict=True)]
    torch.testing.assert_close(loss.balance, sum(separate) / 3)
    loss.total.backward()
    routers = [block.feedforward.router for block in model.decoder.blocks if hasattr(block.feedforward, "router")]
    assert all(router.weight.grad.abs().sum() > 0 for router in routers)


def test_an_encoder_with_more_layers_than_its_decoder_balances_them_all():
    layers = tuple(LayerConfig(feedforward={"experts": {"num_experts": n, "top_k": 1}}) for n in (2, 3, 4))
    sizes = {"vocab_size": 23, "dim": 16, "num_heads": 2, "num_layers": 1, "num_encoder_layers": 3}
    model = Transformer(ModelConfig(**sizes, shape="encoder-decoder", layers=layers))
    tokens, record = torch.randint(0, 23, (2, 5)), Record("router")
    loss = model.loss(tokens, tokens, targets=tokens)
    model(tokens, tokens, record=record)
    torch.testing.assert_close(loss.balance, balancing_loss([*record.router, *record.encoder.router], 1))


def test_a_fresh_model_is_as_unsure_as_its_vocabulary_is_large():
    model = make_model(init={"kind": "normal", "std": 1e-6})
    loss = loss_of(model, Documents()[0])
    # Logits of the order of 1e-6 leave log V that much away.
    assert float(loss.total.detach()) == pytest.approx(math.log(23), abs=1e-5)
    assert (loss.z, loss.balance) == (None, None)


def test_padding_counts_for_nothing_even_where_it_is_infinite():
    values, weights = torch.tensor([2.0, math.inf, 4.0, math.nan]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert float(weighted_sum(values, weights)) == 6.0
    assert float(weighted_sum(values, torch.zeros(4))) == 0.0


def test_the_loss_of_a_batch_in_which_nothing_counts_is_0():
    batch = dataclasses.replace(Documents()[0], weights=torch.zeros(3, 17))
    assert float(loss_of(make_model(), batch).total.detach()) == 0.0


def test_half_precision_logits_are_summed_in_float32():
    logits, targets, weights = awkward()
    half = logits.detach().bfloat16()
    ours = cross_entropy(half, targets, weights.float())
    theirs = cross_entropy(half.double(), targets, weights)
    # Sums of some tens of terms in float32.
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=0)


def test_an_encoder_decoder_reads_its_source_without_the_padding():
    model = make_model(shape="encoder-decoder")
    source, tokens = torch.randint(0, 23, (2, 9)), torch.randint(0, 23, (2, 7))
    real = torch.arange(9) < torch.tensor([[9], [5]])
    one = {"tokens": tokens, "targets": tokens, "weights": torch.ones(2, 7), "source_attention_mask": real}
    first = loss_of(model, Batch(source=source, **one)).total
    second = loss_of(model, Batch(source=source.where(real, 3), **one)).total
    torch.testing.assert_close(first, second)
    other = loss_of(model, Batch(source=source.flip(0), **one)).total
    assert abs(float((first - other).detach())) > 1e-6

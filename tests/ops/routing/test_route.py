"""How scores of experts become weights and choices: as transformers has it, and what keeps the router's correction."""

import copy

import pytest
import torch
from device import DEVICE
from references import normal
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer

import phasor
from phasor.config import ExpertsConfig, FeedForwardConfig
from phasor.nn.moe import Experts, RoutedTokens, balance_of
from phasor.ops.routing import route

SIZES = [(12, 3, 2, 4), (8, 4, 2, 3), (6, 1, 1, 2), (10, 2, 1, 5)]  # experts, groups, groups that remain, top_k
GROUPED = ExpertsConfig(
    num_experts=6, top_k=2, scores="sigmoid", correction=True, num_groups=3, top_groups=2, scale=2.5
)


def dense(weights, chosen, count):
    """Weights `[N, experts]`, zero where an expert was not chosen."""
    return torch.zeros(len(weights), count).scatter_(1, chosen, weights.detach())


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "scores"])
@pytest.mark.parametrize(("count", "groups", "remain", "top_k"), SIZES)
def test_sigmoid_scores_with_groups_and_a_correction_are_those_of_deepseek_v3(count, groups, remain, top_k, normalize):
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=7, n_routed_experts=count, num_experts_per_tok=top_k, n_group=groups, topk_group=remain,
            norm_topk_prob=normalize, routed_scaling_factor=2.5,
        )
    )  # fmt: skip
    theirs.weight.data, theirs.e_score_correction_bias = normal(count, 7).float(), normal(count, seed=1).float()
    logits, weights, chosen = theirs(normal(63, 7, seed=2).float())
    config = ExpertsConfig(
        num_experts=count, top_k=top_k, scores="sigmoid", num_groups=groups, top_groups=remain, correction=True,
        normalize=normalize, scale=2.5,
    )  # fmt: skip
    ours = route(logits, config, theirs.e_score_correction_bias)
    torch.testing.assert_close(dense(*ours, count), dense(weights, chosen, count), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("count", "groups", "remain", "top_k"), SIZES)
def test_groups_by_their_best_expert_are_those_of_deepseek_v2(count, groups, remain, top_k):
    theirs = DeepseekV2TopkRouter(
        DeepseekV2Config(
            hidden_size=7, num_attention_heads=7, n_routed_experts=count, num_experts_per_tok=top_k, n_group=groups,
            topk_group=remain, topk_method="group_limited_greedy", routed_scaling_factor=16.0,
        )
    )  # fmt: skip
    theirs.weight.data = normal(count, 7).float()
    logits, weights, chosen = theirs(normal(63, 7, seed=2).float())
    config = ExpertsConfig(
        num_experts=count, top_k=top_k, num_groups=groups, top_groups=remain, group_score="max", normalize=False,
        scale=16.0,
    )  # fmt: skip
    torch.testing.assert_close(dense(*route(logits, config), count), dense(weights, chosen, count), rtol=1e-6, atol=0)


def test_of_equal_scores_the_first_experts_and_groups_are_chosen():
    config = GROUPED.replace(top_k=3, correction=False)
    weights, chosen = route(torch.zeros(4, 6, dtype=torch.bfloat16), config)
    assert chosen.tolist() == [[0, 1, 2]] * 4
    assert weights.dtype == torch.float32
    assert route(torch.full((1, 6), -200.0), config)[0].tolist() == [[0.0, 0.0, 0.0]]  # sigmoids that are zero


def mixture(config=GROUPED):
    torch.manual_seed(0)
    network = Experts(FeedForwardConfig(activation="swiglu", experts=config), 16, 24)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(0.3 * torch.randn_like(weight))
        if network.correction is not None:
            network.correction.copy_(torch.rand(config.num_experts))
    return network


def test_the_gradient_flows_through_the_weights_and_leaves_the_correction():
    network = mixture().double()
    x = normal(9, 16).requires_grad_()
    logits = network.route_logits(x)
    weights, chosen = route(logits, GROUPED, network.correction)
    scores = 1 / (1 + torch.exp(-logits))
    picked = scores.gather(1, chosen)
    expected = 2.5 * picked / picked.sum(1, keepdim=True)
    seed = normal(9, 2, seed=3)
    ours, plain = (torch.autograd.grad((y * seed).sum(), x, retain_graph=True)[0] for y in (weights, expected))
    torch.testing.assert_close(ours, plain)
    assert [name for name, _ in network.named_parameters()] == ["up", "down", "router.weight"]


def test_parts_of_the_experts_add_up():
    whole = mixture().double()
    x = normal(11, 16)
    parts = []
    for index in range(2):
        part = copy.deepcopy(whole)
        part.up.data, part.down.data = part.up.data.chunk(2)[index], part.down.data.chunk(2)[index]
        part.first_expert = 3 * index
        parts.append(part(x))
    torch.testing.assert_close(parts[0] + parts[1], whole(x))


def test_the_balancing_loss_counts_what_the_router_chose():
    logits, correction = normal(2, 9, 6), normal(6, seed=1)
    scores = 1 / (1 + torch.exp(-logits))
    _, chosen = route(logits, GROUPED, correction)
    share = torch.bincount(chosen.flatten(), minlength=6) / 18
    expected = 6 * (share * (scores / scores.sum(-1, keepdim=True)).mean((0, 1))).sum()
    torch.testing.assert_close(balance_of([RoutedTokens(logits, GROUPED, correction)]), expected)


def test_kernels_say_what_they_do_not_compute():
    plain = ExpertsConfig(num_experts=6)
    assert plain.kernel_why_not is None
    for field, value, reason in (
        ("scores", "sigmoid", "sigmoid scores of experts have no kernel"),
        ("correction", True, "a correction of the choice of experts has no kernel"),
        ("num_groups", 3, "groups of experts have no kernel"),
        ("scale", 2.0, "scaled weights of experts have no kernel"),
    ):
        assert plain.replace(**{field: value}).kernel_why_not == reason


def small_model():
    torch.manual_seed(0)
    config = phasor.preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, hidden_dim=24)
    model = phasor.Transformer(config.replace(feedforward={"activation": "swiglu", "experts": GROUPED}))
    for block in model.blocks():
        assert torch.equal(block.feedforward.correction, torch.zeros(6))
        block.feedforward.correction.copy_(torch.rand(6))
    return model


def test_the_correction_stays_in_float32_wherever_the_model_goes(tmp_path):
    model = small_model()
    before = [block.feedforward.correction.clone() for block in model.blocks()]
    half = copy.deepcopy(model).bfloat16()
    phasor.save(half, tmp_path / "half")
    phasor.save(model, tmp_path / "whole")
    loaded = phasor.load(tmp_path / "half"), phasor.load(tmp_path / "whole", dtype=torch.bfloat16)
    back = [half, *(each.to(DEVICE) for each in loaded)]
    for each in (*back, copy.deepcopy(half).to(torch.float32)):
        assert all(torch.equal(b.feedforward.correction, x) for b, x in zip(each.blocks(), before, strict=True))
    assert {each.tokens.weight.dtype for each in back} == {torch.bfloat16}
    tokens = torch.arange(12)[None]
    assert torch.equal(back[0].eval()(tokens), back[1](tokens))
    assert back[1].blocks()[0].feedforward.route_logits(torch.zeros(1, 32, dtype=torch.bfloat16)).dtype == torch.float32


def test_training_leaves_the_correction_as_it_is():
    model = small_model()
    before = [block.feedforward.correction.clone() for block in model.blocks()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(14)[None]
    loss = model.loss(tokens[:, :-1], targets=tokens[:, 1:])
    assert float(loss.balance) > 0
    loss.total.backward()
    optimizer.step()
    assert all(torch.equal(b.feedforward.correction, x) for b, x in zip(model.blocks(), before, strict=True))


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
def test_sparsemixer_is_that_of_phimoe(jitter):
    """Choices and weights of its evaluation, and the gradients of the weights."""
    logits = torch.randn(40, 7, dtype=torch.float64, requires_grad=True)
    config = ExpertsConfig(num_experts=7, top_k=2, scores="sparsemixer", normalize=False, jitter=jitter)
    found, expected = route(logits, config), sparsemixer(logits, jitter, training=False)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    upstream = torch.randn(40, 2, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(x[0], logits, upstream)[0] for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_weights_of_inputs_multiply_what_experts_take():
    """Llama 4: `expert(weight x)`, which is not `weight expert(x)` where the experts are gated."""
    config = FeedForwardConfig(
        activation="swiglu",
        experts={"num_experts": 3, "top_k": 2, "scores": "sigmoid", "normalize": False, "weight_inputs": True},
    )
    torch.manual_seed(5)
    module = Experts(config, 7, 5).double()
    for weight in module.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(11, 7, dtype=torch.float64)
    weights, chosen = (x @ module.router.weight.T).sigmoid().topk(2)
    expected = torch.zeros_like(x)
    for token in range(11):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = (weight * x[token] @ module.up[expert]).chunk(2)
            expected[token] += (gate * gate.sigmoid() * up) @ module.down[expert]
    assert (module(x) - expected).abs().max() < 1e-12 * expected.abs().max()

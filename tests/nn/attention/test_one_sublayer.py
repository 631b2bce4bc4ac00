"""Layers of attention or of a feed-forward network alone."""

import copy

import pytest
import torch
from device import DEVICE
from schemes import build, tiny, tokens

import phasor
from phasor.config.parameters import parameters_of
from phasor.generation.runners.fused import model_why_not
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.record import Record
from phasor.parallel import plan
from phasor.parallel.tensor import cut_weights

COUNT = 11
SAME = 1e-12  # float64, of the largest value: the same sums in another order
ALONE, NETWORK = {"hidden_dim": 0}, {"attention": "none"}
MIXTURE = {"activation": "relu2", "experts": {"num_experts": 4, "hidden_dim": 12, "shared_dim": 10, "latent_dim": 6}}
LAYERS = [
    {"attention": "mamba2", "feedforward": ALONE},
    NETWORK,
    {"feedforward": ALONE},
    {**NETWORK, "feedforward": MIXTURE},
    {"attention": {"window": 4}},
]


def config(scheme="rotary", **fields):
    return tiny(scheme, num_layers=len(LAYERS), layers=LAYERS, **fields)


def full(model, ids, **args):
    with torch.no_grad():
        return model(ids, **args)


def assert_same(found, expected):
    assert (found - expected).abs().max() < SAME * expected.abs().max()


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "deepnorm", "output", "parallel"])
def test_a_layer_is_one_sum_with_one_norm(placement):
    """Each block by its equation, out of its own parts."""
    model = build(config(placement=placement)).double()
    ids, record = tokens(2, COUNT), phasor.Record("hidden")
    full(model, ids, record=record)
    for index, block in enumerate(model.decoder.blocks[:4]):
        x, y = record.hidden[index : index + 2]
        assert len(block.residual.norms) == (2 if placement == "sandwich" else 1)
        assert (block.feedforward is None) == (index in (0, 2))
        if index not in (1, 3):
            continue
        first, last = block.residual.norms[0], block.residual.norms[-1]
        with torch.no_grad():
            expected = {
                "pre": lambda f=block.feedforward, n=first, x=x: x + f(n(x)),
                "parallel": lambda f=block.feedforward, n=first, x=x: x + f(n(x)),
                "post": lambda f=block.feedforward, n=first, x=x: n(x + f(x)),
                "deepnorm": lambda f=block.feedforward, n=first, x=x: n(10**0.25 * x + f(x)),
                "sandwich": lambda f=block.feedforward, n=first, m=last, x=x: x + m(f(n(x))),
                "output": lambda f=block.feedforward, n=first, x=x: x + n(f(x)),
            }[placement]()
        assert_same(y, expected)


@pytest.mark.parametrize("scheme", ["rotary", "alibi", "forget", "learned"])
def test_caches_equal_the_full_forward(scheme, tmp_path):
    model, ids = build(config(scheme)).double(), tokens(3, COUNT)
    expected, cache = full(model, ids), model.new_cache(3, COUNT)
    pieces = [full(model, piece, cache=cache) for piece in ids[:, :8].split([5, 1, 2], dim=1)]
    cache.save(tmp_path / "cache")
    cache = phasor.KVCache.load(tmp_path / "cache", DEVICE)
    cache.reorder([2, 0, 1])
    ids, expected = ids[[2, 0, 1]], expected[[2, 0, 1]]
    pieces = [torch.cat(pieces, dim=1)[[2, 0, 1]], full(model, ids[:, 8:9], cache=cache)]
    static = StaticKVCache(cache)
    pieces += [full(model, ids[:, i : i + 1], cache=static) for i in range(9, COUNT)]
    assert_same(torch.cat(pieces, dim=1), expected)


def test_padded_and_packed_rows_equal_each_sequence_alone():
    model, ids = build(config()).double(), tokens(1, COUNT)
    real = torch.ones(1, COUNT + 3, dtype=torch.bool, device=ids.device)
    real[:, :3] = False
    padded = torch.cat([ids[:, :3], ids], dim=1)
    assert_same(full(model, padded, attention_mask=real)[:, 3:], full(model, ids))
    documents = torch.tensor([[0] * 4 + [1] * 7], device=ids.device)
    alone = torch.cat([full(model, piece) for piece in ids.split([4, 7], dim=1)], dim=1)
    assert_same(full(model, ids, document_ids=documents), alone)


@pytest.mark.parametrize("layers", [LAYERS, LAYERS[1:]], ids=["with a state", "without"])
def test_generation_takes_the_likeliest_tokens_however_it_is_computed(layers):
    model = build(tiny("rotary", num_layers=len(layers), layers=layers)).double()
    prompts = tokens(2, 5).tolist()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=DEVICE)
        for _ in range(9):
            ids = torch.cat([ids, full(model, ids)[:, -1:].argmax(-1)], dim=1)
        expected.append(ids[0, 5:].tolist())
    assert [list(phasor.generate(model, prompt, max_new_tokens=9)) for prompt in prompts] == expected
    guessed = phasor.generate(model, prompts[0], max_new_tokens=9, prompt_lookup_tokens=3)
    assert list(guessed) == expected[0]
    with phasor.Engine(model, max_rows=2) as engine:
        handles = [engine.submit(prompt, max_new_tokens=9) for prompt in prompts]
        assert [list(handle.result().tokens) for handle in handles] == expected


def test_weights_are_those_declared_and_plans_count_them():
    given = config(norm="rmsnorm")
    model = build(given)
    assert parameters_of(given).total == sum(weight.numel() for weight in model.parameters())
    names = {name for name, _ in model.named_parameters() if ".blocks.1." in name}
    assert names == {f"decoder.blocks.1.{n}.weight" for n in ("feedforward.up", "feedforward.down", "residual.norms.0")}
    planned = plan(given, devices=4, mesh="tensor=2,context=2", context=64, batch_tokens=1024)
    assert planned.parameters == parameters_of(given).total
    assert phasor.backends(given, device="cuda").ops
    assert model_why_not(model) is None


def test_parts_of_blocks_add_up():
    """What a mesh with tensor=2 computes of every sub-layer."""
    whole = build(config()).double()
    parts = [copy.deepcopy(whole) for _ in range(2)]
    for index, part in enumerate(parts):
        cut_weights(part, index, 2)
    x = torch.randn(2, COUNT, 32, dtype=torch.float64, device=DEVICE)

    def sublayers(model):
        seq = phasor.nn.sequence.sequence_info(2, COUNT, x.device)
        contexts = model.decoder._self_attention_contexts(x, seq, None, None, [Record()] * 9)
        with torch.no_grad():
            return [
                block.feedforward(x) if index in (1, 3) else block.attention(x, ctx)
                for index, (block, ctx) in enumerate(zip(model.decoder.blocks, contexts, strict=True))
            ]

    for found, other, expected in zip(*map(sublayers, parts), sublayers(whole), strict=True):
        assert_same(found + other, expected)


def test_a_folder_reads_back_and_its_projections_are_quantized(tmp_path):
    model, ids = build(config(dim=64)), tokens(1, COUNT)
    phasor.save(model, tmp_path / "model")
    other = phasor.load(tmp_path / "model", device=DEVICE)
    assert other.config == model.config
    assert torch.equal(full(other, ids), full(model, ids))
    expected, small = full(model, ids), phasor.quantize(model)
    assert (full(small, ids) - expected).norm() < 0.1 * expected.norm()


def test_gradients_reach_every_weight():
    model = build(config()).double().train()
    model(tokens(2, COUNT)).logsumexp(-1).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())


def test_a_layer_of_neither_is_refused():
    with pytest.raises(
        ValueError, match="attention, a feed-forward network or both: its attention is 'none', and Feed"
    ):
        tiny("rotary", layers=[{}, {**NETWORK, "feedforward": ALONE}])
    with pytest.raises(ValueError, match="hidden_dim 0 is no network, and it has experts"):
        phasor.FeedForwardConfig(hidden_dim=0, experts={"num_experts": 2})
    with pytest.raises(ValueError, match="none attention has no cross-attention"):
        tiny("none", attention="none", shape="encoder-decoder")
    with pytest.raises(ValueError, match="none attention takes no positions"):
        tiny("none", layers=[{}, {**NETWORK, "position": "rotary"}])

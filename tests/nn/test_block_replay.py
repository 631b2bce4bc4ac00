"""Blocks that are replayed give the bits of blocks that are not, whatever changes between calls."""

import copy
import gc
import pickle
import weakref
from collections import OrderedDict

import pytest
import torch
from device import ON_GPU
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from phasor import ModelConfig, Record, Transformer
from phasor.nn import replay
from phasor.nn.block import Block
from phasor.nn.replay import MIN_CALLS, Recording
from phasor.ops import dispatch

SIZES = {"vocab_size": 40, "dim": 32, "num_layers": 3, "num_heads": 4, "hidden_dim": 48}
MODELS = {
    "llama": {"position": "rotary", "num_kv_heads": 2},
    "gpt": {"position": "learned", "norm": "layernorm", "feedforward": {"activation": "gelu", "bias": True}},
    "alibi": {"position": "alibi"},
    "t5": {"position": "t5", "shape": "encoder-decoder", "norm": "rmsnorm"},
    "post": {"placement": "post", "shape": "encoder-decoder", "position": "sinusoidal"},
    "sandwich": {"placement": "sandwich", "attention": {"softcap": 20.0, "window": 4}, "position": "rotary"},
    "parallel": {"placement": "parallel", "position": "rotary"},
    "encoder": {"shape": "encoder", "attention": {"window": 3}, "position": "rotary"},
    "query norm": {"attention": {"qk_norm": "head"}, "position": "rotary"},
    "experts": {"feedforward": {"experts": {"num_experts": 4, "top_k": 2}}, "position": "rotary"},
    "sinks": {"attention": {"sink_logits": True, "window": 4}, "position": "rotary"},
    "dropout": {"dropout": {"residual": 0.2, "attention": 0.1}, "position": "rotary"},
}


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    monkeypatch.setattr(replay, "DEVICES", ("cpu", "cuda"))


def build(**fields):
    torch.manual_seed(0)
    return Transformer(ModelConfig(**{**SIZES, **fields}))


def plain(model):
    """The same model, whose blocks are never replayed."""
    other = copy.deepcopy(model)
    for block in blocks(other):
        block.replays = lambda block, run, *args: run(*args)
    return other


def blocks(model):
    return [part for part in model.modules() if hasattr(part, "replays")]


def stores(model):
    return {id(block.replays.recordings): block.replays.recordings for block in blocks(model)}.values()


def recordings(model):
    return [found for store in stores(model) for found in store.found.values()]


def recorded(model):
    return [found for found in recordings(model) if isinstance(found, Recording)]


def step(model, tokens, **options):
    """The logits, and the gradients of all weights."""
    torch.manual_seed(5)
    inputs = (tokens, tokens.flip(1)) if model.config.shape == "encoder-decoder" else (tokens,)
    logits = model(*inputs, **options)
    logits.backward(torch.linspace(-1, 1, logits.numel()).view_as(logits))
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return logits.detach(), grads, torch.get_rng_state()


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    for name, grad in expected[1].items():
        assert (grad is None) == (found[1][name] is None), name
        if ON_GPU and grad is not None:  # some kernels there add in any order
            torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))
        else:
            assert grad is None or torch.equal(grad, found[1][name]), name
    assert torch.equal(found[2], expected[2])  # recording draws no random numbers from the program's


def tokens_of(rows, length, seed=0):
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_replayed_blocks_give_the_same_bits(name):
    model = build(**MODELS[name])
    other = plain(model)
    for call in range(MIN_CALLS + 3):
        tokens = tokens_of(2, 9, call)
        assert_same(step(model, tokens), step(other, tokens))
    assert recorded(model), recordings(model)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sandwich", "experts"))]
)
def test_kernels_are_launched_again(name, monkeypatch):
    monkeypatch.setattr(replay, "MIN_CALLS", 0)
    model = build(**MODELS[name], num_layers=2)
    other = plain(model)
    with dispatch.force_path("triton"):
        for call in range(2):
            tokens = tokens_of(1, 4, call)
            assert_same(step(model, tokens), step(other, tokens))
    assert recorded(model), recordings(model)


def test_masks_documents_and_positions_are_those_of_each_call():
    model = build(position="rotary", attention={"window": 4})
    other = plain(model)
    for call in range(MIN_CALLS + 4):
        tokens = tokens_of(2, 9, call)
        keep = torch.ones(2, 9, dtype=torch.bool)
        keep[0, 9 - call % 3 :] = False
        documents = (torch.arange(9) > call).long().expand(2, 9)
        positions = torch.arange(9) * (call + 1)
        for options in ({"attention_mask": keep}, {"document_ids": documents}, {"positions": positions}):
            assert_same(step(model, tokens, **options), step(other, tokens, **options))
    assert recorded(model)


def test_few_calls_are_not_recorded():
    model = build(position="rotary")
    for length in range(3, 13):
        step(model, tokens_of(1, length))
    assert not recordings(model)


def test_lengths_take_turns():
    model = build(position="rotary")
    other = plain(model)
    for call in range(MIN_CALLS + 2):
        for length in (5, 8):
            tokens = tokens_of(2, length, call)
            assert_same(step(model, tokens), step(other, tokens))
    assert len(recorded(model)) == 2


def warmed_up(**fields):
    model = build(position="rotary", **fields)
    for _ in range(MIN_CALLS + 1):
        step(model, tokens_of(2, 9))
    assert recorded(model)
    return model


def test_hooks_see_the_calls():
    model, seen = warmed_up(), []
    other = plain(model)
    handle = model.decoder.blocks[1].attention.out.register_forward_hook(lambda *args: seen.append(args[1][0].shape))
    assert_same(step(model, tokens_of(2, 9)), step(other, tokens_of(2, 9)))
    assert seen == [(2, 9, 32)]
    handle.remove()
    step(model, tokens_of(2, 9))
    assert len(seen) == 1


def test_records_are_kept():
    model = warmed_up()
    record = Record("attention", "hidden")
    step(model, tokens_of(2, 9), record=record)
    assert len(record.attention) == 3
    assert len(record.hidden) == 4


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_changed_modules_and_weights_are_seen():
    model = warmed_up()
    down = model.decoder.blocks[0].feedforward.down
    model.decoder.blocks[0].feedforward.down = Doubled(48, 32, bias=False)
    assert_same(step(model, tokens_of(2, 9)), step(plain(model), tokens_of(2, 9)))
    model.decoder.blocks[0].feedforward.down = down
    model.decoder.blocks[1].attention.out.weight.requires_grad_(False)
    assert_same(step(model, tokens_of(2, 9)), step(plain(model), tokens_of(2, 9)))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1
    assert_same(step(model, tokens_of(2, 9)), step(plain(model), tokens_of(2, 9)))
    model.decoder.blocks[2].attention.qkv.__class__ = Doubled
    assert_same(step(model, tokens_of(2, 9)), step(plain(model), tokens_of(2, 9)))
    model.double()
    assert_same(step(model, tokens_of(2, 9)), step(plain(model), tokens_of(2, 9)))


def test_settings_of_torch_are_seen():
    model = warmed_up()
    other = plain(model)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(MIN_CALLS + 2):
            assert_same(step(model, tokens_of(2, 9)), step(other, tokens_of(2, 9)))
    with dispatch.force_path("reference"):
        assert_same(step(model, tokens_of(2, 9)), step(other, tokens_of(2, 9)))
    assert_same(step(model, tokens_of(2, 9)), step(other, tokens_of(2, 9)))


class Full(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def test_what_is_computed_without_autocast_stays_so():
    model = build(position="rotary")
    for block in blocks(model):
        block.attention.out.__class__ = Full
    other = plain(model)
    for call in range(MIN_CALLS + 2):
        found = []
        for one in (model, other):
            with torch.autocast("cpu", torch.bfloat16):
                logits = one(tokens_of(2, 9, call))
            logits.float().square().mean().backward()
            found.append((logits.detach(), {n: w.grad for n, w in one.named_parameters()}, torch.get_rng_state()))
            one.zero_grad(set_to_none=True)
        assert_same(*found)
    assert recorded(model), recordings(model)


def test_changed_attributes_are_seen():
    model = warmed_up(dropout={"residual": 0.1})
    model.decoder.blocks[0].residual.dropout = 0.5
    model.decoder.blocks[1].attention.scale = 0.1
    model.decoder.blocks[2].attention.config = model.decoder.blocks[2].attention.config.replace(softcap=1.0)
    assert_same(step(model, tokens_of(2, 9)), step(plain(model), tokens_of(2, 9)))


def test_methods_of_single_modules_are_called():
    model, seen = warmed_up(), []
    attention = model.decoder.blocks[1].attention
    project = attention.project
    attention.project = lambda x: (seen.append(x.shape), project(x))[1]
    step(model, tokens_of(2, 9))
    assert len(seen) == 1


def test_hooks_are_seen_where_all_were_removed_at_once():
    model, seen = warmed_up(), []
    attention = model.decoder.blocks[1].attention
    attention._forward_hooks = OrderedDict()
    attention.register_forward_hook(lambda *args: seen.append(args))
    step(model, tokens_of(2, 9))
    assert len(seen) == 1


def test_weights_that_are_cut_in_place_are_seen():
    model = warmed_up()
    network = model.decoder.blocks[1].feedforward
    network.down.weight.data = network.down.weight.data[:, :24]
    network.up.weight.data = network.up.weight.data[:24]
    assert_same(step(model, tokens_of(2, 9)), step(plain(model), tokens_of(2, 9)))


@pytest.mark.parametrize("position", ["rotary", "t5"])
def test_hooks_of_weights_act_once(position):
    model = build(position=position)
    other = plain(model)
    step(model, tokens_of(2, 9))
    for one in (model, other):
        table = [one.decoder.positions[0].weight] if position == "t5" else []
        for weight in (one.decoder.blocks[1].attention.out.weight, *table):
            weight.register_hook(lambda grad: 2 * grad)
    for call in range(MIN_CALLS + 3):
        assert_same(step(model, tokens_of(2, 9, call)), step(other, tokens_of(2, 9, call)))


def test_running_means_count_each_call_once():
    model = build(position="rotary")
    for block in blocks(model):
        block.attention.out = nn.Sequential(block.attention.out, nn.BatchNorm1d(9))
    other = plain(model)
    for call in range(MIN_CALLS + 2):
        assert_same(step(model, tokens_of(2, 9, call)), step(other, tokens_of(2, 9, call)))
    for found, expected in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(found, expected)


class Checkpointed(Block):
    def forward(self, *args):
        return checkpoint(super().forward, *args, use_reentrant=False)


def test_some_blocks_may_recompute_their_activations():
    model = build(position="rotary")
    model.decoder.blocks[0].__class__ = Checkpointed
    other = plain(model)
    for call in range(MIN_CALLS + 3):
        assert_same(step(model, tokens_of(2, 9, call)), step(other, tokens_of(2, 9, call)))
    assert recorded(model)


def test_forward_gradients_are_those_of_the_operations():
    found = []
    with sdpa_kernel(SDPBackend.MATH):
        model = warmed_up()
        for one in (model, plain(model)):
            weights = dict(one.named_parameters())
            with forward_ad.dual_level():
                table = weights["tokens.weight"]
                weights["tokens.weight"] = forward_ad.make_dual(table, torch.ones_like(table))
                logits = torch.func.functional_call(one, weights, (tokens_of(2, 9),))
                found.append(forward_ad.unpack_dual(logits).tangent)
    assert torch.equal(*found)


def test_a_loss_that_is_kept_keeps_no_contexts():
    model, seen = warmed_up(shape="encoder-decoder"), []
    handle = model.encoder.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    loss = model(tokens_of(2, 9), tokens_of(2, 9)).sum()
    loss.backward()
    handle.remove()
    assert [one() for one in seen] == [None]


def test_copies_that_share_recordings_have_their_own_weights():
    model = warmed_up()
    block = model.decoder.blocks[0]
    other = copy.copy(block)
    other._modules = {**block._modules, "attention": copy.deepcopy(block.attention)}
    with torch.no_grad():
        other.attention.out.weight.mul_(2)
    model.decoder.blocks[0] = other
    assert_same(step(model, tokens_of(2, 9)), step(plain(model), tokens_of(2, 9)))


def second_gradients(model, weights, **settings):
    """Gradients, and the gradients of their squares, outside of the settings of the forward."""
    torch.manual_seed(3)
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16, **settings):
        loss = torch.func.functional_call(model, weights, (tokens_of(2, 9),)).float().square().mean()
    wanted = list(weights.values())
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    state = torch.get_rng_state()
    return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted), state


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_gradients_have_the_weights_numbers_and_settings_of_the_forward(autocast):
    model = build(position="rotary", dropout={"residual": 0.2})
    other = plain(model)
    for _ in range(MIN_CALLS + 2):
        found = []
        for one in (model, other):
            weights = {name: (1.5 * w.detach()).requires_grad_() for name, w in one.named_parameters()}
            found.append(second_gradients(one, weights, enabled=autocast))
        tolerance = 0.02 if autocast else 1e-5
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))
    assert recorded(model), recordings(model)


def test_a_block_that_changed_has_no_gradients_of_gradients():
    with sdpa_kernel(SDPBackend.MATH):
        model = warmed_up(dropout={"residual": 0.2})
        loss = model(tokens_of(2, 9)).square().mean()
        model.eval()
        with pytest.raises(RuntimeError, match="a block was changed"):
            torch.autograd.grad(loss, model.tokens.weight, create_graph=True)


def test_gradients_of_gradients_are_those_of_the_operations():
    found = []
    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels of attention have no second derivatives
        model = warmed_up()
        for one in (model, plain(model)):
            loss = one(tokens_of(2, 9)).square().mean()
            weights = [one.decoder.blocks[1].attention.out.weight, one.tokens.weight]
            first = torch.autograd.grad(loss, weights, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), weights))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_weights_that_blocks_have_in_common_get_the_gradient_of_each():
    """The table of T5 is read by all blocks: one that is recorded must not take the gradients of those before it."""
    found = []
    with sdpa_kernel(SDPBackend.MATH), dispatch.force_path("reference"):  # its kernel has no second gradient
        model = build(position="t5", num_layers=2)
        model.decoder.blocks[0].attention.out.register_forward_hook(lambda *args: None)  # it is not recorded
        other = plain(model)
        for call in range(MIN_CALLS + 2):
            tokens = tokens_of(2, 9, call)
            assert_same(step(model, tokens), step(other, tokens))
        assert recorded(model), recordings(model)
        for one in (model, other):
            table = one.decoder.positions[0].weight
            loss = one(tokens_of(2, 9)).square().mean()
            (first,) = torch.autograd.grad(loss, table, create_graph=True)
            found.append((first, *torch.autograd.grad(first.square().sum(), table)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_graph_may_be_run_backward_twice():
    model = warmed_up()
    loss = model(tokens_of(2, 9)).square().mean()
    weight = model.decoder.blocks[0].attention.qkv.weight
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, weight)[0])


def test_saved_tensors_may_be_kept_elsewhere():
    model = warmed_up()
    packed = []

    def pack(x):
        packed.append(x.shape)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = step(model, tokens_of(2, 9))
    assert packed
    assert_same(found, step(plain(model), tokens_of(2, 9)))


def test_nothing_is_recorded_while_saved_tensors_are_given_to_hooks():
    model = build(position="rotary")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        for _ in range(MIN_CALLS + 2):
            step(model, tokens_of(2, 9))
    assert not recordings(model)


def test_weights_that_changed_between_forward_and_backward_are_an_error():
    model = warmed_up()
    logits = model(tokens_of(2, 9))
    with torch.no_grad():
        model.decoder.blocks[1].feedforward.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


def test_copies_begin_without_recordings():
    model = warmed_up()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not recordings(other)
        assert_same(step(other, tokens_of(2, 9)), step(model, tokens_of(2, 9)))


def test_functional_calls_use_the_weights_that_are_given():
    model = warmed_up()
    other = build(position="rotary")
    with torch.no_grad():
        for weight in other.parameters():
            weight *= 1.5
    weights = dict(other.named_parameters())
    found = torch.func.functional_call(model, weights, (tokens_of(2, 9),))
    assert torch.equal(found, other(tokens_of(2, 9)))
    found.sum().backward()
    assert all(weight.grad is None for weight in model.parameters())
    assert other.decoder.blocks[1].attention.out.weight.grad is not None


def test_generation_and_evaluation_are_not_recorded():
    model = build(position="rotary").eval()
    for _ in range(MIN_CALLS + 2):
        with torch.no_grad():
            model(tokens_of(2, 9))
    assert not recordings(model)


def test_no_forward_keeps_memory_of_the_last():
    model = warmed_up()
    model(tokens_of(2, 9)).sum().backward()
    assert not any(isinstance(x, torch.Tensor) for found in recorded(model) for x in found.forward.__globals__.values())
    assert all(type(last) is object for store in stores(model) for last, _ in store.calls.values())


def test_models_and_graphs_are_freed_without_the_garbage_collector():
    model = warmed_up(shape="encoder-decoder")
    seen = []
    handle = model.encoder.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    gc.collect()
    gc.disable()
    try:
        step(model, tokens_of(2, 9))
        assert [one() for one in seen] == [None]
        handle.remove()
        weight, block = weakref.ref(model.tokens.weight), weakref.ref(model.decoder.blocks[1].attention.out.weight)
        del model, handle
        assert weight() is None
        assert block() is None
    finally:
        gc.enable()

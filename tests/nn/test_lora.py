"""Low-rank updates against their formulas in float64: forward, gradients, parts, several at once, merged."""

import copy
import importlib

import pytest
import torch
from device import DEVICE
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from phasor import ModelConfig, Transformer, generate, preset, quantize
from phasor.adapters import adaptable_layers, add_adapter, disable_adapters, merge_adapters, set_adapters
from phasor.config import FeedForwardConfig
from phasor.config.lora import LoRAConfig
from phasor.generation.runners.fused import fused_step_why_not
from phasor.nn.adapted import adapt, effective_weight, strip_adapters
from phasor.nn.adapted_linear import ADAPTED_LINEAR
from phasor.nn.feed_forward import FeedForward
from phasor.nn.lora import LoRA, LowRank
from phasor.nn.lora_hook import adapters_of
from phasor.nn.quantized import Quantization, QuantizedLinear
from phasor.ops import dispatch
from phasor.parallel.tensor import PartialLinear, end_in_sum
from phasor.training.float8 import Float8Linear, convert_to_float8

ROWS = torch.tensor([5, 0, 3]), torch.tensor([1, 6])  # of seven: two have no update


def draw(lora):
    """Random factors in the place of zeros."""
    for weight in lora.parameters():
        nn.init.normal_(weight)
    return lora


def layer_with(kind, *, bias=True, parts=True, scales=(2.0, 0.5), width=9, bits=None):
    torch.manual_seed(3)
    layer = nn.Linear(width, 7, bias=bias).double()
    if bits is not None:
        layer = QuantizedLinear(layer, Quantization(bits).quantize(layer.weight))
    has_magnitude = kind == "dora"
    if parts:
        ranks = zip(("q", "v"), (4, 2), scales, ROWS, strict=True)
        updates = {
            n: LowRank(len(rows), width, r, s, has_magnitude=has_magnitude, rows=rows) for n, r, s, rows in ranks
        }
    else:
        updates = {"whole": LowRank(7, width, 3, scales[0], has_magnitude=has_magnitude)}
    adapt(layer, "one", draw(LoRA(updates, 7)).double())
    return layer


def frozen_layer_with(kind, **options):
    layer = layer_with(kind, width=10, **options)
    if isinstance(layer, nn.Linear):
        layer.weight.requires_grad_(False)
    return layer


def formula(layer, x):
    """`(W + s B A) x + b`, with DoRA's magnitudes where there are any, row by row."""
    weight = layer.weight.clone()
    for part in layer.lora["one"].values():
        for i, row in enumerate(range(7) if part.rows is None else part.rows.tolist()):
            changed = layer.weight[row] + part.scale * part.B[i] @ part.A
            if part.magnitude is not None:
                changed = part.magnitude[i] * changed / changed.detach().norm()
            weight = weight.index_put((torch.tensor([row]),), changed[None])
    y = x @ weight.t()
    return y if layer.bias is None else y + layer.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_layer_is_its_formula(kind, parts, bias):
    layer = layer_with(kind, bias=bias, parts=parts)
    x = torch.randn(2, 5, 9, dtype=torch.float64)
    weights = [w for name, w in layer.named_parameters() if "lora" in name]
    found = torch.autograd.grad((y := layer(x)).square().sum(), weights)
    expected = torch.autograd.grad((wanted := formula(layer, x)).square().sum(), weights)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(found, expected)
    merged = x @ effective_weight(layer).t() + (0 if layer.bias is None else layer.bias)
    torch.testing.assert_close(y, merged)


FUSED = ADAPTED_LINEAR.paths[0].name


def count_kept(layer, function, x):
    """The elements that are kept for the backward pass, but for those of the layer, and the result."""
    own = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
    kept = {}

    def keep(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = function(x)
    return sum(kept.values()), y


@pytest.mark.parametrize("bits", [None, 8, "nf4"])
@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_frozen_layer_and_its_update_are_one_operation(kind, parts, bits):
    layer = frozen_layer_with(kind, parts=parts, bits=bits)
    x = torch.randn(2, 5, 10, dtype=torch.float64, requires_grad=True)
    assert ADAPTED_LINEAR.explain(layer, x) == (FUSED, {})
    weights = [x, *(w for w in layer.parameters() if w.requires_grad)]
    assert len(weights) == 2 + (3 if kind == "dora" else 2) * (2 if parts else 1)  # x and the bias
    fewer, y = count_kept(layer, layer, x)
    more, expected = count_kept(layer, layer.multiply_then_add, x)
    assert fewer <= more
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), weights) for each in (y, expected)))
    layer.lora["one"].strength = 0.5
    torch.testing.assert_close(layer(x), layer.multiply_then_add(x))


def test_why_a_product_and_its_update_are_apart():
    layer, x = frozen_layer_with("dora", bits="nf4"), torch.randn(4, 10, dtype=torch.float64)
    lora, why_not = layer.lora["one"], layer.update_why_not
    lora.strength = 0.5
    assert why_not(x) == "the magnitudes of DoRA count by another weight than 1"
    lora.strength, lora.dropout = 1.0, 0.1
    assert why_not(x) == "the adapter has dropout"
    assert layer.eval().update_why_not(x) is None
    with torch.no_grad():
        assert why_not(x) == "no gradient is needed"
    adapt(layer, "two", draw(LoRA({"whole": LowRank(7, 10, 2, 3.0)}, 7)).double())
    assert why_not(x) == "2 adapters are in use, not one"
    plain = layer_with("lora", width=10)
    assert plain.update_why_not(x) == "the layer's own weight is trained"
    plain.weight.requires_grad_(False)
    assert plain.update_why_not(x.float()) == "the layer computes in another dtype"
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert plain.float().update_why_not(x.bfloat16()) is None
    assert ADAPTED_LINEAR.choose(plain, x.float()).name == FUSED
    four = nn.Linear(32, 4)
    four = QuantizedLinear(four, Quantization(4).quantize(four.weight))
    adapt(four, "one", LoRA({"whole": LowRank(4, 32, 2, 1.0)}, 4))
    assert four.update_why_not(torch.zeros(2, 32)) == "the weights pass no gradients on"
    assert torch.equal(four.eval()(torch.ones(2, 32)), four.multiply_then_add(torch.ones(2, 32)))


def test_hooks_of_an_adapted_layer_see_its_input_and_what_it_gives():
    layer, seen = frozen_layer_with("lora"), []
    layer.register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
    layer.register_full_backward_hook(lambda module, dx, dy: seen.append(dx[0].shape))
    x = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(seen[0][1], formula(layer, x))
    assert seen[1] == x.shape


def test_a_layer_of_another_class_keeps_its_adapters():
    layer, x = layer_with("lora"), torch.randn(4, 9, dtype=torch.float64)
    expected = formula(layer, x) - layer.bias
    end_in_sum(layer, 1)
    assert type(layer) is PartialLinear
    torch.testing.assert_close(layer(x), expected)
    strip_adapters(layer)
    assert torch.equal(layer(x), x @ layer.weight.t())
    assert not layer._forward_hooks


def test_float8_keeps_adapters():
    model = build("grouped").float()
    adapt_all(model)
    expected = call(model)
    convert_to_float8(model)
    assert type(model.decoder.blocks[0].attention.qkv) is Float8Linear
    torch.testing.assert_close(call(model), expected)  # it does not train here, and computes in float32


@pytest.mark.parametrize("bits", [None, "nf4"])
def test_under_autocast_a_frozen_layer_is_kept_as_it_is_held(bits):
    layer = frozen_layer_with("lora", bits=bits).float()
    own = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
    x, kept = torch.randn(5, 10, requires_grad=True), []
    with torch.autocast(DEVICE.type, torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = layer(x)
        assert y.dtype == layer.multiply_then_add(x).dtype == torch.bfloat16
    copies = [tuple(t.shape) for t in kept if t.untyped_storage().data_ptr() not in own and t.is_floating_point()]
    assert sorted(copies) == [(5, 6), (5, 10), (6, 10), (7, 6)]  # A x, x, and the factors, in bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == layer.lora["one"]["q"].A.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_several_adapters_add_up_by_weight(kind):
    layer = layer_with(kind)
    other = draw(LoRA({"whole": LowRank(7, 9, 2, 3.0)}, 7)).double()
    x = torch.randn(4, 9, dtype=torch.float64)
    one, plain = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
    adapt(layer, "two", other)
    layer.lora["one"].strength, other.strength = 0.25, -1.5
    update = 3.0 * x @ (other["whole"].B @ other["whole"].A).t()
    torch.testing.assert_close(layer(x), plain + 0.25 * (one - plain) - 1.5 * update)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, effective_weight(layer), layer.bias))
    strip_adapters(layer)
    assert torch.equal(layer(x), plain)
    assert not adapters_of(layer)
    assert not layer._forward_hooks


def test_parts_keep_one_matrix_of_all_b_for_the_backward_pass():
    layer, kept = layer_with("lora"), {}
    own = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}

    def keep(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    x = torch.randn(10, 9, dtype=torch.float64, requires_grad=True)
    layer.weight.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        layer(x)
    ranks = 4 + 2
    expected = x.numel() + ranks * (9 + 10 + 7)  # A, A x, and B of seven rows
    assert sum(x.untyped_storage().nbytes() // x.element_size() for x in kept.values()) == expected


def test_a_copy_has_its_own_adapter():
    layer = layer_with("lora")
    twin, x = copy.deepcopy(layer), torch.randn(4, 9, dtype=torch.float64)
    assert torch.equal(twin(x), layer(x))
    nn.init.zeros_(twin.lora["one"]["q"].B)
    assert not torch.equal(twin(x), layer(x))


def test_dropout_acts_on_the_update_alone():
    layer = layer_with("lora").train()
    layer.lora["one"].dropout = 0.5
    x = torch.randn(4000, 9, dtype=torch.float64)
    mean = layer(x[:1].expand(40000, -1)).mean(0)
    layer.eval()
    # The mean of 40,000 updates with standard deviations of about 30.
    torch.testing.assert_close(mean, layer(x[:1])[0], atol=0.6, rtol=0)


MODELS = {
    "grouped": ModelConfig(
        vocab_size=40, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, position="rotary", norm="rmsnorm"
    ),
    "gated": preset("llama-2", vocab_size=40, dim=32, num_heads=4, num_layers=2, attention={"output_gate": True}),
    "tied": preset("gpt-2", vocab_size=40, dim=32, num_heads=4, num_layers=2, max_length=32),
    "masked": preset("roformer", vocab_size=40, dim=32, num_heads=4, num_layers=2, max_length=32),
    "pairs": preset("t5-1.1", vocab_size=40, dim=32, num_heads=4, num_layers=2, num_encoder_layers=1),
    "experts": preset("grok-1", vocab_size=40, dim=32, num_heads=4, num_layers=2),
    "latent": ModelConfig(
        vocab_size=40, dim=32, num_layers=2, num_heads=4, position="rotary", attention={"kind": "latent"}
    ),
    "gated-delta": ModelConfig(
        vocab_size=40, dim=32, num_layers=2, num_heads=4, attention={"kind": "gated-delta"}, norm="rmsnorm"
    ),
}


def build(name):
    torch.manual_seed(1)
    return Transformer(MODELS[name].replace(dropout={})).double().eval()


def call(model):
    tokens = torch.arange(14).view(2, 7) % 40
    return model(tokens, tokens) if model.config.shape == "encoder-decoder" else model(tokens)


def adapt_all(model, kind="lora"):
    """An adapter with random factors on every layer that can have one."""
    targets = dict.fromkeys(layer.target for layer in adaptable_layers(model))
    if kind == "dora":
        targets.pop("experts", None)
    adapter = add_adapter(model, LoRAConfig(rank=3, kind=kind, targets=tuple(targets)))
    for path in adapter.layers:
        for part in model.get_submodule(path).lora["default"].values():
            nn.init.normal_(part.A, std=0.2)
            nn.init.normal_(part.B, std=0.2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_equals_adapted_and_disabled_equals_the_base(name, kind):
    model = build(name)
    before, weights = call(model), {n: w.clone() for n, w in model.state_dict().items()}
    adapt_all(model, kind)
    y = call(model)
    assert not torch.allclose(y, before)
    with disable_adapters(model):
        torch.testing.assert_close(call(model), before)
    assert torch.equal(call(model), y)
    assert all(torch.equal(weights[n], w) for n, w in model.state_dict().items() if n in weights)
    set_adapters(model, {"default": 0.5})
    half = call(model)
    merge_adapters(model)
    torch.testing.assert_close(call(model), half)
    assert not any(".lora." in name for name in model.state_dict())


@pytest.mark.parametrize("name", ["latent", "grouped", "gated-delta", "experts"])
def test_a_cache_equals_the_full_forward(name):
    model, tokens = build(name), torch.arange(14).view(2, 7) % 40
    adapt_all(model)
    cache = model.new_cache(2, 7)
    steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(7)]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens))


@pytest.mark.parametrize("name", ["grouped", *(pytest.param(n, marks=pytest.mark.slow) for n in ("experts", "pairs"))])
def test_compiled_blocks_compute_the_same(name):
    """In one graph for blocks that are alike, and with the gradients of adapters on a frozen base."""
    model = build(name)
    adapt_all(model)
    for name_of, weight in model.named_parameters():
        weight.requires_grad_(".lora." in name_of)
    trained = [weight for weight in model.parameters() if weight.requires_grad]

    def run():
        y = call(model)
        return y.detach(), *torch.autograd.grad(y.square().mean(), trained)

    torch.compiler.reset()
    expected, counter = run(), CompileCounterWithBackend("aot_eager")
    model.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(run(), expected)
    assert counter.frame_count == (2 if name == "pairs" else 1)
    set_adapters(model, {"default": 0.5})
    assert not torch.allclose(call(model), expected[0])


def test_generation_is_that_of_the_merged_model():
    model = build("grouped").float()
    adapt_all(model)
    found = generate(model, [1, 2, 3], max_new_tokens=12)
    base = generate(build("grouped").float(), [1, 2, 3], max_new_tokens=12)
    merge_adapters(model)
    assert found == generate(model, [1, 2, 3], max_new_tokens=12) != base


def test_the_fused_step_and_quantization_take_no_adapters():
    model = build("grouped").float()
    with dispatch.force_path("triton"):
        add_adapter(model, LoRAConfig())
        assert fused_step_why_not(model) == "a part of the model was replaced"
    with pytest.raises(ValueError, match="is quantized when they are merged"):
        quantize(model)


def test_a_fresh_adapter_changes_nothing():
    for kind in ("lora", "rslora", "dora"):
        model = build("grouped")
        before = call(model)
        add_adapter(model, LoRAConfig(kind=kind, targets=("attention", "feedforward", "embedding", "head")))
        torch.testing.assert_close(call(model), before)


def test_the_default_is_what_a_model_has_of_attention_and_feed_forward():
    model = build("experts")
    assert {name.rpartition(".")[0][-10:] for name in add_adapter(model, LoRAConfig()).layers} == {".attention"}
    with pytest.raises(ValueError, match="'feedforward', and this model has none"):
        add_adapter(model, LoRAConfig(targets=("attention", "feedforward")), "asked")


def test_what_cannot_be_added_is_refused_in_a_sentence():
    model = build("grouped")
    with pytest.raises(ValueError, match="'experts', and this model has none"):
        add_adapter(model, LoRAConfig(targets=("experts",)))
    add_adapter(model, LoRAConfig())
    with pytest.raises(ValueError, match="has an adapter 'default' already"):
        add_adapter(model, LoRAConfig())
    with pytest.raises(ValueError, match=r"letters, digits and underscores, not 'a\.b'"):
        add_adapter(model, LoRAConfig(), "a.b")
    for name in ("keys", "training"):
        with pytest.raises(ValueError, match=f"an adapter cannot have the name '{name}'"):
            add_adapter(model, LoRAConfig(), name)
    with pytest.raises(ValueError, match=r"unknown adapter 'other'.*known: default"):
        set_adapters(model, "other")
    with pytest.raises(ValueError, match="adapters are a name, a list of names, or names with weights, not None"):
        set_adapters(model, None)
    for weight in (float("nan"), float("inf"), "0.5", True):
        with pytest.raises(ValueError, match="weight of the adapter 'default' must be a finite number, not"):
            set_adapters(model, {"default": weight})
    with pytest.raises(ValueError, match="updates have no DoRA"):
        LoRAConfig(kind="dora", targets=("experts",))


def adapted_network(kind, bits):
    """A gated network whose projections have adapters, on a frozen base that may be quantized."""
    torch.manual_seed(5)
    network = FeedForward(FeedForwardConfig(activation="swiglu"), 64, 128).requires_grad_(False)
    for name in ("up", "down"):
        layer = getattr(network, name)
        if bits is not None:
            layer = QuantizedLinear(layer, Quantization(bits).quantize(layer.weight))
            setattr(network, name, layer)
        update = LowRank(layer.out_features, layer.in_features, 4, 2.0, has_magnitude=kind == "dora")
        adapt(layer, "default", draw(LoRA({"whole": update}, layer.out_features)))
    for weight in network.parameters():
        weight.data *= 0.2 if weight.requires_grad else 1.0
    return network


def saved_and_gradients(network, x, path):
    """The elements of activations that are kept for the backward pass, the result, and the gradients."""
    own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers())}
    kept = {}

    def keep(t):
        if t.untyped_storage().data_ptr() not in own and t.numel() >= x[..., 0].numel():
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with dispatch.force_path(path), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = network(x)
        trained = [weight for weight in network.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(y.square().mean(), [x, *trained])
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in kept.values()), y.detach(), gradients


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [None, "nf4", 8])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_activation_that_a_down_projection_reads_is_not_kept(kind, bits):
    network, rows = adapted_network(kind, bits), 3 * 50
    x = torch.randn(3, 50, 64, requires_grad=True)
    fewer, *ours = saved_and_gradients(network, x, "triton")
    more, *theirs = saved_and_gradients(network, x, "reference")
    assert more - fewer >= rows * network.down.in_features
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_compiled_networks_do_not_keep_it_either(monkeypatch):
    """Which the compiler would by itself: it computes nothing again that a matrix product reads."""
    monkeypatch.setattr(importlib.import_module("phasor.ops.glu.glu"), "MIN_COMPILED_ELEMENTS", 0)
    network, kept = adapted_network("lora", None), []
    x = torch.randn(3, 50, 64, requires_grad=True)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    with dispatch.force_path("triton"):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = compiled(x)
        torch.testing.assert_close(y, network(x))
    y.sum().backward()
    rows = [t for t in kept if t.numel() % 150 == 0 and t.numel() >= 150 * 64]
    assert sorted(t.numel() // 150 for t in rows) == [64, 256]  # x, and gate and up


def test_what_has_to_see_the_down_projection_called_does():
    network = adapted_network("lora", None)
    x, seen = torch.randn(3, 7, 64).expand(3, 7, 64) @ torch.randn(64, 256), []
    with dispatch.force_path("triton"):
        assert network.adapted_why_not(x) is None
        with torch.no_grad():
            assert network.adapted_why_not(x) == "no gradient is needed"
        network.down.lora["default"].dropout = 0.1
        assert network.adapted_why_not(x) == "the adapter has dropout"
        assert network.eval().adapted_why_not(x) is None
        network.down.register_forward_hook(lambda *_: seen.append(1))
        assert network.adapted_why_not(x) == "the down projection has no adapter, or has hooks"
        network(torch.randn(2, 64))
    assert seen == [1]

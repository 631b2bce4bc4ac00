"""Layers whose heads differ in width and number: each computes what the layer of a model with those heads does."""

import pytest
import torch
from schemes import SCHEMES, build, tiny, tokens

import phasor
from phasor.config import LayerConfig
from phasor.config.parameters import parameters_of
from phasor.generation.runners.fused import attention_why_not, layers_of, model_why_not
from phasor.kv_cache.static import StaticKVCache
from phasor.lab.rotary_model import rotary_models
from phasor.models.family import differences

WIDE, NARROW = {"head_dim": 12, "num_kv_heads": 1}, {"head_dim": 8, "num_kv_heads": 2}
SAME = 1e-12  # float64, of the largest value: the same sums in another order
COUNT = 11
IN_LAYERS = [name for name, scheme in SCHEMES.items() if "input" not in scheme.acts_on and scheme.axes == 1]


def mixed(scheme, **changes):
    """A wide layer and a narrow one, in a model whose own heads are narrow."""
    return tiny(scheme, layers=(LayerConfig(attention=WIDE), {}), **NARROW | changes)


def fits_wide_heads(scheme):
    """Whether a scheme takes heads of 12 features: the factors of some are for pairs of 8."""
    try:
        return bool(tiny(scheme, **WIDE))
    except ValueError:
        return False


SCHEMES_OF_BOTH = [name for name in IN_LAYERS if fits_wide_heads(name)]
PLAIN = [name for name in SCHEMES_OF_BOTH if not build(tiny(name)).decoder.positions.state_dict()]


def assert_same(found, expected):
    assert (found - expected).abs().max() < SAME * expected.abs().max()


@pytest.mark.parametrize("scheme", PLAIN)
@torch.no_grad()
def test_a_layer_computes_what_it_does_in_a_model_with_its_heads(scheme):
    one, other = build(mixed(scheme)).double(), build(tiny(scheme, **WIDE)).double()
    kept = {name: x for name, x in one.state_dict().items() if not name.startswith("decoder.blocks.1.")}
    other.load_state_dict(kept, strict=False)
    records = phasor.Record("hidden"), phasor.Record("hidden")
    for model, record in zip((one, other), records, strict=True):
        model(tokens(2, COUNT), record=record)
    assert_same(records[0].hidden[1], records[1].hidden[1])


@pytest.mark.parametrize("scheme", SCHEMES_OF_BOTH)
@torch.no_grad()
def test_it_does_not_matter_which_heads_are_the_models(scheme):
    """With a cache, too."""
    ids = tokens(2, COUNT)
    one = build(mixed(scheme)).double()
    other = build(tiny(scheme, layers=({}, LayerConfig(attention=NARROW)), **WIDE)).double()
    other.load_state_dict(one.state_dict())
    length = {"length": COUNT} if SCHEMES[scheme].depends_on_length else {}
    expected = one(ids, **length)
    assert torch.equal(other(ids, **length), expected)
    cache = one.new_cache(2, COUNT)
    pieces = [one(piece, cache=cache) for piece in ids[:, :9].split([5, 1, 3], dim=1)]
    static = StaticKVCache(cache)
    pieces += [one(ids[:, i : i + 1], cache=static) for i in range(9, COUNT)]
    assert_same(torch.cat(pieces, dim=1), expected)
    assert parameters_of(one.config).total == sum(weight.numel() for weight in one.parameters())


def test_heads_that_are_the_models_are_no_difference():
    assert differences(tiny("rotary", attention=NARROW, **NARROW), tiny("rotary", **NARROW)) == []
    found = differences(mixed("rotary"), tiny("rotary", **NARROW))
    assert found[:2] == ["layers' position.rotary_dim (12 and 8)", "layers' attention.head_dim (12 and None)"]


def test_a_cache_keeps_the_heads_of_each_layer():
    config = mixed("rotary")
    assert [config.cached_per_token(i)["keys"].shape for i in range(2)] == [(1, 12), (2, 8)]
    assert config.cached_per_token(0)["values"].shape == (1, 12)


def test_the_lab_shows_a_scheme_for_each_width():
    assert [(model.head_dim, layers) for model, layers in rotary_models(mixed("rotary"))] == [(12, (0,)), (8, (1,))]


def test_layers_with_other_heads_are_modules_of_the_fused_step():
    model = build(mixed("rotary"))
    assert model_why_not(model) is None
    reasons = [attention_why_not(*each) for each in layers_of(model.decoder)]
    assert reasons == ["the heads of some layers are not the model's", None]


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"num_heads \(4\) is not divisible by SoftmaxAttentionConfig.num_kv_heads"):
        tiny("rotary", layers=(LayerConfig(attention={"num_kv_heads": 3}), {}))
    with pytest.raises(ValueError, match="rotary dimension of a head must be even"):
        tiny("rotary", layers=(LayerConfig(attention={"head_dim": 9}), {}))

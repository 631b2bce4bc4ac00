"""Configurations: JSON both ways, equality, kinds by name, dict and object, and a scheme from outside."""

import dataclasses
import json
import types
import typing

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import phasor
import phasor.config
from phasor import ModelConfig, Transformer, preset
from phasor.config import ActivationConfig, PositionConfig
from phasor.config.schema import Choice, Config, field_types
from phasor.inspect.kinds import CHOICES, GROUPS, describe_kinds
from phasor.nn.feed_forward import ACTIVATIONS_BY_NAME, GLU_ACTIVATIONS, FeedForward, activate
from phasor.nn.positions import configs
from phasor.nn.positions.base import Position
from phasor.parallel.mesh import Mesh, mesh_why_not

RECORDS = [*vars(phasor.config).values(), *configs().values()]
RECORDS = [c for c in RECORDS if isinstance(c, type) and (not issubclass(c, Choice) or hasattr(c, "kind"))]
KINDS = [(base, kind) for base in CHOICES.values() for kind in base.kinds]
SIZES = {"vocab_size": 20, "dim": 16, "num_layers": 2, "num_heads": 2}

# Fields whose good values are fewer than their types allow.
PLAIN = st.sampled_from([cls() for cls in ActivationConfig.kinds.values() if not cls.gated])
SPECIAL = {
    **{(f"{of}ClassifierConfig", "dense"): st.none() | PLAIN for of in ("Sequence", "Token")},
    **{(f"{of}ClassifierConfig", "labels"): st.lists(st.text(), min_size=1).map(tuple) for of in ("Sequence", "Token")},
    ("SoftmaxAttentionConfig", "bias"): st.lists(st.sampled_from(["q", "k", "v", "out"]), unique=True).map(tuple),
    ("CombinedConfig", "schemes"): st.permutations(["rotary", "alibi", "fire", "temperature"]).map(
        lambda kinds: tuple(PositionConfig.from_dict({"kind": kind}) for kind in kinds[:3])
    ),
    ("MaskedHeadConfig", "activation"): PLAIN,
    ("ProportionalScaling", "fraction"): st.floats(0.01, 1.0),
    ("T5PositionConfig", "num_buckets"): st.integers(1, 16).map(lambda n: 4 * n),
    ("T5PositionConfig", "max_distance"): st.integers(64, 512),
    ("ModelConfig", "vocab_size"): st.integers(1, 99),
    ("ModelConfig", "dim"): st.sampled_from([32, 64]),
    ("ModelConfig", "num_heads"): st.sampled_from([2, 4]),
    ("ModelConfig", "head_dim"): st.sampled_from([None, 16]),
    ("ModelConfig", "num_kv_heads"): st.sampled_from([None, 1, 2]),
}
DROPOUT = st.floats(0.0, 0.99)


def values(cls, name, hint):
    """Random good values of a field, from its type."""
    if (cls.__name__, name) in SPECIAL:
        return SPECIAL[cls.__name__, name]
    if cls.__name__ == "DropoutConfig":
        return DROPOUT
    return of_type(hint)


def of_type(hint):
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([of_type(a) for a in args])
    if hint is type(None):
        return st.none()
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(of_type(args[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Choice) and not hasattr(hint, "kind"):
        return st.sampled_from(list(hint.kinds.values())).flatmap(records)
    if isinstance(hint, type) and issubclass(hint, Config):
        return records(hint)
    return {
        int: st.integers(1, 64).map(lambda n: 2 * n),
        float: st.floats(1.001, 1e6),
        bool: st.booleans(),
        str: st.text(),
    }[hint]


@st.composite
def records(draw, cls):
    """A random good configuration of a class: some fields given, the others at their defaults."""
    hints = field_types(cls)
    for _ in range(8):
        fields = {}
        for field in dataclasses.fields(cls):
            needed = field.default is dataclasses.MISSING
            if needed or draw(st.booleans()):
                fields[field.name] = draw(values(cls, field.name, hints[field.name]))
        try:
            return cls(**fields)
        except ValueError:
            pass  # fields that do not go together
    assume(False)


@pytest.mark.sample(50)
@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_json_round_trip(cls, data):
    config = data.draw(records(cls))
    text = config.to_json()
    again = cls.from_json(text)
    assert again == config
    assert type(again) is type(config)
    assert hash(again) == hash(config)
    assert again.to_json() == text
    assert json.loads(text) == config.to_dict()
    assert cls.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("base", CHOICES.values(), ids=CHOICES)
@given(data=st.data())
def test_a_choice_is_read_back_as_its_own_kind(base, data):
    config = data.draw(of_type(base))
    again = base.from_dict(config.to_dict())
    assert again == config
    assert type(again) is type(config)
    assert again.kind == config.kind


@pytest.mark.parametrize("name", phasor.kinds("presets"))
def test_presets_survive_json(name):
    config = preset(name)
    assert ModelConfig.from_json(config.to_json()) == config


def defaults(base, kind):
    """A kind's fields where it needs some."""
    fields = {
        "linear": {"factor": 2.0},
        "ntk": {"factor": 2.0},
        "dynamic-ntk": {"factor": 2.0, "original_length": 16},
        "yarn": {"factor": 2.0, "original_length": 64},
        "dynamic-yarn": {"original_length": 64},
        "llama3": {"factor": 8.0, "original_length": 64},
        "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_length": 16, "factor": 2.0},
        "proportional": {"fraction": 0.5},
    }
    return fields[kind] if base is phasor.config.Extension else {}


@pytest.mark.parametrize(("base", "kind"), KINDS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_kind_is_accepted_by_name_by_dict_and_by_object(base, kind):
    fields = defaults(base, kind)
    made = base.kinds[kind](**fields)
    holder = type("Holder", (Config,), {"__annotations__": {"part": base}})
    assert holder(part=made).part is made
    assert holder(part={"kind": kind, **fields}).part == made
    assert holder.from_json(holder(part=made).to_json()).part == made
    if not fields:
        assert holder(part=kind).part == made


def test_configurations_are_values():
    one, same, other = (phasor.RotaryConfig(base=b) for b in (5.0, 5.0, 6.0))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert len({one, same, other}) == 2
    assert phasor.PreConfig() != phasor.PostConfig()
    assert phasor.RotaryConfig() != phasor.XPosConfig()
    assert phasor.RotaryConfig() != phasor.AxialConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.base = 7.0


def test_numbers_and_lists_are_brought_to_their_types():
    assert phasor.RotaryConfig(base=500000).to_json() == phasor.RotaryConfig(base=500000.0).to_json()
    assert isinstance(phasor.RotaryConfig(base=500000).base, float)
    assert phasor.SoftmaxAttentionConfig(bias=["q"]) == phasor.SoftmaxAttentionConfig(bias=("q",))
    assert ModelConfig(**SIZES, layers=[{"attention": {"window": 3}}]).layers[0].attention.window == 3


def test_replace_changes_what_it_is_told_and_checks_again():
    config = ModelConfig(**SIZES, position="rotary")
    wider = config.replace(dim=32, norm="rmsnorm")
    assert (wider.dim, wider.norm.kind, wider.position) == (32, "rmsnorm", config.position)
    assert config.dim == 16
    assert wider.replace(dim=16, norm="layernorm") == config
    with pytest.raises(ValueError, match="not divisible"):
        config.replace(num_heads=3)


def test_fields_left_out_of_a_dict_take_their_defaults():
    assert ModelConfig.from_dict(SIZES) == ModelConfig(**SIZES)
    assert PositionConfig.from_dict({"kind": "alibi"}) == phasor.ALiBiConfig()


def test_a_learned_table_takes_the_models_length():
    config = ModelConfig(**SIZES, position="learned", max_length=77)
    assert config.input_position.max_length == 77
    assert config.replace(max_length=99).input_position.max_length == 99
    assert ModelConfig(**SIZES, position={"kind": "learned", "max_length": 9}).input_position.max_length == 9


def test_groups_of_kinds_cover_the_registries():
    registered = {cls.what for cls in Choice.__subclasses__() if cls.__module__.startswith("phasor.")}
    assert {cls.what for cls in CHOICES.values()} == registered
    for group in GROUPS:
        lines = describe_kinds(group)
        assert phasor.kinds(group) == list(lines)
        assert lines
        for name, line in lines.items():
            assert name
            assert line.strip()
            assert "\n" not in line
    for group, base in CHOICES.items():
        ours = {cls for cls in everything_under(base) if cls.__module__.startswith("phasor.")}
        assert set(phasor.kinds(group)) == {cls.kind for cls in ours if "kind" in vars(cls)}


def everything_under(cls):
    return {cls}.union(*(everything_under(sub) for sub in cls.__subclasses__()))


def test_the_choices_of_the_specification_are_there():
    """What the literature names, written out: a choice that disappears is noticed."""
    expected = {
        "positions": "none sinusoidal learned counting normalized t5 alibi rotary xpos axial mrope",
        "extensions": "linear ntk dynamic-ntk yarn dynamic-yarn llama3 longrope proportional",
        "sparse": "chunked strided dilated top-k",
        "norms": "layernorm rmsnorm none",
        "placements": "pre post sandwich deepnorm output parallel",
        "heads": "lm mlm none pooled",
        "initializations": "normal xavier fan-in t5",
        "shapes": "encoder decoder encoder-decoder",
        "activations": "relu relu2 silu gelu gelu-tanh xielu glu reglu swiglu swiglu-clamped geglu geglu-tanh",
        "pairings": "half adjacent",
        "qk-norms": "none head heads whole",
        "poolers": "none first cls mean max",
        "presets": "transformer-base transformer-big bert roformer gpt-2 t5 t5-1.1 llama-2 llama-3.1 palm grok-1 "
        "deepnet bloom mpt",
    }
    for group, names in expected.items():
        assert set(names.split()) <= set(phasor.kinds(group)), group
    assert set(expected) <= set(GROUPS)


def test_tables_of_names_are_the_types_of_their_fields():
    fields = {
        "shapes": field_types(ModelConfig)["shape"],
        "pairings": field_types(phasor.RotaryConfig)["pairing"],
        "qk-norms": field_types(phasor.SoftmaxAttentionConfig)["qk_norm"],
        "poolers": field_types(phasor.PooledHeadConfig)["pooler"],
    }
    for group, hint in fields.items():
        assert phasor.kinds(group) == list(typing.get_args(hint))


def test_every_activation_has_a_function():
    gated = {kind for kind, cls in ActivationConfig.kinds.items() if cls.gated}
    assert set(ACTIVATIONS_BY_NAME) == set(ActivationConfig.kinds) - gated
    assert set(GLU_ACTIVATIONS) | {"swiglu-clamped"} == gated
    for name in ActivationConfig.kinds:
        config = phasor.FeedForwardConfig(activation=name)
        assert activate(torch.ones(6), config.activation).shape == (3 if config.gated else 6,)
        assert FeedForward(config, 4, 6)(torch.ones(2, 4)).shape == (2, 4)


FIELD_OF = {"positions": "position", "norms": "norm", "placements": "placement", "initializations": "init"}
PARTS = [(FIELD_OF[group], kind) for group in FIELD_OF for kind in phasor.kinds(group)]


@pytest.mark.parametrize(("field", "kind"), PARTS)
def test_every_kind_has_a_module(field, kind):
    model = Transformer(ModelConfig(**SIZES, **{field: kind}))
    assert model(torch.zeros(1, 3, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize("kind", phasor.kinds("heads"))
def test_every_head_has_a_module(kind):
    model = Transformer(ModelConfig(**SIZES, shape="encoder", head=kind))
    expected = {"lm": (1, 3, 20), "mlm": (1, 3, 20), "none": (1, 3, 16), "pooled": (1, 16)}
    expected |= {"sequence-classifier": (1, 2), "token-classifier": (1, 3, 2)}
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == expected[kind]


@pytest.fixture
def outside():
    """A scheme somebody else wrote: odd positions flip the sign of a learned share of the input."""

    class AlternateConfig(PositionConfig, kind="alternate"):
        """Every second token changes sign."""

        strength: float = 1.0
        acts_on = ("input",)

    class Alternate(Position, config=AlternateConfig):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(()))

        def reset_parameters(self, config):
            torch.nn.init.ones_(self.weight)

        def on_input(self, x, seq):
            sign = 1 - 2 * (seq.positions % 2).to(x.dtype)
            return x * (1 + self.config.strength * self.weight * sign[..., None])

    yield AlternateConfig
    del Position.modules_by_config[AlternateConfig]
    del PositionConfig.kinds["alternate"]


def test_a_scheme_from_outside_is_a_scheme_like_any_other(outside):
    assert "alternate" in phasor.kinds("positions")
    assert describe_kinds("positions")["alternate"] == "Every second token changes sign."
    config = ModelConfig(**SIZES, position={"kind": "alternate", "strength": 0.5})
    assert config.position == outside(strength=0.5)
    assert ModelConfig.from_json(config.to_json()) == config
    model = Transformer(config).eval()
    same = torch.full((1, 4), 7)
    logits = model(same)
    moved = model(same, positions=torch.tensor([1, 0, 1, 0]))
    assert not torch.allclose(logits[0, 0], logits[0, 1])
    assert not torch.allclose(logits[0, 0], moved[0, 0])
    logits.sum().backward()
    assert model.decoder.positions[0].weight.grad.isfinite()


def test_a_scheme_from_outside_leaves_with_its_owner():
    assert "alternate" not in phasor.kinds("positions")
    with pytest.raises(ValueError, match="unknown position scheme 'alternate'"):
        ModelConfig(**SIZES, position="alternate")


def test_a_scheme_nobody_computes_says_so():
    class OrphanConfig(PositionConfig, kind="orphan"):
        """A configuration without a module."""

    try:
        with pytest.raises(ValueError, match="no module computes the position scheme 'orphan'"):
            Transformer(ModelConfig(**SIZES, position="orphan"))
    finally:
        del PositionConfig.kinds["orphan"]


def test_a_scheme_that_no_layer_uses_has_no_weights():
    own = phasor.LayerConfig(position="rotary")
    unused = Transformer(ModelConfig(**SIZES, position="t5", layers=(own,)))
    assert [name for name, _ in unused.named_parameters() if "positions" in name] == []
    used = Transformer(ModelConfig(**SIZES, position="t5", layers=(own, phasor.LayerConfig())))
    assert [name for name, _ in used.named_parameters() if "positions" in name] == ["decoder.positions.0.weight"]
    on_input = Transformer(ModelConfig(**SIZES, position="learned", layers=(own,)))
    assert [name for name, _ in on_input.named_parameters() if "positions" in name] == ["decoder.positions.0.weight"]


def test_a_scheme_that_every_layer_overrides_is_checked():
    wide = phasor.RotaryConfig(rotary_dim=512)
    with pytest.raises(ValueError, match="rotary_dim is 512, wider than the head"):
        ModelConfig(**SIZES, position=wide, layers=(phasor.LayerConfig(position="alibi"),))


def test_capped_sinks_name_the_scheme_that_they_do_not_go_with():
    capped = {"window": 4, "sink_tokens": 1, "cap_sinks": True}
    with pytest.raises(ValueError, match="and not 'axial'"):
        ModelConfig(**SIZES, position="rotary", attention=capped, layers=(phasor.LayerConfig(position="axial"),))
    with pytest.raises(ValueError, match="and not 'learned'"):
        ModelConfig(**SIZES, position="learned", attention=capped, layers=(phasor.LayerConfig(position="rotary"),))


SIDES = {"vocab_size": 9, "dim": 8, "num_layers": 2, "num_heads": 2, "shape": "encoder-decoder"}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"shape": "decoder", "encoder": {"num_heads": 1}}, "encoder is for an encoder-decoder, not for a decoder"),
        ({"encoder": {"dim": 16}}, "share a table of tokens: give EmbeddingConfig.source_vocab_size"),
        ({"encoder": {"num_heads": 3, "head_dim": 4, "num_kv_heads": 2}}, "num_heads .3. is not divisible"),
        ({"encoder": {"num_heads": 0}}, "^EncoderConfig.num_heads must be greater than 0"),
        ({"position": "rotary", "encoder": {"head_dim": 7}}, "^ModelConfig.encoder: the rotary dimension of a head"),
    ],
)
def test_an_encoder_that_does_not_fit_its_decoder_is_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        ModelConfig(**SIDES | fields)


def test_an_encoder_takes_what_it_does_not_name_from_the_model():
    config = ModelConfig(**SIDES, position="rotary", num_encoder_layers=3, encoder={"layers": [{}, {}, {}]})
    encoder = config.for_side("encoder")
    assert (encoder.depth("encoder"), encoder.position, config.for_side("decoder")) == (3, config.position, config)
    assert ModelConfig.from_json(config.to_json()) == config
    assert mesh_why_not(config, Mesh(shard=2), 64).startswith("an encoder that differs from the decoder")

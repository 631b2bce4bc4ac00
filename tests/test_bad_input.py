"""A user's mistake is one ValueError, one sentence that names it, raised where it was made."""

import dataclasses
import re
from itertools import product

import numpy as np
import pytest
import torch

import phasor.config
from phasor import (
    ALiBiConfig,
    AttentionConfig,
    AxialConfig,
    DropoutConfig,
    DynamicNTKScaling,
    DynamicYaRN,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
    LearnedConfig,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    MaskedHeadConfig,
    ModelConfig,
    MultiSectionConfig,
    NTKScaling,
    PooledHeadConfig,
    ProportionalScaling,
    Record,
    Rotary,
    RotaryConfig,
    SinusoidalConfig,
    T5PositionConfig,
    Transformer,
    XPosConfig,
    YaRN,
    balancing_loss,
    kinds,
    preset,
)
from phasor.config.schema import Choice, Config
from phasor.nn.positions import configs

NAN, INF = float("nan"), float("inf")
SIZES = {"vocab_size": 20, "dim": 16, "num_layers": 2, "num_heads": 2}
LONGROPE = {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_length": 16}


def mistake(make):
    """The error something ends in, None where it ends well."""
    try:
        make()
    except ValueError as error:
        return error


def assert_refusal(make, *mentions):
    """The mistake gives one sentence, and the sentence names what it is about."""
    error = mistake(make)
    assert error is not None, "nothing was refused"
    assert_one_sentence(error)
    for mention in mentions:
        assert str(mention) in str(error)


def assert_one_sentence(error):
    assert type(error) is ValueError
    assert str(error).strip()
    assert "\n" not in str(error)
    assert len(str(error)) < 700  # the longest ones list the names of a group


def config(**fields):
    return ModelConfig(**SIZES | fields)


def cases(table):
    """Parametrize over a dict of name: (what is done, what the sentence mentions...)."""
    return pytest.mark.parametrize(("make", "mentions"), [(f, m) for f, *m in table.values()], ids=table)


UNKNOWN = {
    "kind-by-name": (lambda: config(position="rotari"), "'rotari'", "did you mean 'rotary'", "alibi", "sinusoidal"),
    "kind-in-dict": (lambda: config(norm={"kind": "rmsnrm"}), "'rmsnrm'", "did you mean 'rmsnorm'", "layernorm"),
    "kind-nothing-like-it": (lambda: config(placement="zzz"), "'zzz'", "known: pre, post, sandwich"),
    "kind-missing": (lambda: config(position={"base": 5.0}), "kind", "rotary"),
    "kind-not-text": (lambda: config(position={"kind": ["rotary"]}), "position scheme", "known:"),
    "kind-of-another-class": (lambda: RotaryConfig.from_dict({"kind": "alibi"}), "alibi", "RotaryConfig"),
    "extension": (lambda: RotaryConfig(extension="yarm"), "'yarm'", "did you mean 'yarn'", "longrope"),
    "field": (lambda: config(num_head=3), "num_head", "did you mean 'num_heads'", "known: vocab_size, dim"),
    "field-in-dict": (lambda: config(attention={"windw": 3}), "AttentionConfig", "did you mean 'window'"),
    "field-of-kind": (lambda: config(norm={"kind": "rmsnorm", "bias": True}), "RMSNormConfig", "'bias'", "eps"),
    "field-not-text": (lambda: config(attention={1: 2}), "field of AttentionConfig", "1"),
    "field-in-replace": (lambda: config().replace(dims=3), "dims", "did you mean 'dim'"),
    "fields-without-names": (lambda: ModelConfig(20, 16), "by name"),
    "fields-missing": (lambda: ModelConfig(dim=16), "vocab_size", "num_layers", "num_heads"),
    "activation": (lambda: FeedForwardConfig(activation="swigl"), "'swigl'", "did you mean 'swiglu'", "geglu"),
    "activation-of-masked-head": (lambda: MaskedHeadConfig(activation="swiglu"), "swiglu", "gelu"),
    "shape": (lambda: config(shape="decodr"), "shape", "'decodr'", "did you mean 'decoder'", "'encoder'"),
    "pairing": (lambda: RotaryConfig(pairing="haf"), "pairing", "did you mean 'half'", "'adjacent'"),
    "projection": (lambda: AttentionConfig(bias=["q", "o"]), "bias[1]", "'o'", "'out'"),
    "preset": (lambda: preset("gpt2"), "'gpt2'", "did you mean 'gpt-2'", "llama-3.1", "bloom"),
    "preset-not-text": (lambda: preset(["gpt-2"]), "gpt-2", "known:"),
    "preset-field": (lambda: preset("gpt-2", n_layer=3), "n_layer", "num_layers"),
    "group": (lambda: kinds("position"), "'position'", "did you mean 'positions'", "activations"),
    "group-not-text": (lambda: kinds(["positions"]), "group of kinds", "known:"),
    "record": (lambda: Record("hiden"), "'hiden'", "did you mean 'hidden'", "router"),
    "rotary-field": (lambda: Rotary(head_dim=8, bas=3.0), "bas", "did you mean 'base'"),
    "model-of-a-name": (lambda: Transformer("gpt-2"), "ModelConfig", "str"),
    "model-of-a-dict": (lambda: Transformer(SIZES), "ModelConfig", "dict"),
    "json": (lambda: ModelConfig.from_json("{"), "not JSON"),
    "json-not-text": (lambda: ModelConfig.from_json(None), "not JSON"),
    "json-not-a-record": (lambda: ModelConfig.from_json("[1]"), "ModelConfig", "[1]"),
    "json-nan": (lambda: RotaryConfig.from_json('{"base": NaN}'), "RotaryConfig.base", "nan"),
    "registered-twice": (
        lambda: type("Again", (phasor.config.PositionConfig,), {}, kind="rotary"),
        "'rotary'",
        "registered already",
    ),
}


@cases(UNKNOWN)
def test_unknown_names(make, mentions):
    assert_refusal(make, *mentions)


SETTINGS = {
    "odd-rotary-width": (lambda: config(dim=14, position="rotary"), "even", "7"),
    "odd-partial-width": (lambda: RotaryConfig(rotary_dim=5), "RotaryConfig.rotary_dim", "5"),
    "no-rotary-width": (lambda: RotaryConfig(rotary_dim=0), "RotaryConfig.rotary_dim", "0"),
    "rotary-wider-than-head": (lambda: config(position={"kind": "rotary", "rotary_dim": 10}), "10", "8"),
    "rotary-head-not-whole": (lambda: Rotary(head_dim=8.0), "8.0"),
    "rotary-head-text": (lambda: Rotary(head_dim="8"), "'8'"),
    "rotary-of-other-config": (lambda: Rotary(ALiBiConfig(), head_dim=8), "RotaryConfig", "ALiBiConfig"),
    "rotary-in-one-layer": (lambda: config(layers=[{"position": {"kind": "rotary", "rotary_dim": 12}}]), "12", "8"),
    "heads-do-not-divide": (lambda: config(dim=15), "15", "num_heads (2)"),
    "kv-heads-do-not-divide": (lambda: config(num_heads=4, num_kv_heads=3), "num_heads (4)", "num_kv_heads (3)"),
    "more-kv-heads": (lambda: config(num_kv_heads=4), "num_heads (2)", "num_kv_heads (4)"),
    "preset-heads": (lambda: preset("gpt-2", dim=100, num_heads=3), "100", "3"),
    "yarn-without-length": (lambda: YaRN(factor=8.0), "YaRN", "original_length"),
    "yarn-by-name": (lambda: RotaryConfig(extension="yarn"), "YaRN", "original_length", "factor"),
    "yarn-betas": (lambda: YaRN(factor=8.0, original_length=64, beta_fast=1.0, beta_slow=2.0), "beta_fast", "1.0"),
    "yarn-negative-mscale": (lambda: YaRN(factor=8.0, original_length=64, mscale=-1.0), "mscale", "-1.0"),
    "dynamic-without-length": (lambda: DynamicYaRN(), "DynamicYaRN", "original_length"),
    "factor-below-one": (lambda: LinearScaling(factor=0.5), "LinearScaling.factor", "0.5"),
    "llama3-factors": (
        lambda: Llama3Scaling(factor=8.0, original_length=64, low_freq_factor=4.0),
        "high_freq_factor",
        "low_freq_factor",
    ),
    "ntk-width-two": (lambda: Rotary(head_dim=2, extension=NTKScaling(factor=2.0)), "'ntk'", "at least 4", "2"),
    "dynamic-ntk-width-two": (
        lambda: config(
            num_heads=8, position={"kind": "rotary", "extension": DynamicNTKScaling(factor=2.0, original_length=8)}
        ),
        "'dynamic-ntk'",
        "at least 4",
    ),
    "axial-ntk-width-two": (lambda: Rotary(AxialConfig(extension=NTKScaling(factor=2.0)), head_dim=4), "at least 4"),
    "longrope-lists-differ": (
        lambda: LongRoPE(short_factor=[1.0], long_factor=[1.0, 2.0], original_length=64, factor=2.0),
        "short_factor has 1",
        "2",
    ),
    "longrope-count": (lambda: Rotary(head_dim=16, extension=LongRoPE(**LONGROPE)), "4 entries", "16", "8 pairs"),
    "longrope-count-axial": (lambda: Rotary(AxialConfig(extension=LongRoPE(**LONGROPE)), head_dim=8), "4 entries"),
    "longrope-negative": (lambda: LongRoPE(**LONGROPE | {"long_factor": [1.0, 1.0, 1.0, -1.0]}), "greater than 0"),
    "longrope-short-original": (lambda: LongRoPE(**LONGROPE | {"original_length": 1}), "original_length", "1"),
    "proportional": (lambda: ProportionalScaling(fraction=1.5), "fraction", "1.5"),
    "sections-do-not-add-up": (lambda: Rotary(MultiSectionConfig(sections=[1, 1, 1]), head_dim=8), "[1, 1, 1]", "4"),
    "sections-in-model": (lambda: config(position=MultiSectionConfig(sections=[2, 2, 2])), "[2, 2, 2]", "4"),
    "sections-empty": (lambda: MultiSectionConfig(sections=[]), "sections"),
    "sections-of-none": (lambda: MultiSectionConfig(sections=[4, 0, 0]), "sections"),
    "too-few-pairs-for-sections": (lambda: Rotary(MultiSectionConfig(), head_dim=4), "at least 1"),
    "axial-width": (lambda: Rotary(AxialConfig(), head_dim=6), "axial", "6"),
    "axial-and-sections": (lambda: AxialConfig(sections=[1, 1]), "AxialConfig", "sections"),
    "axial-not-axial": (lambda: AxialConfig(axial=False), "AxialConfig", "'axial'"),
    "mrope-axial": (lambda: MultiSectionConfig(axial=True), "MultiSectionConfig", "'axial'"),
    "xpos-axial": (lambda: XPosConfig(axial=True), "XPosConfig", "'axial'"),
    "xpos-sections": (lambda: XPosConfig(sections=[2, 2]), "XPosConfig", "'sections'"),
    "xpos-without-decay": (lambda: XPosConfig(decay=None), "decay"),
    "base-one": (lambda: RotaryConfig(base=1.0), "base", "1.0"),
    "sinusoidal-width-when-added": (lambda: SinusoidalConfig(width=8), "width", "concat"),
    "sinusoidal-offset": (lambda: SinusoidalConfig(offset=-1), "offset", "-1"),
    "learned-offset": (lambda: LearnedConfig(offset=-1), "offset", "-1"),
    "t5-buckets": (lambda: T5PositionConfig(num_buckets=6), "num_buckets", "6"),
    "t5-distance": (lambda: T5PositionConfig(max_distance=16), "max_distance", "16", "32"),
    "input-scheme-in-a-layer": (lambda: LayerConfig(position="learned"), "learned", "ModelConfig.position"),
    "sinks-without-window": (lambda: AttentionConfig(sink_tokens=4), "sink_tokens=4", "window"),
    "negative-sinks": (lambda: AttentionConfig(window=4, sink_tokens=-1), "sink_tokens", "-1"),
    "no-window": (lambda: AttentionConfig(window=0), "window", "0"),
    "bias-twice": (lambda: AttentionConfig(bias=["q", "q"]), "twice"),
    "bias-as-flag": (lambda: AttentionConfig(bias=True), "bias", "list"),
    "qk-norm-without-norm": (lambda: config(norm="none", attention={"qk_norm": "head"}), "qk_norm", "'none'"),
    "qk-norm-in-a-layer": (
        lambda: config(norm="none", layers=[{}, {"attention": {"qk_norm": "whole"}}]),
        "'whole'",
        "'none'",
    ),
    "qk-norm-bias-without-norm": (lambda: AttentionConfig(qk_norm_bias=False), "qk_norm_bias", "qk_norm"),
    "limit-without-clamp": (
        lambda: FeedForwardConfig(activation={"kind": "swiglu", "limit": 5.0}),
        "SwiGLUConfig",
        "'limit'",
    ),
    "top-k": (lambda: ExpertsConfig(num_experts=2, top_k=3), "top_k (3)", "num_experts (2)"),
    "gate-of-no-expert": (lambda: ExpertsConfig(num_experts=2, shared_gate=True), "shared_gate", "shared_dim"),
    "dropout-of-one": (lambda: DropoutConfig(residual=1.0), "residual", "1.0"),
    "encoder-layers-of-a-decoder": (lambda: config(num_encoder_layers=2), "num_encoder_layers", "decoder"),
    "source-vocabulary-of-a-decoder": (
        lambda: config(embedding=EmbeddingConfig(source_vocab_size=9)),
        "source_vocab_size",
        "decoder",
    ),
    "pooler-of-a-decoder": (lambda: config(head="pooled"), "pooler", "decoder"),
    "pooled-without-pooler": (lambda: PooledHeadConfig(pooler="none"), "pooler"),
    "pattern-longer-than-the-model": (lambda: config(layers=[{}] * 3), "3 layers", "2"),
    "no-layers": (lambda: config(num_layers=0), "num_layers", "0"),
    "text-for-a-number": (lambda: config(dim="16"), "ModelConfig.dim", "an integer", "'16'"),
    "half-a-layer": (lambda: config(num_layers=1.5), "num_layers", "1.5"),
    "flag-for-a-number": (lambda: config(num_layers=True), "num_layers", "True"),
    "number-for-a-flag": (lambda: EmbeddingConfig(tied=1), "tied", "true or false", "1"),
    "nothing-for-a-number": (lambda: config(dim=None), "dim", "None"),
    "number-for-a-part": (lambda: config(norm=3), "norm", "layernorm", "3"),
    "other-part": (lambda: config(norm=RotaryConfig()), "norm", "RotaryConfig"),
    "tensor-for-a-number": (lambda: config(dim=torch.zeros(3, 3)), "dim", "tensor"),
    "number-past-64-bits": (lambda: config(max_length=2**70), "max_length", "63 bits"),
    "number-past-float": (lambda: RotaryConfig(base=10**400), "base", "finite"),
    "scale-text": (lambda: EmbeddingConfig(scale="sqr"), "scale", "'sqr'"),
}


@cases(SETTINGS)
def test_settings_that_cannot_be(make, mentions):
    assert_refusal(make, *mentions)


REQUIRED = {
    "ModelConfig": SIZES,
    "ExpertsConfig": {"num_experts": 4},
    "LinearScaling": {"factor": 2.0},
    "NTKScaling": {"factor": 2.0},
    "DynamicNTKScaling": {"factor": 2.0, "original_length": 16},
    "YaRN": {"factor": 2.0, "original_length": 64},
    "DynamicYaRN": {"original_length": 64},
    "Llama3Scaling": {"factor": 8.0, "original_length": 64},
    "LongRoPE": LONGROPE,
    "ProportionalScaling": {"fraction": 0.5},
}
RECORDS = [
    cls
    for cls in (*(getattr(phasor.config, name) for name in phasor.config.__all__), *configs().values())
    if isinstance(cls, type) and issubclass(cls, Config) and (not issubclass(cls, Choice) or hasattr(cls, "kind"))
]
FIELDS = [(cls, f.name, str(f.type)) for cls in RECORDS for f in dataclasses.fields(cls)]


def make(cls, **fields):
    return cls(**REQUIRED.get(cls.__name__, {}) | fields)


def with_value(cls, name, value):
    """The configuration with a value in one field, or in every place of a field that lists several."""
    lists = "tuple" in str(cls.__dataclass_fields__[name].type)
    return make(cls, **{name: [value] * 4 if lists else value})


@pytest.mark.parametrize(("cls", "name"), [(c, n) for c, n, kind in FIELDS if "float" in kind], ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0, -1e-9])
def test_numbers_in_a_configuration_are_finite_and_not_negative(cls, name, value):
    """A NaN base or an infinite factor would poison every logit; no field has a use for a negative number."""
    assert_refusal(lambda: with_value(cls, name, value), cls.__name__, name)


@pytest.mark.parametrize(("cls", "name"), [(c, n) for c, n, kind in FIELDS if re.search(r"\bint\b", kind)], ids=str)
@pytest.mark.parametrize("value", [-1, 1.5, NAN, True, 2**63])
def test_whole_numbers_in_a_configuration_are_whole_and_not_negative(cls, name, value):
    assert_refusal(lambda: with_value(cls, name, value), name)


JUNK = ["x", "", b"x", [1], {}, {"kind": []}, {"kind": "zzz"}, {1: 2}, object(), (None,), [NAN], 1j, [["q"]], {3}]
JUNK += [torch.zeros(2, 2), np.zeros((2, 2)), np.int64(3), lambda: 0, int, Ellipsis]


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_any_value_in_any_field_is_taken_or_refused_in_one_sentence(cls):
    for name, value in product((f.name for f in dataclasses.fields(cls)), JUNK):
        error = mistake(lambda name=name, value=value: make(cls, **{name: value}))
        if error is not None:
            assert_one_sentence(error)


TOKENS = torch.arange(10).view(2, 5)


@pytest.fixture(scope="module")
def models():
    """One small model of each kind the mistakes below need."""
    dynamic = {"kind": "rotary", "extension": DynamicYaRN(original_length=4)}
    made = {
        "decoder": {},
        "encoder": {"shape": "encoder"},
        "encoder-decoder": {"shape": "encoder-decoder"},
        "windowed": {"attention": {"window": 3}},
        "learned": {"position": "learned", "max_length": 5},
        "learned-offset": {"position": {"kind": "learned", "offset": 2}, "max_length": 5},
        "rotary": {"position": "rotary"},
        "axial": {"position": "axial"},
        "mrope": {"position": "mrope"},
        "xpos": {"position": "xpos"},
        "alibi": {"position": "alibi"},
        "normalized": {"position": "normalized"},
        "dynamic": {"position": dynamic},
        "typed": {"shape": "encoder", "embedding": {"token_types": 2}},
    }
    return {name: Transformer(config(**fields)).eval() for name, fields in made.items()}


def calls(table):
    """Parametrize over calls of a model: name: (model, arguments, keywords, mentions...)."""
    each = [(m, a, k, said) for m, a, k, *said in table.values()]
    return pytest.mark.parametrize(("model", "arguments", "keywords", "mentions"), each, ids=table)


def rows(*given):
    return torch.tensor(given)


TOKEN_MISTAKES = {
    "too-large": ("decoder", [TOKENS + 11], {}, "token id 20", "vocabulary of 20"),
    "negative": ("decoder", [TOKENS - 1], {}, "token id -1", "vocabulary of 20"),
    "target-too-large": ("encoder-decoder", [TOKENS, TOKENS + 11], {}, "token id 20"),
    "source-too-large": ("encoder-decoder", [TOKENS + 11, TOKENS], {}, "token id 20"),
    "floats": ("decoder", [TOKENS.float()], {}, "tokens", "float32"),
    "booleans": ("decoder", [TOKENS.bool()], {}, "tokens", "bool"),
    "one-row": ("decoder", [TOKENS[0]], {}, "[batch, tokens]", "[5]"),
    "three-axes": ("decoder", [TOKENS[None]], {}, "[batch, tokens]", "[1, 2, 5]"),
    "list": ("decoder", [[[1, 2]]], {}, "tokens", "list"),
    "text": ("decoder", ["hello"], {}, "tokens", "str"),
    "nothing": ("decoder", [None], {}, "tokens"),
    "array": ("decoder", [TOKENS.numpy()], {}, "tokens", "ndarray"),
    "no-tokens": ("decoder", [TOKENS[:, :0]], {}, "empty", "[2, 0]"),
    "no-rows": ("decoder", [TOKENS[:0]], {}, "empty", "[0, 5]"),
    "no-target": ("encoder-decoder", [TOKENS], {}, "target"),
    "target-for-decoder": ("decoder", [TOKENS, TOKENS], {}, "target", "decoder"),
    "target-for-encoder": ("encoder", [TOKENS, TOKENS], {}, "target", "encoder"),
    "target-padding-for-decoder": (
        "decoder",
        [TOKENS],
        {"target_attention_mask": TOKENS.bool()},
        "target_attention_mask",
    ),
    "target-rows": ("encoder-decoder", [TOKENS, TOKENS[:1]], {}, "2 rows", "1"),
    "source-rows": ("encoder-decoder", [TOKENS[:1], TOKENS], {}, "1 rows", "2"),
    "types-without-table": ("decoder", [TOKENS], {"token_types": TOKENS * 0}, "token types"),
    "type-too-large": ("typed", [TOKENS], {"token_types": TOKENS * 0 + 2}, "[0, 2)", "2"),
    "type-negative": ("typed", [TOKENS], {"token_types": TOKENS * 0 - 1}, "[0, 2)", "-1"),
    "type-floats": ("typed", [TOKENS], {"token_types": TOKENS * 0.0}, "token_types", "float32"),
    "type-shape": ("typed", [TOKENS], {"token_types": TOKENS[:1] * 0}, "token_types", "[1, 5]"),
    "type-list": ("typed", [TOKENS], {"token_types": [[0] * 5] * 2}, "token_types", "list"),
    "record": ("decoder", [TOKENS], {"record": "hidden"}, "record", "'hidden'"),
}


@calls(TOKEN_MISTAKES)
def test_tokens(models, model, arguments, keywords, mentions):
    assert_refusal(lambda: models[model](*arguments, **keywords), *mentions)


AT = torch.arange(5)
POSITION_MISTAKES = {
    "negative": ("rotary", AT - 1, "-1"),
    "negative-without-scheme": ("decoder", AT - 1, "-1"),
    "floats": ("rotary", AT.float(), "int64", "float32"),
    "int32": ("rotary", AT.int(), "int64", "int32"),
    "list": ("rotary", [0, 1, 2, 3, 4], "int64", "list"),
    "number": ("rotary", torch.tensor(3), "[T]", "[]"),
    "too-few": ("rotary", AT[:4], "[4]", "[2, 5]"),
    "too-many": ("rotary", torch.arange(6), "[6]", "[2, 5]"),
    "too-many-rows": ("rotary", AT.expand(3, 5), "[3, 5]", "[2, 5]"),
    "one-axis-too-many": ("rotary", AT.expand(1, 2, 5), "1"),
    "two-axes-for-text": ("rotary", AT.expand(2, 2, 5), "2"),
    "two-axes-without-scheme": ("decoder", AT.expand(2, 2, 5), "2"),
    "axes-for-learned": ("learned", AT.expand(1, 2, 5), "1"),
    "three-axes-for-grid": ("axial", AT.expand(3, 2, 5), "2", "3"),
    "two-axes-for-mrope": ("mrope", AT.expand(2, 2, 5), "3", "2"),
    "four-dimensions": ("mrope", AT.expand(1, 3, 2, 5), "[1, 3, 2, 5]"),
    "beyond-the-table": ("learned", AT + 1, "position 5", "5 positions"),
    "beyond-the-table-with-offset": ("learned-offset", AT + 1, "position 5", "5 positions"),
    "beyond-the-table-in-one-row": ("learned", torch.stack((AT, AT * 2)), "position 8", "5 positions"),
    "xpos-span": ("xpos", AT * 8192, "32768"),
}


@pytest.mark.parametrize(
    ("model", "positions", "mentions"), [(m, p, s) for m, p, *s in POSITION_MISTAKES.values()], ids=POSITION_MISTAKES
)
def test_positions(models, model, positions, mentions):
    assert_refusal(lambda: models[model](TOKENS, positions=positions), *mentions)


def test_sequence_longer_than_a_learned_table(models):
    assert_refusal(lambda: models["learned"](torch.zeros(1, 6, dtype=torch.int64)), "6 tokens", "5 positions")
    packed = torch.zeros(1, 8, dtype=torch.int64)
    halves = torch.tensor([[0] * 4 + [1] * 4])
    models["learned"](packed, document_ids=halves)  # each document fits
    assert_refusal(lambda: models["learned"](packed, document_ids=halves.new_tensor([[0] * 6 + [1] * 2])), "position 5")


def test_xpos_span_is_a_sequence_and_not_a_position(models):
    models["xpos"](TOKENS, positions=AT + 2**40)
    assert_refusal(lambda: models["xpos"](TOKENS, positions=torch.tensor([0, 1, 2, 3, 32768])), "32768")


REAL = torch.ones(2, 5, dtype=torch.bool)
HOLE = torch.tensor([[True, False, True, True, True], [True] * 5])
BACK = rows([0, 1, 0, 1, 1], [0] * 5)
PACKED = rows([0, 0, 0, 1, 1], [7] * 5)
MASK_MISTAKES = {
    "padding-floats": ("decoder", {"attention_mask": REAL.float()}, "attention_mask", "float32"),
    "padding-numbers": ("decoder", {"attention_mask": REAL.long()}, "attention_mask", "int64"),
    "padding-shape": ("decoder", {"attention_mask": REAL[:1]}, "[2, 5]", "[1, 5]"),
    "padding-list": ("decoder", {"attention_mask": [[True] * 5] * 2}, "attention_mask", "list"),
    "padding-everywhere": ("decoder", {"attention_mask": ~REAL}, "row 0", "no real token"),
    "padding-of-one-row": ("encoder", {"attention_mask": torch.stack((REAL[0], ~REAL[1]))}, "row 1", "no real token"),
    "padding-hole-under-window": ("windowed", {"attention_mask": HOLE}, "row 0", "window"),
    "documents-floats": ("decoder", {"document_ids": REAL.float()}, "document_ids", "float32"),
    "documents-booleans": ("decoder", {"document_ids": REAL}, "document_ids", "bool"),
    "documents-complex": ("decoder", {"document_ids": REAL.to(torch.complex64)}, "document_ids", "complex64"),
    "documents-shape": ("decoder", {"document_ids": BACK[:, :4]}, "[2, 5]", "[2, 4]"),
    "documents-list": ("decoder", {"document_ids": [[0] * 5] * 2}, "document_ids", "list"),
    "documents-return": ("decoder", {"document_ids": BACK}, "row 0", "earlier document"),
    "prefix-for-encoder": ("encoder", {"prefix_length": 2}, "prefix_length", "encoder"),
    "prefix-negative": ("decoder", {"prefix_length": -1}, "prefix_length", "-1"),
    "prefix-too-long": ("decoder", {"prefix_length": 6}, "prefix_length", "5 tokens", "6"),
    "prefix-too-long-in-one-row": ("decoder", {"prefix_length": [1, 9]}, "prefix_length", "9"),
    "prefix-float": ("decoder", {"prefix_length": 2.5}, "prefix_length", "2.5"),
    "prefix-flag": ("decoder", {"prefix_length": True}, "prefix_length", "True"),
    "prefix-text": ("decoder", {"prefix_length": "2"}, "prefix_length", "'2'"),
    "prefix-rows": ("decoder", {"prefix_length": [1, 2, 3]}, "prefix_length", "[1, 2, 3]"),
    "prefix-none-in-list": ("decoder", {"prefix_length": [None, 1]}, "prefix_length", "None"),
    "prefix-float-tensor": ("decoder", {"prefix_length": torch.tensor([1.0, 2.0])}, "prefix_length"),
    "prefix-column": ("decoder", {"prefix_length": rows([1], [2])}, "prefix_length"),
    "prefix-huge": ("decoder", {"prefix_length": 2**70}, "prefix_length"),
    "prefix-object": ("decoder", {"prefix_length": {}}, "prefix_length", "{}"),
}


@pytest.mark.parametrize(
    ("model", "keywords", "mentions"), [(m, k, s) for m, k, *s in MASK_MISTAKES.values()], ids=MASK_MISTAKES
)
def test_padding_documents_and_prefix(models, model, keywords, mentions):
    assert_refusal(lambda: models[model](TOKENS, **keywords), *mentions)


LENGTH_MISTAKES = {
    "shorter": ({"length": 4}, "4", "5 tokens"),
    "nothing": ({"length": 0}, "0", "5 tokens"),
    "negative": ({"length": -1}, "-1", "5 tokens"),
    "flag": ({"length": True}, "length", "True"),
    "float": ({"length": 5.0}, "length", "float"),
    "text": ({"length": "5"}, "length"),
    "tensor": ({"length": torch.tensor([5, 5])}, "length", "Tensor"),
    "past-64-bits": ({"length": 2**70}, "length", "63 bits"),
    "row-shorter": ({"length": [5, 4]}, "4", "row 1"),
    "row-past-64-bits": ({"length": [5, 2**70]}, "length", "63 bits"),
    "too-few-rows": ({"length": [5]}, "1 rows", "2"),
    "too-many-rows": ({"length": [5, 5, 5]}, "3 rows", "2"),
    "row-text": ({"length": ["5", 5]}, "length", "'5'"),
    "row-float": ({"length": [5.0, 5]}, "length", "5.0"),
    "row-of-documents-without-documents": ({"length": [[5, 1], [5]]}, "row 0", "2 documents"),
    "document-shorter": ({"document_ids": PACKED, "length": [[3, 1], [5]]}, "1", "row 0"),
    "first-document-shorter": ({"document_ids": PACKED, "length": [[2, 2], [5]]}, "2", "row 0"),
    "one-for-all-documents-shorter": ({"document_ids": PACKED, "length": 2}, "2", "row 0"),
    "too-many-documents": ({"document_ids": PACKED, "length": [[3, 2], [5, 5]]}, "row 1", "2 documents"),
    "shorter-than-the-real-tokens": ({"attention_mask": HOLE, "length": [3, 5]}, "3", "4 tokens"),
}


@pytest.mark.parametrize("model", ["decoder", "rotary", "dynamic", "normalized", "alibi", "encoder"])
@pytest.mark.parametrize(("keywords", "mentions"), [(k, s) for k, *s in LENGTH_MISTAKES.values()], ids=LENGTH_MISTAKES)
def test_length(models, model, keywords, mentions):
    """Refused for every scheme, also where the length has no effect."""
    assert_refusal(lambda: models[model](TOKENS, **keywords), *mentions)


def test_length_of_real_tokens_is_enough(models):
    models["dynamic"](TOKENS, attention_mask=HOLE, length=[4, 5])
    models["dynamic"](TOKENS, document_ids=PACKED, length=[[3, 2], [5]])


def test_encoder_decoder_misuse(models):
    model, decoder, encoder = models["encoder-decoder"], models["decoder"], models["encoder"]
    memory = model.encode(TOKENS)
    assert_refusal(lambda: decoder.encode(TOKENS), "no encoder")
    assert_refusal(lambda: encoder.decode(TOKENS), "no decoder")
    assert_refusal(lambda: model.decode(TOKENS), "memory")
    assert_refusal(lambda: decoder.decode(TOKENS, memory), "memory")
    assert_refusal(lambda: model.decode(TOKENS, memory.hidden), "memory")
    assert_refusal(lambda: model.decode(TOKENS, 3), "memory")
    assert_refusal(lambda: model.decode(TOKENS, model.encode(TOKENS[:1])), "1 rows", "2")
    assert_refusal(lambda: model(TOKENS, TOKENS, prefix_length=2), "prefix_length")
    assert_refusal(lambda: model(TOKENS, TOKENS, document_ids=PACKED), "document_ids", "both")
    assert_refusal(lambda: model(TOKENS, TOKENS, target_document_ids=PACKED), "document_ids", "both")
    other = PACKED.clone()
    other[1] = 8
    assert_refusal(lambda: model(TOKENS, TOKENS, document_ids=PACKED, target_document_ids=other), "document 8", "row 1")
    assert_refusal(lambda: model(TOKENS, TOKENS, target_attention_mask=REAL[:, :4]), "attention_mask", "[2, 5]")
    assert_refusal(lambda: model(TOKENS, TOKENS, target_length=4), "4", "5 tokens")
    assert_refusal(lambda: model(TOKENS, TOKENS, target_positions=AT - 1), "-1")


Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 5, 8)
ROTARY_MISTAKES = {
    "q-width": (lambda r: r.rotate(Q[..., :6], K, AT), "q must", "8]", "[2, 4, 5, 6]"),
    "k-width": (lambda r: r.rotate(Q, K[..., :6], AT), "k must", "[2, 2, 5, 6]"),
    "q-dimensions": (lambda r: r.rotate(Q[0], K, AT), "q must", "[4, 5, 8]"),
    "q-integers": (lambda r: r.rotate(Q.long(), K, AT), "q must", "int64"),
    "k-complex": (lambda r: r.rotate(Q, K.to(torch.complex64), AT), "k must", "complex64"),
    "q-list": (lambda r: r.rotate(Q.tolist(), K, AT), "q must", "list"),
    "k-nothing": (lambda r: r.rotate(Q, None, AT), "k must", "NoneType"),
    "rows-differ": (lambda r: r.rotate(Q[:1], K, AT), "q has 1 rows", "k 2"),
    "fewer-queries": (lambda r: r.rotate(Q[:, :, :3], K, AT), "5 positions", "3 queries"),
    "fewer-positions": (lambda r: r.rotate(Q, K, AT[:4]), "4 positions", "5 queries"),
    "positions-rows": (lambda r: r.rotate(Q, K, AT.expand(3, 5)), "3 rows", "2"),
    "positions-floats": (lambda r: r.rotate(Q, K, AT.float()), "int64", "float32"),
    "positions-list": (lambda r: r.rotate(Q, K, [0, 1, 2, 3, 4]), "int64", "list"),
    "positions-nothing": (lambda r: r.rotate(Q, K, None), "int64"),
    "positions-negative": (lambda r: r.rotate(Q, K, AT - 1), "-1"),
    "positions-axes": (lambda r: r.rotate(Q, K, AT.expand(2, 2, 5)), "2"),
    "cos-sin-negative": (lambda r: r.cos_sin(AT - 1), "-1"),
    "cos-sin-int32": (lambda r: r.cos_sin(AT.int()), "int64", "int32"),
    "cos-sin-dtype": (lambda r: r.cos_sin(AT, dtype=torch.int64), "floating-point", "int64"),
    "length-shorter": (lambda r: r.rotate(Q, K, AT, length=4), "4", "5 tokens"),
    "length-float": (lambda r: r.rotate(Q, K, AT, length=5.0), "length", "float"),
    "length-flag": (lambda r: r.rotate(Q, K, AT, length=True), "length", "True"),
    "length-tensor": (lambda r: r.rotate(Q, K, AT, length=torch.tensor(5)), "length", "Tensor"),
    "length-rows": (lambda r: r.rotate(Q, K, AT.expand(2, 5), length=[5]), "1 rows"),
    "length-rows-without-rows": (lambda r: r.rotate(Q, K, AT, length=[5, 5]), "2 rows", "[5]"),
    "length-text-in-list": (lambda r: r.rotate(Q, K, AT.expand(2, 5), length=[5, "5"]), "length", "'5'"),
}


@pytest.mark.parametrize("extension", [None, DynamicYaRN(original_length=4)], ids=["fixed", "dynamic"])
@cases(ROTARY_MISTAKES)
def test_rotary_alone(extension, make, mentions):
    assert_refusal(lambda: make(Rotary(head_dim=8, extension=extension)), *mentions)


def test_dynamic_rotary_needs_its_length():
    rope = Rotary(head_dim=8, extension=DynamicYaRN(original_length=4))
    assert_refusal(lambda: rope.rotate(Q, K, AT), "'dynamic-yarn'", "length")
    assert_refusal(lambda: rope.cos_sin(AT), "'dynamic-yarn'", "length")
    for wrong in (0, -1, 5.0, True, "5", NAN, torch.tensor(5)):
        assert_refusal(lambda wrong=wrong: rope.frequencies(wrong), "length")
        assert_refusal(lambda wrong=wrong: rope.attention_factor(wrong), "length")


def test_xpos_alone_ends_at_its_span():
    rope = Rotary(XPosConfig(), head_dim=8)
    rope.rotate(Q, K, torch.tensor([0, 1, 2, 3, 32767]))
    assert_refusal(lambda: rope.rotate(Q, K, torch.tensor([0, 1, 2, 3, 32768])), "32768")


def test_balancing_loss():
    logits = torch.zeros(1, 8, 4)
    assert_refusal(lambda: balancing_loss([], 2), "router_logits")
    assert_refusal(lambda: balancing_loss(None, 2), "router_logits")
    assert_refusal(lambda: balancing_loss(logits, 2), "router_logits")
    assert_refusal(lambda: balancing_loss([logits], 5), "top_k", "4 experts", "5")
    assert_refusal(lambda: balancing_loss([logits], 0), "top_k", "0")
    short = torch.ones(1, 7, dtype=torch.bool)
    assert_refusal(lambda: balancing_loss([logits], 2, attention_mask=short), "[1, 8]", "[1, 7]")


def test_mistakes_on_other_devices_are_left_to_them():
    """Values are looked at on the CPU alone: on meta only shapes and types are checked."""
    with torch.device("meta"):
        model = Transformer(config(position="rotary"))
        tokens = torch.zeros(2, 5, dtype=torch.int64)
        assert model(tokens, positions=torch.zeros(5, dtype=torch.int64)).shape == (2, 5, 20)
    assert_refusal(lambda: model(tokens.float()), "float32")

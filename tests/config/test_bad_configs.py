"""A mistake in a configuration is one ValueError, one sentence that names it, raised where it was made."""

import dataclasses
import math
import re
from itertools import product

import numpy as np
import pytest
import torch
from bad_inputs.sentences import INF, LONGROPE, NAN, SIZES, assert_one_sentence, assert_refusal, cases, config, mistake

import phasor.config
from phasor import (
    ALiBiConfig,
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
    SoftmaxAttentionConfig,
    T5PositionConfig,
    Transformer,
    XPosConfig,
    YaRN,
    backends,
    kinds,
    preset,
)
from phasor.config import PositionConfig
from phasor.config.attention import AttentionConfig
from phasor.config.parameters import parameters_of
from phasor.config.schema import Choice, Config
from phasor.config.sparse import SparseConfig
from phasor.nn.positions import configs


def nested(depth):
    """Combined schemes inside each other."""
    scheme = {"kind": "alibi"}
    for _ in range(depth):
        scheme = {"kind": "combined", "schemes": [scheme, {"kind": "alibi"}]}
    return scheme


UNKNOWN = {
    "kind-by-name": (lambda: config(position="rotari"), "'rotari'", "did you mean 'rotary'", "alibi", "sinusoidal"),
    "kind-in-dict": (lambda: config(norm={"kind": "rmsnrm"}), "'rmsnrm'", "did you mean 'rmsnorm'", "layernorm"),
    "kind-nothing-like-it": (lambda: config(placement="zzz"), "'zzz'", "known: pre, post, sandwich"),
    "kind-missing": (lambda: config(position={"base": 5.0}), "kind", "rotary"),
    "kind-not-text": (lambda: config(position={"kind": ["rotary"]}), "position scheme", "known:"),
    "kind-of-another-class": (lambda: RotaryConfig.from_dict({"kind": "alibi"}), "alibi", "RotaryConfig"),
    "extension": (lambda: RotaryConfig(extension="yarm"), "'yarm'", "did you mean 'yarn'", "longrope"),
    "field": (lambda: config(num_head=3), "num_head", "did you mean 'num_heads'", "known: vocab_size, dim"),
    "field-in-dict": (lambda: config(attention={"windw": 3}), "SoftmaxAttentionConfig", "did you mean 'window'"),
    "field-of-kind": (lambda: config(norm={"kind": "rmsnorm", "bias": True}), "RMSNormConfig", "'bias'", "eps"),
    "field-not-text": (lambda: config(attention={1: 2}), "field of SoftmaxAttentionConfig", "1"),
    "field-in-replace": (lambda: config().replace(dims=3), "dims", "did you mean 'dim'"),
    "fields-without-names": (lambda: ModelConfig(20, 16), "by name"),
    "fields-missing": (lambda: ModelConfig(dim=16), "vocab_size", "num_layers", "num_heads"),
    "activation": (lambda: FeedForwardConfig(activation="swigl"), "'swigl'", "did you mean 'swiglu'", "geglu"),
    "activation-of-masked-head": (lambda: MaskedHeadConfig(activation="swiglu"), "swiglu", "gelu"),
    "shape": (lambda: config(shape="decodr"), "shape", "'decodr'", "did you mean 'decoder'", "'encoder'"),
    "pairing": (lambda: RotaryConfig(pairing="haf"), "pairing", "did you mean 'half'", "'adjacent'"),
    "projection": (lambda: SoftmaxAttentionConfig(bias=["q", "o"]), "bias[1]", "'o'", "'out'"),
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
        lambda: Llama3Scaling(factor=8.0, original_length=64, low_freq_factor=4.5),
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
    "sinks-without-window": (lambda: SoftmaxAttentionConfig(sink_tokens=4), "sink_tokens=4", "window"),
    "negative-sinks": (lambda: SoftmaxAttentionConfig(window=4, sink_tokens=-1), "sink_tokens", "-1"),
    "no-window": (lambda: SoftmaxAttentionConfig(window=0), "window", "0"),
    "bias-twice": (lambda: SoftmaxAttentionConfig(bias=["q", "q"]), "twice"),
    "bias-as-flag": (lambda: SoftmaxAttentionConfig(bias=True), "bias", "list"),
    "qk-norm-without-norm": (lambda: config(norm="none", attention={"qk_norm": "head"}), "qk_norm", "'none'"),
    "qk-norm-in-a-layer": (
        lambda: config(norm="none", layers=[{}, {"attention": {"qk_norm": "whole"}}]),
        "'whole'",
        "'none'",
    ),
    "qk-norm-bias-without-norm": (lambda: SoftmaxAttentionConfig(qk_norm_bias=False), "qk_norm_bias", "qk_norm"),
    "qk-norm-weight-without-norm": (lambda: SoftmaxAttentionConfig(qk_norm_weight=False), "qk_norm_weight", "qk_norm"),
    "no-norm-after-positions": (
        lambda: SoftmaxAttentionConfig(qk_norm_after_positions=True),
        "qk_norm_after_positions",
        "no norm",
    ),
    "norm-between-rotations": (
        lambda: config(position="selfextend", attention={"qk_norm": "head", "qk_norm_after_positions": True}),
        "qk_norm_after_positions",
        "'selfextend'",
    ),
    "limit-without-clamp": (
        lambda: FeedForwardConfig(activation={"kind": "swiglu", "limit": 5.0}),
        "SwiGLUConfig",
        "'limit'",
    ),
    "top-k": (lambda: ExpertsConfig(num_experts=2, top_k=3), "top_k (3)", "num_experts (2)"),
    "gate-of-no-expert": (lambda: ExpertsConfig(num_experts=2, shared_gate=True), "shared_gate", "shared_dim"),
    "dropout-of-one": (lambda: DropoutConfig(residual=1.0), "residual", "1.0"),
    "encoder-layers-of-a-decoder": (lambda: config(num_encoder_layers=2), "num_encoder_layers", "decoder"),
    "blocks-that-do-not-divide": (lambda: config(num_blocks=3), "num_layers (2)", "num_blocks (3)"),
    "blocks-of-two-sides": (lambda: config(shape="encoder-decoder", num_blocks=1), "num_blocks", "encoder-decoder"),
    "blocks-of-other-layers": (
        lambda: config(num_blocks=1, layers=[{}, {"attention": {"window": 3}}]),
        "layer 1 shares the weights of layer 0",
        "num_blocks (1)",
    ),
    "a-block-without-its-first-norm": (
        lambda: config(num_blocks=1, placement={"kind": "pre", "first_norm": False}),
        "first_norm",
    ),
    "mask-token-of-a-decoder": (lambda: config(embedding={"mask_token": 3}), "mask_token", "a decoder"),
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
    "one-layer-too-many": (lambda: config(num_layers=10_001), "ModelConfig.num_layers", "at most 10,000, not 10,001"),
    "one-encoder-layer-too-many": (
        lambda: config(shape="encoder-decoder", num_encoder_layers=10_001),
        "num_encoder_layers must be at most 10,000",
    ),
    "one-listed-layer-too-many": (
        lambda: config(num_layers=10_000, layers=[{}] * 10_001),
        "ModelConfig.layers",
        "at most 10,000 entries, not 10,001",
    ),
    "dim-past-memory": (lambda: config(dim=10**12), "ModelConfig.dim", "at most 262,144, not 1,000,000,000,000"),
    "head-dim-past-memory": (lambda: config(head_dim=10**12), "ModelConfig.head_dim", "at most 16,384"),
    "heads-past-memory": (lambda: config(num_heads=10**12, head_dim=2), "ModelConfig.num_heads", "at most 262,144"),
    "vocabulary-past-memory": (lambda: config(vocab_size=10**12), "ModelConfig.vocab_size", "at most 268,435,456"),
    "length-past-memory": (lambda: config(max_length=1 << 62), "ModelConfig.max_length", "at most 1,099,511,627,776"),
    "experts-past-memory": (lambda: ExpertsConfig(num_experts=10**12), "num_experts", "at most 268,435,456"),
    "codes-past-memory": (
        lambda: config(position={"kind": "sandwich", "width": 10**9}),
        "SandwichPositionConfig.width",
        "at most 262,144",
    ),
    "schemes-in-schemes": (lambda: config(position=nested(300)), "nested too deeply"),
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
    "ConvolutionConfig": {"features": 8, "width": 3},
    "FrontEndConfig": {"features": 8, "convolutions": [{"features": 8, "width": 3}]},
}
RECORDS = [
    cls
    for cls in (*vars(phasor.config).values(), *configs().values())
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
    """A NaN base or an infinite factor would poison every logit; only the bias of a gate may be negative."""
    if name == "initial_bias" and math.isfinite(value):
        assert with_value(cls, name, value).initial_bias == value
        return
    assert_refusal(lambda: with_value(cls, name, value), cls.__name__, name)


@pytest.mark.parametrize(("cls", "name"), [(c, n) for c, n, kind in FIELDS if re.search(r"\bint\b", kind)], ids=str)
@pytest.mark.parametrize("value", [-1, 1.5, NAN, True, 2**63])
def test_whole_numbers_in_a_configuration_are_whole_and_not_negative(cls, name, value):
    assert_refusal(lambda: with_value(cls, name, value), name)


def answer(model):
    """What `phasor bench --explain` reads, and logits of models that are small."""
    backends(model, device="cpu")
    if parameters_of(model).total < 100_000:
        assert Transformer(model)(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_large_integers_are_refused_or_cost_nothing():
    """Of 2^62 elements, for which torch has other words than a sentence."""
    parts = {"position": PositionConfig, "attention": AttentionConfig, "sparse": SparseConfig}
    fields = [{"embedding": {"token_types": 2**62}}]
    for part, choice in parts.items():
        for cls in choice.kinds.values():
            for field in dataclasses.fields(cls):
                if re.search(r"\bint\b", str(field.type)) and "tuple" not in str(field.type):
                    value = {"kind": cls.kind, field.name: 2**62}
                    fields.append({"attention": {"sparse": value}} if part == "sparse" else {part: value})
    for one in fields:
        error = mistake(lambda one=one: answer(ModelConfig(**SIZES | one)))
        if error is not None:
            assert_one_sentence(error)


JUNK = ["x", "", b"x", [1], {}, {"kind": []}, {"kind": "zzz"}, {1: 2}, object(), (None,), [NAN], 1j, [["q"]], {3}]
JUNK += [torch.zeros(2, 2), np.zeros((2, 2)), np.int64(3), lambda: 0, int, Ellipsis]


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_any_value_in_any_field_is_taken_or_refused_in_one_sentence(cls):
    for name, value in product((f.name for f in dataclasses.fields(cls)), JUNK):
        error = mistake(lambda name=name, value=value: make(cls, **{name: value}))
        if error is not None:
            assert_one_sentence(error)

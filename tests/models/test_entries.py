"""The entries of a family's table: what a field's absence and null mean, and both directions of the same thing."""

import json
from pathlib import Path

import pytest

from phasor.checkpoints.quantized_folders import take_format
from phasor.checkpoints.text_part import has_text_part, text_fields
from phasor.config import LayerConfig, ModelConfig
from phasor.models.entries import ACTIVATIONS, Activation, Bias, Draft, Field, Nested, Pinned, SameAs, Switch
from phasor.models.families import family
from phasor.models.family import differences
from phasor.models.fields import Fields

SIZES = {"vocab_size": 9, "dim": 12, "num_layers": 3, "num_heads": 3}
PUBLISHED = {file.stem: file for file in sorted((Path(__file__).parents[1] / "published").glob("*.json"))}


def read(entry, data, **values):
    """The draft after an entry has read a file's field, `field`."""
    draft = Draft(SIZES | values)
    entry.read(Fields(data, Path("config.json")), "field", draft)
    return draft


def test_null_and_nothing_are_told_apart():
    entry = Field("num_kv_heads", default=SameAs("num_heads"), absent=1)
    assert [read(entry, data)["num_kv_heads"] for data in ({}, {"field": None}, {"field": 2})] == [1, 3, 2]
    with pytest.raises(ValueError, match=r"config\.json: field is missing"):
        read(Field("dim"), {"field": None})


def test_two_names_of_a_field_agree():
    entry = Field("dim", alias="other")
    assert [read(entry, data)["dim"] for data in ({"field": 5}, {"other": 6}, {"field": 7, "other": 7})] == [5, 6, 7]
    with pytest.raises(ValueError, match="phasor does not honor other = 8; it must be 7"):
        read(entry, {"field": 7, "other": 8})


def test_a_fallback_counts_where_the_field_is_missing():
    entry = Field("dim", default=4, fallback="other")
    found = [read(entry, data)["dim"] for data in ({}, {"other": 6}, {"field": 7, "other": 8})]
    assert found == [4, 6, 7]


def test_fields_of_the_head_need_a_head():
    entry = Field("head.softcap", default=None)
    assert read(entry, {"field": 2.0}, head="lm").build().head.softcap == 2.0
    draft = Draft(SIZES | {"head": "none"})
    fields = Fields({"field": 2.0}, Path("config.json"))
    entry.read(fields, "field", draft)
    assert (draft.build().head.kind, fields.taken) == ("none", set())
    assert entry.write("field", ModelConfig(**SIZES, head="none")) == {}


@pytest.mark.parametrize(
    ("entry", "values"),
    [
        (Field("norm.eps", default=1e-5), [1e-5, 0.25]),
        (Field("attention.window", default=None), [None, 5]),
        (Field("max_length", default=2048, omitted=True), [2048, 7]),
        (Field("dropout.residual", "dropout.embedding", default=0.1), [0.0, 0.5]),
        (Switch("placement", on=ModelConfig(**SIZES).placement, off="post", default=True), [True, False]),
        (Switch("embedding.scale", on="sqrt", off=1.0, default=False), [True, False]),
        (Bias(True, ("q", "k")), [True, False]),
        (Bias(False, feedforward=True), [True, False]),
        (Activation("relu", ACTIVATIONS), ["relu", "silu", "gelu_pytorch_tanh"]),
        (
            Nested({"eps": Field("norm.eps", default=0.5), "kind": Pinned("x", written=True)}),
            [{"eps": 2.0, "kind": "x"}],
        ),
    ],
)
def test_an_entry_writes_what_it_read(entry, values):
    for value in values:
        config = read(entry, {"field": value}, norm="layernorm").build()
        written = entry.write("field", config)
        assert written in ({"field": value}, {}), value
        assert read(entry, written, norm="layernorm").build() == config


def test_a_part_of_another_kind_is_not_written():
    with pytest.raises(ValueError, match="it has no norm 'none'"):
        Field("norm.eps", default=1e-5).write("field", ModelConfig(**SIZES, norm="none"))
    with pytest.raises(ValueError, match="its models have experts"):
        Field("feedforward.experts.top_k", default=2).write("field", ModelConfig(**SIZES))


def test_layers_that_differ_are_a_pattern_and_others_none():
    draft = Draft(dict(SIZES))
    draft.layers = {"attention.window": [4, None, 4], "attention.scale": [2.0, 2.0, 2.0]}
    layers = [draft.build().layer(i).attention for i in range(3)]
    assert [(layer.window, layer.scale) for layer in layers] == [(4, 2.0), (None, 2.0), (4, 2.0)]
    draft.layers = {"attention.window": [None] * 3}
    assert draft.build().layers == ()
    draft.layers = {"attention.window": [4] * 3}
    assert draft.build().layers == (LayerConfig(attention={"window": 4}),)


@pytest.mark.sample(50)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_table_reads_back_what_it_writes(name):
    data = json.loads(PUBLISHED[name].read_text())
    if has_text_part(data):
        data = text_fields(data, Path("config.json"))
    data, _ = take_format(data, Path("config.json"))
    model_type, head = data["model_type"], {"architectures": data.get("architectures")}
    config = family(model_type).read_whole(Fields(data, Path("config.json")))
    written = family(model_type).write(config) | head
    again = family(model_type).read_whole(Fields(written, Path("config.json"), strict=True))
    assert differences(config, again) == []
    assert (again.max_length, again.dropout, again.init) == (config.max_length, config.dropout, config.init)

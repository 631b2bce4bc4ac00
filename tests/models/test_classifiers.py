"""Heads with scores of labels, against transformers: their classes, labels, rounding, and folders in and out."""

import json

import pytest
import torch
import transformers
from families.cases import redraw
from families.classifiers import CASES

import phasor
from phasor.models.families import family, names

transformers.logging.set_verbosity_error()

SIZES = {"vocab_size": 60, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 3, "max_position_embeddings": 64}
CLASSIFIERS = [(name, kind) for name in names() for kind in family(name).classifiers]


def saved(cls, folder, **fields):
    """A small model of theirs with every weight drawn anew, saved."""
    torch.manual_seed(0)
    model = cls(cls.config_class(**SIZES, **fields)).eval()
    redraw(model, lambda name: False)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("name", "kind"), CLASSIFIERS)
def test_a_classifier_is_a_class_of_its_family(name, kind):
    cls = getattr(transformers, family(name).classifiers[kind].architecture)
    assert cls.config_class.model_type == name
    assert f"{name}/{kind.replace('-', ' ')}" in CASES, "and has a random model among the tests of families"


@pytest.mark.parametrize(
    "cls",
    [
        transformers.XLMRobertaForSequenceClassification,
        transformers.CamembertForMaskedLM,
        transformers.MPNetForMaskedLM,
        transformers.ElectraForMaskedLM,
        transformers.ElectraForSequenceClassification,
        transformers.BertForTokenClassification,
    ],
)
@torch.no_grad()
def test_encoders_in_float64(cls, tmp_path):
    """Those without rotary angles, which transformers computes in float32."""
    theirs = saved(cls, tmp_path, num_labels=3, pad_token_id=1).double()
    tokens = torch.randint(2, 60, (3, 17))
    found = phasor.load(tmp_path, dtype=torch.float64)(tokens)
    assert (found - theirs(tokens).logits).abs().max() < 1e-10


def test_labels_are_kept_in_both_formats(tmp_path):
    labels = {0: "B-PER", 1: "I-PER", 2: "O"}
    saved(transformers.BertForTokenClassification, tmp_path / "theirs", id2label=labels)
    model = phasor.load(tmp_path / "theirs")
    assert model.config.head == phasor.TokenClassifierConfig(labels=("B-PER", "I-PER", "O"))
    phasor.save(model, tmp_path / "ours")
    again = phasor.load(tmp_path / "ours")
    assert again.config.head.labels == model.config.head.labels
    phasor.save(again, tmp_path / "back", format="hf")
    back = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "back")
    assert back.config.id2label == labels
    assert back.config.label2id == {name: i for i, name in labels.items()}


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (transformers.XLMRobertaForSequenceClassification, {"num_labels": 1}),
        (transformers.BertForTokenClassification, {}),
        (transformers.LlamaForSequenceClassification, {"num_labels": 1, "pad_token_id": None}),
        (transformers.MistralForSequenceClassification, {"num_labels": 3, "pad_token_id": 0, "num_key_value_heads": 1}),
    ],
)
def test_a_conversion_is_checked(cls, fields, tmp_path):
    saved(cls, tmp_path / "theirs", **fields)
    assert phasor.convert(tmp_path / "theirs", tmp_path / "ours", check=True).largest < 1e-5
    assert phasor.convert(tmp_path / "ours", tmp_path / "back", check=True).largest < 1e-5


@torch.no_grad()
def test_a_made_classifier_is_written_as_one_of_transformers(tmp_path):
    head = phasor.SequenceClassifierConfig(labels=("no", "yes"))
    model = phasor.Transformer(phasor.preset("bert", dim=24, num_heads=3, num_layers=2, vocab_size=50, head=head))
    phasor.save(model.eval(), tmp_path / "model", format="hf")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokens = torch.randint(0, 50, (2, 9))
    assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-5
    assert theirs.config.id2label == {0: "no", 1: "yes"}


@pytest.mark.parametrize("labels", [{"0": "a", "2": "b"}, {"0": 3}, ["a", "b"], {"x": "y"}])
def test_labels_that_are_none_are_refused_in_a_sentence(labels, tmp_path):
    saved(transformers.BertForTokenClassification, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"id2label": labels}))
    with pytest.raises(ValueError, match="id2label must"):
        phasor.load(tmp_path)


def test_an_unknown_pooling_of_a_classifier_is_refused(tmp_path):
    saved(transformers.EuroBertForSequenceClassification, tmp_path, pad_token_id=None)
    with pytest.raises(ValueError, match="classifier_pooling = 'late'; known: bos, mean"):
        phasor.load(tmp_path)


def test_a_classifier_without_labels_or_pooler_is_refused():
    for head, message in (
        (lambda: phasor.TokenClassifierConfig(labels=()), "at least one label"),
        (lambda: phasor.SequenceClassifierConfig(pooler="none"), "SequenceClassifierConfig.pooler must be one of"),
        (lambda: phasor.TokenClassifierConfig(dense="swiglu"), "swiglu"),
        (lambda: phasor.TokenClassifierConfig(dense_norm=True), "dense_norm needs dense"),
    ):
        with pytest.raises(ValueError, match=message):
            head()
    sizes = {"vocab_size": 9, "dim": 8, "num_layers": 1, "num_heads": 1}
    with pytest.raises(ValueError, match="a decoder may have the pooler 'last' or"):
        phasor.ModelConfig(**sizes, head="sequence-classifier")


def test_a_classifier_that_no_family_has_is_refused(tmp_path):
    sizes = {"vocab_size": 9, "dim": 8, "num_layers": 1, "num_heads": 1, "shape": "encoder", "position": "rotary"}
    model = phasor.Transformer(phasor.ModelConfig(**sizes, head={"kind": "sequence-classifier", "pooler": "mean"}))
    with pytest.raises(ValueError, match="no family of transformers computes what this model does"):
        phasor.save(model, tmp_path / "model", format="hf")

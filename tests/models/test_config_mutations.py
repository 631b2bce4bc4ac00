"""Every field of config.json left out, set to null or changed: the same logits as transformers, or a refusal."""

import copy
import importlib
import json
import pkgutil
import random
import warnings

import families
import pytest
import torch
import transformers
from families.cases import redraw

import phasor

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

BUILDERS = {}
for module in pkgutil.iter_modules(families.__path__):
    BUILDERS |= getattr(importlib.import_module(f"families.{module.name}"), "CASES", {})
del BUILDERS["mpt/other slopes"]
KEEP = {"model_type", "architectures", "transformers_version", "dtype"}
DELETE = object()
SAMPLED = 5
WORDS = {"gelu": "relu", "relu": "silu", "silu": "gelu", "default": "linear", "gated-gelu": "gated-silu"}


def values_of(value):
    """What a field is changed into: left out, null, and another value or two of its kind."""
    other = {
        bool: lambda: [not value],
        int: lambda: [value + 1, 1 if value != 1 else 2],
        float: lambda: [value * 2 + 0.25],
        str: lambda: [WORDS.get(value, "gelu_new")],
        list: lambda: [value[::-1], value[1:]],
        dict: lambda: [{}],
        type(None): lambda: [1, True],
    }
    return [DELETE, *([] if value is None else [None]), *other[type(value)]()]


def mutations(config, path=()):
    """Pairs of a path into the configuration and a value to put there."""
    for name, value in sorted(config.items()):
        if name not in KEEP:
            yield from ((*path, name, new) for new in values_of(value))
            if isinstance(value, dict):
                yield from mutations(value, (*path, name))


def mutate(config, mutation):
    *path, name, value = mutation
    changed = inner = copy.deepcopy(config)
    for step in path:
        inner = inner[step]
    inner.pop(name, None)
    if value is not DELETE:
        inner[name] = value
    return changed


class Model:
    """A tiny model of transformers in a folder, whose config.json is changed."""

    def __init__(self, name, folder):
        self.case, self.folder = BUILDERS[name](random.Random(f"{name} 0")), folder
        if self.case.crossing:
            pytest.skip("what transformers computes depends on the texts it read before")
        config = self.case.config
        config._attn_implementation = self.case.attention
        self.theirs = self.case.cls(config).eval()
        redraw(self.theirs, self.case.buffers)
        with torch.no_grad():
            self.case.touch(self.theirs)
        self.theirs.save_pretrained(folder)
        self.config = json.loads((folder / "config.json").read_text())
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, phasor.load(folder).config.vocab_size - 5, (2, 23), generator=generator)
        self.source = self.tokens if self.case.features is None else self.case.features(2, generator)

    def expected(self, config):
        """What transformers computes, or None where it fails."""
        try:
            theirs = type(self.case.config).from_dict(copy.deepcopy(config))
            theirs._attn_implementation = self.case.attention
            theirs._experts_implementation = self.case.config._experts_implementation
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model, info = self.case.cls.from_pretrained(self.folder, config=theirs, output_loading_info=True)
                more = {"decoder_input_ids": self.tokens} if theirs.is_encoder_decoder else {}
                out = model.eval()(**self.case.inputs(self.source), **more)
        except Exception:
            return None
        if info["missing_keys"]:
            return None
        return next(out[n] for n in ("logits", "prediction_logits", "last_hidden_state") if n in out)

    def found(self, config):
        """What phasor computes, and what it says about it; raises ValueError where it refuses."""
        (self.folder / "config.json").write_text(json.dumps(config))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = phasor.load(self.folder)
        said = " ".join(str(one.message) for one in caught)
        return model(self.source, *([self.tokens] if model.config.shape == "encoder-decoder" else [])), said

    def check(self, mutation):
        """The complaint about a mutation, if there is one; where transformers fails, there is nothing to compare."""
        config = mutate(self.config, mutation)
        try:
            ours, said = self.found(config)
        except ValueError as error:
            return None if "\n" not in str(error) and len(str(error)) < 2000 else f"{mutation}: {error}"
        (self.folder / "config.json").write_text(json.dumps(self.config))
        theirs = self.expected(config)
        if theirs is None or "transformers computes with" in said:
            return None
        limit = 1e-4 * max(1.0, float(theirs.abs().max()))  # rounding grows with what is rounded
        same = ours.shape == theirs.shape and float((ours - theirs).abs().max()) < limit
        return None if same else f"{mutation}: other logits"


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [name for name in BUILDERS if "/" not in name])
@torch.no_grad()
def test_some_mutations_of_a_configuration(name, tmp_path):
    model = Model(name, tmp_path)
    sample = random.Random(name).sample(list(mutations(model.config)), SAMPLED)
    wrong = [model.check(mutation) for mutation in sample]
    assert [text for text in wrong if text] == []


FOUND = {
    "mistral4": [("norm_topk_prob", None), ("rope_interleave", None)],
    "mpt": [("max_seq_len", 1), ("attn_config", {"alibi_bias_max": 9})],
    "t5": [("scale_decoder_outputs", None), ("is_gated_act", None)],
    "bart": [("decoder_attention_heads", DELETE), ("decoder_ffn_dim", DELETE)],
    "marian": [("decoder_attention_heads", DELETE)],
    "m2m_100": [("decoder_attention_heads", DELETE)],
    "modernbert/of old": [
        ("rope_scaling", {"rope_type": "linear", "factor": 3.0}),
        ("rope_scaling", {"type": "linear", "factor": 3.0}),
    ],
    "gemma3_text/of old": [("rope_scaling", {"type": "linear", "factor": 3.0})],
    "gpt_oss": [("rope_parameters", "truncate", None)],
    "llama": [("tie_word_embeddings", False), ("tie_word_embeddings", True), ("tie_word_embeddings", DELETE)],
}


@pytest.mark.parametrize("name", FOUND)
@torch.no_grad()
def test_mutations_that_once_computed_something_else(name, tmp_path):
    model = Model(name, tmp_path)
    if model.case.older is not None:
        model.config = model.case.older(model.config)
    wrong = [model.check(mutation) for mutation in FOUND[name]]
    assert [text for text in wrong if text] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
@torch.no_grad()
def test_every_mutation_of_a_configuration_computes_the_same_or_is_refused(name, tmp_path):
    model = Model(name, tmp_path)
    wrong = [model.check(mutation) for mutation in mutations(model.config)]
    assert [text for text in wrong if text] == []

"""Configurations extended to a length: the factor, the original length and the trained length of each method."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest

import phasor
from phasor.config import Extension
from phasor.models.extensions import extend_config, make_extension, methods, trained_length

TINY = {"dim": 32, "num_heads": 2, "num_layers": 2, "vocab_size": 60, "hidden_dim": 64}


def llama(**fields: object) -> phasor.ModelConfig:
    return phasor.preset("llama-2", **{**TINY, "max_length": 512, **fields})


def test_without_a_record_the_trained_length_is_what_it_was():
    assert trained_length(llama()) == 512
    assert trained_length(phasor.preset("llama-3.1")) == 8192
    assert trained_length(llama().with_extension(phasor.LinearScaling(factor=4.0))) == 512


def test_a_recorded_length_goes_into_every_extension():
    config = llama(trained_length=128)
    assert trained_length(config) == 128
    for kind in ("yarn", "dynamic-ntk", "llama3", "dynamic-yarn"):
        assert extend_config(config, kind, 1024).position.extension.original_length == 128
    extended = extend_config(config, "yarn", 1024)
    assert (extended.position.extension.factor, extended.max_length, extended.trained_length) == (8.0, 1024, 128)
    assert make_extension("yarn", config, factor=2.0).original_length == 128


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3", "longrope"])
def test_the_factor_is_the_ratio_of_the_lengths(kind):
    extended = extend_config(llama(trained_length=128), kind, 640)
    assert extended.position.extension.factor == 5.0
    assert extended.max_length == 640
    again = extend_config(extended.replace(trained_length=640), kind, 1280)  # trained since: the base is the same
    assert again.position.extension.factor == 10.0
    assert again == extend_config(llama(trained_length=128), kind, 1280).replace(trained_length=640)


def test_a_dynamic_extension_at_a_length_is_ntk_of_that_length():
    dynamic, fixed = (extend_config(llama(), kind, 2048) for kind in ("dynamic-ntk", "ntk"))
    assert dynamic.max_length == 512  # where transformers has its original length
    assert dynamic.position.frequencies(16, 2048) == fixed.position.frequencies(16)


def test_longrope_divides_as_yarn_does_unless_it_is_told_otherwise():
    longrope, yarn = (extend_config(llama(), kind, 2048) for kind in ("longrope", "yarn"))
    for ours, theirs in zip(longrope.position.frequencies(16, 2048), yarn.position.frequencies(16), strict=True):
        assert math.isclose(ours, theirs, rel_tol=1e-15)
    assert longrope.position.frequencies(16, 512) == llama().position.frequencies(16)
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert extend_config(llama(), "longrope", 2048, **factors).position.extension.long_factor == (2.0,) * 8


def test_none_removes_an_extension_and_drop_the_positions():
    extended = extend_config(llama(), "yarn", 2048)
    assert extend_config(extended, "none", 4096) == llama(max_length=4096, trained_length=512)
    dropped = extend_config(extended, "drop", 2048)
    assert {dropped.layer(i).position.kind for i in range(2)} == {"none"}
    assert trained_length(dropped) == 512
    mixed = llama(layers=[{"position": {"kind": "rotary", "base": 500.0}}, {}])
    assert {extend_config(mixed, "drop", 2048).layer(i).position.kind for i in range(2)} == {"none"}


def test_every_extension_is_a_method():
    assert methods() == ["none", *Extension.kinds, "drop"]


@pytest.mark.parametrize(
    ("config", "method", "length", "fields", "sentence"),
    [
        (llama(), "yarm", 1024, {}, "unknown method 'yarm' (did you mean 'yarn'?); known: none, linear, ntk"),
        (llama(), "yarn", 256, {}, "a length of 256 is below the 512 tokens the model was trained at"),
        (llama(), "yarn", 0, {}, "length must be an integer of at least 1, not 0"),
        (llama(), "linear", 1024, {"factor": 0.5}, "LinearScaling.factor must be at least 1"),
        (llama(), "drop", 1024, {"factor": 2.0}, "the method 'drop' has no field 'factor'"),
        (phasor.preset("gpt-2"), "yarn", 4096, {}, "are 'learned', a table of 1,024 positions"),
        (phasor.preset("gpt-2", position="alibi"), "drop", 4096, {}, "needs rotary positions, and this model's are"),
    ],
)
def test_what_cannot_be_extended_is_one_sentence(config, method, length, fields, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        extend_config(config, method, length, **fields)
    assert "\n" not in str(error.value)


def test_extensions_load_no_torch():
    code = "import sys, phasor.models.extensions; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_rotary_part_of_a_combination_is_extended_as_rotary_alone():
    positions = (llama(position=position) for position in ("combined", "rotary"))
    combined, alone = (extend_config(config, "longrope", 2048).extendable_position() for config in positions)
    assert combined.extension == alone.extension

"""What a refusal looks like: one ValueError, one sentence that names the mistake."""

import pytest

from phasor import ModelConfig

NAN, INF = float("nan"), float("inf")
SIZES = {"vocab_size": 20, "dim": 16, "num_layers": 2, "num_heads": 2}
LONGROPE = {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_length": 16}


def config(**fields):
    """A small model configuration with some fields changed."""
    return ModelConfig(**SIZES | fields)


def cases(table):
    """Parametrize over a dict of name: (what is done, what the sentence mentions...)."""
    return pytest.mark.parametrize(("make", "mentions"), [(f, m) for f, *m in table.values()], ids=table)


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

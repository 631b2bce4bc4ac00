"""Values and names in error messages: bounded in length, and in what it takes to write them."""

import subprocess
import sys
import time

import pytest

from phasor.cli import main
from phasor.config import ModelConfig
from phasor.config.schema import name_some, quote, shorten


def nested(depth: int) -> list:
    """A list of ten times the list inside, of 10 ** depth elements that share their memory."""
    value: list = [1]
    for _ in range(depth):
        value = [value] * 10
    return value


def cyclic() -> dict:
    value: dict = {}
    value["a"] = value
    return value


class Broken:
    def __repr__(self) -> str:
        raise TypeError("no")


HUGE = [nested(40), {"a": nested(40)}, cyclic(), "x" * 10**6, 10**10000, list(range(10**5)), Broken(), "\ud800" * 500]


@pytest.mark.parametrize("value", HUGE, ids=range(len(HUGE)))
def test_a_quote_is_short_and_quick(value: object) -> None:
    start = time.perf_counter()
    assert len(quote(value)) <= 120
    with pytest.raises(ValueError, match="dim") as error:
        ModelConfig(vocab_size=9, dim=value, num_layers=1, num_heads=1)
    assert len(str(error.value)) < 700
    with pytest.raises(ValueError, match="shape") as error:
        ModelConfig(vocab_size=9, dim=4, num_layers=1, num_heads=1, shape=value)
    assert len(str(error.value)) < 700
    assert time.perf_counter() - start < 2


def test_small_values_are_quoted_whole() -> None:
    for value in (None, 1.5, "a'b", [1, "x"], {"kind": "rotary", "base": 1e4}, (1,), {3}, {"a": {"b": [1, 2]}}):
        assert quote(value) == repr(value)


def test_names_are_listed_up_to_a_number() -> None:
    assert name_some([]) == ""
    assert name_some("abc", 3) == "a, b, c"
    assert name_some("abcde", 3) == "a, b, c and 2 more"
    assert len(name_some("x" * 10**5 for _ in range(10**3))) < 1600
    assert shorten("x" * 2000) == "x" * 997 + "..."


def test_the_command_line_prints_one_line_of_bounded_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x" * 100_000 + "\x1b[2J\n\n", "y"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 1100
    assert "\x1b" not in said


def test_arguments_that_are_not_utf8() -> None:
    for arguments in (["--prompt", b"\xff"], [b"\xff\xfe"], ["--\udcff"]):
        command = [sys.executable, "-m", "phasor", "generate", "missing", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr

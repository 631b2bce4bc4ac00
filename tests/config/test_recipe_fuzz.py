"""Recipes with random changes, by fixed seeds: a recipe comes out, or a ValueError of one sentence."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from phasor.config.overrides import apply_overrides, fields_of
from phasor.config.recipe import DEFAULT, Recipe
from phasor.config.yaml_text import from_yaml
from phasor.recipes import names, read

JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 1.5, -0.0, 1e308, 1 << 62, 1 << 63, 1 << 80, "", "x", "none", "auto", "\ud800"),
    *([], {}, [1], [[]], {"kind": "x"}, {"kind": None}, {"": 1}, {"a": {"b": {}}}, "rotary", {"kind": "rotary"}, "\0"),
]
PIECES = [
    *"{}[]:,&*!|>-?#'\"\n\t %@`\\",
    *("<<: ", "&a ", "*a", "!!python/object:os.system ", "!!int x", "\x00", "é", "\ufeff"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside another."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


def change(rng: random.Random, data: Any) -> Any:
    """The mapping of a recipe with one value replaced, left out or added."""
    *path, last = rng.choice(places(data)[1:])
    inner = data
    for step in path:
        inner = inner[step]
    what = rng.randrange(3)
    if what == 0 or isinstance(inner, list):
        inner[last] = copy.deepcopy(rng.choice(JUNK))
    elif what == 1:
        del inner[last]
    else:
        inner[rng.choice(["x", "kind", "layers", "model", "position", "", "\ud800"])] = copy.deepcopy(rng.choice(JUNK))
    return data


def outcome(call: Any) -> None:
    try:
        call()
    except ValueError as error:
        if "\n" in str(error) or len(str(error)) > 1200 or type(error) is not ValueError:
            raise AssertionError(f"not a sentence: {error!r}") from error


def check_mappings(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        data = json.loads(DEFAULT.to_json())
        for _ in range(rng.randrange(1, 4)):
            data = change(rng, data)
        outcome(lambda: Recipe.from_dict(data))  # noqa: B023


def check_texts(seeds: range, file: Path) -> None:
    texts = [read(name) for name in names()]
    for seed in seeds:
        rng = random.Random(seed)
        text = rng.choice(texts)
        for _ in range(rng.randrange(1, 6)):
            start = rng.randrange(len(text))
            stop = start + rng.choice([0, 0, 1, 5, 40])
            text = text[:start] + rng.choice(PIECES) * rng.choice([1, 1, 3]) + text[stop:]
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        outcome(lambda: Recipe.from_file(file))


def check_overrides(seeds: range) -> None:
    fields = [f"{a}.{b}" for a, hint in fields_of(Recipe).items() for b in fields_of(hint)]
    values = ["", "x", "[", "{a: 1}", "1e999", "-1", "none", "*a", "&a [*a]", "!!set {a}", "\ud800", "9" * 5000]
    for seed in seeds:
        rng = random.Random(seed)
        changes = {rng.choice(fields) + rng.choice(["", "", ".kind", ".x"]): rng.choice(values) for _ in range(2)}
        outcome(lambda: Recipe.from_dict(apply_overrides(DEFAULT.to_dict(), changes)))  # noqa: B023


def test_changed_mappings_texts_and_overrides(tmp_path: Path) -> None:
    check_mappings(range(300))
    check_texts(range(100), tmp_path / "r.yaml")
    check_overrides(range(300))


@pytest.mark.slow
def test_many_changed_mappings_texts_and_overrides(tmp_path: Path) -> None:
    check_mappings(range(1000, 11000))
    check_texts(range(1000, 3000), tmp_path / "r.yaml")
    check_overrides(range(1000, 11000))


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system [ls]", "!!python/name:os.system", "!foo bar"])
def test_tags_execute_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="not YAML"):
        from_yaml(text, "here")

"""Recipes in the package: every one is valid, listed, printed and found by its name."""

import json

import pytest
from commands import CommandRunner

import phasor
from phasor import recipes
from phasor.cli.train import build_recipe
from phasor.config.recipe import Recipe, read_recipe
from phasor.training.build import check_model


@pytest.fixture
def run_phasor(capsys):
    return CommandRunner(capsys)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_valid_and_says_what_it_trains(name, tmp_path, monkeypatch):
    recipe = Recipe.from_file(recipes.find(name))
    monkeypatch.chdir(tmp_path)
    if recipe.init_from is not None:
        first = phasor.Transformer(phasor.preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=261))
        phasor.save(first, recipe.init_from)
    check_model(recipe)
    first, *others = recipes.read(name).splitlines()
    assert first == f"# {recipes.summary(name)}"
    assert recipes.summary(name).endswith(".")
    assert any(line.startswith(f"#   phasor train {name}") for line in others)


def test_the_list_has_a_line_for_each(run_phasor):
    lines = run_phasor("recipes").splitlines()
    assert [line.split()[0] for line in lines] == recipes.names()
    assert all(recipes.summary(line.split()[0]) in line for line in lines)
    assert json.loads(run_phasor("recipes", "--json")) == {name: recipes.summary(name) for name in recipes.names()}


def test_one_is_printed_to_start_from(run_phasor, tmp_path):
    (tmp_path / "mine.yaml").write_text(run_phasor("recipes", "show", "dates"), encoding="utf-8")
    assert read_recipe(tmp_path / "mine.yaml") == read_recipe(recipes.find("dates"))


def test_a_name_stands_for_its_recipe_and_an_existing_file_for_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert build_recipe("dates", {"train.steps": "3"}, False).train.steps == 3
    assert build_recipe("dates", {}, False) == Recipe.from_file(recipes.find("dates"))
    (tmp_path / "dates").write_text("train: {steps: 7}")
    assert build_recipe("dates", {}, False).train.steps == 7
    (tmp_path / "dates").unlink()
    (tmp_path / "dates").mkdir()  # a folder of that name is no recipe
    assert build_recipe("dates", {}, False).data.format == "dates"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["train", "date"],
            "unknown recipe 'date' (did you mean 'dates'?); known: chat, dates, language-model, ",
        ),
        (["recipes", "show", "date"], "unknown recipe 'date' (did you mean 'dates'?)"),
        (["recipes", "show"], "show takes the name of a recipe: chat, dates, "),
        (["recipes", "print"], "invalid choice: 'print'"),
        (["train", "here/dates"], "here/dates cannot be read"),
        (["train", "dates.yaml"], "dates.yaml cannot be read"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, expected, run_phasor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in run_phasor.expect_error(*arguments)
    assert not list(tmp_path.iterdir())

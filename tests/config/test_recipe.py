"""Recipes: records checked when made, files, overrides as a command line writes them, and schedules."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor.config.overrides import apply_overrides
from phasor.config.recipe import DEFAULT, DataConfig, Recipe, TrainConfig, read_recipe
from phasor.config.schedules import InverseSqrtSchedule, ScheduleConfig, StableSchedule

YAML = """
task: translation
model: {preset: transformer-base, dim: 64, position: {kind: rotary, base: 5e5}}
data:
  train: pairs.tsv
  sequence_length: 64
optimizer:
  lr: 3e-4  # a number, though PyYAML alone reads text
schedule: inverse-sqrt
"""


def test_a_recipe_is_the_same_from_yaml_json_and_itself(tmp_path):
    (tmp_path / "a.yaml").write_text(YAML)
    recipe = Recipe.from_file(tmp_path / "a.yaml")
    assert recipe.optimizer.lr == 3e-4
    assert recipe.model["position"] == {"kind": "rotary", "base": 5e5}
    assert isinstance(recipe.schedule, InverseSqrtSchedule)
    (tmp_path / "a.json").write_text(recipe.to_json())
    assert Recipe.from_file(tmp_path / "a.json") == recipe


def test_a_recipe_keeps_what_it_was_given_when_that_changes():
    model = {"position": {"kind": "rotary"}}
    recipe = Recipe(model=model)
    model["position"]["kind"] = "alibi"
    assert recipe.model["position"]["kind"] == "rotary"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {sequence_lenght: 3}", "did you mean 'sequence_length'?"),
        ("dta: {}", "did you mean 'data'?"),
        ("model: {dimm: 3}", "did you mean 'dim'?"),
        ("model: 3", "must be a mapping of names"),
        ("train: {steps: many}", "TrainConfig.steps must be an integer, not 'many'"),
        ("train: {compile: yes}", "must be true or false, not 'yes'"),
        ("train: {steps: 3, epochs: 2}", "give one of them"),
        ("train: {steps: 0}", "greater than 0"),
        ("train: {batch_tokens: 100}", "at least one row"),
        ("data: {format: csv}", "must be one of"),
        ("data: {validation_fraction: 1.0}", "between 0 and 1"),
        ("data: {train_target: b.txt}", "the other side"),
        ("data: {format: python, train: a.txt}", "generates its own data"),
        ("data: {format: dates}", "is for translation"),
        ("{task: translation, data: {format: python}}", "is for lm, mlm and distill"),
        ("schedule: cosin", "did you mean 'cosine'?"),
        ("schedule: {kind: cosine, floor: 2}", "a fraction"),
        ("a: [1", "is not YAML"),
        ("a: 1\na: 2", "line 2: this is not YAML: the key 'a' stands twice"),
        ("- 1", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("!!python/object:os.system {}", "is not YAML"),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_sentence(tmp_path, text, said):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"r\.yaml") as error:
        Recipe.from_file(tmp_path / "r.yaml")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.yaml cannot be read"):
        read_recipe(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"task: \xff")
    with pytest.raises(ValueError, match="not UTF-8 at byte 6"):
        read_recipe(tmp_path / "b.yaml")


def test_overrides_change_what_they_name_and_nothing_else():
    before = DEFAULT.to_dict()
    kept = json.dumps(before)
    changes = {"data.sequence_length": "128", "train.max-skips": "3", "optimizer.lr": "1e-3", "data.train": "2024"}
    after = apply_overrides(before, {**changes, "data.format": "auto", "model.position.kind": "alibi"})
    recipe = Recipe.from_dict(after)
    assert (recipe.data.sequence_length, recipe.train.max_skips, recipe.optimizer.lr) == (128, 3, 1e-3)
    assert recipe.data.train == "2024"
    assert recipe.model["position"] == {"kind": "alibi"}
    assert json.dumps(before) == kept
    assert Recipe.from_dict(apply_overrides(after, {"data.train": "null"})).data.train is None


def test_another_kind_keeps_the_fields_it_has_too():
    recipe = {"schedule": {"kind": "cosine", "warmup": 7, "floor": 0.3}, "model": {"position": {"kind": "a", "b": 1}}}
    changes = {"schedule.decay": "0.5", "schedule.kind": "wsd", "model.position.kind": "c"}
    after = apply_overrides(recipe, changes)
    assert after["schedule"] == {"kind": "wsd", "warmup": 7, "floor": 0.3, "decay": 0.5}
    assert after["model"]["position"] == {"kind": "c"}
    usual = {"schedule": {"kind": "cosine", "warmup": 7, "floor": 0.1}}  # the floor of cosine, and not of wsd
    assert apply_overrides(usual, {"schedule.kind": "wsd"})["schedule"] == {"kind": "wsd", "warmup": 7}
    assert apply_overrides({"schedule": "wsd"}, {"schedule.warmup": "3"})["schedule"] == {"kind": "wsd", "warmup": 3}


def test_an_unknown_override_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'sequence_length'"):
        apply_overrides({}, {"data.sequence_lenght": "3"})
    with pytest.raises(ValueError, match=r"data\.sequence_length is 3, which has no fields"):
        apply_overrides({"data": {"sequence_length": 3}}, {"data.sequence_length.x": "3"})
    with pytest.raises(ValueError, match="is not YAML"):
        apply_overrides({}, {"data.sequence_length": "[3"})


@given(
    kind=st.sampled_from(sorted(ScheduleConfig.kinds)),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 200),
    peak=st.floats(1e-5, 1.0),
)
def test_rates_rise_to_the_peak_and_never_again(kind, warmup, steps, peak):
    schedule = ScheduleConfig.from_dict({"kind": kind, "warmup": warmup})
    rates = [schedule.lr_at(step, steps, peak) for step in range(steps)]
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert all(a >= b - 1e-12 * peak for a, b in zip(rates[top:], rates[top + 1 :], strict=False))
    if 0 < warmup <= steps:
        assert rates[warmup - 1] == pytest.approx(peak)


def test_the_inverse_square_root_is_the_one_of_2017():
    dim, warmup = 512, 40
    paper = [dim**-0.5 * min(t**-0.5, t * warmup**-1.5) for t in range(1, 400)]
    ours = [InverseSqrtSchedule(warmup=warmup).lr_at(t, 400, (dim * warmup) ** -0.5) for t in range(399)]
    assert ours == pytest.approx(paper)


def test_stable_is_stable_and_then_falls_to_nothing():
    rates = [StableSchedule(warmup=10, decay=0.2).lr_at(step, 100, 1.0) for step in range(100)]
    assert set(rates[10:81]) == {1.0}
    assert rates[99] == pytest.approx(1 / 20)


def test_epochs_are_counted_in_updates():
    assert TrainConfig(steps=7).num_steps(100) == 7
    assert TrainConfig().num_steps(9) == 9
    assert TrainConfig(epochs=3, gradient_accumulation_steps=4).num_steps(9) == math.ceil(27 / 4)


def test_the_default_makes_its_own_data():
    assert DEFAULT.data.generates_data
    assert DataConfig().train is None

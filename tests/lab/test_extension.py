"""The view "extension": its numbers are those of `phasor explain --json`, for presets and for published files."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rope_formulas
from commands import CommandRunner

from phasor import preset
from phasor.config import Extension
from phasor.lab.endpoints import ENDPOINTS, FieldError
from phasor.lab.rotary_model import read_model_config, rotary_presets
from phasor.lab.views import extension
from phasor.models.presets import PRESETS

PUBLISHED = Path(__file__).parents[1] / "published"
ROTARY_FILES = ("gemma-3-1b-it", "gpt-oss-20b", "llama-3.1-8b-instruct", "vicuna-7b-v1.5-16k", "phi-2", "gpt-neox-20b")


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


def ask(name: str, **body: object) -> dict:
    answer = ENDPOINTS[f"/api/extension/{name}"].answer(json.loads(json.dumps(body)))
    return json.loads(json.dumps(answer, allow_nan=False))


def row_of(answer: dict, name: str) -> dict:
    return next(row for row in answer["rows"] if row["id"] == name)


def as_explained(row: dict) -> dict:
    """A row in the form of `phasor explain --json`."""
    columns = row["pairs"]
    pairs = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return row["report"] | {"pairs": pairs}


def explained(run_phasor: CommandRunner, *arguments: str) -> dict:
    return json.loads(run_phasor("explain", *arguments, "--json"))["schemes"][0]


def options(fields: dict[str, object]) -> list[str]:
    def text(value: object) -> str:
        return ",".join(map(repr, value)) if isinstance(value, list) else json.dumps(value)

    given = {name: value for name, value in fields.items() if value is not None and name != "kind"}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", text(value))]


@pytest.mark.parametrize("name", rotary_presets())
def test_the_numbers_of_every_preset_are_those_of_explain(name: str, run_phasor: CommandRunner) -> None:
    answer = ask("methods", model={"preset": name}, methods=extension.method_names())
    length = str(answer["length"])
    for row in answer["rows"]:
        chosen = [] if row["id"] in ("none", "model") else ["--extension", row["id"]]
        if row["id"] == "none" and preset(name).position.extension is not None:
            chosen = ["--extension", "linear", "--factor", "1"]
        given = row["report"]["settings"]["extension"] or {}
        given = given if row["id"] in Extension.kinds else {}
        expected = explained(run_phasor, f"preset:{name}", "--length", length, *chosen, *options(given))
        found = as_explained(row)
        if row["id"] == "none":
            found["settings"] = expected["settings"]  # a factor of 1 stands for no extension
        assert found == expected
    plain = as_explained(ask("methods", model={"preset": name}, factor=1, methods=["none"])["rows"][-1])
    if preset(name).position.extension is None:
        assert plain == explained(run_phasor, f"preset:{name}")


def test_the_rotary_presets_are_all_that_rotate(run_phasor: CommandRunner) -> None:
    assert [one["name"] for one in ask("presets")] == list(rotary_presets())
    for name in PRESETS:
        assert bool(explained(run_phasor, f"preset:{name}")["pairs"]) == (name in rotary_presets())


@pytest.mark.parametrize("name", ROTARY_FILES)
def test_a_published_file_opens_as_explain_reads_it(name: str, run_phasor: CommandRunner, tmp_path: Path) -> None:
    text = (PUBLISHED / f"{name}.json").read_text()
    (tmp_path / "config.json").write_text(text)
    schemes = json.loads(run_phasor("explain", str(tmp_path), "--json"))["schemes"]
    rotated = [scheme for scheme in schemes if scheme["pairs"]]
    opened = ask("open", text=text)["schemes"]
    assert len(opened) == len(rotated)
    for found, scheme in zip(opened, rotated, strict=True):
        assert (found["trained_length"], found["max_length"]) == (scheme["original_length"], scheme["length"])
        factor = scheme["length"] / scheme["original_length"]
        answer = ask("methods", model=found["model"], factor=factor, methods=["none"])
        row = as_explained(answer["rows"][-1])
        assert row | {"layers": scheme["layers"]} == scheme


def test_the_text_part_of_a_multimodal_file_opens() -> None:
    text_part = {"model_type": "llama", "rope_theta": 500000.0, "max_position_embeddings": 8192}
    config = read_model_config(json.dumps({"model_type": "llava", "text_config": text_part}))
    assert config.position.base == 500000.0


@pytest.mark.parametrize("method", Extension.kinds)
def test_frequencies_attention_factor_and_similarity_in_high_precision(method: str) -> None:
    fields = {"proportional": {"fraction": 0.25}, "yarn": {"beta_fast": 20.0, "beta_slow": 2.0}}.get(method, {})
    body = {"base": 50000.0, "head_dim": 64, "trained_length": 2048, "factor": 4, "methods": [method]}
    row = ask("methods", **body, fields={method: fields})["rows"][0]
    settings = row["report"]["settings"]["extension"]
    formula = getattr(rope_formulas, method.replace("-", "_"))
    given = {name: value for name, value in settings.items() if name != "kind"}
    frequencies, factor = formula(50000.0, 64, 8192, **given)
    assert row["pairs"]["extended_frequency"] == pytest.approx([float(f) for f in frequencies], rel=1e-14)
    assert row["report"]["attention_factor"] == pytest.approx(float(factor), rel=1e-14)
    curve = ask("similarity", **body, fields={method: fields})
    mp = rope_formulas.mp
    groups = extension.nearby_distances(8192)
    assert len(groups) == len(curve["distances"])
    for at in range(0, len(groups), 19):
        assert curve["distances"][at] in groups[at]
        mean = sum(mp.cos(f * distance) for f in frequencies for distance in groups[at]) / (32 * len(groups[at]))
        assert curve["rows"][0]["similarity"][at] == pytest.approx(float(mean), abs=1e-12)


@pytest.mark.parametrize("method", ["none", "linear", "ntk", "yarn", "llama3"])
def test_new_angles_are_those_no_trained_position_had(method: str) -> None:
    answer = ask("methods", base=1000.0, head_dim=32, trained_length=256, factor=4, methods=[method])
    row = answer["rows"][0]
    rotation = 2 * rope_formulas.mp.pi
    for i in range(16):
        frequency, extended = row["pairs"]["frequency"][i], row["pairs"]["extended_frequency"][i]
        seen = max(p * frequency for p in range(257)) / rotation
        reached = max(p * extended for p in range(1025)) / rotation
        assert row["angles"]["seen"][i] == pytest.approx(float(min(1, seen)), rel=1e-12)
        assert row["angles"]["reached"][i] == pytest.approx(float(min(1, reached)), rel=1e-12)
        assert (row["angles"]["new"][i] > 0) == bool(min(1, reached) - min(1, seen) > 1e-9)
    assert sum(row["counts"][effect] for effect in extension.EFFECTS) == 16
    assert row["counts"]["new"] == sum(new > 0 for new in row["angles"]["new"])


def test_what_happens_to_pairs_has_a_name() -> None:
    counts = {row["id"]: row["counts"] for row in ask("methods", methods=extension.method_names())["rows"]}
    assert counts["none"]["kept"] == 64
    assert counts["linear"]["slowed"] == 64
    assert (counts["ntk"]["kept"], counts["ntk"]["blended"], counts["ntk"]["slowed"]) == (1, 62, 1)
    assert (counts["yarn"]["kept"], counts["yarn"]["slowed"]) == (21, 18)
    assert counts["dynamic-ntk"] == counts["ntk"]
    assert counts["proportional"]["still"] == 32
    faster = {"short_factor": [1.0] * 64, "long_factor": [0.5] * 64}
    row = ask("methods", methods=["longrope"], fields={"longrope": faster})["rows"][0]
    assert row["counts"]["faster"] == 64


def test_two_models_are_compared_at_one_length(run_phasor: CommandRunner) -> None:
    answer = ask("methods", model={"preset": "llama-2"}, other={"preset": "llama-3.1"}, factor=4)
    both = json.loads(run_phasor("explain", "preset:llama-2", "preset:llama-3.1", "--length", "16384", "--json"))
    assert as_explained(row_of(answer, "model")) == both["schemes"][0]
    assert as_explained(row_of(answer, "other")) == both["other"]["schemes"][0]
    fields = {one["field"]: (one["model"], one["other"]) for one in answer["differences"]}
    assert fields["base"] == (10000.0, 500000.0)
    assert fields["trained_length"] == (4096, 8192)
    assert fields["extension.kind"] == (None, "llama3")
    assert not ask("methods", other={"preset": "llama-2"})["differences"]


def test_other_settings_leave_the_model_behind() -> None:
    own = ask("methods", model={"preset": "llama-3.1"})
    assert own["as_opened"]
    assert [row["id"] for row in own["rows"]] == ["none", "linear", "ntk", "yarn", "model"]
    same = ask("methods", model={"preset": "llama-3.1"}, base=500000, trained_length=8192)
    assert same["as_opened"]
    changed = ask("methods", model={"preset": "llama-3.1"}, trained_length=4096)
    assert not changed["as_opened"]
    assert (changed["base"], changed["trained_length"], changed["factor"]) == (500000, 4096, 8)
    assert [row["id"] for row in changed["rows"]] == ["none", "linear", "ntk", "yarn"]


@pytest.mark.parametrize(
    ("name", "body", "field", "said"),
    [
        (
            "methods",
            {"fields": {"yarn": {"beta_fast": 0.5}}},
            "fields.yarn.beta_fast",
            "must be greater than beta_slow",
        ),
        ("methods", {"fields": {"yarn": {"beta": 1}}}, "fields.yarn", "did you mean 'beta_slow'"),
        ("methods", {"fields": {"yarn": 3}}, "fields.yarn", "must be an object"),
        ("methods", {"fields": {"yarm": {}}}, "methods", "did you mean 'yarn'"),
        ("methods", {"methods": ["drop"]}, "methods", "unknown method 'drop'"),
        ("methods", {"methods": ["ntk"], "head_dim": 2}, "fields.ntk", "at least 4, not 2"),
        ("methods", {"head_dim": 7}, "head_dim", "must be even"),
        ("methods", {"head_dim": 514}, "head_dim", "at most 512"),
        ("methods", {"base": 1}, "base", "must be greater than 1"),
        ("methods", {"factor": 0.5}, "factor", "at least 1"),
        ("methods", {"trained_length": 2**36, "factor": 2}, "factor", "more than 2^36"),
        ("methods", {"model": {"preset": "bert"}}, "model.preset", "has no rotary positions"),
        ("methods", {"model": {"preset": "gpt-9"}}, "model.preset", "is unknown"),
        ("methods", {"other": {"position": {"kind": "alibi"}}}, "other.position", "RotaryConfig is expected"),
        ("open", {}, "preset", "either"),
        ("open", {"preset": "bert"}, "preset", "has no rotary positions"),
        ("open", {"text": "{"}, "text", "this is not JSON"),
        ("open", {"text": "[1]"}, "text", "must be an object"),
        ("open", {"text": preset("bert").to_json()}, "text", "no rotary positions"),
        ("open", {"text": '{"model_type": "zebra"}'}, "text", "unknown model_type 'zebra'"),
        ("open", {"text": " " * (2**20 + 1)}, "text", "at most 1,048,576 characters"),
        ("open", {"text": "长" * 2**19}, "text", "may have 1 MB"),
    ],
)
def test_a_mistake_is_one_sentence_about_its_field(name: str, body: dict, field: str, said: str) -> None:
    with pytest.raises(FieldError) as error:
        ask(name, **body)
    assert error.value.field == field
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_numbers_beyond_floats_are_a_mistake() -> None:
    huge = {"kind": "rotary", "base": 1e300, "extension": {"kind": "ntk", "factor": 1e300}}
    with pytest.raises(ValueError, match="beyond what float64 holds"):
        ask("methods", model={"position": huge})


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({"dim": 1 << 13, "num_heads": 1}, "512 are the most"), ({"num_layers": 10**12}, "at most 10,000")],
    ids=["a wide head", "a deep model"],
)
def test_what_is_too_large_is_refused_before_it_costs_anything(sizes: dict[str, int], said: str) -> None:
    text = json.dumps(preset("llama-2").to_dict() | sizes)
    began = time.process_time()
    with pytest.raises(FieldError, match=said):
        ask("open", text=text)
    assert time.process_time() - began < 0.5


@pytest.mark.slow
def test_a_slider_takes_at_most_30_ms() -> None:
    for name in ("methods", "similarity"):
        ask(name)
        times = []
        for factor in range(2, 23):
            began = time.process_time()
            ENDPOINTS[f"/api/extension/{name}"].answer({"factor": factor})
            times.append(time.process_time() - began)
        assert statistics.median(times) < 0.03


def test_methods_need_no_torch() -> None:
    code = (
        "import sys; from phasor.lab.views.extension import *; explain_methods(MethodsRequest());"
        "list_presets(PresetsRequest()); open_config(OpenRequest(preset='palm')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

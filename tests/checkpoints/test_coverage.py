"""Which checkpoints are read, and how much of what people download that is."""

import json
from importlib import resources
from pathlib import Path

import pytest
from commands import CommandRunner

from phasor.checkpoints.coverage import checkpoint_types, covered_share
from phasor.checkpoints.text_part import MULTIMODAL
from phasor.models.families import SAME_AS, family, names

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"
TYPES = checkpoint_types()


def downloads() -> dict[str, int]:
    """The rows of the table that are text or multimodal, counted again."""
    text = resources.files("phasor.models").joinpath("downloads.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()[2:]]
    return {row[0]: int(row[1]) for row in rows if row[2] in ("text", "multimodal")}


def test_shares_add_up_to_one_and_fall():
    assert sum(one.share for one in TYPES) == pytest.approx(1, abs=1e-12)
    assert [one.share for one in TYPES] == sorted((one.share for one in TYPES), reverse=True)


def test_every_family_every_multimodal_type_and_every_download_is_listed_once():
    listed = [one.model_type for one in TYPES]
    assert len(listed) == len(set(listed))
    assert set(listed) == {*names(), *SAME_AS, *MULTIMODAL, *downloads()}
    parts = {one.model_type: one.part for one in TYPES}
    assert {name for name, part in parts.items() if part == "model"} == {*names(), *SAME_AS}
    assert {name for name, part in parts.items() if part == "text part"} == set(MULTIMODAL) - set(names())
    titles = {one.model_type: one.title for one in TYPES}
    assert titles == {name: family(SAME_AS.get(name, name)).title if parts[name] == "model" else "" for name in listed}


def test_the_share_is_that_of_the_downloads():
    counts = downloads()
    read = sum(count for name, count in counts.items() if name in {*names(), *SAME_AS, *MULTIMODAL})
    assert covered_share(TYPES) == pytest.approx(read / sum(counts.values()), abs=1e-12)


def test_the_document_states_the_share():
    sentence = f"phasor reads {100 * covered_share(TYPES):.0f} % of what people download"
    assert sentence in " ".join(DOCUMENT.read_text(encoding="utf-8").split()), f"docs/checkpoints.md: {sentence}"


def test_the_command_prints_the_share_and_what_is_missing(capsys):
    run = CommandRunner(capsys)
    shown = run("families").splitlines()
    assert shown[-1].startswith(f"{len(names())} families")
    assert f"{covered_share(TYPES):.1%} of the downloads" in shown[-1]
    read, missing = (json.loads(run("families", "--json", *more)) for more in ((), ("--missing",)))
    assert [one["model_type"] for one in read] == [one.model_type for one in TYPES if one.part]
    assert [one["model_type"] for one in missing] == [one.model_type for one in TYPES if not one.part]
    assert sum(one["share"] for one in read + missing) == pytest.approx(1, abs=1e-12)

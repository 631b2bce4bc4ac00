"""Architectures that are refused by name, with what they would need."""

import json
from importlib import resources

import pytest

import phasor
from phasor.checkpoints.coverage import checkpoint_types
from phasor.models.families import names
from phasor.models.missing import MISSING


@pytest.mark.parametrize("kind", MISSING)
def test_a_known_architecture_is_refused_with_its_part_and_the_nearest_family(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ValueError, match=f"does not load {kind}: it has .*; the nearest family is ") as refused:
        phasor.load(tmp_path)
    nearest = str(refused.value).rpartition(" ")[2]
    assert nearest in names()
    assert kind not in names()


NO_ARCHITECTURE = {"unknown", "list_ultra_coder", "ilama", "relik-reader"}  # what repositories made up, or left out


def test_every_downloaded_text_type_is_read_or_refused_with_its_part():
    text = resources.files("phasor.models").joinpath("downloads.tsv").read_text(encoding="utf-8")
    listed = {line.split("\t")[0] for line in text.splitlines() if line.endswith("\ttext")}
    read = {one.model_type for one in checkpoint_types() if one.part}
    assert listed - read - set(MISSING) == NO_ARCHITECTURE

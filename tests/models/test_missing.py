"""Architectures that are refused by name, with what they would need."""

import json

import pytest

import phasor
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

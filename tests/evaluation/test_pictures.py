"""The pictures of docs/compare.md are what the charts of today draw from the results that are kept."""

import io
import json

import numpy as np
import pytest
from matplotlib.image import imread
from test_pages import ROOT

from phasor.evaluation.compare.report import draw_ranking
from phasor.evaluation.lengths_report import draw_losses
from phasor.evaluation.report import to_png


def kept_result(name):
    """What a chart reads of a comparison, with the ends of intervals from their widths."""
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    for row in result["rows"]:
        row["seeds"] = [row["loss"]["estimate"]]
        for interval in (row["loss"], row["difference"], row["change"]):
            if interval is not None:
                interval["low"] = interval["estimate"] - interval["half_width"]
                interval["high"] = interval["estimate"] + interval["half_width"]
    lengths = sorted({row["length"] for row in result["rows"]})
    names = dict.fromkeys(row["extension"] for row in result["rows"])
    schemes = [name for name in names if "(" not in name]
    return result | {"names": schemes, "schemes": schemes, "lengths": lengths, "seeds": 1}


@pytest.mark.parametrize(
    ("name", "draw"), [("compare", lambda result: draw_losses(result, "difference")), ("compare-all", draw_ranking)]
)
def test_pictures_are_those_of_the_results(name, draw, tmp_path):
    drawn = to_png(draw(kept_result(name)))
    (tmp_path / f"{name}.png").write_bytes(drawn)
    page, now = imread(ROOT / "docs" / f"{name}.png"), imread(io.BytesIO(drawn))
    assert page.shape == now.shape
    off = (np.abs(page - now).max(axis=-1) > 0.2).sum()
    assert off < 30, f"docs/{name}.png differs in {off} pixels from {tmp_path / name}.png; a dot has about 60"

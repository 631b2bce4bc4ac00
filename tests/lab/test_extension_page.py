"""The view "extension" in a browser: presets, posted files, two models, mistakes, and the numbers it shows."""

import csv
import json
from pathlib import Path

import pytest

from phasor.config import Extension
from phasor.inspect.explain import explain

PUBLISHED = Path(__file__).parents[1] / "published"


def rows_of(visit, table="td.name"):
    """The rows of the first table, by their names."""
    rows = visit.page.locator("tr", has=visit.page.locator(table)).all()
    return {(cells := row.locator("td").all_inner_texts())[0]: cells[1:] for row in rows}


def download(visit, figure):
    """The CSV of a figure."""
    with visit.page.expect_download() as found:
        visit.page.locator("figure", has_text=figure).locator(".downloads button", has_text="CSV").click()
    return list(csv.DictReader(Path(found.value.path()).read_text(encoding="utf-8-sig").splitlines()))


def test_a_preset_brings_its_settings_and_is_compared_with_another(open_page):
    visit = open_page("extension")
    visit.control("model").select_option("llama-3.1")
    visit.control("other").select_option("llama-2")
    visit.settle()
    shown = {
        name: visit.page.locator(f'[data-control="{name}"] .value').input_value()
        for name in ("trained", "times", "base")
    }
    assert shown == {"trained": "8,192", "times": "16", "base": "500,000"}
    assert rows_of(visit)["llama-3.1 llama3 ×8"][:4] == ["29", "6", "29", "29"]
    pairs, others = (explain(f"preset:{name}").schemes[0].pairs for name in ("llama-3.1", "llama-2"))
    waves = download(visit, "Tokens per rotation")
    assert [float(row["llama-3.1"]) for row in waves] == [pair.extended_wavelength for pair in pairs]
    assert [float(row["as trained"]) for row in waves] == [pair.wavelength for pair in pairs]
    assert [float(row["llama-2"]) for row in waves] == [pair.wavelength for pair in others]
    table = visit.page.locator("table").nth(1).inner_text()
    assert "500,000" in table
    assert "llama3" in table
    assert open_page(visit.address()).picture() == visit.picture()


def test_a_posted_file_is_opened_and_mistakes_stand_beside_their_controls(open_page, tmp_path):
    visit = open_page("extension")
    name = "vicuna-7b-v1.5-16k.json"
    visit.page.set_input_files('[data-control="file"] input', PUBLISHED / name)
    visit.settle()
    assert rows_of(visit)[f"{name} linear ×4"][:4] == ["0", "0", "64", "0"]
    assert visit.control("model").evaluate("(e) => e.selectedOptions[0].text") == name
    address = visit.address()
    assert len(address) < 300
    assert open_page(address).picture() == visit.picture()

    visit.page.locator('[data-control="attention"] input:visible').fill("much")
    visit.settle()
    said = visit.page.locator('[data-control="attention"] .error:visible').inner_text()
    assert said == "YaRN.attention must be a number, not 'much'"
    visit.page.locator('[data-control="attention"] input:visible').fill("")
    visit.settle()
    assert not visit.page.locator(".error:visible").count()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "zebra"}))
    visit.page.set_input_files('[data-control="file"] input', tmp_path / "config.json")
    visit.settle()
    assert "unknown model_type 'zebra'" in visit.error("file")
    visit.page.set_input_files('[data-control="file"] input', PUBLISHED / name)
    visit.page.set_input_files('[data-control="otherFile"] input', tmp_path / "config.json")
    visit.settle()
    assert "unknown model_type 'zebra'" in visit.error("otherFile")
    assert not visit.error("file")
    visit.errors.clear()  # chromium reports every status of 400


@pytest.mark.slow
def test_a_file_with_two_schemes_offers_both(open_page):
    visit = open_page("extension")
    visit.page.set_input_files('[data-control="file"] input', PUBLISHED / "gemma-3-1b-it.json")
    visit.settle()
    before = visit.picture()
    visit.control("scheme").select_option(index=1)
    visit.settle()
    assert visit.page.locator('[data-control="base"] .value').input_value() == "1,000,000"
    assert visit.picture() != before


@pytest.mark.slow
def test_models_of_other_sizes_are_not_compared_pair_by_pair(open_page):
    visit = open_page("extension?other=palm")
    assert "64 and 128 pairs" in visit.page.locator("section", has_text="What differs").last.inner_text()
    visit.control("other").select_option("")
    visit.settle()
    assert not visit.page.locator("table").nth(1).is_visible()


@pytest.mark.slow
def test_every_method_can_be_shown_with_its_fields(open_page):
    visit = open_page("extension")
    for method in Extension.kinds:
        visit.control("method").select_option(method)
    visit.settle()
    assert len(rows_of(visit)) == 1 + len(Extension.kinds)
    address = visit.address()
    assert all(f"{method}=1" in address for method in Extension.kinds if method not in ("linear", "ntk", "yarn"))
    visit.control("method").select_option("llama3")
    visit.page.locator('[data-control="high_freq_factor"] .value').fill("8")
    visit.page.keyboard.press("Enter")
    visit.settle()
    body = [body for path, body in visit.asked if path.endswith("/methods")][-1]
    assert body["fields"] == {"llama3": {"high_freq_factor": 8}}

"""The views Encodings and Parts in a browser: every scheme and every part, and the numbers they show."""

import csv
from pathlib import Path

import pytest
import torch

from phasor.lab.codes import build_scheme, nearest_pair
from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.schemes import describe_schemes
from phasor.nn.positions import SinusoidalConfig

NAMES = {scheme["kind"]: scheme["texts"]["en"]["name"] for scheme in describe_schemes()}
PARTS = ["scale", "activations", "norms", "placements"]


def download(visit, figure):
    """The CSV of a figure, as rows."""
    with visit.page.expect_download() as found:
        visit.page.locator("figure", has_text=figure).locator(".downloads button", has_text="CSV").first.click()
    return list(csv.reader(Path(found.value.path()).read_text(encoding="utf-8-sig").splitlines()))


def test_every_scheme_is_chosen_and_says_what_it_finds(open_page):
    visit = open_page("encodings")
    titles = set()
    for kind in NAMES:
        visit.control("s").select_option(kind)
        visit.settle()
        assert not visit.page.locator(".error:visible").all_inner_texts(), kind
        titles.add(visit.page.locator("h1").inner_text())
        assert "{" not in visit.page.locator(".header").inner_text()  # every number was measured
        assert visit.page.locator('button[aria-pressed="true"]').all_inner_texts() == [NAMES[kind]]
    assert len(titles) == len(NAMES)


def test_the_codes_of_the_page_are_those_of_the_library(open_page):
    start = 2**36 - 100
    visit = open_page(f"encodings?start={start}&n=16&dim=32")
    expected = build_scheme(SinusoidalConfig(layout="halves"), 32).codes(start + torch.arange(16), start + 16)
    head, *rows = download(visit, "Codes")
    assert len(head) == 33
    found = torch.tensor([[float(cell) for cell in row[1:]] for row in rows], dtype=torch.float64)
    assert float((found - expected).abs().max()) < 1e-7
    pair = nearest_pair(expected)
    caption = visit.page.locator("figcaption", has_text="The nearest pair").inner_text()
    assert f"{start + pair['a']:,} and {start + pair['b']:,}" in caption
    assert "largest difference" in visit.page.locator(".aside").first.inner_text()


def test_clicks_choose_a_position_and_a_scheme(open_page):
    visit = open_page("encodings")
    visit.page.locator("figure canvas").first.click(position={"x": 100, "y": 304})
    visit.settle()
    assert visit.address() == "encodings?t=40"
    assert visit.page.locator("figcaption", has_text="Row 40 the code").count() == 1
    rows = visit.page.locator(".criteria tbody tr")
    assert [row.locator("th").inner_text() for row in rows.all()] == list(NAMES.values())
    fails = [row.locator("th").inner_text() for row in rows.all() if row.locator(".no").count()]
    cards = ENDPOINTS["/api/encodings/criteria"].answer({})
    criteria = ("unique", "consistent", "bounded", "deterministic")
    assert set(fails) == {NAMES[card["kind"]] for card in cards if not all(card[name]["holds"] for name in criteria)}
    visit.page.locator(".criteria button", has_text="ALiBi").click()
    visit.settle()
    assert visit.address() == "encodings?s=alibi&t=40"
    assert visit.page.locator("figcaption", has_text="head 1").is_visible()


def test_the_score_card_says_growth_and_what_follows_the_tokens(open_page):
    visit = open_page("encodings")
    rows = visit.page.locator(".criteria tbody tr").all()
    said = {row.locator("th").inner_text(): row.locator("td span").all_text_contents() for row in rows}
    for card in ENDPOINTS["/api/encodings/criteria"].answer({}):
        *_, bounded, deterministic = said[NAMES[card["kind"]]]
        expected = "ends" if card["bounded"]["refused"] else "|x| ≤" if card["bounded"]["holds"] else "grows"
        assert bounded.startswith(expected), card["kind"]
        follows = card["kind"] in ("accumulated", "cope", "forget", "profiles")
        assert (deterministic == "follows the tokens") is follows, card["kind"]


def test_mistakes_stand_beside_their_controls(open_page):
    visit = open_page("sources")
    for address, control, words in (
        ("encodings?dim=513", "dim", "at most 512"),
        ("encodings?s=learned&start=5000", "start", "ends after 1,024 positions"),
        ("encodings?s=axial&base=0.5", "base", "greater than 1"),
        ("parts?part=placements&layers=200", "layers", "at most 64"),
    ):
        visit.page.evaluate("(hash) => { location.hash = hash; }", f"#/{address}")
        place = visit.page.locator(f'[data-control="{control}"] .error', has_text=words)
        place.wait_for()
    visit.settle()
    visit.errors.clear()  # chromium reports every status of 400


def test_every_part_is_shown(open_page):
    visit = open_page("parts")
    titles = {}
    for i, part in enumerate(PARTS):
        visit.page.locator(".tabs button").nth(i).press("Enter")
        visit.settle()
        sections = [one for one in visit.page.locator("main section").all() if one.is_visible()]
        assert len(sections) == 1
        assert sections[0].locator("figure svg[role], figure canvas").count() >= 3
        titles[part] = visit.page.locator("h1").inner_text()
        assert visit.address() == ("parts" if part == "scale" else f"parts?part={part}")
    assert len(set(titles.values())) == len(PARTS)
    for i, part in ((0, "scale"), (3, "placements")):  # back again
        visit.page.locator(".tabs button").nth(i).press("Enter")
        visit.settle()
        assert visit.page.locator("h1").inner_text() == titles[part]


def test_the_title_of_parts_has_the_numbers_of_its_plots(open_page):
    visit = open_page("parts")
    title = visit.page.locator("h1").inner_text()
    for figure in ("Softmax, not divided", "Softmax, divided by √d"):
        largest = f"{float(download(visit, figure)[1][-1]):.0%}".replace("%", "\u00a0%")
        assert largest in title
        assert f"largest {largest}" in visit.page.locator("figcaption", has_text=figure).inner_text()


def test_the_curves_of_the_page_are_those_of_the_library(open_page):
    visit = open_page("parts?part=activations")
    expected = ENDPOINTS["/api/parts/curves"].answer({})["curves"]
    head, *rows = download(visit, "Plain activations")
    for kind in ("relu", "silu", "gelu", "gelu-tanh"):
        assert [float(row[head.index(kind)]) for row in rows] == expected[kind]["values"]


STATES = [f"encodings?s={kind}" for kind in NAMES] + [f"parts?part={part}" for part in PARTS]


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("address", STATES)
def test_every_state_is_accessible_and_fits_a_phone(open_page, address, language):
    visit = open_page(address, width=390, theme="dark", language=language)
    assert visit.sideways() <= 0
    assert not visit.serious_findings()

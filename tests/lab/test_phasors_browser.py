"""The views "phasors" and "precision" in a real browser: they show the library's numbers, by pointer, keys, address."""

import random

import pytest
from browser import visit
from test_phasors import library_score

from phasor.lab.views.phasors import ScoreRequest, score

LAST = 2**36

HANDS = """async ([increments, position]) => {
  const { angles, parseIncrements } = await import("/js/core/phase.js");
  return [...angles(parseIncrements(increments), position)];
}"""


def shown_score(page):
    return float(page.locator("#score").get_attribute("data-value"))


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_scores_on_the_page_are_those_of_the_library(open_page, count):
    """At random positions up to 2^36, by the address."""
    rng, lab = random.Random(count), open_page("phasors?seed=1")
    for _ in range(count):
        request = ScoreRequest(
            query=(at := rng.randint(0, LAST - 255)) + (q := rng.randrange(256)),
            key=at + (k := rng.randrange(256)),
            alike=round(rng.random(), 2),
            pairing=rng.choice(["half", "adjacent"]),
        )
        state = f"q={q}&k={k}&at={at}&alike={request.alike}&pairing={request.pairing}"
        lab.page.evaluate("(state) => { location.hash = `#/phasors?${state}`; }", state)
        formula = f"q{request.query:,} · k{request.key:,}"
        lab.page.wait_for_function("(text) => document.querySelector('.formula').textContent === text", arg=formula)
        assert shown_score(lab.page) == pytest.approx(library_score(request), abs=1e-12)


def test_hands_on_the_page_are_turned_exactly(open_page):
    """The page's own 64-bit product against Python's integers."""
    lab, rng = open_page("phasors"), random.Random(2)
    increments = [rng.randrange(-(2**63), 2**63) for _ in range(64)]
    for position in (0, 1, LAST, rng.randint(0, LAST)):
        found = lab.page.evaluate(HANDS, [[str(inc) for inc in increments], position])
        phases = [(inc * position + 2**63) % 2**64 - 2**63 for inc in increments]
        assert found == [float(phase) * (2 * 3.141592653589793 / 2**64) for phase in phases]


def test_handles_are_dragged_and_moved_by_keys(open_page):
    lab = open_page("phasors")
    query, before = lab.page.get_by_role("slider", name="Position of the query"), lab.picture()
    box = query.bounding_box()
    lab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    lab.page.mouse.down()
    lab.page.mouse.move(box["x"] + 300, box["y"] + 10, steps=5)
    lab.page.mouse.up()
    lab.settle()
    dragged = int(query.get_attribute("aria-valuenow"))
    assert dragged > 60
    assert lab.picture() != before
    query.press("ArrowLeft")
    lab.settle()
    query.press("PageUp")
    lab.settle()
    assert query.get_attribute("aria-valuenow") == str(dragged + 15)
    query.press("Home")
    lab.settle()
    assert lab.address() == "phasors?q=0"
    assert shown_score(lab.page) == pytest.approx(library_score(ScoreRequest(query=0, key=28)), abs=1e-12)


def test_moving_both_keeps_the_score_and_turns_the_hands(open_page):
    lab = open_page("phasors")
    value, before = shown_score(lab.page), lab.picture()
    button = lab.control("play")
    button.click()
    lab.page.wait_for_function("() => Number(document.querySelector('.formula sub').textContent) > 45")
    button.click()
    lab.settle()
    assert shown_score(lab.page) == pytest.approx(value, abs=1e-9)
    assert lab.picture() != before
    assert "at=" in lab.address()


def test_rotation_before_the_projection_changes_the_finding(open_page):
    lab = open_page("phasors?rotate=before&at=4096")
    assert "place matters" in lab.page.locator("h1").inner_text()
    expected = score(ScoreRequest(query=4136, key=4124, rotate="before"))["score"]
    assert shown_score(lab.page) == pytest.approx(expected, abs=1e-12)
    lab.control("rotate").select_option("after")
    lab.settle()
    assert "Only the distance matters" in lab.page.locator("h1").inner_text()


MISTAKES = [
    ("phasors?base=1", "base", "base must be at least 2"),
    ("phasors?alike=3", "alike", "alike must be at most 1"),
    ("phasors?dim=7", "dim", "head_dim must be even"),
    ("phasors?at=68719476736", "at", "query must be at most 68,719,476,736"),
    ("precision?at=-1", "at", "offset must be at least 0"),
]


def test_a_mistake_stands_beside_its_control(chromium, lab):
    """Such a request is answered by 400, which the console reports: this page is not checked for its errors."""
    page = visit(chromium, lab).open("phasors")
    for address, control, sentence in MISTAKES:
        page.page.evaluate("(address) => { location.hash = `#/${address}`; }", address)
        place = f'.view.{address.partition("?")[0]} [data-control="{control}"] .error'
        page.page.locator(place, has_text=sentence).wait_for()
    page.page.evaluate("() => { location.hash = '#/precision'; }")
    page.page.locator(".error:visible").wait_for(state="detached")
    page.close()


def test_precision_is_picked_in_the_chart_and_moved_by_keys(open_page):
    lab = open_page("precision")
    assert "2²²" in lab.page.locator("h1").inner_text()
    chart = lab.page.locator("figure svg").first
    before = lab.picture()
    chart.press("End")
    chart.press("Enter")
    lab.settle()
    assert lab.address() == f"precision?at={LAST}"
    assert lab.picture() != before
    lab.control("method").select_option("bfloat16")
    lab.settle()
    assert lab.page.get_by_text("Error by pair: bfloat16").is_visible()

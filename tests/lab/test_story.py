"""The lab as a story: where it begins, how it goes on, that nothing jumps, and what stands where."""

import re

import pytest
from test_page_conduct import hold

from phasor.config import Extension, NormConfig, PlacementConfig, PositionConfig
from phasor.config.schema import names
from phasor.lab.figures import DOCUMENTS, FIGURES
from phasor.lab.server import VIEWS

# Words of a heading that are broken at the end of a line, and lines that end in an opening bracket or a sign.
BROKEN = """(heading) => {
  const texts = document.createTreeWalker(heading, NodeFilter.SHOW_TEXT);
  const tops = [];
  while (texts.nextNode())
    for (let i = 0; i < texts.currentNode.length; i++) {
      const range = document.createRange();
      range.setStart(texts.currentNode, i);
      range.setEnd(texts.currentNode, i + 1);
      tops.push(Math.round(range.getBoundingClientRect().bottom));
    }
  const text = heading.textContent;
  const segmenter = new Intl.Segmenter("zh", { granularity: "word" });
  const words = [...segmenter.segment(text)].filter(({ segment, index, isWordLike }) => {
    const lines = new Set(tops.slice(index, index + segment.length + (/[（(×]/.test(segment) ? 1 : 0)));
    return (isWordLike || /[（(×]/.test(segment)) && lines.size > 1;
  });
  return words.map(({ segment }) => segment);
}"""
FIRST_FIGURE = """() => {
  const box = document.querySelector("main figure .plot").getBoundingClientRect();
  return [box.top, box.height];
}"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_links_lead_from_order_through_all_views(open_page, language):
    one = open_page("", language=language)
    visited = []
    for view in VIEWS:
        one.page.wait_for_selector(f"main .view.{view}", state="attached")
        one.settle()
        visited.append(view)
        words = one.page.locator(".words").inner_text()
        assert bool(re.search(r"[\u4e00-\u9fff]", words)) == (language == "zh")
        if view != VIEWS[-1]:
            one.page.locator(".next a").click()
    assert visited == ["order", "encodings", "phasors", "precision", "extension", "parts", "runs", "sources"]
    assert not one.page.locator(".next").count()


@pytest.mark.parametrize(("language", "words"), [("en", "Beijing"), ("zh", "北京")])
def test_order_is_shown_with_and_without_positions_in_the_language_of_the_page(open_page, language, words):
    one = open_page("order", language=language)
    assert words in one.page.locator(".sentences").inner_text()
    plain, positioned = (one.page.locator(".view > .halves figure").nth(i) for i in range(2))
    same = {"en": "the two lines are one", "zh": "两条线重合"}[language]
    assert same in plain.inner_text()
    assert same not in positioned.inner_text()
    paths = "(all) => new Set(all.map((e) => e.getAttribute('d'))).size"
    assert plain.locator("svg path").evaluate_all(paths) < positioned.locator("svg path").evaluate_all(paths)
    percent = re.search(r"[\d.]+ %", one.page.locator("h1").inner_text()).group()
    assert percent in positioned.inner_text()
    one.control("pos").select_option("none")
    one.settle()
    assert not positioned.is_visible()


@pytest.mark.sample(1)
@pytest.mark.parametrize("view", ["order", "encodings", "phasors", "extension", "precision"])
def test_drawings_have_a_place_before_there_are_data(open_page, view):
    one = open_page("sources")
    held = hold(one, f"**/api/{view}/*")
    one.page.evaluate("(hash) => { location.hash = hash; }", f"#/{view}")
    one.page.wait_for_selector("main figure.empty", state="attached")
    assert one.page.evaluate(FIRST_FIGURE)[1] >= 150
    assert "{" not in one.page.locator("main").inner_text()
    assert not [button for button in one.page.locator(".downloads button").all() if button.is_visible()]
    for route in held:
        route.continue_()
    one.page.unroute_all()
    one.settle()
    assert one.page.locator("main figure").first.locator(".downloads button").first.is_visible()
    assert not one.page.locator("figure.empty:visible").count()


@pytest.mark.sample(1)
@pytest.mark.parametrize("view", ["order", "encodings", "phasors", "precision", "extension", "parts"])
def test_on_a_phone_the_drawing_stands_above_the_controls(open_page, view):
    one = open_page(view, width=390)
    tops = "(all) => all.filter((e) => e.offsetParent).map((e) => e.getBoundingClientRect().top)"
    figures, controls = (one.page.locator(f"main {what}").evaluate_all(tops) for what in ("figure", ".control"))
    assert min(figures) < min(controls)


@pytest.mark.sample(1)
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("view", VIEWS)
def test_headings_break_between_words(open_page, view, language):
    one = open_page(view, width=390, language=language)
    for width in range(320, 440, 10):
        one.page.set_viewport_size({"width": width, "height": 900})
        assert one.page.locator("h1").evaluate(BROKEN) == [], width


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary", "alibi"])
def test_sum_or_concatenation_is_asked_where_a_scheme_can_be_either(open_page, kind):
    one = open_page(f"encodings?s={kind}")
    assert one.page.get_by_text("Sum or concatenation").is_visible() == ("combine" in names(PositionConfig.kinds[kind]))


def test_lists_are_those_of_the_registries(open_page):
    one = open_page("extension")
    shown = one.page.locator(".choices .control").evaluate_all("(all) => all.map((e) => e.dataset.control)")
    assert shown == ["none", *Extension.kinds]
    one = open_page("parts?part=placements")
    assert one.control("norm").locator("option").all_inner_texts() == list(NormConfig.kinds)
    assert {body["placement"] for path, body in one.asked if path.endswith("placement")} == set(PlacementConfig.kinds)


@pytest.mark.sample(1)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_index_says_what_the_documents_are(open_page, language):
    one = open_page("sources", language=language)
    assert set(DOCUMENTS) == {figure.document for figure in FIGURES}
    text = one.page.locator(".index").inner_text()
    assert all(described[language] in text for described in DOCUMENTS.values())

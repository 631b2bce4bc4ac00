"""How the page behaves in between: answers that come late, views that are left, focus that stays, mistakes in sight."""

import re

import pytest
from browser import PRESENT, visit

PARTS = [f"parts?part={part}" for part in ("activations", "norms", "placements")]
# The visible texts of an element that are in the language of the page.
TEXTS = """(main) => {
  const nodes = document.createTreeWalker(main, NodeFilter.SHOW_TEXT), found = [];
  while (nodes.nextNode()) {
    const { parentElement: parent, textContent: text } = nodes.currentNode;
    if (parent.checkVisibility() && parent.closest("[lang]").lang !== "en") found.push(text);
  }
  return found;
}"""


def hold(one, pattern):
    """Hold requests of a page back; each is answered when it is popped and continued."""
    held = []
    one.page.route(pattern, lambda route: held.append(route))
    return held


def wait_for(one, condition):
    for _ in range(500):
        if condition():
            return
        one.page.wait_for_timeout(20)
    raise AssertionError("it did not happen")


def go(one, address):
    one.page.evaluate("(hash) => { location.hash = hash; }", f"#/{address}")


def test_an_address_that_changes_while_its_view_loads_opens_one_view(open_page):
    one = open_page("sources")
    held = hold(one, "**/views/parts.js")
    go(one, "parts")
    wait_for(one, lambda: held)
    go(one, "parts?part=norms")
    one.page.wait_for_timeout(50)
    held.pop().continue_()
    one.page.wait_for_selector("main .view.parts")
    one.settle()
    assert [path for path, _ in one.asked] == ["/api/parts/norms"]
    one.page.unroute_all()


def test_a_view_that_is_left_does_not_name_the_window(open_page):
    one = open_page("order")
    held = hold(one, "**/api/order/ticket")
    one.control("pos").select_option("alibi")
    wait_for(one, lambda: held)
    go(one, "sources")
    one.page.wait_for_selector(".index a")
    one.page.wait_for_timeout(100)
    assert one.page.title() == f"{one.page.locator('h1').inner_text()} · phasor lab"
    one.page.unroute_all()


@pytest.mark.slow
def test_a_view_that_is_left_asks_no_more(open_page):
    one = open_page("runs")
    held = hold(one, "**/api/runs/curves")
    wait_for(one, lambda: held)  # a look at the folders that is not answered
    go(one, "sources")
    one.page.wait_for_selector(".index a")
    one.page.unroute_all()
    asked = len(one.asked)
    one.page.wait_for_timeout(2500)
    assert len(one.asked) == asked


def test_a_mistake_does_not_stop_what_was_chosen_meanwhile(open_page):
    """Also: a position that is no integer is a sentence at its control, and no failure of the dials."""
    one = open_page("phasors")
    held = hold(one, "**/api/phasors/score")
    typed = one.page.locator('[data-control="at"] .value')
    for text in ("3.5", "5"):  # the second one while the first is asked for
        typed.fill(text)
        typed.press("Enter")
        wait_for(one, lambda: held)
    one.page.wait_for_timeout(50)
    held.pop().continue_()
    wait_for(one, lambda: held)  # it goes on with the newest choice
    assert one.asked[-1][1]["query"] == 45
    held.pop().continue_()
    one.page.unroute_all()
    one.settle()
    assert not one.page.locator(".error:visible").count()
    typed.fill("3.5")
    typed.press("Enter")
    wait_for(one, lambda: "must be an integer" in one.error("at"))
    typed.fill("1e999")
    typed.press("Enter")
    assert typed.input_value() == "4"  # 3.5 as it is shown
    assert all("400" in error for error in one.errors)
    one.errors.clear()


def test_a_number_that_is_being_typed_stays_when_the_page_is_drawn_again(open_page):
    one = open_page("extension")
    typed = one.page.locator('[data-control="trained"] .value')
    typed.fill("81")
    one.page.evaluate("dispatchEvent(new Event('theme'))")
    one.page.wait_for_timeout(100)
    assert typed.input_value() == "81"
    typed.press("Escape")
    assert typed.input_value() == "4,096"


def test_other_values_in_the_storage_do_not_matter(chromium, lab):
    one = visit(chromium, lab)
    names = ["language", "theme", "phasor-lab-language", "phasor-lab-theme"]
    one.page.add_init_script(f"for (const name of {names}) localStorage.setItem(name, 'system');")
    one.open("sources").check()
    assert one.page.evaluate("document.documentElement.dataset.theme") == "light"
    one.close()


def test_the_focus_stays_on_what_was_pressed(open_page):
    one = open_page("parts")
    focused = "document.activeElement.textContent"
    one.page.locator(".tabs button").nth(2).press("Enter")
    one.settle()
    assert one.page.evaluate(focused) == "Norms"
    one.page.locator("nav a", has_text="Index").press("Enter")
    one.page.wait_for_selector(".index a")
    assert one.page.evaluate(focused) == "Index"


def test_a_mistake_stands_at_the_control_in_sight(open_page):
    """The norms have features too, in a part that is hidden."""
    one = open_page("parts?part=placements&width=9999")
    assert "dim must be at most" in one.error("width")
    one.errors.clear()


def test_the_index_says_when_the_server_has_ended(open_page):
    one = open_page("sources")
    go(one, "parts")
    one.page.wait_for_selector("main .view.parts")
    one.settle()
    one.page.route("**/api/figures", lambda route: route.abort())
    go(one, "sources")
    one.page.locator(".banner", has_text="Is phasor lab still running?").wait_for()
    one.page.unroute_all()
    one.errors.clear()


@pytest.mark.parametrize(
    ("language", "words"), [("en", "large.json has more than 1 MB"), ("zh", "large.json 超过 1 MB")]
)
def test_a_file_that_is_too_large_is_refused_beside_its_control(open_page, tmp_path, language, words):
    one = open_page("extension", language=language)
    (tmp_path / "large.json").write_text(" " * (3 << 20))
    one.page.set_input_files('[data-control="otherFile"] input', tmp_path / "large.json")
    assert one.error("otherFile").startswith(words)
    assert not one.page.locator(".banner:visible").count()
    assert "/api/extension/open" not in [path for path, _ in one.asked]
    one.control("other").select_option("llama-3.1")
    one.settle()
    assert not one.error("otherFile")


def test_schemes_and_criteria_are_named_in_chinese(open_page):
    one = open_page("encodings", language="zh")
    assert one.control("s").locator("option:checked").inner_text() == "正弦"
    labels = one.page.locator(".criteria td b").evaluate_all("(all) => all.map((e) => e.ariaLabel)")
    assert set(labels) == {"符合", "不符合"}
    assert not re.search(r"\bpair\b", one.page.locator("main").inner_text())


@pytest.mark.sample(4)
@pytest.mark.parametrize("address", [*(view for view in PRESENT if view != "sources"), *PARTS])
def test_chinese_pages_have_no_english_sentences(open_page, address):
    """But those that are marked as English."""
    one = open_page(address, language="zh")
    found = one.page.locator("main").evaluate(TEXTS)
    assert not [text for text in found if re.search(r"(\b[A-Za-z]{2,}[,:]? ){3,}", text)]

"""Every view in a real browser: both languages and themes, narrow and wide, by keyboard, restored by its address."""

import itertools
import re
import statistics
import time

import pytest
from browser import PRESENT, visit

from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.figures import FIGURES
from phasor.lab.server import build_app

build_app()  # fills the table of figures

LOOKS = [(w, theme, language) for w in (1280, 390) for theme in ("light", "dark") for language in ("en", "zh")]
QUICK = [(1280, "light", "en"), (390, "dark", "zh")]
VIEWS = [(view, *look) for view in PRESENT for look in LOOKS]
QUICK_VIEWS = [(view, *look) for view, look in zip(PRESENT, itertools.cycle(QUICK), strict=False)]


def check_look(visit, language):
    visit.check()
    assert visit.sideways() <= 0
    assert not visit.serious_findings()
    title = visit.page.locator("h1").inner_text()
    assert bool(re.search(r"[\u4e00-\u9fff]", title)) == (language == "zh"), title
    assert visit.page.locator(".lead").inner_text()
    assert not visit.page.locator(".error:visible").all_inner_texts()
    for picture in visit.page.locator("figure svg[role], figure canvas").all():
        assert picture.get_attribute("aria-label")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("view", "width", "theme", "language"), QUICK_VIEWS, ids=str)
def test_a_view_is_sound(open_page, view, width, theme, language):
    """No console error, no request off the machine, nothing serious from axe, no sideways scroll."""
    check_look(open_page(view, width=width, theme=theme, language=language), language)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("view", "width", "theme", "language"), [look for look in VIEWS if look not in QUICK_VIEWS], ids=str
)
def test_a_view_is_sound_in_every_look(open_page, view, width, theme, language):
    check_look(open_page(view, width=width, theme=theme, language=language), language)


@pytest.mark.sample(1)
@pytest.mark.parametrize("view", PRESENT)
def test_keys_move_sliders_and_the_address_restores_the_picture(open_page, view):
    """Arrow keys change the picture, and the address brings it back."""
    visit = open_page(view)
    before = visit.picture()
    sliders = move_sliders(visit)
    if sliders:
        assert visit.picture() != before
    address = visit.address()
    assert bool(sliders) == ("?" in address)
    assert len(address) < 300
    assert open_page(address).picture() == visit.picture()


def move_sliders(visit):
    """Press an arrow key on every slider in sight; how many there are."""
    sliders = [one for one in visit.page.locator("input[type=range]").all() if one.is_visible()]
    for slider in sliders:
        value = slider.get_attribute("aria-valuetext")
        slider.press("ArrowRight")
        if slider.evaluate("(e) => e.value === e.max"):
            slider.press("ArrowLeft")
            slider.press("ArrowLeft")
        visit.settle()
        assert slider.get_attribute("aria-valuetext") != value
    return len(sliders)


@pytest.mark.slow
@pytest.mark.parametrize("view", PRESENT)
def test_sliders_are_answered_in_30_ms_and_drawn_in_10(open_page, view):
    """Medians: of the CPU time of a request, and of the time of a drawing."""
    visit = open_page(view)
    asked = len(visit.asked)
    move_sliders(visit)
    bodies = {path: body for path, body in visit.asked[asked:] if not ENDPOINTS[path].folders}
    slow = {path: spent for path, body in bodies.items() if (spent := cpu_time(path, body)) > 0.03}
    assert not slow
    times = visit.draw_times()
    assert not times or statistics.median(times) <= 10


def cpu_time(path, body):
    """The median CPU time in seconds of answering a request."""
    times = []
    for _ in range(5):
        start = time.thread_time()
        ENDPOINTS[path].answer(body)
        times.append(time.thread_time() - start)
    return statistics.median(times)


@pytest.mark.slow
def test_every_figure_of_the_documents_opens_by_its_link(open_page):
    """By navigation within one page, as a reader does from the index."""
    visit = open_page("sources")
    assert visit.page.locator(".index a").count() == len(FIGURES)
    for figure in FIGURES:
        view, _, query = figure.url.removeprefix("#/").partition("?")
        visit.page.evaluate("(hash) => { location.hash = hash; }", figure.url)
        visit.page.wait_for_selector(f"main .view.{view}", state="attached")
        visit.settle()
        visit.check()
        assert not visit.page.locator(".error:visible").all_inner_texts(), figure.url
        known = visit.page.evaluate(
            "(view) => import(`/js/views/${view}.js`).then((m) => Object.keys(m.defaults))", view
        )
        assert {part.partition("=")[0] for part in query.split("&") if part} <= set(known), figure.url


def test_requests_off_the_machine_are_blocked_and_counted(chromium, lab):
    """Of a page without the lab's policy, which alone would forbid them."""
    one = visit(chromium, lab)
    one.page.goto("about:blank")
    asked = "(url) => fetch(url, { mode: 'no-cors' }).then(() => 'answered', () => 'blocked')"
    for url in ("http://example.com/", "http://192.0.2.1/"):
        assert one.page.evaluate(asked, url) == "blocked"
    assert len(one.outside) == 2
    one.close()


def test_language_and_theme_are_switched_and_remembered(open_page):
    visit = open_page("sources")
    title = visit.page.locator("h1").inner_text()
    paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    visit.page.locator("#switches button").nth(0).press("Enter")
    visit.settle()
    assert visit.page.locator("h1").inner_text() != title
    assert visit.page.evaluate("document.documentElement.lang") == "zh-CN"
    visit.page.locator("#switches button").nth(1).press("Enter")
    assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") != paper
    visit.page.reload()
    visit.settle()
    assert visit.page.evaluate("[document.documentElement.lang, document.documentElement.dataset.theme]") == [
        "zh-CN",
        "dark",
    ]


def test_an_unknown_view_says_so(open_page):
    visit = open_page("sources")
    visit.page.evaluate("location.hash = '#/nonsense'")
    visit.page.wait_for_function("document.querySelector('main h1').textContent.includes('nonsense')")
    visit.page.evaluate("location.hash = '#/%'")  # not an encoding of anything
    visit.page.wait_for_function("document.querySelector('main h1').textContent.includes('%')")


def test_a_view_that_cannot_be_loaded_says_so(open_page):
    visit = open_page("sources")
    visit.page.route("**/*", lambda route: route.abort())  # as if the server had ended
    visit.page.evaluate("location.hash = '#/parts'")
    visit.page.locator("h1", has_text="Is phasor lab still running?").wait_for()
    visit.page.unroute_all()
    visit.errors.clear()  # the browser itself notes what it cannot load


@pytest.mark.sample(1)
@pytest.mark.parametrize("view", [view for view in PRESENT if view not in ("sources", "runs")])
def test_figures_are_downloaded_and_read_by_keyboard(open_page, view):
    """Each figure has CSV and SVG or PNG; arrow keys move a cursor whose read-out is spoken."""
    check_figures(open_page(view))


def check_figures(visit):
    figures = [one for one in visit.page.locator("figure").all() if one.locator(".downloads button").first.is_visible()]
    kinds = set()
    for figure in figures:
        picture = figure.locator("svg[role], canvas").first
        kind = (
            picture.evaluate("(e) => e.tagName"),
            figure.evaluate("(e) => e.querySelector('.plot').figure.constructor.name"),
        )
        if kind in kinds:
            continue  # one of each sort
        kinds.add(kind)
        for button in figure.locator(".downloads button").all():
            with visit.page.expect_download() as waiting:
                button.click()
            path = waiting.value.path()
            assert path.stat().st_size > 20
            if button.inner_text() == "SVG":
                assert "var(--" not in path.read_text()
        picture.press("ArrowRight")
        picture.press("ArrowRight")
        assert figure.locator(".spoken").inner_text(), kind
        picture.press("Escape")
        assert figure.locator(".tip").is_hidden()
    assert kinds

"""The site: both languages are built without a warning, and its pages need nothing that is not in its folder."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
from xml.etree import ElementTree

import pytest
from bs4 import BeautifulSoup
from docutils import nodes
from lab.browser import serve, visit
from markdown_it.renderer import RendererHTML
from myst_parser.config.main import MdParserConfig
from myst_parser.parsers.mdit import create_md_parser
from sphinx.util.inventory import InventoryFile

import phasor
from phasor.cli import VERBS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))
from sphinx_extensions.colors import COLORS  # noqa: E402
from sphinx_extensions.docstrings import to_markdown  # noqa: E402
from sphinx_extensions.mathml import to_mathml  # noqa: E402

FULL = os.environ.get("PHASOR_EXAMPLES") == "full"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}


class Page(HTMLParser):
    """The ids, links, fetched files and tags of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.fetched, self.tags, self.classes = set(), [], [], defaultdict(int), defaultdict(int)
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags[tag] += 1
        for name in (given.get("class") or "").split():
            self.classes[name] += 1
        self.ids.add(given.get("id"))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("index", "search", "next", "prev", "canonical"):
            self.fetched.append(given["href"])
        if given.get(FETCHED.get(tag)):
            self.fetched.append(given[FETCHED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder with both languages, built by the commands of `make docs`, at once; in `make test` of few figures."""
    folder = tmp_path_factory.mktemp("site")
    recipes = re.findall(r"^docs-(?:en|zh): .*\n\t\$\(SITE\) (.*)$", MAKEFILE, re.MULTILINE)
    sphinx = re.search(r"^SITE := \$\(BIN\)/python (.*)$", MAKEFILE, re.MULTILINE)[1]
    assert len(recipes) == 2
    assert {"-W", "-n"} <= set(sphinx.split())
    if not FULL:
        sphinx = sphinx.replace("-m sphinx", str(Path(__file__).with_name("sphinx_of_few_figures.py")))
    arguments = [f"{sphinx} {recipe}".replace("build/docs", str(folder)).split() for recipe in recipes]
    running = [subprocess.Popen([sys.executable, *a], cwd=ROOT, stderr=subprocess.PIPE, text=True) for a in arguments]
    for process in running:
        _, errors = process.communicate(timeout=570)
        assert process.returncode == 0, errors
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """Every page by its path in the folder."""
    return {path.relative_to(site).as_posix(): Page(path) for path in sorted(site.glob("[ez][nh]/**/*.html"))}


def sources(folder):
    """The names of the pages that a folder of sources has."""
    outside = ("conf", "extensions", "static", "templates", *(["zh"] if folder.name == "docs" else []))
    return {
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*.md")
        if path.relative_to(folder).parts[0] not in outside
    }


def test_every_source_is_a_page_of_its_language(pages):
    assert {"index", "positions", "guide/rotary", "reference/functions"} <= sources(ROOT / "docs")
    for language, folder in (("en", ROOT / "docs"), ("zh", ROOT / "docs" / "zh")):
        missing = [name for name in sources(folder) | {"README"} if f"{language}/{name}.html" not in pages]
        assert not missing, missing
    assert {"en/CONTRIBUTING.html", "en/CHANGELOG.html"} <= pages.keys()


def test_links_and_anchors_lead_somewhere(pages, site):
    """Those to the other language and to sources too."""
    wrong, followed = [], 0
    for name, page in pages.items():
        for link in page.links:
            url = urlsplit(urljoin(name, link))
            if url.scheme:
                continue
            followed += 1
            target, fragment = unquote(url.path), unquote(url.fragment)
            if target not in pages:
                wrong += [] if (site / target).is_file() else [f"{name}: {link}"]
            elif fragment and fragment not in pages[target].ids:
                wrong.append(f"{name}: {link}")
    assert followed > 5000
    assert not wrong, wrong[:20]


def test_nothing_is_fetched_from_a_network(pages, site):
    for name, page in pages.items():
        for address in page.fetched:
            url = urlsplit(urljoin(name, address))
            assert (url.scheme, url.netloc) == ("", ""), f"{name} fetches {address}"
            assert (site / unquote(url.path)).is_file(), f"{name} fetches {address}, which is not there"
    for path in site.glob("[ez][nh]/**/*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", path.read_text(encoding="utf-8")), path


def test_formulas_are_mathml(pages):
    """In every chapter with formulas, and none is left as LaTeX."""
    for name in ("en/guide/attention.html", "en/guide/rotary.html", "zh/guide/attention.html", "zh/guide/rotary.html"):
        assert pages[name].tags["math"] > 20
    for name, page in pages.items():
        assert page.classes["math"] <= page.tags["math"], f"{name} has formulas that are not MathML"
        assert "annotation" not in page.tags


def test_elements_of_formulas_have_the_children_that_mathml_demands(site):
    needed = {"mfrac": 2, "mover": 2, "msub": 2, "msubsup": 3, "msup": 2, "munder": 2, "munderover": 3}
    seen = 0
    for path in site.glob("[ez][nh]/**/*.html"):
        for formula in re.findall(r"<math\b.*?</math>", path.read_text(encoding="utf-8"), re.DOTALL):
            for element in ElementTree.fromstring(formula).iter():
                name = element.tag.rpartition("}")[2]
                assert len(element) == needed.get(name, len(element)), (path, formula)
                seen += name in needed
    assert seen > 500


def test_names_of_functions_stand_apart():
    gap = '<mspace width="0.167em" />'
    shown = to_mathml(nodes.math("", r"u\cos a - 2\sin(b) + \ln\frac{c}{2}"), "inline")
    assert f"<mi>u</mi>{gap}<mi>cos</mi>{gap}<mi>a</mi>" in shown
    assert f"<mn>2</mn>{gap}<mi>sin</mi><mo" in shown
    assert f"<mi>ln</mi>{gap}<mfrac>" in shown
    shown = to_mathml(nodes.math("", r"x + f(\operatorname{norm}(x))"), "inline")
    assert '<mi>norm</mi><mo stretchy="false">&#x00028;</mo>' in shown
    shown = to_mathml(nodes.math("", r"\max_i x + \sin^2 x"), "inline")
    assert "<msub><mi>max</mi><mi>i</mi></msub>" in shown
    assert "<msup><mi>sin</mi><mn>2</mn></msup>" in shown


def test_docstrings_become_markdown_that_says_the_same():
    shown = to_markdown("Adds x * y_z to `a*b`, not <N> of [B, T].\n\n    a = 1\n\n>>> 1 + 1\n2")
    html = BeautifulSoup(create_md_parser(MdParserConfig(), RendererHTML).render(shown), "html.parser")
    assert html.p.text == "Adds x * y_z to a*b, not <N> of [B, T]."
    assert [code.text for code in html.find_all("code")] == ["a*b", "a = 1\n", ">>> 1 + 1\n2\n"]


def test_the_reference_has_every_public_name_once(site):
    with (site / "en" / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, target: target)
    names = {name for kind in ("py:class", "py:function") for name in inventory[kind]}
    public = {f"phasor.{name}" for name in phasor.__all__}
    assert public - names == set()
    assert {name for name in names if name.count(".") == 1} == public
    text = (site / "en" / "reference" / "configurations.html").read_text(encoding="utf-8")
    assert text.count('id="phasor.YaRN"') == 1
    options = {name.partition(".")[0] for name in inventory["std:cmdoption"]}
    assert options == {f"phasor-{verb}" for verb in VERBS}


def test_fields_of_records_have_types_defaults_and_what_help_says(site):
    text = (site / "en" / "reference" / "configurations.html").read_text(encoding="utf-8")
    entries = text.split('<dt class="sig sig-object py" id="phasor.')
    for name in phasor.__all__:
        value = getattr(phasor, name)
        if dataclasses.is_dataclass(value) and name != "Generated":
            (entry,) = [entry for entry in entries if entry.startswith(f'{name}"')]
            shown = re.findall(r'<tr class="row-\w+"><td><p><code[^>]*><span class="pre">(\w+)</span>', entry)
            assert shown == [field.name for field in dataclasses.fields(value) if field.init], name
    assert "divides the logits; 0 is greedy decoding" in text
    assert "how to handle bytes that are not UTF-8" in text


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def base(site):
    """The address at which the folder is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def open_page(chromium, base):
    """A function that opens pages, which must report no error and ask for nothing elsewhere."""
    opened = []

    def open_one(address, width=1280, theme="light", **options):
        one = visit(chromium, base, width=width, theme=theme, **options)
        one.page.goto(f"{base}/{address}")
        opened.append(one)
        return one

    yield open_one
    for one in opened:
        one.check()
        one.close()


@pytest.mark.parametrize(
    ("language", "query", "expected"),
    [
        ("zh", "位置", "guide/order.html"),
        ("zh", "缓存里的词元", "guide/extension.html"),  # words that browsers do not know
        pytest.param("zh", "旋转位置编码", "guide/rotary.html", marks=pytest.mark.slow),
        ("en", "rotary frequencies", "guide/rotary.html"),
        pytest.param("en", "YaRN", "reference/configurations.html", marks=pytest.mark.slow),
    ],
)
def test_search_finds_pages(open_page, language, query, expected):
    """By typing into the box of the first page."""
    one = open_page(f"{language}/index.html", language=language)
    box = one.page.locator("input.sidebar-search")
    box.fill(query)
    box.press("Enter")
    one.page.wait_for_selector("#search-results > p.search-summary")
    one.page.wait_for_function("document.querySelectorAll('#search-results li').length > 0")
    found = one.page.locator("#search-results li a").evaluate_all("(all) => all.map((a) => a.getAttribute('href'))")
    assert any(link.split("?")[0].split("#")[0] == expected for link in found), found
    one.page.goto(f"{one.page.url.rpartition('/')[0]}/{expected}")
    assert one.page.locator("h1").count() == 1


LOOKS = ["en/index", "en/guide/attention", "en/positions", "en/reference/configurations", "zh/index", "zh/guide/rotary"]


@pytest.mark.parametrize("name", LOOKS)
def test_a_page_fits_a_phone(open_page, name):
    """Nothing is wider than the window; tables, formulas and code scroll by themselves."""
    one = open_page(f"{name}.html", width=390)
    assert one.sideways() <= 0


@pytest.mark.slow
def test_every_page_fits_a_phone(open_page, pages):
    one = open_page("en/index.html", width=390)
    wide = []
    for name in pages:
        one.page.goto(f"{one.base}/{name}")
        wide += [name] if one.sideways() > 0 else []
    assert not wide


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_are_those_of_the_lab(open_page, theme):
    one = open_page("en/guide/attention.html", theme=theme)
    seen = one.page.evaluate("""() => {
      const style = getComputedStyle(document.body);
      const shown = [...document.querySelectorAll("figure.plot img")].filter((img) => img.offsetWidth > 0);
      return [style.backgroundColor, style.color, shown.map((img) => img.className)];
    }""")
    expected = ["rgb({}, {}, {})".format(*bytes.fromhex(COLORS[theme][name][1:])) for name in ("card", "ink")]
    assert seen[:2] == expected
    assert seen[2]
    assert all(f"only-{theme}" in classes for classes in seen[2])


@pytest.mark.parametrize("name", ["en/guide/rotary", "zh/guide/rotary"])
def test_parentheses_are_as_high_as_their_matrix(open_page, name):
    """They are not where the font is one that has no large ones, as that of Chinese text."""
    heights = open_page(f"{name}.html").page.evaluate("""() => [...document.querySelectorAll("math mtable")]
      .map((table) => [table.previousElementSibling, table])
      .filter(([before]) => before?.textContent === "(")
      .map((both) => both.map((one) => one.getBoundingClientRect().height))
      .map(([parenthesis, matrix]) => parenthesis / matrix)
    """)
    assert heights
    assert min(heights) > 0.9


@pytest.mark.parametrize("name", ["en/guide/rotary", "zh/guide/rotary"])
def test_no_line_begins_with_the_punctuation_behind_a_formula(open_page, name):
    one = open_page(f"{name}.html", width=390)
    lines = one.page.evaluate("""() => [...document.querySelectorAll("article p math")].map((formula) => {
      const next = formula.nextSibling;
      if (!/^[,.;:!?)，。；：！？、）]/.test(next?.textContent ?? "")) return null;
      const range = document.createRange();
      range.setStart(next, 0);
      range.setEnd(next, 1);
      return range.getBoundingClientRect().left >= formula.getBoundingClientRect().right - 1;
    }).filter((line) => line !== null)""")
    assert len(lines) > 10
    assert all(lines)


@pytest.mark.parametrize("name", ["zh/guide/rotary", "zh/search"])
def test_navigation_is_in_the_language_of_the_page(site, name):
    """All but names, and labels of symbols that the theme gives no translator."""
    html = BeautifulSoup((site / f"{name}.html").read_text(encoding="utf-8"), "html.parser")
    for part in html.select("article, math, script, style, svg, .left-details"):
        part.extract()
    said = set(html.body.stripped_strings) - {"html"}
    english = {text for text in said if text.isascii() and text[0].isalpha()}
    assert english == {"English", "Transformer", f"phasor {phasor.__version__}"}


def test_the_other_language_is_a_click_away(open_page):
    one = open_page("en/guide/rotary.html")
    one.page.click("a.other-language")
    one.page.wait_for_url("**/zh/guide/rotary.html")
    one.page.click("a.other-language")
    one.page.wait_for_url("**/en/guide/rotary.html")


def test_links_to_the_lab_name_what_its_views_know(chromium, pages):
    """Every key of a state is one that the view reads."""
    links = {link for page in pages.values() for link in page.links if link.startswith("http://127.0.0.1:8765/#/")}
    assert len(links) > 5
    with serve() as lab:
        one = visit(chromium, lab).open("parts")
        for link in links:
            view, _, query = link.partition("#/")[2].partition("?")
            known = one.page.evaluate(
                "(view) => import(`/js/views/${view}.js`).then((m) => Object.keys(m.defaults))", view
            )
            assert {part.partition("=")[0] for part in query.split("&") if part} <= set(known), link
        one.check()
        one.close()

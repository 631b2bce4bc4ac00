"""Pages of reports in a browser: both languages, both themes, a wide and a narrow window, in the look of the lab."""

import functools
import json
import re

import numpy as np
import pytest

import phasor
from phasor.data.tokenizers import byte_tokenizer
from phasor.evaluation import evaluate_lengths, evaluate_retrieval
from phasor.evaluation.compare import compare

from browser import Visit  # isort: skip

PAGES = (
    ("lengths", "lengths.html"),
    ("retrieval", "retrieval.html"),
    ("task", "compare.html"),
    ("texts", "compare.html"),
)
COMPARED = {"schemes": "rotary,alibi", "steps": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The folders of reports, each made when it is asked for."""
    folder = tmp_path_factory.mktemp("reports")

    @functools.cache
    def make(name):
        out = folder / name
        if name in ("lengths", "retrieval"):
            sizes = {"dim": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 261, "max_length": 16}
            model = phasor.Transformer(phasor.preset("llama-2", **sizes))
            model.tokenizer = byte_tokenizer()
        if name == "lengths":
            np.save(folder / "ids.npy", np.random.default_rng(0).integers(0, 250, 300))
            evaluate_lengths(model, folder / "ids.npy", lengths="16,32", extensions=["yarn"], out=out)
        elif name == "retrieval":
            evaluate_retrieval(model, "recall", lengths="64,96", extensions="yarn", trials=1, out=out)
        elif name == "task":
            compare(out, task="copy", length=2, rows=4, seeds=2, **COMPARED)
        else:
            lines = (json.dumps({"text": f"{number} cats sat on the mat. " * 9}) for number in range(60))
            (folder / "texts.jsonl").write_text("\n".join(lines))
            texts = {"data": str(folder / "texts.jsonl"), "length": 8, "rows": 4, "tokenizer": "bytes", "seeds": 2}
            compare(out, **texts, **COMPARED)
        return out

    return make


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "page"), PAGES)
@pytest.mark.parametrize(
    ("theme", "language", "width"), [("light", "en", 1280), ("dark", "zh", 1280), ("dark", "en", 390)]
)
def test_a_report_reads_in_both_languages_and_themes(chromium, lab, reports, name, page, theme, language, width):
    locale = {"en": "en-US", "zh": "zh-CN"}[language]
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, locale=locale)
    visit = Visit(context.new_page(), lab)
    visit.page.goto((reports(name) / page).as_uri())
    visit.outside = [url for url in visit.outside if not url.startswith("file:")]
    visit.check()
    assert visit.sideways() == 0
    assert visit.serious_findings() == []
    title, shown = visit.page.title(), visit.page.locator("main").inner_text()
    assert "`" not in shown
    if name == "texts" and language == "en":
        assert "original_length" in visit.page.locator("td code:visible").all_inner_texts()
    assert re.search("[\u4e00-\u9fff]", title) if language == "zh" else title.isascii()
    for heading in visit.page.locator("h2, figcaption, caption").all_inner_texts():
        if heading not in ("recall",):
            assert bool(re.search("[\u4e00-\u9fff]", heading)) == (language == "zh"), heading
    if language == "en":
        assert not re.search("[\u4e00-\u9fff]", shown)
    else:
        cells = visit.page.locator("td, th").all_inner_texts()
        english = re.compile(r"\b(factors?|seeds?|to|of|layers?|features|not finite)\b")
        assert [cell for cell in cells if english.search(cell)] == []
        assert "in memory" not in shown
    if width == 1280:
        charts = visit.page.evaluate("[...document.querySelectorAll('figure')].map((f) => [f, f.querySelector('svg')]"
                                     ".map((e) => e.getBoundingClientRect().width))")  # fmt: skip
        assert charts
        assert all(chart == pytest.approx(whole) for whole, chart in charts)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = visit.page.evaluate(paper)
    visit.page.locator("button").nth(1).click()
    assert visit.page.evaluate(paper) != before
    visit.page.locator("button").first.click()
    assert visit.page.title() != title
    context.close()

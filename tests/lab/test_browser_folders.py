"""The views that read folders, in a real browser: texts as models read them, curves that grow, reports."""

import contextlib
import re
import time

import numpy
import pytest
from browser import serve
from test_browser import QUICK, check_figures, check_look
from test_order import build

from phasor import ModelConfig, Transformer
from phasor.config.recipe import DataConfig, Recipe
from phasor.evaluation import evaluate_lengths
from phasor.training.run import RunFolder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of models, a folder of runs of which one trains, a report; and the run that trains."""
    place = tmp_path_factory.mktemp("lab")
    build(place / "models" / "decoder")
    build(place / "models" / "translator", "encoder-decoder")
    numpy.save(place / "ids.npy", numpy.random.default_rng(0).integers(0, 50, 400))
    config = ModelConfig(vocab_size=50, dim=16, num_heads=2, num_layers=1, max_length=16, position="rotary")
    evaluate_lengths(
        Transformer(config), place / "ids.npy", lengths="16,64", extensions=["none", "yarn"], out=place / "report"
    )
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(RunFolder(place / "runs" / f"lm-{number}", Recipe(), resume=False)) for number in (1, 2)
        ]
        for number, run in enumerate(runs):
            run.start(0)
            for step in range(10, 60, 10):
                run.log(step, loss=5 - step / 20 + number, lr=0.001)
            run.log(50, validation_loss=2.5 + number)
        yield [place / "models", place / "runs", place / "report"], runs[0]


@pytest.fixture(scope="module")
def lab_with_folders(folders):
    with serve(folders[0]) as base:
        yield base


def wait_for_text(visit, selector, text):
    visit.page.locator(selector, has_text=text).first.wait_for()


def read_text(open_page, base, address="order", **options):
    """A page whose part with the reader's own text is drawn."""
    visit = open_page(address, base=base, **options)
    visit.page.wait_for_selector(".columns canvas")
    visit.settle()
    return visit


@pytest.mark.sample(1)
@pytest.mark.parametrize(("width", "theme", "language"), QUICK, ids=str)
def test_a_text_and_a_run_are_sound(open_page, lab_with_folders, width, theme, language):
    look = {"width": width, "theme": theme, "language": language}
    check_look(read_text(open_page, lab_with_folders, **look), language)
    check_look(open_page("runs", base=lab_with_folders, **look), language)


def test_heads_and_tokens_of_a_text_are_chosen(open_page, lab_with_folders):
    visit = read_text(open_page, lab_with_folders, "order?x=the cat sat on the mat .")
    heading = visit.page.locator("h2").first
    before, picture = heading.inner_text(), visit.picture()
    visit.control("fh").select_option("3")
    visit.settle()
    assert "head 3" in heading.inner_text() != before
    assert visit.picture() != picture
    asked = len(visit.asked)
    visit.control("fl").select_option("2")
    visit.settle()
    assert len(visit.asked) == asked  # the weights of all heads are there already
    canvas = visit.page.locator(".columns canvas").first
    for key in ("ArrowRight", "Enter", "Escape"):  # to the first cell, choose its row, take the cursor away
        canvas.press(key)
    visit.page.wait_for_function(
        "() => document.querySelector('.columns .stack figcaption b').textContent.includes('“the”')"
    )
    address = visit.address()
    assert {"fh=3", "fl=2", "i=0"} <= set(address.partition("?")[2].split("&"))
    again = read_text(open_page, lab_with_folders, address)
    wait_for_text(again, ".columns .stack figcaption b", "“the”")
    assert again.settle().picture() == visit.settle().picture()


def test_a_mistake_in_a_text_stands_beside_it(open_page, lab_with_folders):
    visit = read_text(open_page, lab_with_folders)
    visit.control("x").fill("cat " * 600)
    wait_for_text(visit, "[data-control=x] .error", "this text has 600 tokens, and at most 512 are read")
    visit.control("x").fill("the cat")
    visit.page.wait_for_function("() => !document.querySelector('[data-control=x] .error').textContent")
    visit.control("a").fill("word " * 17)
    wait_for_text(visit, "[data-control=a] .error", "a sentence has 1 to 16 words")
    visit.errors.clear()  # the browser itself notes answers with status 400


def test_a_text_that_loads_says_so_and_takes_later_choices(open_page, lab_with_folders):
    visit = open_page("runs", base=lab_with_folders)
    held = []
    for name in ("models", "text", "attention"):
        visit.page.route(f"**/api/order/{name}", lambda route: held.append(route))

    def release():
        while not held:
            visit.page.wait_for_timeout(20)
        held.pop().continue_()

    visit.page.goto(f"{lab_with_folders}/#/order?fh=3&i=400")  # the text has no token 400
    visit.page.locator(".note", has_text="Loading the model").wait_for()  # before it is known which ones there are
    release()
    visit.page.locator("[role=status]", has_text="Loading the model").wait_for()
    assert not visit.control("fh").is_visible()
    release()
    visit.control("fh").wait_for()
    assert not visit.page.locator("[role=status]").is_visible()
    visit.control("fh").select_option("2")  # while the weights are on their way
    visit.page.wait_for_timeout(100)
    release()
    wait_for_text(visit, ".columns figcaption b", "layer 1, head 2")
    visit.page.unroute_all()
    assert not visit.page.locator(".error:visible").count()


def test_cross_attention_is_shown_for_an_encoder_decoder(open_page, lab_with_folders):
    visit = read_text(open_page, lab_with_folders)
    visit.control("f").select_option(label="models/translator")
    visit.page.wait_for_selector('[data-control="s"]:visible')
    visit.settle()
    assert visit.control("k").locator("option").all_inner_texts() == ["cross", "causal", "bidirectional"]
    heading = visit.page.locator("h2").first
    assert "source token" in heading.inner_text()
    visit.control("k").select_option("bidirectional")
    visit.settle()
    assert "source token" not in heading.inner_text()


def test_curves_grow_while_the_page_is_open(open_page, lab_with_folders, folders):
    visit = open_page("runs", base=lab_with_folders)
    assert visit.page.locator("h1").inner_text() == "lm-1 has the lowest validation loss: 2.500 at step 50"
    picture = visit.picture()
    folders[1].log(60, loss=1.25, lr=0.001)
    folders[1].log(60, validation_loss=1.5)
    wait_for_text(visit, "h1", "1.500 at step 60")
    visit.settle()
    assert visit.picture() != picture
    assert visit.page.locator("td.state").first.inner_text() == "training"
    for address in ("runs?log=1", "runs?m=lr"):
        assert open_page(address, base=lab_with_folders).picture() != visit.picture()


def test_only_runs_on_the_same_data_are_compared(open_page, tmp_path):
    """In the title, in the plot and in the table; the others have their own plot."""
    texts = Recipe(model={"preset": "llama-2"}, data=DataConfig(train="notes.txt"))
    dates = Recipe(task="translation", data=DataConfig(format="dates"), model={"preset": "transformer-base"})
    recipes = {"notes-1": texts, "notes-2": texts, "dates": dates}
    for loss, (name, recipe) in zip((2.0, 3.0, 0.5), recipes.items(), strict=True):
        with RunFolder(tmp_path / name, recipe, resume=False) as run:
            run.start(0)
            run.log(10, loss=loss)
            run.log(10, validation_loss=loss)
    with serve([tmp_path]) as base:
        visit = open_page("runs", base=base)
        title, rows = visit.page.locator("h1"), visit.page.locator("table.runs tbody tr")
        assert title.inner_text() == "Of 2 runs on notes.txt, notes-1 has the lowest validation loss: 2.000 at step 10"
        assert [row.split("\t")[:2] for row in rows.all_inner_texts()] == [["notes-1", "rotary"], ["notes-2", "rotary"]]
        visit.control("g").select_option(index=1)
        wait_for_text(visit, "h1", "dates")
        assert "0.500" in title.inner_text()
        assert [row.split("\t")[:2] for row in rows.all_inner_texts()] == [["dates", "sinusoidal"]]
        assert open_page(visit.address(), base=base).picture() == visit.settle().picture()


def test_a_run_is_hidden_and_shown(open_page, lab_with_folders):
    visit = open_page("runs", base=lab_with_folders)
    first = visit.page.locator("button.toggle").first
    paths = visit.page.locator("figure").first.locator("path")
    count = paths.count()
    first.press("Enter")
    visit.settle()
    assert first.get_attribute("aria-pressed") == "false"
    assert first.evaluate("(button) => button === document.activeElement")
    assert paths.count() < count
    assert re.search(r"off=\d", visit.address())


def test_a_report_is_in_chinese_but_for_its_notes(open_page, lab_with_folders):
    visit = open_page("runs", base=lab_with_folders, language="zh")
    wait_for_text(visit, "li", "16：")
    words = visit.page.locator(".halves .stack").last.evaluate(
        "(e) => { e.querySelectorAll('[lang=en]').forEach((one) => one.remove()); return e.innerText; }"
    )
    assert "方式 last：只预测每行末尾的" in words
    assert not re.search(r"not shown|Protocol|rows|\{", words)
    heads = visit.page.locator("table.runs th").all_inner_texts()
    assert heads == ["训练", "位置编码", "状态", "步数", "损失", "最低验证损失", "所在步"]


def test_a_first_answer_that_takes_longer_than_the_pause_is_drawn_whole(open_page, lab_with_folders):
    visit = open_page("parts", base=lab_with_folders)
    slow = [3.0]

    def answer(route):
        time.sleep(slow.pop() if slow else 0.0)
        route.continue_()

    visit.page.route("**/api/runs/curves", answer)
    visit.page.evaluate("() => { location.hash = '#/runs'; }")
    visit.page.wait_for_selector("figure:visible >> nth=2", timeout=20_000)
    visit.page.unroute("**/api/runs/curves")


def test_figures_of_runs_and_reports_are_downloaded(open_page, lab_with_folders):
    visit = open_page("runs", base=lab_with_folders)
    assert visit.page.locator("figure:visible").count() == 3
    check_figures(visit)


def test_without_folders_the_views_say_how_to_give_one(open_page):
    assert "phasor lab runs" in open_page("runs").page.locator(".lead").inner_text()
    visit = open_page("order")
    visit.page.wait_for_function(
        "() => document.querySelector('.order > .note')?.textContent.includes('phasor lab FOLDER')"
    )

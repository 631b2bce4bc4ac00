"""A position scheme is one folder: the lab shows it in both languages, and no file of the page changes."""

import importlib
import re
import sys
import textwrap
from functools import partial

import pytest
from browser import serve
from starlette.testclient import TestClient

from phasor.config import PositionConfig
from phasor.lab.schemes import PLACES, describe_schemes
from phasor.lab.server import build_app
from phasor.lab.views.order import word_schemes
from phasor.nn.positions.base import Position

FILES = {
    "__init__.py": "",
    "config.py": '''
        from typing import ClassVar

        from phasor.config import PositionConfig


        class StaircaseConfig(PositionConfig, kind="staircase"):
            """A penalty that grows by one with every fourth token of distance."""

            acts_on: ClassVar[tuple[str, ...]] = ("scores",)
            shift_invariant: ClassVar[bool] = True
        ''',
    "module.py": """
        from phasor.nn.positions.base import Position

        from .config import StaircaseConfig


        class Staircase(Position, config=StaircaseConfig):
            @classmethod
            def build(cls, config, model, side):
                module = super().build(config, model, side)
                module.num_heads = model.num_heads
                return module

            def on_scores(self, prepared):
                return self.penalty

            def penalty(self, queries, keys):
                distance = (queries[:, None, :, None] - keys[:, None, None, :]).abs()
                return -distance.div(4, rounding_mode="floor").expand(-1, self.num_heads, -1, -1)
        """,
    "texts.toml": """
        [en]
        name = "stairs"
        headline = "Four tokens to a step: distance {last} costs {cost}"
        about = "Tokens on the same step are equally far away."

        [zh]
        name = "台阶"
        headline = "四个词元一级：距离 {last} 要付出 {cost}"
        about = "同一级上的词元一样远。"
        """,
}


@pytest.fixture
def staircase(tmp_path, monkeypatch):
    """A folder as CONTRIBUTING.md describes it, registered until the test ends."""
    folder = tmp_path / "staircase"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = importlib.import_module("staircase.config").StaircaseConfig
    yield config
    del PositionConfig.kinds[config.kind]
    Position.modules_by_config.pop(config, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "staircase"]:
        del sys.modules[name]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("language", "name", "title", "about", "properties"),
    [
        ("en", "stairs", "Four tokens to a step: distance 63 costs 15", "Tokens on the same step", "acts on: scores"),
        ("zh", "台阶", "四个词元一级：距离 63 要付出 15", "同一级上的词元一样远。", "作用于：分数"),
    ],
)
def test_a_new_folder_is_on_the_page(staircase, open_page, language, name, title, about, properties):
    with serve(modules=["staircase.config"]) as base:
        look_at_the_new_scheme(partial(open_page, base=base, language=language), name, title, about, properties)


def look_at_the_new_scheme(open_page, name, title, about, properties):
    one = open_page("encodings?s=staircase")
    assert one.control("s").locator("option:checked").inner_text() == name
    assert one.page.locator("h1").inner_text() == title
    assert about in one.page.locator(".lead").inner_text()
    assert properties in one.page.locator("main").inner_text()
    row = one.page.locator(".criteria tr.chosen")
    assert row.locator("th").inner_text() == name
    assert row.locator(".no").count() == 2  # distances on a step are alike, and the penalty has no bound
    one = open_page("order?pos=staircase")
    assert name in one.page.locator("h1").inner_text()


def test_a_scheme_without_texts_has_its_kind_and_its_docstring(staircase, tmp_path):
    (tmp_path / "staircase" / "texts.toml").unlink()
    with TestClient(build_app(), base_url="http://127.0.0.1") as page:
        schemes = {scheme["kind"]: scheme for scheme in page.get("/api/about").json()["schemes"]}
    line = "A penalty that grows by one with every fourth token of distance."
    plain = {"name": "staircase", "headline": "staircase", "about": line, "summary": line}
    assert schemes["staircase"]["texts"] == {"en": plain, "zh": plain}
    assert (schemes["staircase"]["acts_on"], schemes["staircase"]["shift_invariant"]) == (["scores"], True)


def test_every_scheme_is_described_in_both_languages():
    schemes = describe_schemes()
    assert {scheme["kind"] for scheme in schemes} == set(PositionConfig.kinds)
    for scheme in schemes:
        english, chinese = scheme["texts"]["en"], scheme["texts"]["zh"]
        assert set(english) == set(chinese) == {"name", "headline", "about", "summary"}
        assert set(scheme["acts_on"]) <= set(PLACES)
        for field in ("headline", "about", "summary"):
            assert re.search(r"[\u4e00-\u9fff]", chinese[field]), scheme["kind"]
            assert not re.search(r"[\u4e00-\u9fff]", english[field]), scheme["kind"]
            assert set(re.findall(r"\{\w+\}", chinese[field])) == set(re.findall(r"\{\w+\}", english[field]))
    for language in ("en", "zh"):
        assert len({scheme["texts"][language]["headline"] for scheme in schemes}) == len(schemes)


def test_words_have_every_scheme_of_one_axis(staircase):
    assert "staircase" in word_schemes()
    assert set(word_schemes()) == {kind for kind, cls in PositionConfig.kinds.items() if cls().axes == 1}

"""The colors of the page: told apart by everyone, and by people with deuteranopia, in both themes."""

import itertools
import re

import numpy
import pytest

from phasor.lab.server import PAGE

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
DEUTERANOPIA = numpy.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
TO_XYZ = numpy.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = numpy.array([0.95047, 1.0, 1.08883])
SEEN = {"all colors": numpy.eye(3), "deuteranopia": DEUTERANOPIA}
CURVES = ["c1", "c2", "c3", "c4", "c5", "c6", "ink"]
TOGETHER = [["query", "key"], ["agree", "oppose"], ["seen", "new", "never"], ["query-text", "key-text"], CURVES]


def themes():
    """The colors of style.css by theme and name, as linear RGB."""
    text = (PAGE / "style.css").read_text()
    blocks = {"light": text.index(":root {"), "dark": text.index(':root[data-theme="dark"]')}
    found = {}
    for theme, start in blocks.items():
        block = text[start : text.index("}", start)]
        found[theme] = {
            name: linear([int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)])
            for name, value in re.findall(r"--([\w-]+): #([0-9a-f]{6})", block)
        }
    return found


def linear(rgb):
    rgb = numpy.array(rgb)
    return numpy.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE L*a*b* of linear RGB."""
    xyz = TO_XYZ @ rgb.clip(0, 1) / WHITE
    f = numpy.where(xyz > 216 / 24389, numpy.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return numpy.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_that_stand_together_differ(theme, eyes):
    """By 18 and more in L*a*b*, where about 2 are just noticed."""
    colors = {name: lab(SEEN[eyes] @ rgb) for name, rgb in themes()[theme].items()}
    near = {
        (a, b): round(float(distance))
        for names in TOGETHER
        for a, b in itertools.combinations(names, 2)
        if (distance := numpy.linalg.norm(colors[a] - colors[b])) < 18
    }
    assert not near


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_agreement_and_opposition_differ_in_lightness(theme):
    colors = themes()[theme]
    assert abs(lab(colors["agree"])[0] - lab(colors["oppose"])[0]) > 20


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_heat_maps_rise_in_lightness_alone(theme, eyes):
    """A sequential palette goes one way; a diverging one goes away from its middle on both sides."""
    colors = {name: lab(SEEN[eyes] @ rgb)[0] for name, rgb in themes()[theme].items()}
    rising = [colors[f"seq-{i}"] for i in range(4)]
    assert rising in (sorted(rising), sorted(rising, reverse=True))
    apart = [abs(colors[f"div-{i}"] - colors["div-2"]) for i in range(5)]
    assert apart[0] > apart[1] > 0 < apart[3] < apart[4]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_names_at_curves_are_readable(theme):
    """A contrast of 4.5 and more with the paper, as WCAG asks of texts."""
    colors = themes()[theme]
    light = {name: float(TO_XYZ[1] @ rgb) + 0.05 for name, rgb in colors.items()}
    for name in (*CURVES, "query-text", "key-text", "agree-text", "oppose-text", "soft", "bad"):
        low, high = sorted((light[name], light["paper"]))
        assert high / low >= 4.5, name


def test_chinese_texts_have_one_word_for_tokens():
    for path in PAGE.rglob("*.js"):
        for text in re.findall(r'"([^"\n]*[\u4e00-\u9fff][^"\n]*)"', path.read_text()):
            assert not re.search(r"\btokens?\b", re.sub(r"\{\w+\}", "", text)), text


def test_texts_of_figures_name_no_lightness():
    """What is dark on white is light on black."""
    for path in (PAGE / "js" / "views").rglob("*.js"):
        for text in re.findall(r'"([^"\n]*)"', path.read_text(encoding="utf-8")):
            assert not re.search(r"\b(dark|light|black|white|pale)(er)?\b|颜色|[深浅黑白]色", text), text

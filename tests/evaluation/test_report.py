"""Reports: one page without network or other files, charts, a folder whose files land whole."""

import re
from html.parser import HTMLParser

import pytest

from phasor.evaluation.report import Curve, Page, check_out, draw_curves, provenance, to_png, to_svg, write_report


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def chart(name="yarn"):
    curves = [
        Curve(name, [4096, 8192], [2.0, 1.9], [1.9, 1.8], [2.1, 2.0]),
        Curve("window", [4096, 8192], [2.0, 2.0], baseline=True),
    ]
    return draw_curves(curves, x_label="length", y_label="loss", log_x=True, x_ticks=[(4096, "4k"), (8192, "8k")])


def test_the_page_is_one_file_with_its_tags_closed():
    page = Page("Loss <by> length", "a & b").heading("A").paragraph("text").bullets(["yarn < linear"])
    page.figure(to_svg(chart()), "The loss").table(["name", "loss"], [["a", 1.5]], "caption")
    html = page.provenance(provenance("phasor evaluate 'a b'", "cpu", seed=3)).html()
    tags = Tags()
    tags.feed(html)
    assert not tags.open
    assert all(link.startswith("#") for link in tags.links), "nothing is fetched from anywhere"
    assert not re.search(r"<script|<link|@import|url\(http", html)
    for text in ("Loss &lt;by&gt; length", "yarn &lt; linear", "phasor evaluate", "torch", "seed"):
        assert text in html


def test_charts_are_png_and_svg():
    assert to_png(chart())[:8] == b"\x89PNG\r\n\x1a\n"
    svg = to_svg(chart())
    assert svg == to_svg(chart())
    assert "<svg" in svg
    assert "<image" not in svg


def test_a_report_lands_beside_what_is_there(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    write_report(check_out(tmp_path), {"results.json": "{}", "loss.png": b"\x89PNG"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "mine.txt", "results.json"]


def test_folders_that_cannot_be_written_are_refused_first(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file, and a report is a folder"):
        check_out(file)
    with pytest.raises(ValueError, match="there is no folder"):
        check_out(tmp_path / "a" / "b")
    assert check_out(None) is None

"""Reports: one page without network or other files, charts, a folder whose files land whole."""

import math
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser

import pytest

import phasor
from phasor.evaluation.report import (
    Curve,
    Dot,
    Page,
    Text,
    check_out,
    draw_curves,
    draw_dots,
    provenance,
    to_png,
    to_svg,
    write_report,
)
from phasor.files import lock_folder

TINY = {"dim": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 50}


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
    return draw_curves(
        curves, x_label="length", y_label=Text("loss", "损失"), log_x=True, x_ticks=[(4096, "4k"), (8192, "8k")]
    )


def test_the_page_is_one_file_with_its_tags_closed():
    page = Page(Text("Loss <by> length", "损失"), "a & b").heading("A").paragraph("text").bullets(["yarn < linear"])
    page.figure(to_svg(chart()), "The loss").table(["name", "loss"], [["a", 1.5]], "caption")
    html = page.provenance(provenance("phasor evaluate 'a b'", "cpu", seed=3)).html()
    tags = Tags()
    tags.feed(html)
    assert not tags.open
    assert all(link.startswith("#") for link in tags.links), "nothing is fetched from anywhere"
    assert not re.search(r"<script |<link|@import|url\(http", html)
    for text in ("Loss &lt;by&gt; length", "yarn &lt; linear", "phasor evaluate", "torch", "seed"):
        assert text in html


def test_code_in_texts_is_marked_after_escaping():
    cells = [[Text("`a < b` or `c`", "`a < b`"), "x`y`z"]]
    html = Page(Text("`1`", "`2`")).table(["what it is", "path"], cells).html()
    assert '<span lang="en"><code>a &lt; b</code> or <code>c</code></span>' in html
    assert '<span lang="zh-CN"><code>a &lt; b</code></span>' in html
    assert "x`y`z" in html, "what was typed is shown as it is"
    curve = Curve("loss", [1, 2], [2.0, 1.0])
    assert "<code>" not in to_svg(draw_curves([curve], x_label=Text("`n`", "`n` 个"), y_label="loss"))


def test_charts_are_png_and_svg():
    assert to_png(chart())[:8] == b"\x89PNG\r\n\x1a\n"
    svg = to_svg(chart())
    assert svg == to_svg(chart())
    assert "<svg" in svg
    assert "<image" not in svg
    assert '<tspan lang="en">loss</tspan><tspan lang="zh-CN">损失</tspan>' in svg
    assert not re.search("#(?!ffffff)[0-9a-f]{6}", svg), "colors are those of the page's theme"


def test_no_text_stands_among_the_bars_of_curves():
    curves = [Curve("yarn", [16, 32], [2.0, 1.9], [0.0, 0.0], [9.0, 9.0])]
    made = draw_curves(curves, x_label="length", y_label="loss", log_x=True, vertical=(16, Text("trained", "训练")))
    assert not made.figure.axes[0].texts
    assert [text.get_text() for text in made.figure.legends[0].get_texts()] == ["yarn", "trained"]
    assert '<tspan lang="zh-CN">训练</tspan>' in to_svg(made)


def test_dots_are_sorted_and_one_far_out_is_at_the_edge():
    ends = {"b": 2.0, "a": 5.0, "f": 3.0, "d": 2.5, "e": 2.25, "c": 90.0}
    chart = draw_dots(
        [Dot(name, 2.0, end, end - 0.1, end + 0.1) for name, end in ends.items()],
        x_label="loss",
        title="t",
        legend=("first", "last"),
    )
    axes = chart.figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "a", "f", "d", "e", "b"]
    arrows = [line for line in axes.lines if line.get_marker() == ">"]
    assert [list(line.get_ydata()) for line in arrows] == [[0]]
    assert 5.1 < axes.get_xlim()[1] < 6
    assert {text.get_text() for text in axes.texts} == {f"{end:.3f}" for end in ends.values()}


def test_dots_that_began_beyond_the_edge_are_an_arrow_alone():
    ends = {2.1: 2.0, 2.2: 2.0, 2.3: 2.0, 2.4: 2.0, 2.5: 2.0, 2.6: 2.0, 2.0: 2.3, 80.0: 2.0, 90.0: 60.0}
    dots = [Dot(str(end), start, end) for end, start in ends.items()]
    axes = draw_dots(dots, x_label="loss", title="t", legend=("first", "last")).figure.axes[0]
    edge = axes.get_xlim()[1]
    assert all(x <= edge for line in axes.lines for x in line.get_xdata())
    markers = [[line.get_marker() for line in axes.lines if list(line.get_ydata())[-1:] == [y]] for y in (0, 1, 8)]
    assert markers == [[">"], ["None", "o", ">"], ["None", "o", "o"]]


def test_dots_without_a_value_stand_last():
    for ends in ([math.nan], [2.0, math.nan, 1.0]):
        dots = [Dot(str(end), end, end) for end in ends]
        axes = draw_dots(dots, x_label="loss", title="t", legend=("first", "last")).figure.axes[0]
        assert axes.get_yticklabels()[0].get_text() == "nan"
        assert axes.texts[0].get_text() == "–"


def test_a_report_replaces_reports_and_nothing_else(tmp_path):
    report = {"results.json": "{}", "loss.png": b"\x89PNG"}
    folder = check_out(tmp_path / "report", report)
    write_report(folder, report)
    (folder / "mine.json").write_text("kept")
    write_report(check_out(folder, report), report | {"results.json": "[]"})
    assert (folder / "results.json").read_text() == "[]"
    with pytest.raises(ValueError, match=r"mine\.json is not by the report in this folder"):
        check_out(folder, ["mine.json"])
    with pytest.raises(ValueError, match=r"mine\.json is not by the report in this folder"):
        write_report(folder, {"mine.json": "{}"})
    assert (folder / "mine.json").read_text() == "kept"
    with pytest.raises(ValueError, match=r"is not empty and holds no report \(but report\): name another folder"):
        check_out(tmp_path)
    phasor.save(phasor.Transformer(phasor.preset("llama-2", **TINY)), tmp_path / "model")
    for write in (check_out, write_report):
        with pytest.raises(ValueError, match="is a model folder, and no report goes there"):
            write(tmp_path / "model", report)
    assert [report.wrong for report in phasor.verify(folder)] == [[]]
    (folder / "results.json").write_text("{}")
    assert [name for report in phasor.verify(folder) for name, _ in report.wrong] == ["results.json"]


def test_reports_that_are_written_at_once_are_each_whole(tmp_path):
    """By this process and another one, which says when it begins."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom phasor.evaluation.report import write_report\n"
        "print('begins', flush=True)\n"
        "for _ in range(40):\n"
        "    write_report(Path(sys.argv[1]), {name: '1' * 9999 for name in ('a.json', 'b.html')})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "report")], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begins\n"
        for _ in range(40):
            write_report(tmp_path / "report", dict.fromkeys(("a.json", "b.html"), "2" * 9999))
    assert process.returncode == 0
    assert (tmp_path / "report" / "a.json").read_text() == (tmp_path / "report" / "b.html").read_text()
    assert [report.wrong for report in phasor.verify(tmp_path / "report")] == [[]]


def test_a_report_waits_for_another_that_is_being_written(tmp_path):
    folder = tmp_path / "report"
    write_report(folder, {"a.json": "1"})
    thread = threading.Thread(target=write_report, args=(folder, {"a.json": "2"}))
    with lock_folder(folder):
        thread.start()
        thread.join(1)
        assert thread.is_alive()
        assert (folder / "a.json").read_text() == "1"
    thread.join()
    assert (folder / "a.json").read_text() == "2"


def test_folders_that_cannot_be_written_are_refused_first(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file, and a report is a folder"):
        check_out(file)
    with pytest.raises(ValueError, match="there is no folder"):
        check_out(tmp_path / "a" / "b")
    assert check_out(None) is None

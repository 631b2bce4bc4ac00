"""What a terminal and a log show while a run trains."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from decoding import speaker

import phasor
from phasor.cli import main
from phasor.cli.output import Bar
from phasor.cli.progress import LiveProgress, PlainProgress
from phasor.cli.streams import escape_controls
from phasor.cli.train import show
from phasor.config.recipe import Recipe
from phasor.training import RunSummary, StepReport, TrainingResult
from phasor.training.progress import SplitSize


def report(step: int) -> StepReport:
    return StepReport(step=step, steps=200, loss=2.5, lr=0.1, tokens_per_second=1234.5, seconds_left=61.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    now = iter(range(100))
    monkeypatch.setattr("phasor.cli.progress.time", SimpleNamespace(monotonic=lambda: next(now)))
    display = LiveProgress()
    display.on_prepare("reading", 0, None)
    display.on_prepare("tokenizing", 500, 1000)
    display.on_step(report(100))
    display.on_evaluation(100, 2.25)
    display.on_message("something happened")
    display.close()
    shown = screen.getvalue().split("\r\x1b[K")
    assert shown[1:3] == ["reading", f"{'█' * 15}{'░' * 15} tokenizing 500/1,000"]
    live = shown[3]
    assert re.fullmatch("█+░+ step 100/200, loss 2.500, 1,234 tokens/s, 1:01 left", live)
    assert len(live) < 80
    assert shown[4:] == [
        f"step 100: validation loss 2.2500\n{live}",
        f"phasor: something happened\n{live}",
        "",
    ]


def test_a_bar_says_how_much_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call begins the time: what was done before it took as long as nobody knows."""
    for screen, expected in ((Terminal(), ["20 %", "40 %, 1:00 left", "100 %"]), (io.StringIO(), ["40 %, 1:00 left"])):
        monkeypatch.setattr(sys, "stderr", screen)
        now = iter([0.0, 25.0, 45.0, 50.0])
        monkeypatch.setattr("phasor.cli.output.time", SimpleNamespace(monotonic=lambda now=now: next(now)))
        bar = Bar("evaluating")
        for done in (20, 40, 100):
            bar(done, 100)
        assert re.findall(r"(\d+ %.*?)(?=[\r\n])", screen.getvalue()) == expected


def test_a_terminal_is_not_written_to_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("phasor.cli.progress.time", SimpleNamespace(monotonic=lambda: 5.0))
    display = LiveProgress()
    for step in range(1, 201):
        display.on_step(report(step))
    assert [int(n) for n in re.findall(r"step (\d+)/", screen.getvalue())] == [1, 200]


def test_a_log_has_a_line_for_every_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    display = PlainProgress()
    display.on_prepare("tokenizing", 500, 1000)
    for step in range(1, 201):
        display.on_step(report(step))
    steps = [int(n) for n in re.findall(r"step (\d+)/200", log.getvalue())]
    assert steps == [1, *range(20, 201, 20)]
    assert log.getvalue().count("\n") == 11


def test_messages_name_options_as_they_were_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    PlainProgress({"schedule.warmup": "--schedule.warmup"}).on_message("schedule.warmup is 50, in \x1b[2J")
    assert log.getvalue() == "phasor: --schedule.warmup is 50, in \\x1b[2J\n"


class Broken(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("kind", [LiveProgress, PlainProgress])
def test_a_run_goes_on_when_nobody_reads_any_more(
    kind: type[LiveProgress | PlainProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Broken())
    display = kind()
    display.on_step(report(1))
    display.on_evaluation(1, 2.0)
    display.on_message("something happened")
    display.close()


def test_names_of_folders_do_not_reach_a_terminal_raw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "run\x1b[2J"
    sizes = {"train": SplitSize(1, 1), "valid": SplitSize(1, 1), "sequence_length": 8, "tokens_per_step": 8}
    about = {"parameters": 1, "vocab_size": 1, "device": "cpu", "precision": "float32", "step": 0, "steps": 1}
    folder = tmp_path / name
    (folder / "model").mkdir(parents=True)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, Terminal())
    PlainProgress().on_start(RunSummary(folder=folder, **sizes, **about))
    show(TrainingResult(folder=folder, status="finished", exit_code=0, step=1, steps=1), Recipe())
    assert "\x1b[2J" not in sys.stderr.getvalue() + sys.stdout.getvalue()
    assert "run\\x1b[2J" in sys.stderr.getvalue()
    assert sys.stdout.getvalue().count("run\\x1b[2J") == 3  # the run, its model, and the next command


@pytest.mark.parametrize("name", ["model\x1b[2J", "model [red]"])
def test_titles_are_names_and_no_controls_or_markup(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    phasor.save(speaker(), folder)
    for arguments in (["explain", str(folder)], ["plan", "--model", str(folder)], ["bench", "--explain", str(folder)]):
        assert main(arguments) == 0
        shown = "".join(capsys.readouterr().out.split())
        assert "".join(escape_controls(name).split()) in shown
        assert "\x1b" not in shown

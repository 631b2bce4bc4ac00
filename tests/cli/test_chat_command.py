"""`phasor chat`: on a pipe, and in a terminal as a person sees it."""

from __future__ import annotations

import codecs
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import CommandRunner
from tokenizers import AddedToken

import phasor
from phasor.checkpoints.chat_template import ChatTemplate
from phasor.cli.chat import chat_loop
from phasor.data.tokenizers import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('never no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = phasor.Transformer(phasor.preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=263))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    with torch.no_grad():  # letters alone, so that what is printed is what was said
        model.head.weight[: 5 + ord("a")] = 0
        model.head.weight[5 + ord("z") + 1 :] = 0
    model.tokenizer = byte_tokenizer()
    model.tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    model.chat_template = ChatTemplate({"default": TEMPLATE})
    folder = tmp_path_factory.mktemp("chat") / "model"
    phasor.save(model, folder)
    return folder


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))


def replies(folder: Path, *turns: str, **fields: object) -> list[str]:
    talk = phasor.ChatSession(phasor.load(folder), **{**GREEDY, **fields})
    return [talk.reply(turn) for turn in turns]


def test_a_pipe_gives_a_turn_per_line(folder: Path, run_phasor: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"Hello\n\nWhy?\r\n/reset")
    printed = run_phasor("chat", str(folder), "--max-new-tokens", "8", "--system", "Be kind.")
    assert printed.splitlines() == replies(folder, "Hello", "Why?", "/reset", system="Be kind.")
    pipe(monkeypatch, b"Hello\n")
    sampled = run_phasor("chat", str(folder), "--max-new-tokens", "8", "--temperature", "1.5", "--seed", "3")
    assert sampled.splitlines() == replies(folder, "Hello", temperature=1.5, seed=3)


def test_mistakes_end_a_pipe(folder: Path, run_phasor: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"no\n")
    assert "refuses this conversation: never no" in run_phasor.expect_error("chat", str(folder))
    pipe(monkeypatch, b"\n\xff\n")
    assert "standard input, turn 2, line 1: the byte 0 is not UTF-8" in run_phasor.expect_error("chat", str(folder))
    assert "--num-beams" in run_phasor.expect_error("chat", str(folder), "--num-beams", "no")


def test_a_folder_without_a_template(
    folder: Path, run_phasor: CommandRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = phasor.load(folder)
    model.origin, file = None, tmp_path / "mine.jinja"
    phasor.save(model, tmp_path / "bare")
    pipe(monkeypatch, b"Hello\n")
    error = run_phasor.expect_error("chat", str(tmp_path / "bare"))
    assert "bare has no chat template" in error
    assert "--template FILE" in error
    file.write_text(TEMPLATE)
    pipe(monkeypatch, b"Hello\n")
    printed = run_phasor("chat", str(tmp_path / "bare"), "--template", str(file), "--max-new-tokens", "8")
    assert printed.splitlines() == replies(folder, "Hello")


class Terminal:
    """A command on a terminal of its own, typed at and read from."""

    def __init__(self, *arguments: str) -> None:
        pid, self.screen = pty.fork()
        if pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "phasor", *arguments], {**os.environ, "TERM": "dumb"})
        self.pid, self.text = pid, ""
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read_until(self, text: str, seconds: float = 90) -> str:
        """All that was shown since the last call, up to and with a text."""
        self.wait(lambda: text in self.text, repr(text), seconds)
        shown, _, self.text = self.text.partition(text)
        return shown + text

    def wait(self, done: Callable[[], bool], what: str, seconds: float = 90) -> None:
        """Read until something is true of the text that was shown."""
        end = time.monotonic() + seconds
        while not done():
            if not select.select([self.screen], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"{what} does not come: {self.text!r}")
            self.text += self.decoder.decode(os.read(self.screen, 1 << 12)).replace("\r\n", "\n")

    def interrupt(self, text: str) -> None:
        """Ctrl-C at the prompt, until a text is there: Python's readline may miss one that comes as it begins."""
        for _ in range(9):
            os.write(self.screen, b"\x03")
            with suppress(TimeoutError):
                self.read_until(text, seconds=10)
                return
        raise TimeoutError(f"{text!r} does not come: {self.text!r}")

    def type(self, line: str) -> None:
        os.write(self.screen, line.encode() + b"\n")

    def end(self) -> int:
        try:
            while os.read(self.screen, 1 << 12):
                pass
        except OSError:  # how a terminal tells that nobody writes to it any more
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_what_is_typed_at_a_prompt(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a standard input that is strict, as in most locales, a byte that is not UTF-8 ends no conversation."""

    def typed(_: str) -> str:
        line = next(lines)
        if isinstance(line, bytes):
            line = line.decode()
        return line

    lines = iter([b"caf\xe9", "caf\udce9", "/save ~/talk.jsonl", "/exit"])
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setenv("HOME", str(tmp_path))
    chat_loop(phasor.ChatSession(phasor.load(folder), system="Be kind.", max_new_tokens=8))
    said = capsys.readouterr().err
    assert "phasor: the line is not UTF-8 text: see its byte 3\n" in said
    assert "phasor: the line is not UTF-8 text: see its character 3\n" in said
    assert json.loads((tmp_path / "talk.jsonl").read_text())["messages"][0]["content"] == "Be kind."


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are those of Unix")
def test_a_terminal(folder: Path, tmp_path: Path) -> None:
    screen = Terminal("chat", str(folder), "--max-new-tokens", "100000", "--system", "Be kind.")
    try:
        screen.read_until("/help lists commands\n> ")
        screen.type("Hello")
        screen.read_until("Hello\n")
        screen.wait(lambda: len(screen.text) >= 5, "an answer that would go on for minutes")
        os.write(screen.screen, b"\x03")
        said = screen.read_until("phasor: stopped\n> ")
        screen.type("/save " + str(tmp_path / "talk.jsonl"))
        screen.read_until("\n> ")
        system, question, reply = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
        assert (system["content"], question["content"]) == ("Be kind.", "Hello")
        assert reply["content"].startswith(said.partition("^C")[0].rstrip("\n")[:5])
        screen.type("no")
        assert "refuses this conversation: never no" in screen.read_until("never no\n> ")
        screen.type("/save " + str(tmp_path / "talk.jsonl"))
        assert "exists: name another file" in screen.read_until("file\n> ")
        screen.type("/save " + str(tmp_path / "missing" / "talk.jsonl"))
        assert "talk.jsonl cannot be written: No such file or directory" in screen.read_until("directory\n> ")
        screen.type("/system")
        screen.read_until("\n> ")
        screen.type("/resett")
        assert "unknown command '/resett' (did you mean '/reset'?)" in screen.read_until("/exit\n> ")
        screen.type("/help")
        assert "/save FILE" in screen.read_until("turn, and no command.\n> ")
        screen.interrupt("/exit or Ctrl-D ends\n> ")
        screen.type("/exit")
        assert screen.end() == 0
    finally:
        os.close(screen.screen)


def test_ctrl_c_ends_a_pipe(folder: Path) -> None:
    command = [sys.executable, "-m", "phasor", "chat", str(folder), "--max-new-tokens", "100000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"Hello\n")
        process.stdin.close()
        assert process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == b""
        assert process.wait() == 130


def test_an_encoder_decoder_talks_without_a_template(
    run_phasor: CommandRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = phasor.Transformer(phasor.preset("t5", dim=32, num_heads=2, num_layers=1, hidden_dim=32, vocab_size=261))
    model.tokenizer, model.special = byte_tokenizer("$A <eos>"), phasor.SpecialTokens(start=0, stop=(2,))
    phasor.save(model, tmp_path / "model")
    pipe(monkeypatch, b"Hello\nWhy?\n")
    printed = run_phasor("chat", str(tmp_path / "model"), "--max-new-tokens", "4")
    assert printed.splitlines() == replies(tmp_path / "model", "Hello", "Why?", max_new_tokens=4)

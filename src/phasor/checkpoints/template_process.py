"""Chat templates rendered in a separate process, which is ended where one takes too much."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import Any

from phasor.config.schema import shorten
from phasor.distribution import missing_package

SECONDS = 1  # of the processor, as the worker counts them
WAIT = 10.0  # seconds, where the system has no timer that counts those of the processor
SAFE = (3, 1, 6)  # the first version of jinja2 whose sandbox has no way out that is known
PROGRAM = Path(__file__).with_name("template_worker.py")


class TemplateProcess:
    """A process that renders templates, one after another; another one is started where it had to be ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, variables: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the ranges of characters that the template marks with `{% generation %}`."""
        request = json.dumps([template, variables]).encode() + b"\n"
        with self.lock:
            answer = self.ask(request)
        if "error" in answer:
            raise ValueError(shorten(" ".join(answer["error"].split()), 600))
        return answer["text"], [(start, end) for start, end in answer["spans"]]

    def ask(self, request: bytes) -> dict[str, Any]:
        process = self.process = self.process or self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = None if hasattr(signal, "setitimer") else threading.Timer(WAIT, process.kill)
        try:
            if timer is not None:
                timer.start()
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        except BaseException:  # Ctrl-C: its answer would be taken for that of the next request
            self.end()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        return json.loads(line) if line.endswith(b"\n") else {"error": self.reason_of_end()}

    def start(self) -> subprocess.Popen[bytes]:
        check_jinja()
        process = subprocess.Popen(
            [sys.executable, "-P", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C in the terminal is for the one that asks
        )
        weakref.finalize(self, close, process)
        return process

    def end(self) -> int:
        """End the process; its exit code."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.kill()
        close(process)
        return process.returncode

    def reason_of_end(self) -> str:
        process = self.process
        assert process is not None
        try:
            process.wait(WAIT)
        except subprocess.TimeoutExpired:
            return f"is not answered: the process that renders it closed its output ({self.end()})"
        code = self.end()
        if code == -getattr(signal, "SIGPROF", 0) or not hasattr(signal, "setitimer"):
            return f"computes for more than {SECONDS} s"
        return f"ended the process that renders it (exit code {code})"


def close(process: subprocess.Popen[bytes]) -> None:
    """Close a process's input, by which it ends, and wait for it."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was not written yet goes to a process that has ended
                continue
    process.wait()


def check_jinja() -> None:
    """Refuse to render without jinja2, or with one whose sandbox leaks."""
    if importlib.util.find_spec("jinja2") is None:
        raise missing_package("chat templates need the package jinja2", "chat")
    version = importlib.metadata.version("jinja2")
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
    if numbers < SAFE:
        raise missing_package(f"the sandbox of jinja2 {version} has holes: chat templates need 3.1.6 or newer", "chat")


@cache
def template_process(owner: int) -> TemplateProcess:
    """The process that renders for the process `owner`; a fork of that has another."""
    return TemplateProcess()

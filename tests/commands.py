"""Commands for the tests: in this process, where that is quicker, or in a separate one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phasor.cli import main


class CommandRunner:
    """Runs commands in this process, and checks their exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """The standard output of a command that succeeds, or ends with another code that is expected."""
        found = main(arguments)
        out, self.error = self.capsys.readouterr()
        assert found == code, self.error
        return out

    def expect_error(self, *arguments: str) -> str:
        """The one line on the standard error of a command that does not."""
        code = main(arguments)
        out, error = self.capsys.readouterr()
        assert (code, out) == (2, "")
        assert error.startswith("phasor: ")
        assert error.endswith("\n")
        assert error.count("\n") == 1
        return error


def run(*arguments: str, code: str | None = None, given: str = "") -> subprocess.CompletedProcess[str]:
    how = ["-m", "phasor"] if code is None else ["-c", code]
    return subprocess.run([sys.executable, *how, *arguments], capture_output=True, text=True, input=given, check=False)

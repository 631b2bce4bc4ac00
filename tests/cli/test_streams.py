"""Standard streams as they may be: closed, terminals, not UTF-8; and Ctrl-C from the first moment on."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from commands import CommandRunner, run
from decoding import byte_tokenizer, reciter, speaker

import phasor
from phasor.cli import main
from phasor.cli.streams import escape_controls

TEXT = "Grüße \x1b[2J\x07\x9b世\tend\nline \\"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that answers every prompt of five characters with the text."""
    tokenizer = byte_tokenizer()
    place = tmp_path_factory.mktemp("streams") / "model"
    phasor.save(reciter(tokenizer.encode(TEXT).ids, tokenizer, 5), place)
    return str(place)


@pytest.fixture
def run_phasor(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


COUNT = str(len(TEXT.encode()))


def command(folder: str, *more: str) -> list[str]:
    given = ["generate", folder, "--prompt", "Say: ", "--max-new-tokens", COUNT]
    return [sys.executable, "-m", "phasor", *given, *more]


class Screen(io.TextIOWrapper):
    """A standard output of some encoding, perhaps a terminal."""

    def __init__(self, encoding: str, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(self.encoding)


@pytest.mark.parametrize("more", [[], ["--stream"], ["--json"]])
def test_text_is_written_whatever_the_encoding(
    folder: str, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen("ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert main([*command(folder)[3:], *more]) == 0
    if "--json" in more:
        assert json.loads(screen.text())[0]["text"] == TEXT
    else:
        assert screen.text() == TEXT.encode("ascii", "backslashreplace").decode() + "\n"


def test_a_process_in_another_encoding(folder: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LANG": "C"}
    done = subprocess.run(command(folder), capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout.count(b"\\u4e16")) == (0, 1), done.stderr


@pytest.mark.parametrize("more", [[], ["--stream"], ["--json"]])
def test_control_characters_do_not_reach_a_terminal(
    folder: str, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe gets the text as it is; on a terminal one sees what the model wrote, and nothing is done to it."""
    for terminal in (False, True):
        screen = Screen("utf-8", terminal)
        monkeypatch.setattr(sys, "stdout", screen)
        assert main([*command(folder)[3:], *more]) == 0
        shown = screen.text()
        if more == ["--json"]:
            assert json.loads(shown)[0]["text"] == TEXT
        else:
            assert shown == (escape_controls(TEXT) if terminal else TEXT) + "\n"
        assert not terminal or not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_closed_streams(
    folder: str, monkeypatch: pytest.MonkeyPatch, run_phasor: CommandRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    error = run_phasor.expect_error("generate", folder, "--max-new-tokens", "2")
    assert error == "phasor: standard input is closed, and the prompt would be read from there\n"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main(command(folder)[3:]) == 2
    assert capsys.readouterr().err == "phasor: standard output is closed, and the result would be printed there\n"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        assert main(command(folder)[3:]) == 0
        assert main(["generate"]) == 2
    assert capsys.readouterr().out == TEXT + "\n"  # and no message among it


def test_a_terminal_says_what_is_waited_for(
    folder: str, monkeypatch: pytest.MonkeyPatch, run_phasor: CommandRunner
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("Say: "))
    assert run_phasor("generate", folder, "--max-new-tokens", COUNT) == TEXT + "\n"
    assert run_phasor.error.startswith("phasor: type the prompt, then Ctrl-D\n")


def test_bytes_that_are_not_utf8(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_phasor: CommandRunner
) -> None:
    given = ["generate", folder, "--max-new-tokens", "2"]
    error = run_phasor.expect_error(*given, "--prompt", os.fsdecode(b"Say\xff "))
    assert error == "phasor: --prompt is not UTF-8 text: see its character 3\n"
    (tmp_path / "prompt").write_bytes(b"one\n\xfftwo")
    error = run_phasor.expect_error(*given, "--prompt-file", str(tmp_path / "prompt"))
    assert error == f"phasor: {tmp_path}/prompt, line 2: the byte 4 is not UTF-8\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), "ascii"))
    assert run_phasor.expect_error(*given) == "phasor: standard input, line 1: the byte 0 is not UTF-8\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüß.".encode()), "ascii"))
    run_phasor(*given)  # read as UTF-8 in any locale


def test_several_prompts(folder: str, tmp_path: Path, run_phasor: CommandRunner) -> None:
    (tmp_path / "prompts").write_text("Say: \nTell \r\n")
    options = ["--prompts", str(tmp_path / "prompts"), "--max-new-tokens", COUNT]
    line = TEXT.replace("\\", "\\\\").replace("\n", "\\n")
    assert run_phasor("generate", folder, *options) == f"{line}\n{line}\n"
    found = json.loads(run_phasor("generate", folder, *options, "--json"))
    assert [one["text"] for one in found] == [TEXT, TEXT]
    sampled = [*options, "--temperature", "1e-9", "--num-return-sequences", "2", "--seed", "1"]
    assert run_phasor("generate", folder, *sampled) == f"{line}\n" * 4
    assert "one prompt" in run_phasor.expect_error("generate", folder, *options, "--stream")
    assert "not both" in run_phasor.expect_error("generate", folder, *options, "--prompt", "x")
    (tmp_path / "prompts").write_text("")
    assert "has no prompts" in run_phasor.expect_error("generate", folder, *options)


def test_sampling_at_the_command_line(folder: str, tmp_path: Path, run_phasor: CommandRunner) -> None:
    model = speaker()
    model.generation_settings = {"do_sample": True, "temperature": 1.4, "max_new_tokens": 6}
    phasor.save(model, tmp_path / "sampler")
    given = ["generate", str(tmp_path / "sampler"), "--prompt", "1 2"]
    expected = phasor.generate(model, [1, 2], seed=3)
    assert [int(token) for token in run_phasor(*given, "--seed", "3").split()] == expected
    assert len(run_phasor(*given, "--num-return-sequences", "3").splitlines()) == 3
    greedy = phasor.generate(model, [1, 2], temperature=0)
    assert [int(token) for token in run_phasor(*given, "--temperature", "0").split()] == greedy
    assert "--seed is for sampling" in run_phasor.expect_error(*given, "--temperature", "0", "--seed", "3")


def test_a_text_longer_than_the_model_is_made_for_is_said(tmp_path: Path, run_phasor: CommandRunner) -> None:
    model = speaker(max_length=16)
    phasor.save(model, tmp_path)
    for count, said in ((14, False), (15, True)):
        for more in ([], ["--stream"]):
            run_phasor("generate", str(tmp_path), "--prompt", "1 2", "--max-new-tokens", str(count), *more)
            assert ("longer than the 16 tokens" in run_phasor.error) is said


def test_warnings_are_lines_of_their_own(tmp_path: Path) -> None:
    model = speaker()
    model.generation_settings = {"guidance_scale": 3.0}
    phasor.save(model, tmp_path)
    with pytest.warns(UserWarning, match="guidance_scale"):
        phasor.generate(model, [1], max_new_tokens=1)
    done = run("generate", str(tmp_path), "--prompt", "1", "--max-new-tokens", "1")
    said = "phasor: warning: generation settings of the model's folder that phasor does not honor: guidance_scale\n"
    assert said in done.stderr


def interrupt(folder: str, moments: list[float]) -> list[int]:
    """The exit codes of commands that get Ctrl-C after some seconds."""
    codes = []
    for moment in moments:
        given = [*command(folder), "--temperature", "1"]
        with subprocess.Popen(given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            time.sleep(moment)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=120)
        codes.append(process.returncode)
        starting = (
            error.endswith(b"KeyboardInterrupt\n") and b"phasor/" not in error
        )  # Python itself, before the command
        assert process.returncode in (130, -signal.SIGINT) or starting or b"tokens/s" in error, error
    return codes


def test_ctrl_c_ends_the_command(folder: str) -> None:
    """While the interpreter starts, and while torch is imported."""
    assert 0 not in interrupt(folder, [0.2, 0.5])


@pytest.mark.slow
def test_ctrl_c_ends_the_command_at_any_moment(folder: str) -> None:
    random_moments = random.Random(5)
    codes = interrupt(folder, [0.05 + random_moments.random() * 2.5 for _ in range(60)])
    assert codes.count(130) > 20


def test_ctrl_c_before_the_command_is_parsed_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasor.cli.build_parser", lambda: signal.raise_signal(signal.SIGINT))
    assert main(["kinds"]) == 130


def test_ctrl_c_is_not_lost_by_an_import_that_catches_everything(tmp_path: Path) -> None:
    """torch's import goes through code that drops exceptions; here one that drops them all."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        "import sys, time\nprint('importing', flush=True)\n"
        "for _ in range(300):\n    try:\n        time.sleep(0.1)\n    except BaseException:\n        pass\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    given = [sys.executable, "-m", "phasor", "generate", "nowhere", "--prompt", "x"]
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130


def test_the_handler_is_put_back(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main(["kinds", "--json"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["recipes"])))
    thread.start()
    thread.join()
    assert codes == [0]
    capsys.readouterr()


def test_threads_generate_from_a_model_in_training_mode() -> None:
    """One that ends does not put the model back into training mode under another."""
    torch.manual_seed(0)
    model = speaker(dropout={"residual": 0.5}).train()
    prompts = [[i, i + 1] for i in range(6)]
    expected = [phasor.generate(model, prompt, max_new_tokens=4 + 6 * i) for i, prompt in enumerate(prompts)]
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = phasor.generate(model, prompts[i], max_new_tokens=4 + 6 * i)

    for _ in range(3):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(6)] == expected
    assert all(module.training for module in model.modules())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
def test_standard_output_on_a_full_disk_is_named() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "phasor", "kinds"], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.decode()) == (2, "phasor: standard output: No space left on device\n")

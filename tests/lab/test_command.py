"""`phasor lab` itself: what it prints, what it opens, what it refuses."""

import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from phasor.cli import main
from phasor.cli.lab import describe_exposure
from phasor.serving.listen import is_loopback, listen

COMMAND = [sys.executable, "-m", "phasor", "lab", "--no-browser", "--port", "0"]


def refuse(capsys, *words):
    """The one line that a refused command prints."""
    assert main(["lab", "--no-browser", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_missing_folder_is_one_sentence(capsys, tmp_path):
    assert refuse(capsys, tmp_path / "nothing").endswith("does not exist")
    (tmp_path / "file").touch()
    assert "file" in refuse(capsys, tmp_path / "file")


def test_an_occupied_port_is_one_sentence(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"cannot listen at 127.0.0.1 port {port}" in refuse(capsys, "--port", port)


@pytest.mark.parametrize("words", [["--port", "65536"], ["--port", "-1"], ["--host", "no.such.host.invalid"]])
def test_an_address_that_cannot_be_had_is_one_sentence(capsys, words):
    assert words[0] in refuse(capsys, *words)


@pytest.mark.parametrize("name", ["starlette", "uvicorn"])
def test_a_missing_extra_is_one_sentence(capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'phasor-transformer[lab]'" in refuse(capsys)


def test_only_loopback_is_listened_at_unless_a_host_is_given():
    assert is_loopback("127.0.0.1")
    assert not is_loopback("0.0.0.0")
    with listen("127.0.0.1", 0) as server_socket:
        assert server_socket.getsockname()[0] == "127.0.0.1"
    said = describe_exposure("0.0.0.0", 8765, ["runs/lm-1"])
    assert "0.0.0.0" in said
    assert "without a password" in said
    assert "runs/lm-1" in said


def test_the_page_is_there_before_torch_is_loaded_and_ctrl_c_ends_it():
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            base = process.stdout.readline().split()[2]
            start = time.monotonic()
            with urllib.request.urlopen(base, timeout=20) as answer:
                assert b"phasor lab" in answer.read()
            assert time.monotonic() - start < 10
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_serving_the_page_does_not_import_torch():
    code = """
import sys
from starlette.testclient import TestClient
from phasor.lab.server import build_app
client = TestClient(build_app(), base_url="http://127.0.0.1")  # without its lifespan, which starts workers
for path in ("/", "/api/about", "/api/figures", "/openapi.json"):
    assert client.get(path).status_code == 200
assert "torch" not in sys.modules and "numpy" not in sys.modules, "torch is loaded"
"""
    subprocess.run([sys.executable, "-c", code], check=True)

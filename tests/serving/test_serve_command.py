"""`phasor serve` as a process: what it prints, how a signal ends it, and its page in a browser."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

import phasor

from .conftest import TEMPLATE, small_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("serve") / "tiny-llama"
    phasor.save(small_model(max_length=100_000), place)
    return place


@contextmanager
def serving(folder, *options, **environment):
    """The process of a server and its address."""
    command = [sys.executable, "-m", "phasor", "serve", str(folder), "--port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stderr.read()
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def test_a_first_signal_finishes_answers_and_ends_with_0(folder):
    with serving(folder) as (process, url):
        answers = []

        def ask():
            body = {"prompt": "Once", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
            answers.append(httpx.post(f"{url}v1/completions", json=body, timeout=120))

        thread = threading.Thread(target=ask)
        thread.start()
        while not httpx.get(f"{url}stats").json()["running"]:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        thread.join(120)
        assert answers[0].json()["usage"]["completion_tokens"] == 300
        assert process.wait(30) == 0
        assert "a second signal ends at once" in process.stderr.read()


def test_a_client_that_does_not_read_is_waited_for_so_long(folder):
    with serving(folder, "--shutdown-timeout", "1") as (process, url):
        body = json.dumps({"prompt": "Once", "max_tokens": 90_000, "ignore_eos": True, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            while not httpx.get(f"{url}stats").json()["running"]:
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 1
        said = process.stderr.read()
        assert "finished within 1 second;" in said
        assert "1 connection closed before the end of the answer" in said
        assert "Traceback" not in said


def test_a_second_signal_ends_at_once(folder):
    with serving(folder) as (process, url):
        body = {"prompt": "Once", "max_tokens": 90_000, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGTERM)
            process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 1


def test_a_template_file_a_name_and_a_key(folder, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    options = ("--template", str(template), "--name", "mine", "--max-rows", "2", "--deterministic")
    with serving(folder, *options, PHASOR_API_KEY="secret\n") as (_, url):
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url}v1/models").status_code == 401
        assert httpx.get(f"{url}v1/models", headers=headers).json()["data"][0]["id"] == "mine"
        body = {"model": "mine", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        answer = httpx.post(f"{url}v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] <= 5


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-rows", "0"), "--max-rows must be an integer of at least 1"),
        (("--pages", "0"), "pages must be an integer of at least 1, not 0"),
        (("--port", "99999"), "--port must be from 0 to 65535"),
        (("--template", "nothing.jinja"), "nothing.jinja"),
        (("--shutdown-timeout", "-1"), "--shutdown-timeout must be an integer of at least 0, not -1"),
        (("--max-length", "0"), "--max-length must be an integer of at least 1"),
    ],
)
def test_mistakes_of_the_command_line(folder, options, words):
    command = [sys.executable, "-m", "phasor", "serve", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def page(chromium):
    page = chromium.new_page(viewport={"width": 390, "height": 844})
    page.set_default_timeout(60_000)
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()
    assert not wrong


def test_the_page_shows_what_happens(folder, tmp_path, page):
    with serving(folder) as (_, url):
        page.goto(url)
        page.wait_for_selector("#cards div")
        body = {"prompt": "Once", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        assert httpx.post(f"{url}v1/completions", json=body, timeout=60).status_code == 200
        page.wait_for_function("document.getElementById('cards').innerText.includes('40')")
        assert "tiny-llama" in page.inner_text("header")
        assert not page.is_visible("#key")
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert json.loads(httpx.get(f"{url}health").text) == {"status": "ok"}


def test_the_page_asks_for_the_key(folder, tmp_path, page):
    with serving(folder, PHASOR_API_KEY="secret") as (_, url):
        page.goto(url)
        page.wait_for_selector("#key")
        assert page.inner_text("#state") == "This server asks for its API key."
        page.screenshot(path=tmp_path / "key.png", full_page=True)
        page.fill("#key input", "another")
        page.click("#key button")
        page.wait_for_selector("#state.bad")
        assert page.inner_text("#state") == "This is not the API key of this server."
        page.fill("#key input", "secret")
        page.press("#key input", "Enter")
        page.wait_for_selector("#cards div")
        assert not page.is_visible("#key")

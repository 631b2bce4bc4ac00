"""Worker processes: what a computation may take, and that it ends with its client."""

import importlib
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from browser import serve

from phasor.lab import server, workers
from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.workers import Worker

CLIENT = httpx.Client(timeout=60)
LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is bounded on Linux alone")


@pytest.fixture(scope="module")
def limits():
    """Bounds that tests can wait for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "SECONDS", 2.0)
        patch.setattr(server, "GRACE", 0.2)
        patch.setattr(server, "MEMORY", 256 << 20)
        yield


@pytest.fixture(scope="module")
def lab(limits):
    """A lab that has the endpoints of example_endpoints.py as well, and workers that start without torch."""
    before = dict(ENDPOINTS)
    importlib.import_module("example_endpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "Worker", lambda _, modules: Worker(False, modules))
        with serve(computing=2, modules=["example_endpoints"]) as base:
            warm(base)
            yield base
    ENDPOINTS.clear()
    ENDPOINTS.update(before)
    del sys.modules["example_endpoints"]


@pytest.fixture(scope="module")
def lab_with_torch(limits):
    with serve() as base:
        yield base


def ask(base, name, path="/api/example/", **body):
    return CLIENT.post(f"{base}{path}{name}", json=body)


def ask_together(base, count, name, **body):
    """The answers to a number of requests at once."""
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(ask(base, name, **body))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def warm(base):
    """Wait until both workers are there; their numbers."""
    found = set()
    while len(found) < 2:
        answers = ask_together(base, 2, "work", number=0.1)
        assert {answer.status_code for answer in answers} == {200}
        found = {answer.json()["worker"] for answer in answers}
    return found


@contextmanager
def leave_early(base, name, body=b"{}"):
    """A client that asks, and hangs up at the end of the block."""
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /api/example/{name} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield


def test_two_compute_at_once_and_some_wait_and_more_are_refused(lab, monkeypatch):
    monkeypatch.setattr(workers, "WAITING", 4)  # so few that all are there before the first two have computed
    long: list[httpx.Response] = []
    first = threading.Thread(target=lambda: long.extend(ask_together(lab, 2, "work", number=1.5)))
    first.start()
    time.sleep(0.4)  # until these compute
    start = time.monotonic()
    answers = ask_together(lab, 4 + 3, "work", number=0.2)
    seconds = time.monotonic() - start
    first.join()
    assert sorted(answer.status_code for answer in answers) == [200] * 4 + [503] * 3
    assert seconds >= 0.2 * 4 / 2
    assert len({answer.json()["worker"] for answer in long}) == 2


def test_what_computes_too_long_is_ended_and_others_go_on(lab):
    answers = ask_together(lab, 2, "work", number=10)
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json()["error"] == "this takes more than 2 seconds: choose smaller sizes"
    warm(lab)


def test_what_computes_for_nobody_is_ended(lab):
    before = warm(lab)
    start = time.monotonic()
    for _ in before:
        with leave_early(lab, "work", b'{"number": 9}'):
            time.sleep(0.2)
    while any(Path(f"/proc/{pid}").exists() for pid in before):
        assert time.monotonic() - start < 1.9  # below the bound on every computation
        time.sleep(0.02)
    warm(lab)


def test_a_worker_outlives_a_client_that_leaves_a_moment_before_the_answer(lab):
    before = warm(lab)
    for _ in range(4):
        with leave_early(lab, "work", b'{"number": 0.15}'):
            time.sleep(0.1)
    assert warm(lab) == before


@LINUX
def test_more_memory_than_a_request_may_have_is_one_sentence(lab):
    assert ask(lab, "allocate", size=100 << 20).json() == {"last": 1}
    for size in (300 << 20, 1 << 40):
        answer = ask(lab, "allocate", size=size)
        assert answer.status_code == 400
        assert answer.json()["error"] == "this needs more than 268,435,456 bytes of memory: choose smaller sizes"


@LINUX
def test_a_worker_that_keeps_memory_is_replaced(lab):
    """So that what requests leave in caches does not add up."""
    workers = [ask(lab, "keep", size=100 << 20).json()["worker"] for _ in range(7)]
    assert len(set(workers)) > 2


def test_a_worker_that_crashes_is_replaced(lab):
    answer = ask(lab, "crash")
    assert answer.status_code == 500
    assert answer.json()["error"] == "the process that computed this ended with the exit code 3"
    warm(lab)


def test_a_worker_that_is_ready_is_taken_before_one_that_is_starting(lab):
    before = warm(lab)
    assert ask(lab, "crash").status_code == 500
    assert ask(lab, "work", number=0.1).json()["worker"] in before


def test_workers_start_one_after_the_other(monkeypatch):
    """The first would be ready later if another one imported torch beside it."""
    events = []

    class RecordedWorker:
        def __init__(self, *_):
            events.append("starts")

        def wait(self):
            events.append("is ready")

    monkeypatch.setattr(workers, "Worker", RecordedWorker)
    pool = workers.WorkerPool(2, seconds=1, grace=1, memory=1)
    thread = threading.Thread(target=anyio.run, args=(pool.start,))  # where no other test has a loop running
    thread.start()
    thread.join()
    assert events == ["starts", "is ready"] * 2


def test_a_recursion_without_end_is_one_sentence(lab):
    answer = ask(lab, "nest")
    assert (answer.status_code, answer.json()["error"]) == (400, "this request is nested too deeply")


SCHEMES = {
    "fire": {"kind": "fire", "hidden_dim": 10**9},
    "learned": {"kind": "learned", "max_length": 2**36},
    "t5": {"kind": "t5", "num_buckets": 2**35, "max_distance": 2**36},
}
NESTED = {"kind": "combined"}
for _ in range(150):
    NESTED = {"kind": "combined", "schemes": [NESTED, "alibi"]}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "scheme",
    [
        *SCHEMES.values(),
        *({"kind": "combined", "schemes": ["rotary", one]} for one in SCHEMES.values()),
        {"kind": "fire", "hidden_dim": 4096},  # few weights, and 4 GB between them and the scores
        NESTED,
    ],
)
@pytest.mark.parametrize("name", ["matrix", "facts", "rotation"])
def test_no_scheme_takes_the_memory_of_the_machine(lab_with_torch, name, scheme):
    length = {} if name == "rotation" else {"length": 1024}
    answer = ask(lab_with_torch, name, "/api/encodings/", position=scheme, **length)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert "\n" not in answer.json()["error"]


def test_workers_end_with_the_server():
    """Those that are ready, and the one that is starting."""
    others = set(worker_processes(os.getpid()))
    for count in (1, 2):
        with serve(computing=2) as base:
            while len(set(worker_processes(os.getpid())) - others) < count:
                assert httpx.get(base).status_code == 200
        deadline = time.monotonic() + 5
        while set(worker_processes(os.getpid())) - others:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def worker_processes(server_pid):
    """The ids of workers that a process has started and that still run."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = path.with_name("cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == server_pid and fields[0] != "Z" and "phasor.lab.worker" in command:
            yield int(path.parent.name)

"""Many clients at once: no error, and memory that does not grow."""

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from browser import visit
from test_workers import worker_processes

from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.server import build_app

CLIENTS = 20
SECONDS = 60


def resident(pid):
    """Bytes of memory that a process and its workers occupy."""
    pages = [int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in (pid, *worker_processes(pid))]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def server():
    """`phasor lab` in a separate process, and its address."""
    command = [sys.executable, "-m", "phasor", "lab", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().split()[2].rstrip("/")
        process.terminate()


@pytest.mark.slow
def test_the_first_view_stands_within_two_seconds_and_is_drawn_when_torch_is_there(chromium, server):
    """Its title, sentences and the places of its drawings come while torch is still being imported.

    The drawings need torch, whose import alone takes more than two seconds: they come within twice the time that it
    takes in another process, and two seconds. On a machine that does other things too, in proportion to its load.
    """
    _, base = server
    page = visit(chromium, base)
    two = 2 * max(1, os.getloadavg()[0] / os.cpu_count())
    start = time.monotonic()
    page.page.goto(base)
    page.page.wait_for_selector("main .sentences .chip")
    page.page.wait_for_selector("main figure")
    assert time.monotonic() - start <= two
    page.page.wait_for_selector("main figure:not(.empty)", timeout=60_000)
    drawn = time.monotonic() - start
    page.settle()
    assert not page.page.locator("main figure.empty:visible").count()
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    assert drawn <= 2 * (time.monotonic() - start) + two
    page.check()
    page.close()


async def load(base, seconds):
    """The statuses that clients got in a while, each asking for one thing after the other, as sliders do."""
    build_app()
    bodies = [(path, {}) for path, endpoint in sorted(ENDPOINTS.items()) if not endpoint.folders]
    statuses, end = [], time.monotonic() + seconds

    async def ask(number):
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:
            turn = number
            while time.monotonic() < end:
                path, body = bodies[turn % len(bodies)]
                statuses.append((await client.post(path, json=body)).status_code)
                turn += 1

    await asyncio.gather(*(ask(number) for number in range(CLIENTS)))
    return statuses


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_twenty_clients_for_two_minutes_leave_no_error_and_no_memory(server):
    """Memory after the second minute is within 5 % of that after the first."""
    process, base = server
    memory = []
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:  # a browser of other tests may have an event loop in this one
            statuses = thread.submit(asyncio.run, load(base, SECONDS)).result()
        assert len(statuses) > 100
        assert set(statuses) <= {200, 400}, set(statuses)  # some endpoints need more than an empty body
        memory.append(resident(process.pid))
    assert memory[1] <= memory[0] * 1.05

"""Computations in worker processes: a few at once, each with a bound on its time and memory, and ended with its client.

A worker that computes too long, or for a client that has left, is killed, and another is started in its place.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread
from starlette.requests import Request

from phasor.lab.answers import Answer, mistake
from phasor.lab.worker import read_message, write_message

WAITING = 32  # requests; more are refused


class Worker:
    """A worker process. With `torch_first` it imports torch at once, seconds for which the first request waits."""

    def __init__(self, torch_first: bool, modules: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phasor.lab.worker", "torch" if torch_first else "", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.is_ready, self.starting = False, threading.Lock()

    def wait(self) -> None:
        """Wait until it can compute; EOFError where it ends before."""
        with self.starting:
            if not self.is_ready:
                self.receive()
                self.is_ready = True

    def ask(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Its answer; EOFError where it ends before."""
        assert self.process.stdin is not None
        try:
            write_message(self.process.stdin, head, body)
        except OSError:
            raise EOFError from None
        return self.receive()

    def receive(self) -> tuple[dict[str, Any], bytes]:
        assert self.process.stdout is not None
        try:
            return read_message(self.process.stdout)
        except EOFError:
            self.process.wait()
            raise

    def end(self) -> None:
        self.process.kill()


class WorkerPool:
    """Up to `count` workers, started by `start`, or with `lazy` when they are needed.

    A request may compute for `seconds`, and take `memory` bytes, where that is not None. When its client leaves, it has
    `grace` seconds to finish: a worker, with what it has loaded and cached, outlives a slider that is dragged.
    """

    def __init__(
        self,
        count: int,
        *,
        seconds: float,
        grace: float,
        memory: int | None,
        modules: Sequence[str] = (),
        lazy: bool = False,
    ) -> None:
        self.count, self.seconds, self.grace, self.memory, self.modules = count, seconds, grace, memory, modules
        self.turns = anyio.Semaphore(count if lazy else 0)
        self.idle: list[Worker] = []  # the last of which is taken first
        self.waiting = 0

    async def start(self) -> None:
        """Start the workers one after the other: the first computes sooner if no other one imports torch beside it."""
        for _ in range(self.count):
            worker = self.new_worker()
            self.idle.insert(0, worker)
            with suppress(EOFError):  # of which the request that takes it is told
                await anyio.to_thread.run_sync(worker.wait, abandon_on_cancel=True)
            self.turns.release()

    def new_worker(self) -> Worker:
        # A bound on memory is one above what a worker has with torch.
        return Worker(self.memory is not None, self.modules)

    def stop(self) -> None:
        """End the workers that compute nothing; those that do end with their requests."""
        for worker in self.idle:
            worker.end()
            worker.process.communicate()
        self.idle.clear()

    async def run(self, request: Request, path: str, body: bytes, folders: Sequence[tuple[Any, ...]] = ()) -> Answer:
        """The answer of a worker, or 503 where too many requests wait already."""
        if self.waiting >= WAITING:
            return mistake("too many computations are waiting: try again in a moment", 503, retry=1)
        self.waiting += 1
        try:
            await self.turns.acquire()
        finally:
            self.waiting -= 1
        try:
            if await request.is_disconnected():
                return Answer(499, {}, b"")  # the page has asked for something newer
            return await self.compute(request, {"path": path, "folders": folders, "memory": self.memory}, body)
        finally:
            self.turns.release()

    async def compute(self, request: Request, head: dict[str, Any], body: bytes) -> Answer:
        """The answer of a free worker, which is replaced where it had to be ended."""
        worker = self.idle.pop() if self.idle else self.new_worker()
        reply: dict[str, Any] = {"spent": True}
        found = Answer(499, {}, b"")
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self.leave, request, group.cancel_scope)
                try:
                    await anyio.to_thread.run_sync(worker.wait, abandon_on_cancel=True)
                    with anyio.fail_after(self.seconds):
                        reply, content = await anyio.to_thread.run_sync(worker.ask, head, body, abandon_on_cancel=True)
                    found = Answer(reply["status"], reply["headers"], content)
                except TimeoutError:
                    found = mistake(f"this takes more than {self.seconds:g} seconds: choose smaller sizes")
                except EOFError:
                    code = worker.process.returncode
                    found = mistake(f"the process that computed this ended with the exit code {code}", 500)
                group.cancel_scope.cancel()
        finally:
            if reply["spent"]:
                worker.end()
                self.idle.insert(0, self.new_worker())
            else:
                self.idle.append(worker)
        return found

    async def leave(self, request: Request, scope: anyio.CancelScope) -> None:
        """Cancel a scope a while after the client of a request has left."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        await anyio.sleep(self.grace)
        scope.cancel()

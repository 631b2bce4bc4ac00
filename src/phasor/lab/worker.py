"""A worker process of the lab: requests come in at its standard input, answers go out at its standard output.

It computes one request at a time and can be killed at any moment. On Linux a request may take a bounded number of bytes
more than the process had before; a worker that has kept as much as that says so, and is replaced.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import struct
import sys
import threading
from pathlib import Path
from typing import IO, Any

from phasor.lab.answers import OutOfMemoryError, answer, mistake
from phasor.lab.folders import Folder, FolderList
from phasor.lab.views import import_views

THREADS = 4  # of torch: plots are small, and the stack of a thread counts as memory
SIZE = struct.Struct(">QQ")  # of the two parts of a message
STATUS = Path("/proc/self/status")


def write_message(file: IO[bytes], head: dict[str, Any], body: bytes = b"") -> None:
    """Write a message: a head of plain data, and bytes.

    >>> import io
    >>> file = io.BytesIO()
    >>> write_message(file, {"path": "/"}, b"body")
    >>> read_message(io.BytesIO(file.getvalue()))
    ({'path': '/'}, b'body')
    """
    text = json.dumps(head).encode()
    file.write(SIZE.pack(len(text), len(body)) + text + body)
    file.flush()


def read_message(file: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """The next message; EOFError where the other side has ended."""
    start = file.read(SIZE.size)
    if len(start) < SIZE.size:
        raise EOFError
    first, second = SIZE.unpack(start)
    parts = file.read(first + second)
    if len(parts) < first + second:
        raise EOFError
    return json.loads(parts[:first]), parts[first:]


def used_memory() -> int | None:
    """Bytes of memory that this process can write to and shares with none; None where the system does not say."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:")), None)


def limit_memory(more: int | None) -> None:
    """Bound what this process takes from now on; None takes the bound away."""
    used = used_memory()
    if used is None:
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY if more is None else used + more, hard))


def respond(head: dict[str, Any], body: bytes, before: int | None) -> tuple[dict[str, Any], bytes]:
    """The message that answers another. `before` is what the process used when it started."""
    limit = head["memory"]
    limit_memory(limit)
    folders = FolderList([Folder.from_plain(fields) for fields in head["folders"]])
    spent = False
    try:
        found = answer(head["path"], body, folders)
    except OutOfMemoryError:
        found, spent = mistake(f"this needs more than {limit or 0:,} bytes of memory: choose smaller sizes"), True
    limit_memory(None)
    if limit is not None and before is not None:
        spent = spent or (used_memory() or 0) > before + limit
    return {"status": found.status, "headers": found.headers, "spent": spent}, found.content


def receive(file: IO[bytes], messages: queue.SimpleQueue[tuple[dict[str, Any], bytes]]) -> None:
    """Pass requests on, and end the process, even while it computes, when the server has ended."""
    try:
        while True:
            messages.put(read_message(file))
    except EOFError:
        os._exit(0)


def main(torch_first: bool, modules: list[str]) -> None:
    """Answer requests to the endpoints of the views, and of other modules, until the input ends.

    With `torch_first` torch is imported before the first request, else when a request needs it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the server
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    messages: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=receive, args=(sys.stdin.buffer, messages), daemon=True).start()
    import_views()
    for module in modules:
        importlib.import_module(module)
    if torch_first:
        import torch

        torch.set_num_threads(min(THREADS, torch.get_num_threads()))
        importlib.import_module("phasor.transformer")
    before = used_memory()
    write_message(output, {})
    while True:
        write_message(output, *respond(*messages.get(), before))


if __name__ == "__main__":
    main(sys.argv[1] == "torch", sys.argv[2:])

"""Processes that see each other as `torchrun` would have it, forked so that what they import is imported once."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import traceback
from collections.abc import Callable

# After which a process prints where it stands and ends; tests wait a little longer.
PATIENCE_SECONDS = float(os.environ.get("WORLD_SECONDS", 280))


def fork_processes(size: int, work: Callable[[], None]) -> int:
    """Run some work in every process; 0 where all of them finished it."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = str(one.getsockname()[1])
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port, WORLD_SIZE=str(size))
    started = []
    for rank in range(size):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        if (process := os.fork()) == 0:
            run_and_exit(work)
        started.append(process)
    return max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0 for process in started)


def run_and_exit(work: Callable[[], None]) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)

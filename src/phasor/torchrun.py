"""What `torchrun` tells a process about itself. Nothing here imports torch."""

from __future__ import annotations

import os
import time
from typing import NamedTuple, NoReturn

FAILED = 2  # the exit code of processes that end because another one failed
REPORT_SECONDS = 8.0  # in which another process has reported an error


class Launch(NamedTuple):
    """This process among those that were started together; `restarts` counts how often they were started again."""

    rank: int
    size: int
    local_rank: int
    restarts: int


def read_launch() -> Launch | None:
    """How this process was started; None where it was not by `torchrun` or the like.

    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}):
    ...     read_launch()
    Launch(rank=3, size=8, local_rank=1, restarts=0)
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if any(name not in os.environ for name in names):
        return None
    try:
        rank, size, local_rank = (int(os.environ[name]) for name in names)
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    except ValueError:
        raise ValueError("RANK, WORLD_SIZE and LOCAL_RANK must be integers, as torchrun sets them") from None
    return Launch(rank, size, local_rank, restarts)


def is_first_process() -> bool:
    """Whether this process is the one that reports: the first, or the only one."""
    return os.environ.get("RANK", "0") == "0" or read_launch() is None


def leave_report() -> NoReturn:
    """End this process and leave it to another one to report why.

    That one gets the time: `torchrun` ends all processes as soon as it sees that one of them has ended.
    """
    time.sleep(REPORT_SECONDS)
    raise SystemExit(FAILED)

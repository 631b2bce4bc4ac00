"""Processes for the tests that begin with everything imported."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOAD = ["training_runs", "kill_points"]


def forkserver() -> ForkServerContext:
    """A context whose processes are forked from one that has imported the modules above.

    The server finds them by the environment alone: until Python 3.13 it does not have the path of this process.
    """
    tests, path = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if tests not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([tests, *filter(None, path)])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context

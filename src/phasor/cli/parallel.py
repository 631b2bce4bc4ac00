"""Commands that run a model under torchrun: it is cut over the processes, and the first of them reads and prints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, TypeVar, cast

from phasor.config.recipe import MeshConfig
from phasor.config.recipe_help import HELP
from phasor.torchrun import read_launch

if TYPE_CHECKING:
    from phasor.parallel.processes import JoinedProcesses

Value = TypeVar("Value")
AXES = ("replicate", "shard")  # of a mesh that models are run on
NAMES = {"MeshConfig.": "--parallel.", "TrainConfig.device": "--device"}


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Options for the mesh of processes that a model is cut over."""
    group = parser.add_argument_group("under torchrun, which cuts the model over its processes")
    for axis in AXES:
        option = f"parallel.{axis}"
        group.add_argument(f"--{option}", type=int, metavar="N", default=argparse.SUPPRESS, help=HELP[option])


@contextmanager
def join_command(given: argparse.Namespace) -> Iterator[JoinedProcesses | None]:
    """The processes that `torchrun` started for a command; None where this one is alone. One of them prints."""
    axes = {axis: getattr(given, f"parallel.{axis}") for axis in AXES if hasattr(given, f"parallel.{axis}")}
    if read_launch() is None and not axes:
        yield None
        return
    from phasor.parallel.processes import JoinedProcesses, join_processes

    try:
        with join_processes(MeshConfig(**axes), given.device) as processes:
            if not isinstance(processes, JoinedProcesses):
                yield None
            elif processes.is_first:
                yield processes
            else:
                with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                    yield processes
    except ValueError as error:
        message = str(error).replace("phasor train", f"phasor {given.typed[0]}")
        for name, option in NAMES.items():
            message = message.replace(name, option)
        raise ValueError(message) from None


def from_first(processes: JoinedProcesses | None, read: Callable[[], Value]) -> Value:
    """What the first process reads, draws or chooses for all.

    >>> from_first(None, lambda: "the prompt")
    'the prompt'
    """
    if processes is None:
        return read()
    return processes.from_first(read() if processes.is_first else cast(Value, None))


def processes_argument(processes: JoinedProcesses | None) -> dict[str, Any]:
    """The processes as an argument of a function that runs in one by default."""
    return {} if processes is None else {"processes": processes}


def refuse_processes(processes: JoinedProcesses | None, option: str) -> None:
    """Refuse an option that is for a process alone."""
    if processes is not None:
        raise ValueError(f"{option} is for one process: leave it out, or leave torchrun out")

"""The processes of a run: how they meet, agree, and end together when one of them fails."""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # in its documentation, not in `__all__`
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from phasor.checkpoints.stored_adapters import Adapters
from phasor.config.recipe import MeshConfig
from phasor.device import resolve_device
from phasor.torchrun import FAILED, Launch, leave_report, read_launch
from phasor.transformer import Transformer

Value = TypeVar("Value")

WATCH_SECONDS, GRACE_SECONDS, POLL_SECONDS = 0.5, 3.0, 0.02
RUNS = itertools.count()
AXES = ("replicate", "shard", "context", "tensor")  # of a mesh, outermost first
ERROR, ENDED = "error", "ended"  # keys of the store


class Processes:
    """All processes of a run, and this one among them. Without `torchrun` there is one, and nothing is exchanged.

    >>> alone = Processes()
    >>> alone.is_first, alone.from_first("runs/lm-1"), alone.any(False)
    (True, 'runs/lm-1', False)
    """

    rank, size, restarts = 0, 1, 0

    @property
    def is_first(self) -> bool:
        """Whether this is the process that owns the run folder and reports."""
        return self.rank == 0

    @property
    def share(self) -> tuple[int, int]:
        """Which share of the rows of a batch this process takes, and of how many."""
        return 0, 1

    def from_first(self, value: Value) -> Value:
        """The value that the first process gives, as JSON; the others wait for it, however long that takes."""
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all of them have to ask."""
        return flag

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor summed over all processes, in place."""
        return tensor

    def __str__(self) -> str:
        return ""


class JoinedProcesses(Processes):
    """Processes that `torchrun` started, with a process group over all of them and a mesh.

    Waiting for the first process goes through the store and not through a collective, which would time out.
    """

    def __init__(self, started: Launch, store: Store) -> None:
        self.rank, self.size, self.local_rank, self.restarts = started
        self.store, self.count = store, 0
        self.done = threading.Event()
        self.watcher = threading.Thread(target=self._watch, args=(cast(Any, store).clone(),), daemon=True)
        self.watcher.start()

    def start(self, mesh: MeshConfig, device_name: str, backend: str | None = None) -> None:
        """Start the process group: by default NCCL between GPUs, Gloo between CPUs."""
        sizes = mesh.sizes(self.size)
        self.device = self._choose_device(device_name)
        if backend is None:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
        group_store = PrefixStore("group", self.store)
        device_id = self.device if backend == "nccl" else None
        dist.init_process_group(backend, store=group_store, rank=self.rank, world_size=self.size, device_id=device_id)
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=AXES)

    @property
    def share(self) -> tuple[int, int]:
        (group, groups), (part, parts) = (
            (self.mesh[axis].get_local_rank(), self.mesh[axis].size()) for axis in ("replicate", "shard")
        )
        return group * parts + part, groups * parts

    def _choose_device(self, name: str) -> torch.device:
        device = resolve_device(name)
        if device.type != "cuda":
            return device
        if name not in ("auto", "cuda"):
            raise ValueError(f"TrainConfig.device {name} is one GPU, and every process takes its own: give cuda")
        if self.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"process {self.local_rank} of this machine has no GPU, of which there are "
                f"{torch.cuda.device_count()}: start as many with --nproc-per-node"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def from_first(self, value: Value) -> Value:
        key = f"value {self.count}"
        self.count += 1
        if self.is_first:
            self.store.set(key, json.dumps(value))
            return value
        self._wait(key)
        return cast(Value, json.loads(self.store.get(key)))

    def any(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def __str__(self) -> str:
        sizes = dict(zip(AXES, self.mesh.shape, strict=True))
        shown = [f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis in ("replicate", "shard")]
        return f"{self.size} processes, {' x '.join(shown)}"

    def load(
        self, folder: Path, dtype: torch.dtype | None, part: str | None = None, adapter: Adapters | None = None
    ) -> Transformer:
        """The model of a folder, or a part of it, with adapters if they are given, cut over these processes."""
        from phasor.parallel.load import load_shards

        return load_shards(folder, self, dtype, part, adapter)

    def end(self) -> None:
        """Say that this process is through; the first one, which may hold the store, waits for all others."""
        try:
            self.store.add(ENDED, 1)
        except RuntimeError:  # whoever held the store is through or has failed; this process has done its part
            if self.is_first:
                raise
        while self.is_first and self.store.add(ENDED, 0) < self.size:
            time.sleep(POLL_SECONDS)

    def fail(self) -> bool:
        """Have all other processes end; whether this is the first one to fail, whose error is reported."""
        try:
            return self.store.compare_set(ERROR, "", str(self.rank)) == str(self.rank).encode()
        except RuntimeError:  # the store has ended with the process that failed
            raise SystemExit(FAILED) from None

    def _wait(self, key: str) -> None:
        while not self.store.check([key]):
            time.sleep(POLL_SECONDS)

    def _watch(self, store: Store) -> None:
        """End this process where another one failed, if it does not end by itself: it may wait for that one."""
        while not self.done.wait(WATCH_SECONDS):
            try:
                failed = store.check([ERROR])
            except RuntimeError:
                failed = True
            if failed:
                if not self.done.wait(GRACE_SECONDS):
                    os._exit(FAILED)
                return


@functools.cache
def meeting_store() -> Store:
    """Where the processes meet: the store of `torchrun`, or else one that the first process holds until it ends."""
    store, _, _ = next(iter(rendezvous("env://")))
    return store


@contextmanager
def join_processes(mesh: MeshConfig, device: str, advice: str = "") -> Iterator[Processes]:
    """The processes of a run for the length of a `with`.

    An error in one ends all of them. The one that failed first raises it; the others raise `SystemExit` without a word.
    `advice` is what to do when one of them is lost.
    """
    started = read_launch()
    if started is None:
        mesh.sizes(1)
        yield Processes()
        return
    prefix = f"phasor {started.restarts} {next(RUNS)}"  # other keys for every run of these processes
    processes = JoinedProcesses(started, PrefixStore(prefix, meeting_store()))
    try:
        processes.start(mesh, device)
        yield processes
        processes.end()
    except BaseException as error:
        if not processes.fail():
            leave_report()
        if isinstance(error, RuntimeError) and is_lost_connection(error):
            raise OSError(f"a process of this run ended or cannot be reached{advice}") from None
        raise
    finally:
        processes.done.set()
        processes.watcher.join()
    dist.destroy_process_group()


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether an error is that of an exchange with a process that is gone."""
    words: tuple[Any, ...] = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)

"""Load a checkpoint once in this process, and print how long it took and how much memory, as JSON.

    python -m phasor.bench.load_once phasor|transformers FOLDER DTYPE MODE BYTES

The imports, and as much memory as the files are large, come before the clock. MODE is "time"; "watch", in which a
thread watches the memory, which takes time; "check", with logits; or "copy", with the time of copying the weights once.
"""

from __future__ import annotations

import importlib
import json
import mmap
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch


def loader(library: str, folder: str, dtype: torch.dtype) -> Callable[[], Any]:
    if library == "phasor":
        from phasor.checkpoints import load

        return lambda: load(folder, dtype=dtype)
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cls = transformers.LlamaForCausalLM  # imported here, before the clock
    return lambda: cls.from_pretrained(folder, dtype=dtype).eval()


def anonymous_bytes() -> int:
    """What the process itself holds, without mapped files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class MemoryWatch:
    """The most anonymous memory while in it."""

    def __enter__(self) -> MemoryWatch:
        self.peak, self.done = 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.done.is_set():
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.001)


def main(library: str, folder: str, dtype: str, mode: str, size: str) -> dict[str, Any]:
    read = loader(library, folder, getattr(torch, dtype))
    with mmap.mmap(-1, int(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE):
        pass  # a virtual machine gets its memory when it is first used: that is not timed
    before, peak = anonymous_bytes(), 0
    begun = time.perf_counter()
    if mode == "watch":
        with MemoryWatch() as watch:
            model = read()
        peak = watch.peak
    else:
        model = read()
    took = time.perf_counter() - begun
    held = max(peak, anonymous_bytes()) - before
    with torch.inference_mode():
        model(torch.tensor([[1]]))
    ready = time.perf_counter() - begun
    weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    found: dict[str, Any] = {"seconds": took, "ready": ready, "peak": held, "model": sum(weights.values())}
    if mode == "check":
        with torch.no_grad():
            out = model(torch.arange(64).view(2, 32))
        found["logits"] = (out if library == "phasor" else out.logits).float()[:, -1, :50].tolist()
    if mode == "copy":
        source = [weight.detach().clone() for weight in model.parameters()]
        begun = time.perf_counter()
        for weight in source:
            torch.empty_like(weight).copy_(weight)
        found["copy"] = time.perf_counter() - begun
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

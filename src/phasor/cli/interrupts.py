"""Ctrl-C from the first moment on: while torch is being imported, and after that."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
# Imports during which an exception may be lost, as in a callback or in an `except` that catches everything.
HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "huggingface_hub")


@contextmanager
def handle_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, or end the process at once while a heavy package is being imported.

    Nothing has been begun by then that could be left half done. In other threads than the main one it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)


def on_interrupt(number: int, frame: FrameType | None) -> None:
    if any(is_being_imported(name) for name in HEAVY):
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))

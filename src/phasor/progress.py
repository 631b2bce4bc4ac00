"""Progress of long work, and who shows that of work which a function does without being asked to show it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

# How far work is: (done, all of it).
Progress = Callable[[int, int], None]
# Given what is done, such as fetching a model, the function to call with how far it is; the command line sets it.
shown_progress: ContextVar[Callable[[str], Progress] | None] = ContextVar("shown_progress", default=None)

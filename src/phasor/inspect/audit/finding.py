"""A finding: what a reader of a configuration gets wrong, where that was seen, and what to write instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# An error is computed wrong or refused by what many use today, a warning by some engine or version; a note is a choice
# whose effect is worth knowing.
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One field of a configuration that is read in different ways.

    `seen` names the reports of it, as OWNER/REPOSITORY#NUMBER on GitHub.
    """

    severity: Severity
    field: str
    what: str
    instead: str
    seen: tuple[str, ...]

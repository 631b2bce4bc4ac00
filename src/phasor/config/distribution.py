"""The distribution: its name and version, and the packages that its extras install."""

from __future__ import annotations

import importlib.metadata

DISTRIBUTION = "phasor-transformer"  # on PyPI; `phasor` is another project there


def missing_package(need: str, extra: str) -> ValueError:
    """What to raise where a package is not installed.

    >>> missing_package("tables need the package rich", "cli")
    ValueError("tables need the package rich: pip install 'phasor-transformer[cli]'")
    """
    return ValueError(f"{need}: pip install '{DISTRIBUTION}[{extra}]'")


def installed_version() -> str:
    """The version of phasor; "unknown" in a source tree that is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"

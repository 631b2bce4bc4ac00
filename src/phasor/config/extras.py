"""Packages that phasor needs for some things alone, which an extra of the distribution installs."""

from __future__ import annotations

DISTRIBUTION = "phasor-transformer"  # on PyPI; `phasor` is another project there


def missing_package(need: str, extra: str) -> ValueError:
    """What to raise where a package is not installed.

    >>> missing_package("tables need the package rich", "cli")
    ValueError("tables need the package rich: pip install 'phasor-transformer[cli]'")
    """
    return ValueError(f"{need}: pip install '{DISTRIBUTION}[{extra}]'")

"""The distribution: its name and version, and the packages that its extras install."""

from __future__ import annotations

DISTRIBUTION = "phasor-transformer"  # on PyPI; `phasor` is another project there
__version__ = "0.1.0"  # the only place; `phasor.__version__` and the distribution have it from here


def missing_package(need: str, extra: str) -> ValueError:
    """What to raise where a package is not installed.

    >>> missing_package("tables need the package rich", "cli")
    ValueError("tables need the package rich: pip install 'phasor-transformer[cli]'")
    """
    return ValueError(f"{need}: pip install '{DISTRIBUTION}[{extra}]'")

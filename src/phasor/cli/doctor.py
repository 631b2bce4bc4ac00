"""`phasor doctor`: whether this installation works."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from phasor.cli.output import print_json
from phasor.cli.streams import print_text

if TYPE_CHECKING:
    from phasor.inspect.doctor import Check, Diagnosis


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show versions, devices, compilers, caches, variables and which kernels are used, and test this installation "
        "for some seconds against float64. It ends with a block to paste into an issue. No network is asked. The exit "
        "code is 1 where something fails that should work."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> int:
    from phasor.inspect.doctor import doctor

    found = doctor(None if given.json or not sys.stderr.isatty() else show_check)
    if given.json:
        print_json(found.to_dict())
        return int(bool(found.problems))
    for title, lines in sections(found).items():
        print_text(f"{title}\n" + "".join(f"  {line}\n" for line in lines))
    print_text(f"for an issue\n\n{found.issue_text()}\n")
    print_text("\n".join(found.problems) or "everything that was tested works")
    return int(bool(found.problems))


def show_check(check: Check) -> None:
    """A check, as it ends."""
    print(f"phasor: {check.name} on {check.device}: {check.problem or 'passes'}", file=sys.stderr)


def sections(found: Diagnosis) -> dict[str, list[str]]:
    """The lines of the report by their titles."""
    extras = dict.fromkeys(package.extra for package in found.packages)
    packages = [
        f"{extra}: " + ", ".join(f"{p.name} {p.version or 'not installed'}" for p in found.packages if p.extra == extra)
        for extra in extras
    ]
    checks = [
        f"{check.name} on {check.device}: {check.problem or f'{check.error:.1e} of {check.bound:.1e} allowed'} "
        f"({check.seconds:.2f} s)"
        for check in found.checks
    ]
    caches = [
        f"{cache.name}: {cache.place}, {'not there' if cache.size is None else f'{cache.size / 2**30:,.2f} GiB'}"
        for cache in found.caches
    ]
    return {
        "versions": [f"{name} {version}" for name, version in found.versions.items()],
        "packages": packages,
        "devices": list(found.devices),
        "compilers": [f"{name}: {line}" for name, line in found.compilers.items()],
        "caches": caches,
        "variables": [f"{name}={value}" for name, value in found.environment.items()] or ["none is set"],
        "kernels": [line for kernels in found.kernels for line in str(kernels).splitlines()],
        "self-test": checks,
    }

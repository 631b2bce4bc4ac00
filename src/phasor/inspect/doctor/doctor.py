"""`doctor`: whether this installation works, and what to say about it in an issue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from phasor.config.schema import json_value
from phasor.inspect.backends import Backends, backends
from phasor.inspect.doctor import system
from phasor.inspect.doctor.self_test import Check, self_test
from phasor.inspect.doctor.system import Cache, Package
from phasor.quantization import WEIGHTS


@dataclass(frozen=True)
class Diagnosis:
    """What was found; `problems` are the sentences about what should work and does not."""

    versions: dict[str, str]
    packages: tuple[Package, ...]
    devices: tuple[str, ...]
    compilers: dict[str, str]
    kernels: tuple[Backends, ...]
    caches: tuple[Cache, ...]
    environment: dict[str, str]
    checks: tuple[Check, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON."""
        return json_value(self)

    def issue_text(self) -> str:
        """The lines to paste into an issue, in a fenced block; they contain no secrets and no home folder."""
        lines = [f"{name}: {value}" for name, value in self.versions.items()]
        lines += [f"device {device}" for device in self.devices]
        lines += [f"compiler for {name}: {value}" for name, value in self.compilers.items()]
        lines += [f"{name}={value}" for name, value in self.environment.items()]
        passed = Counter(check.device for check in self.checks if check.problem is None)
        total = Counter(check.device for check in self.checks)
        lines += [f"self-test on {device}: {passed[device]} of {count} checks pass" for device, count in total.items()]
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(["```text", *lines, "```"])


def doctor(progress: Callable[[Check], None] | None = None) -> Diagnosis:
    """Look at this installation, and test it for some seconds against float64 formulas. No network is asked.

    `progress` is called with each check of the self-test.

    >>> found = doctor()
    >>> found.problems, found.versions["torch"] == torch.__version__
    ((), True)
    """
    names = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    packages = system.packages()
    problems = [package.problem for package in packages] + [system.triton_problem()]
    compilers, wrong = system.compilers()
    checks = []
    for check in self_test(names):
        checks.append(check)
        if progress is not None:
            progress(check)
    problems += wrong
    problems += [f"{check.name} on {check.device}: {check.problem}" for check in checks if check.problem is not None]
    return Diagnosis(
        system.versions(),
        packages,
        system.devices(),
        compilers,
        tuple(kernels for name in names for kernels in usable_kernels(name)),
        system.caches(),
        system.environment(),
        tuple(checks),
        tuple(problem for problem in problems if problem is not None),
    )


def usable_kernels(device: str) -> list[Backends]:
    """Which paths a model takes on a device: inference, training, and with quantized weights."""
    plain = backends(device=device)
    others = {op.op for op in plain.ops}
    quantized = [backends(device=device, weights=weights) for weights in WEIGHTS]
    quantized = [replace(one, ops=tuple(op for op in one.ops if op.op not in others)) for one in quantized]
    return [plain, backends(device=device, training=True), *quantized]

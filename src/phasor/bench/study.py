"""Studies: workloads whose results have their own format, such as times by length or by batch size."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_origin

import torch

from phasor.bench import STUDIES
from phasor.bench.runner import build_machine, device_name
from phasor.bench.sizes import CPU, FULL, TINY
from phasor.bench.workload import Machine
from phasor.config.overrides import read_value
from phasor.config.schema import field_types, names, unknown
from phasor.device import resolve_device
from phasor.ops import dispatch


class Study:
    """One run of a study: the machine, its settings, and the result, which is saved after every row.

    A study is a module of `phasor.bench.studies` with `run` and the settings `TINY`, `GPU` where it is for a GPU, and
    `CPU` where it is for a CPU; without, it times Triton kernels.
    """

    def __init__(
        self,
        machine: Machine,
        settings: Any,
        say: Callable[[str], None] = print,
        save: Callable[[dict[str, Any]], None] = lambda result: None,
    ) -> None:
        self.machine, self.settings, self.say, self._save = machine, settings, say, save
        self.result: dict[str, Any] = {"device": device_name(machine.device), "torch": str(torch.__version__)}

    @property
    def device(self) -> torch.device:
        return self.machine.device

    @property
    def on_gpu(self) -> bool:
        return self.machine.on_gpu

    def save(self) -> None:
        self._save(self.result)

    def add_row(self, row: dict[str, Any]) -> None:
        """A row of the result, which is printed and saved."""
        self.result.setdefault("rows", []).append(row)
        self.say(format_row(row))
        self.save()

    def check(self, what: str, error: float, tolerance: float) -> float:
        """The error, if it is within the tolerance; a ValueError otherwise."""
        if not error <= tolerance:
            raise ValueError(f"{what} is off by {error:.1e}, where {tolerance:.1e} is allowed: it is not timed")
        return error

    @contextmanager
    def noting_failure(self, row: dict[str, Any], key: str = "failed") -> Iterator[None]:
        """A failure becomes a line in the row, and the next row is measured."""
        try:
            yield
        except Exception as error:
            row[key] = first_line(error)
        finally:
            self.free()

    def free(self) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()


def format_row(row: Mapping[str, Any]) -> str:
    """A row in one line.

    >>> format_row({"who": "phasor", "tokens": 16384, "forward_ms": 3.9123, "share": {"cuDNN": 1.25}, "gib": None})
    'phasor, tokens 16,384, forward_ms 3.912, share: cuDNN 1.25'
    """
    return ", ".join(part for name, value in row.items() if (part := format_field(name, value)))


def format_field(name: str, value: Any) -> str:
    if value is None or isinstance(value, list | tuple):
        return ""
    if isinstance(value, dict):
        return f"{name}: {format_row(value)}" if value else ""
    if isinstance(value, str):
        return value
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:,.4g}"


def first_line(error: Exception, length: int = 150) -> str:
    """
    >>> first_line(RuntimeError("out of\\nluck"))
    'RuntimeError: out of'
    """
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:length]}"


def run_study(
    name: str,
    changes: Mapping[str, Any] | None = None,
    *,
    device: str = "auto",
    tiny: bool = False,
    say: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run a study with some of its settings changed; `tiny` takes sizes that only show that it works.

    `say` is called with every line, `save` with the result after every row.
    """
    module = load_study(name)
    here = resolve_device(device if device != "auto" or hasattr(module, "GPU") else "cpu")
    on_gpu, interpreted = here.type == "cuda", os.environ.get("TRITON_INTERPRET") == "1"
    kernels = not hasattr(module, "CPU")
    if kernels and not on_gpu and not interpreted:
        raise ValueError(f"the workload {name} times Triton kernels and needs a GPU, or TRITON_INTERPRET=1 for a trial")
    if on_gpu and not hasattr(module, "GPU"):
        raise ValueError(f"the workload {name} is for a CPU: leave --device out")
    settings = module.TINY if tiny or (kernels and not on_gpu) else module.GPU if on_gpu else module.CPU
    machine = build_machine(here, TINY if tiny else FULL if on_gpu else CPU, compiles=on_gpu)
    study = Study(machine, settings.replace(**(changes or {})), say, save)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with dispatch.force_path("triton" if kernels and not on_gpu else dispatch.forced_path()):
            module.run(study)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    study.save()
    return study.result


def load_study(name: str) -> Any:
    if name not in STUDIES:
        raise unknown("workload", name, STUDIES)
    return importlib.import_module(f"phasor.bench.studies.{name.replace('-', '_')}")


def read_settings(name: str, texts: list[str]) -> dict[str, Any]:
    """The settings of a study from the command line's NAME=VALUE; the items of a list are separated by commas.

    >>> read_settings("scaling", ["longest=4096"]), read_settings("sparse", ["lengths=64,128"])
    ({'longest': 4096}, {'lengths': [64, 128]})
    """
    settings: Any = type(load_study(name).TINY)
    hints: dict[str, Any] = field_types(settings)
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.replace("-", "_")
        if key not in hints:
            raise unknown(f"setting of the workload {name}", key, names(settings))
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, not {text!r}")
        is_list = get_origin(hints[key]) is tuple
        found[key] = read_value(f"[{value}]" if is_list else value, hints[key], f"--set {key}")
    return found

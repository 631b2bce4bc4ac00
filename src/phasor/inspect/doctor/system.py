"""What is installed and found on this machine: packages, devices, compilers, caches and variables."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from phasor.checkpoints.hub import hub_cache
from phasor.device import free_memory
from phasor.distribution import DISTRIBUTION, __version__

CORE = "core"
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;\s*(.*))?")
BOUND = re.compile(r"(>=|<=|<|>|==)\s*([\d.]+)")
BESIDE = ("triton", "transformers", "hf_xet")  # packages that matter where they are installed
# Beginnings of the names of variables that change what torch, Triton, the hub or phasor do.
VARIABLES = (
    *("CC", "CUBLAS_", "CUDA_", "CXX", "HF_", "HIP_", "HUGGINGFACE_", "LD_LIBRARY_PATH", "LD_PRELOAD", "MKL_", "NCCL_"),
    *("NVIDIA_", "OMP_", "PHASOR_", "PYTORCH_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "XDG_CACHE_HOME"),
)
SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASSWORD")
CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
SOURCE = '#include <cmath>\n#include <vector>\nextern "C" double f(double x) { return std::sqrt(x); }\n'
COMPILE_SECONDS = 60


@dataclass(frozen=True)
class Package:
    """A package that phasor or one of its extras takes: its version, None where it is not installed, and its bounds."""

    name: str
    extra: str
    version: str | None
    bounds: str

    @property
    def problem(self) -> str | None:
        """What is wrong with it; a package of an extra may be missing."""
        if self.version is None:
            return f"{self.name} is not installed, which phasor needs" if self.extra == CORE else None
        if not within(self.version, self.bounds):
            return f"{self.name} {self.version} is installed, and phasor supports {self.bounds}"
        return None


@dataclass(frozen=True)
class Cache:
    """A folder in which files are kept between runs, with its size; None where it does not exist."""

    name: str
    place: str
    size: int | None


def packages() -> tuple[Package, ...]:
    """The packages of the library and of its extras; none in a source tree that is not installed."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    found = []
    for line in requirements:
        match = REQUIREMENT.fullmatch(line)
        if match is None or match[1] == DISTRIBUTION:
            continue
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", match[3] or "")
        found.append(Package(match[1], extra[1] if extra else CORE, version_of(match[1]), match[2]))
    return tuple(package for package in found if package.extra != "dev")


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def within(version: str, bounds: str) -> bool:
    """Whether a version is within bounds as a requirement states them.

    >>> within("2.13.0+cpu", ">=2.11,<2.16"), within("2.16", ">=2.11,<2.16"), within("3", "")
    (True, False, True)
    """
    found = numbers(version)
    tests = {">=": found.__ge__, "<=": found.__le__, "<": found.__lt__, ">": found.__gt__, "==": found.__eq__}
    return all(tests[sign](numbers(bound)) for sign, bound in BOUND.findall(bounds))


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at the end."""
    found = [int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def versions() -> dict[str, str]:
    """The versions of what runs phasor."""
    found = {
        "phasor": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": torch.__version__,
        "CUDA of torch": str(torch.version.cuda or torch.version.hip or "none"),
    }
    return found | {name: version for name in BESIDE if (version := version_of(name)) is not None}


def devices() -> tuple[str, ...]:
    """The devices with their memory."""
    free = free_memory(torch.device("cpu"))
    memory = "" if free is None else f", {free / 2**30:,.1f} GiB free"
    capability = torch.backends.cpu.get_cpu_capability()
    found = [f"cpu: {os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability}{memory}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        size, capability = properties.total_memory / 2**30, f"{properties.major}.{properties.minor}"
        found.append(f"cuda:{index}: {properties.name}, compute capability {capability}, {size:,.0f} GiB")
    return tuple(found)


def compilers() -> tuple[dict[str, str], list[str]]:
    """The compilers that torch.compile and Triton call, and what is wrong with them."""
    found, problems = {}, []
    cxx = next((path for name in ("CXX", "") if (path := shutil.which(os.environ.get(name, "") or "g++"))), None)
    cxx = cxx or shutil.which("clang++")
    if cxx is None:
        found["C++"] = "none: torch.compile on a CPU and kernels for 4 and 8 bits need one (g++ or clang++)"
    else:
        reason = compile_error(cxx)
        found["C++"] = f"{cxx}, {version_line(cxx)}" + (f"; does not compile: {reason}" if reason else "")
        problems += [f"{cxx} does not compile: {reason}"] if reason else []
    cc = shutil.which(os.environ.get("CC", "") or "gcc") or shutil.which("clang")
    found["C"] = "none: Triton needs one on a GPU (gcc or clang)" if cc is None else f"{cc}, {version_line(cc)}"
    return found, problems


def version_line(compiler: str) -> str:
    """The first line that a compiler says about itself."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return next(iter(done.stdout.splitlines()), "no version")


def compile_error(compiler: str) -> str | None:
    """Why a compiler does not compile a few lines with the standard library; None where it does."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "f.cpp")
        source.write_text(SOURCE)
        command = [compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(Path(place, "f.so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return None if done.returncode == 0 else next(iter(lines), f"exit code {done.returncode}")


def caches() -> tuple[Cache, ...]:
    """The folders that fill up: models, compiled graphs and kernels."""
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{user()}"
    triton = os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME", Path.home()), ".triton", "cache")
    places = {"Hugging Face hub": hub_cache(), "torch.compile": Path(inductor), "Triton": Path(triton)}
    return tuple(Cache(name, without_home(str(place)), folder_size(place)) for name, place in places.items())


def user() -> str:
    """The name by which torch calls its folder."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (OSError, KeyError):
        return str(os.getuid())


def folder_size(folder: Path) -> int | None:
    """The bytes of the files below a folder, links not followed."""
    if not folder.is_dir():
        return None
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:  # deleted meanwhile
                continue
            total += status.st_size
    return total


def environment() -> dict[str, str]:
    """The variables that change what is computed or where it is kept; of secrets only that they are set."""
    return dict(sorted(shown_variables()))


def shown_variables() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if name.startswith(VARIABLES):
            yield name, "(set)" if SECRET.search(name) else without_home(CREDENTIALS.sub("***", value))


def without_home(text: str) -> str:
    """A path as one would show it to others.

    >>> without_home(str(Path.home() / "models"))
    '~/models'
    """
    home = str(Path.home())
    return text if home in ("/", "") else text.replace(home, "~")


def triton_problem() -> str | None:
    """Why Triton, which is installed, cannot be imported."""
    if version_of("triton") is None or "triton" in sys.modules:
        return None
    try:
        import triton  # noqa: F401
    except Exception as error:  # any of them belongs in the report
        return f"triton is installed and cannot be imported: {type(error).__name__}: {error}"
    return None

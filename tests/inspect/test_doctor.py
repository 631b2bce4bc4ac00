"""The self-test finds what is wrong, and the report says what an issue needs and no more."""

import json
import re
import socket
import stat
import sys
from pathlib import Path

import mpmath
import pytest
import torch

from phasor.cli import main
from phasor.inspect.doctor import doctor, self_test, system
from phasor.inspect.doctor.system import Package

HALF = {"rotary at 2^36": "Rotary", "attention": "attention", "norm": "norm", "gated activation": "glu"}
HALF |= {"cross-entropy": "linear_cross_entropy", "decoding step": "tiny_model", "save and load": "load"}


@pytest.fixture(scope="module")
def found():
    return doctor()


def test_everything_passes_here(found):
    assert found.problems == ()
    assert [check.name for check in found.checks if check.device == "cpu"] == list(self_test.CHECKS)
    assert all(check.error <= check.bound for check in found.checks)


def test_angles_of_the_self_test_are_those_of_mpmath():
    with mpmath.workdps(70), self_test.localcontext() as context:
        context.prec = self_test.DIGITS
        assert abs(mpmath.mpf(str(self_test.pi())) - mpmath.pi) < mpmath.mpf(10) ** -55


def spoil(name, monkeypatch):
    """Have what one check tests give a result that is wrong by little."""
    right = getattr(self_test, HALF[name])

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        if name == "rotary at 2^36":
            cos_sin = result.cos_sin
            result.cos_sin = lambda positions: cos_sin(positions.float().long())  # positions in float32
            return result
        if name == "cross-entropy":
            return result._replace(loss=result.loss * 1.001)
        if name == "decoding step":
            forward = result.forward
            result.forward = lambda *a, **k: forward(*a, **k) * (1.01 if "cache" in k else 1.0)
            return result
        if name == "save and load":
            with torch.no_grad():
                result.tokens.weight[0, 0] += 1e-6
            return result
        return result * 1.001

    monkeypatch.setattr(self_test, HALF[name], wrong)


@pytest.mark.parametrize("name", HALF)
def test_a_wrong_result_is_found(name, monkeypatch):
    spoil(name, monkeypatch)
    monkeypatch.setattr(self_test, "CHECKS", {name: self_test.CHECKS[name]})
    (check,) = self_test.self_test(("cpu",))
    assert check.problem.startswith("the error is")


def test_a_check_that_raises_is_a_problem_and_others_run(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(self_test, "norm", fail)
    monkeypatch.setattr(self_test, "CHECKS", {name: self_test.CHECKS[name] for name in ("norm", "gated activation")})
    first, second = self_test.self_test(("cpu",))
    assert first.problem == "RuntimeError: no kernel image is available"
    assert second.problem is None


def test_the_command(found, monkeypatch, capsys):
    monkeypatch.setattr("phasor.inspect.doctor.doctor", lambda progress=None: found)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "versions",
        "devices",
        "kernels",
        "caches",
        "rotary at 2^36",
        "```text",
        "everything that was tested works",
    ):
        assert word in shown
    assert found.issue_text() in shown
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["versions"]["torch"] == torch.__version__
    assert {one["name"] for one in data["checks"]} == set(self_test.CHECKS)
    ill = found.__class__(**{**vars(found), "problems": ("norm on cpu: the error is 1",)})
    monkeypatch.setattr("phasor.inspect.doctor.doctor", lambda progress=None: ill)
    assert main(["doctor"]) == 1
    assert "problem: norm on cpu: the error is 1" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1


def test_no_network_is_asked(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(sys.modules["phasor.inspect.doctor.doctor"], "usable_kernels", lambda device: [])
    assert doctor().kernels == ()


def test_secrets_and_the_home_folder_are_not_shown(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:password@hub.example")
    monkeypatch.setenv("HF_HOME", str(Path.home() / "hf"))
    monkeypatch.setenv("UNRELATED", "hf_secret")
    shown = system.environment()
    assert shown["HF_TOKEN"] == "(set)"
    assert shown["HF_ENDPOINT"] == "https://***@hub.example"
    assert shown["HF_HOME"] == "~/hf"
    assert "UNRELATED" not in shown
    assert system.caches()[0].place == "~/hf/hub"


def test_sizes_of_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    (tmp_path / "inductor" / "a").mkdir(parents=True)
    (tmp_path / "inductor" / "a" / "b").write_bytes(bytes(1000))
    assert [cache.size for cache in system.caches()][:2] == [None, 1000]


@pytest.mark.parametrize(
    ("version", "bounds", "problem"),
    [
        ("2.13.0+cpu", ">=2.11,<2.16", False),
        ("2.16.0", ">=2.11,<2.16", True),
        ("2.10.9", ">=2.11,<2.16", True),
        ("2.11", ">=2.11,<2.16", False),
        ("2.11.0", "<=2.11", False),
        (None, ">=2", True),
    ],
)
def test_versions_are_compared_with_the_bounds(version, bounds, problem):
    assert bool(Package("torch", "core", version, bounds).problem) == problem
    assert Package("rich", "cli", None, bounds).problem is None


def test_a_compiler_that_does_not_compile(monkeypatch, tmp_path):
    script = tmp_path / "broken-g++"
    script.write_text("#!/bin/sh\necho 'f.cpp:1: error: cmath: no such file' >&2\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    shown, problems = system.compilers()
    assert problems == [f"{script} does not compile: f.cpp:1: error: cmath: no such file"]
    assert "does not compile" in shown["C++"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    shown, problems = system.compilers()
    assert (shown["C++"].partition(":")[0], problems) == ("none", [])


def test_kernels_are_those_of_the_dispatch_tables(found):
    operations = {op.op for kernels in found.kernels for op in kernels.ops}
    assert {"attention", "cross-entropy", "decoding step", "quantized weights, one row"} <= operations
    assert all(op.why_not for kernels in found.kernels for op in kernels.ops if re.match("torch", op.path))

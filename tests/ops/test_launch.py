"""Launches of Triton kernels: which of them reuse what was compiled, and what they pass on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phasor.ops.launch import KernelLauncher, cdiv, next_power_of_2


class Kernel:
    """Stands in for a Triton kernel: records how it was launched, and what was compiled."""

    arg_names = ("x_ptr", "y_ptr", "n", "BLOCK")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles, self.compiled, self.reused = compiles, [], []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **args: Any) -> Any:
            self.compiled.append((grid, dict(zip(self.arg_names, given, strict=False)) | args))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    """Stands in for a compiled kernel, as `CompiledLaunch` takes it apart."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def run(self, *given: Any) -> None:
        grid, own, args = given[:3], given[3:9], given[9:]
        assert own == (0, "function", "metadata", None, None, None)  # of the stream, the kernel, and hooks
        self.kernel.reused.append((grid, args))


def launch(launcher: KernelLauncher, x: torch.Tensor, n: int = 3, grid: tuple[int, ...] = (5,)) -> None:
    launcher(x, {"x_ptr": x, "y_ptr": None}, grid, BLOCK=16, n=n, num_warps=4)


def test_arguments_alike_reuse_the_compiled_kernel_in_the_order_of_its_signature():
    kernel = Kernel()
    launcher, x, other = KernelLauncher(kernel), torch.zeros(8), torch.ones(8)
    launch(launcher, x, grid=(7, 2))
    launch(launcher, other, grid=(7, 2))
    assert [args["num_warps"] for _, args in kernel.compiled] == [4]
    [(grid, (x_ptr, y_ptr, n, block))] = kernel.reused
    assert grid == (7, 2, 1)
    assert x_ptr == other.data_ptr()
    assert (y_ptr, n, block) == (None, 3, 16)


def test_scalars_may_come_in_any_order():
    kernel = Kernel()
    launcher, x = KernelLauncher(kernel), torch.zeros(8)
    for _ in range(2):
        launch(launcher, x)
    for _ in range(2):
        launcher(x, {"x_ptr": x, "y_ptr": None}, (5,), n=3, BLOCK=16, num_warps=4)
    assert kernel.reused[0] == kernel.reused[1] == ((5, 1, 1), (x.data_ptr(), None, 3, 16))
    for n, block in ((16, 3), (3, 16)):
        launcher(x, {"x_ptr": x, "y_ptr": None}, (5,), BLOCK=block, n=n, num_warps=4)
    assert kernel.compiled[-1][1]["n"] == 16
    assert kernel.reused[-1] == kernel.reused[0]


def test_tensors_come_in_the_order_of_the_signature():
    x = torch.zeros(8)
    with pytest.raises(ValueError, match=r"first arguments are \('x_ptr', 'y_ptr'\), not \('y_ptr', 'x_ptr'\)"):
        KernelLauncher(Kernel())(x, {"y_ptr": None, "x_ptr": x}, (5,), n=3, BLOCK=16)


@pytest.mark.parametrize("change", ["dtype", "number", "grid", "address"])
def test_other_arguments_are_left_to_triton(change):
    kernel = Kernel()
    launcher, x = KernelLauncher(kernel), torch.zeros(9)
    launch(launcher, x)
    for _ in range(2):
        changed = {"dtype": x.double(), "address": x[1:]}.get(change, x)
        launch(launcher, changed, n=4 if change == "number" else 3, grid=(6 if change == "grid" else 5,))
    # Addresses that are not aligned are never kept: the code for them is that of neither case.
    assert len(kernel.compiled) == (3 if change == "address" else 2)


def test_the_interpreter_compiles_nothing_to_reuse():
    kernel = Kernel(compiles=False)
    launcher = KernelLauncher(kernel)
    for _ in range(2):
        launch(launcher, torch.zeros(8))
    assert (len(kernel.compiled), kernel.reused) == (2, [])


def test_host_arithmetic_is_that_of_triton():
    triton = pytest.importorskip("triton")
    for n in (1, 2, 3, 16, 17, 1000, 2**20 + 1):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert cdiv(n, 16) == triton.cdiv(n, 16)


def prepare(programs: int, *, n: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    return (programs,), {"BLOCK": 16 * n, "num_warps": 4}


def test_prepared_launches_reuse_grid_and_arguments():
    kernel = Kernel()
    launcher, x, other = KernelLauncher(kernel, prepare), torch.zeros(8), torch.ones(8)
    launcher(x, {"x_ptr": x, "y_ptr": None}, 5, n=3)
    launcher(other, {"x_ptr": other, "y_ptr": None}, 5, n=3)
    [(grid, args)] = kernel.compiled
    assert grid == (5,)
    assert args == {"x_ptr": x, "y_ptr": None, "n": 3, "BLOCK": 48, "num_warps": 4}
    assert kernel.reused == [((5, 1, 1), (other.data_ptr(), None, 3, 48))]


@pytest.mark.parametrize("change", ["dtype", "number", "key", "presence", "address"])
def test_prepared_launches_are_for_equal_arguments(change):
    kernel = Kernel()
    launcher, x = KernelLauncher(kernel, prepare), torch.zeros(9)
    launcher(x, {"x_ptr": x, "y_ptr": None}, 5, n=3)
    for _ in range(2):
        changed = {"dtype": x.double(), "address": x[1:]}.get(change, x)
        tensors = {"x_ptr": changed, "y_ptr": x if change == "presence" else None}
        launcher(x, tensors, 6 if change == "key" else 5, n=4 if change == "number" else 3)
    assert len(kernel.compiled) == (3 if change == "address" else 2)


def test_prepared_launches_of_the_interpreter_are_not_kept():
    kernel = Kernel(compiles=False)
    launcher, x = KernelLauncher(kernel, prepare), torch.zeros(8)
    for _ in range(2):
        launcher(x, {"x_ptr": x, "y_ptr": None}, 5, n=3)
    assert len(kernel.compiled) == 2


def test_tensors_that_may_begin_anywhere_are_named():
    kernel = Kernel()
    launcher, x = KernelLauncher(kernel, prepare, unaligned=("y_ptr",)), torch.zeros(9)
    for y in (x, x[1:]):
        launcher(x, {"x_ptr": x, "y_ptr": y}, 5, n=3)
    assert [args[1] for _, args in kernel.reused] == [x[1:].data_ptr()]
    launcher(x, {"x_ptr": x[1:], "y_ptr": x}, 5, n=3)
    assert len(kernel.compiled) == 2

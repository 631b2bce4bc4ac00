"""What every test shares: the device, fixed seeds, poisoned memory and reproducible random examples.

`PHASOR_EXAMPLES=full` draws ten times as many random examples, and runs every case of tests marked `sample`.
`PHASOR_TEST_DEVICE=cuda` runs tests on a GPU with compiled Triton kernels; tests marked `cpu_only` are skipped there.
"""

import gc
import os
import random
import sys
import warnings
from collections import defaultdict
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from device import DEVICE, ON_GPU
from hypothesis import HealthCheck, settings

if ON_GPU:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS needs to be deterministic
    # float32 is float32: the tolerances of the tests are those of its 24 bits, and TF32 has 11.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False

    class DeviceGenerator(torch.Generator):
        """A generator for the device of the tests, unless another is named."""

        def __new__(cls, device=DEVICE):
            return super().__new__(cls, device)

    torch.Generator = DeviceGenerator
    torch.set_default_device(DEVICE)
else:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton kernels run on the CPU; read when Triton is imported
    if find_spec("triton") is not None:
        from triton_interpreter import shorten

        shorten()

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a network; read when huggingface_hub is imported

EXAMPLES = {"quick": 40, "full": 400}
for name, count in EXAMPLES.items():
    settings.register_profile(
        name,
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
PROFILE = os.environ.get("PHASOR_EXAMPLES", "quick")
settings.load_profile(PROFILE)

if PROFILE == "quick":
    os.fsync = lambda handle: None  # no test ends by a power failure, and a disk takes milliseconds for each


def pytest_configure(config):
    if ON_GPU:  # `poison_memory` asks for deterministic algorithms, which some operations do not have on a GPU
        config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation")


def pytest_collection_modifyitems(config, items):
    for item in items:
        mark = item.get_closest_marker("cpu_only")
        if ON_GPU and mark is not None:
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))
    if PROFILE == "quick" and not ON_GPU and not any("::" in argument for argument in config.args):
        drop_cases(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What collecting makes stays until the end: the garbage collector need not look through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def drop_cases(config, items):
    """Of a test marked `sample(count)`, keep that many of its cases: always the same ones, drawn by its name."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    dropped = set()
    for name, group in cases.items():
        count = min(group[0].get_closest_marker("sample").args[0], len(group))
        dropped.update(group)
        dropped.difference_update(random.Random(name).sample(group, count))
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(autouse=True, scope="session")
def create_cublas_handle():
    """A first backward pass: in autograd's thread cuBLAS finds no context, and warns of that once per process."""
    if ON_GPU:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
            x = torch.ones(2, 2, device=DEVICE, requires_grad=True)
            (x @ x).sum().backward()
            torch.cuda.synchronize()


@pytest.fixture(autouse=True, scope="session")
def paint_no_losses():
    """In `make test` the loss.png of a run in this process is empty: to paint it takes as long as a few small steps."""
    run = sys.modules.get("phasor.training.run")  # which no test has imported where there is no run
    if PROFILE == "quick" and run is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        def plot(self, plot=run.RunFolder.plot):
            with mock.patch.object(FigureCanvasBase, "print_figure"):
                plot(self)

        run.RunFolder.plot = plot


@pytest.fixture(scope="session")
def chromium():
    """The browser, one for all tests of a process; tests that need it are skipped where there is none."""
    from lab.browser import ARGUMENTS, CHROMIUM, MISSING

    if CHROMIUM is None:
        pytest.skip(MISSING)
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def fix_seed():
    """The same random numbers in every test, whichever others ran before it.

    `torch.manual_seed` also queues the seeds of devices that are not there, each with the traceback of its call.
    """
    if ON_GPU:
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def poison_memory():
    """Memory that nobody wrote to reads as NaN.

    Torch does this itself in deterministic mode (`torch.utils.deterministic.fill_uninitialized_memory`), for
    `torch.empty`, `empty_like`, `new_empty` and `to_empty` alike. Ops without a deterministic form still run.
    """
    if not (torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()):
        torch.use_deterministic_algorithms(True, warn_only=True)

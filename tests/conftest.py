"""What every test shares: fixed seeds, poisoned memory and reproducible random examples.

`PHASOR_EXAMPLES=full` draws ten times as many random examples.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton kernels run on the CPU; read when Triton is imported

import pytest
import torch
from hypothesis import HealthCheck, settings

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
settings.load_profile(os.environ.get("PHASOR_EXAMPLES", "quick"))


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every test, whichever others ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody wrote to reads as NaN.

    Torch does this itself in deterministic mode (`torch.utils.deterministic.fill_uninitialized_memory`), for
    `torch.empty`, `empty_like`, `new_empty` and `to_empty` alike. Ops without a deterministic form still run.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])

"""Context cuts of layers with a state: the state goes along the processes, exactly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")
def test_rows_that_are_cut_are_as_whole_ones_gradients_too():
    """In float64, with documents that begin within chunks and between them, and with padding on all sides."""
    command = [sys.executable, HERE / "state_world.py", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SECONDS": "100"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

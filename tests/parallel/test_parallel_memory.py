"""What a process takes to load a model that is cut over several: its part of the weights, and little more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import phasor

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.cpu_only("Gloo exchanges tensors of CPUs")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much memory was resident at most")
def test_loading_takes_a_quarter_and_the_largest_tensor_and_100_megabytes(tmp_path):
    sizes = {"dim": 1024, "num_heads": 16, "num_layers": 8, "hidden_dim": 2816, "vocab_size": 16000}
    small = phasor.Transformer(phasor.preset("llama-2", **sizes | {"num_layers": 1, "vocab_size": 50}))
    phasor.save(small, tmp_path / "small")
    model = phasor.Transformer(phasor.preset("llama-2", **sizes))
    nbytes = [weight.numel() * weight.element_size() for weight in model.parameters()]
    assert sum(nbytes) > 500e6
    phasor.save(model, tmp_path / "own")
    phasor.save(model, tmp_path / "hf", format="hf")
    del model
    for name in ("own", "hf"):
        command = [sys.executable, HERE / "memory_world.py", "4", tmp_path / name, tmp_path]
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
        assert all(each["held"] <= 1.1 * sum(nbytes) / 4 for each in found)
        assert all(each["grown"] < sum(nbytes) / 4 + max(nbytes) + 100e6 for each in found)

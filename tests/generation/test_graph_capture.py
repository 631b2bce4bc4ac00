"""Captures of CUDA graphs leave the process as it was, whether or not they succeed."""

from __future__ import annotations

import gc

import pytest
import torch
from device import DEVICE, ON_GPU

from phasor.generation.runners.cuda_graph import capture, no_garbage_collection


def test_garbage_is_collected_again_after_a_capture() -> None:
    seen = [gc.isenabled()]
    with no_garbage_collection():
        seen.append(gc.isenabled())
    assert [*seen, gc.isenabled()] == [True, False, True]


@pytest.mark.skipif(not ON_GPU, reason="a capture needs a GPU")
def test_a_capture_that_fails_is_over() -> None:
    calls, stream = [], torch.cuda.current_stream()

    def body() -> torch.Tensor:
        calls.append(torch.ones(3, device=DEVICE))
        if len(calls) == 3:  # two calls come before the capture
            torch.cuda.synchronize()  # which a capture does not allow
        return calls[-1]

    with pytest.raises(RuntimeError):
        capture(body)
    assert torch.cuda.current_stream() == stream
    torch.rand(3, device=DEVICE)
    assert capture(lambda: torch.ones(3, device=DEVICE) * 2)().tolist() == [2, 2, 2]

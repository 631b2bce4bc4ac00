"""The device that tests run on: the CPU, or what the variable `PHASOR_TEST_DEVICE` names (`make test-gpu`).

Tests name no device: tensors are made on this one by default, and so are random generators.
"""

import os

import torch

DEVICE = torch.device(os.environ.get("PHASOR_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type != "cpu"

"""Whether this installation works: versions, devices, kernels, compilers, caches, and a self-test against float64."""

from phasor.inspect.doctor.doctor import Diagnosis, doctor
from phasor.inspect.doctor.self_test import Check

__all__ = ["Check", "Diagnosis", "doctor"]

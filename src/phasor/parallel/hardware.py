"""What a device computes, holds and exchanges, and how much of that training reaches."""

from __future__ import annotations

from dataclasses import dataclass

from phasor.config.schema import unknown

GIB = 1 << 30

# Shares of the peak that training reaches. Calibrated on three published steps on H200s in nodes of four: 8 B on one
# device (3.13 s), 8 B with tensor 4 (1.30 s), 70 B with tensor 4 and shard 8 (14.03 s). Their source and how these
# numbers follow from them is in tests/parallel/test_published_steps.py.
MATMUL_SHARE = 0.720
NVLINK_SHARE = 0.333
NETWORK_SHARE = 0.597
# Of attention with a causal mask, forward and backward, without what the mask hides: from phasor's own steps of rows
# of 4,096 and of 32,768 tokens on an H200 (docs/speed.md).
ATTENTION_SHARE = 0.385
# Seconds that a ring of devices takes per device, however few bytes it passes on.
NVLINK_LATENCY = 1e-6
NETWORK_LATENCY = 5e-6
MEMORY_SHARE = 0.9  # of a device's memory; the rest is for the driver, the network's buffers and fragmentation


@dataclass(frozen=True)
class Hardware:
    """One kind of device: bfloat16 operations per second without sparsity, bytes, and bytes per second.

    `nvlink` is one direction of a device within its node, `network` that of a device between nodes.
    """

    name: str
    flops: float
    memory: int
    memory_bandwidth: float
    nvlink: float
    network: float

    @property
    def usable(self) -> int:
        """Bytes that a plan may fill."""
        return int(self.memory * MEMORY_SHARE)


HARDWARE = {
    device.name: device
    for device in (
        Hardware("h200", 989.5e12, 139 * GIB, 4.8e12, 450e9, 50e9),
        Hardware("h100", 989.5e12, 79 * GIB, 3.35e12, 450e9, 50e9),
        Hardware("a100", 312e12, 79 * GIB, 2.0e12, 300e9, 25e9),
    )
}


def find_hardware(name: str) -> Hardware:
    """A kind of device by its name.

    >>> find_hardware("h200").memory // GIB
    139
    """
    if name not in tuple(HARDWARE):
        raise unknown("device", name, HARDWARE)
    return HARDWARE[name]

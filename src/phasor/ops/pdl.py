"""Programmatic dependent launch (PDL): a kernel starts while the previous one ends, which hides the launch overhead.

Before `pdl_wait`, a kernel may only touch memory that no kernel still running could write.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


def pdl_launch(pdl: bool) -> dict[str, bool]:
    """The launch options of a kernel that calls `pdl_wait` under the same condition.

    >>> pdl_launch(True), pdl_launch(False)
    ({'launch_pdl': True}, {})
    """
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def pdl_wait(USE_PDL: tl.constexpr):
    """Let the next kernel start, and wait for the results of the previous one."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def compute_early(x, USE_PDL: tl.constexpr):
    """`x`, a float32 tensor, computed here: the compiler moves arithmetic behind a wait that follows otherwise."""
    if USE_PDL:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def pdl_wait_alone(USE_PDL: tl.constexpr):
    """Wait for the results of the previous kernel; the next one starts after `pdl_start_next`."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_start_next(USE_PDL: tl.constexpr):
    """Let the next kernel start, which it does when all programs of this one have come here."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()

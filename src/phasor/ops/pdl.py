"""Kernels that begin while the one before them ends: how they are launched, and where they wait.

What a launch takes is then spent while the other still works. Before it waits, a kernel reads and writes only what no
kernel that could still be running writes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


def early(overlap: bool) -> dict[str, bool]:
    """The options of a launch that may begin early, of a kernel that waits under the same condition.

    >>> early(True), early(False)
    ({'launch_pdl': True}, {})
    """
    return {"launch_pdl": True} if overlap else {}


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Let the next kernel begin, and wait for the results of the one before."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

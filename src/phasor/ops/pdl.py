"""Kernels that begin while the one before them ends: how they are launched, and where they wait.

What a launch takes is then spent while the other still works. Before it waits, a kernel reads and writes only what no
kernel that could still be running writes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


def pdl_launch(pdl: bool) -> dict[str, bool]:
    """The options of a launch that may begin early, of a kernel that waits under the same condition.

    >>> pdl_launch(True), pdl_launch(False)
    ({'launch_pdl': True}, {})
    """
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def pdl_wait(USE_PDL: tl.constexpr):
    """Let the next kernel begin, and wait for the results of the one before."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

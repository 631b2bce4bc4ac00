"""cuDNN's attention, the fastest there is on Hopper and Blackwell for long sequences.

Torch prefers it by itself only from cuDNN 9.15.1 on. Before that it was wrong for lengths that 128 does not divide.
Where all scores of a query are far below zero, it still makes gradients that are not numbers, of some lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from phasor.ops import dispatch

# It plans anew for every shape, for tens of milliseconds. Shapes come again and again in training; prompts are all
# different, and have to be this long for one plan to pay.
LONG_TRAINING, LONG_PROMPT = 1024, 8192
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # what torch has beside it


def why_not(q: Tensor, k: Tensor, v: Tensor, dropout: float, training: bool, causal: bool) -> str | None:
    """Why cuDNN is not asked for by name, to attend to all keys or causally; None where it is.

    >>> why_not(*torch.zeros(3, 1, 2048, 4, 64, dtype=torch.bfloat16), dropout=0.0, training=True, causal=True)
    'the tensors are not on a GPU'
    """
    if not (q.is_cuda and k.is_cuda and v.is_cuda):
        return "the tensors are not on a GPU"
    if dispatch.forced_path() == "reference":
        return "the reference path is forced"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in 16 bits"
    if dropout > 0:
        return "attention weights are dropped"
    if q.shape[-1] > 128 or q.shape[-1] % 8 or v.shape[-1] != q.shape[-1]:
        return "a head has more than 128 features, or a number that 8 does not divide"
    if min(q.shape[1], k.shape[1]) < (LONG_TRAINING if training else LONG_PROMPT):
        return "the sequence is too short to plan for"
    ready, any_length = available()
    if not ready:
        return "no device of Hopper's or Blackwell's kind is here, or cuDNN's attention is switched off"
    if not any_length and (q.shape[1] % 128 or k.shape[1] % 128):
        return "before 9.15.1 it is wrong for lengths that 128 does not divide"
    if training and overflows(q.shape[1], k.shape[1], causal):
        return "its gradients may overflow where the keys are 64 more than a multiple of 128"
    return None


def overflows(queries: int, keys: int, causal: bool) -> bool:
    """Whether gradients may be NaN where scores are far below zero.

    The keys it adds to fill a tile of 128 have a score of 0 on the way back, whose weight is then beyond float32, if
    half of the tile is real and no triangle hides the rest; or if there is one query.

    >>> overflows(704, 704, causal=False), overflows(704, 704, causal=True), overflows(704, 700, causal=False)
    (True, False, False)
    """
    return queries == 1 or (not causal and keys % 128 == 64)


def misleads(q: Tensor, k: Tensor, causal: bool) -> bool:
    """Whether torch might choose it for gradients that overflow, of queries `[B, H, Tq, D]` over `[B, K, Tk, D]`."""
    return q.is_cuda and available()[0] and overflows(q.shape[2], k.shape[2], causal)


def others() -> list[SDPBackend]:
    """What torch may choose beside it."""
    return [kernel for kernel, on in zip(OTHERS, enabled(), strict=True) if on] or [SDPBackend.MATH]


def enabled() -> tuple[bool, ...]:
    """Which of `OTHERS` are switched on."""
    of = torch.backends.cuda
    return of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.math_sdp_enabled()


def available() -> tuple[bool, bool]:
    """Whether cuDNN may attend on the present device, and whether to any number of tokens."""
    if not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        return False, False
    version = torch.backends.cudnn.version() or 0
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    suits = torch.cuda.get_device_capability()[0] in (9, 10) and version >= 90000
    return suits and not strict and torch.backends.cuda.cudnn_sdp_enabled(), version > 91500


# Constants to the compiler: what torch.compiler.assume_constant_result says, which would import all of it.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]
enabled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, training: bool) -> Tensor:
    """Queries `[B, Tq, H, D]` over keys and values `[B, Tk, K, D]`, whose heads are shared without a copy."""
    made = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, training, 0.0, causal, False, scale=scale
    )
    return made[0].transpose(1, 2)

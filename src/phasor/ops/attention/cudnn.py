"""cuDNN's attention, the fastest on Hopper and Blackwell for long sequences.

Torch prefers it by itself only from cuDNN 9.15.1 on. Before that it was wrong for lengths that are no multiple of 128.
Where all scores of a query are far below zero, its gradients are still NaN for some lengths.
"""

from __future__ import annotations

import functools
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from phasor.ops import dispatch
from phasor.ops.attention import split_large
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.dispatch import compute_dtype, must_be_deterministic, needs_grad

# cuDNN plans anew for every shape, for tens of milliseconds. Shapes recur in training; prompts are all different, and
# have to be this long for one plan to pay.
MIN_TRAINING_LENGTH, MIN_PROMPT_LENGTH = 1024, 8192
MAX_WIDE_KEYS = 192  # features of keys over narrower values: those of DeepSeek's latent attention
OTHER_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def cudnn_unsupported_reason(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why cuDNN is not called directly, to attend to all keys or causally; None where it is.

    >>> qkv = torch.zeros(3, 1, 2048, 4, 64, dtype=torch.bfloat16)
    >>> cudnn_unsupported_reason(*qkv, Mask(causal=True), ScoreMod(scale=0.125))
    'the tensors are not on a GPU'
    """
    if not (q.is_cuda and k.is_cuda and v.is_cuda):
        return "the tensors are not on a GPU"
    if dispatch.forced_path() == "reference":
        return "the reference path is forced"
    dtype, training = compute_dtype(q), needs_grad(q, k, v)
    if not dtype == compute_dtype(k) == compute_dtype(v) or dtype not in (torch.bfloat16, torch.float16):
        return "cuDNN computes in bfloat16 and float16"
    if score_mod.dropout > 0:
        return "attention weights are dropped out"
    if q.shape[-1] > 128 or q.shape[-1] % 8 or v.shape[-1] != q.shape[-1]:
        return "a head has more than 128 features, or a number that is no multiple of 8"
    if min(q.shape[1], k.shape[1]) < (MIN_TRAINING_LENGTH if training else MIN_PROMPT_LENGTH):
        return "the sequence is too short to plan for"
    ready, any_length = available()
    if not ready:
        return "there is no Hopper or Blackwell GPU, or cuDNN's attention is switched off"
    if not any_length and (q.shape[1] % 128 or k.shape[1] % 128):
        return "before 9.15.1 cuDNN is wrong for lengths that are no multiple of 128"
    if training and gradients_may_overflow(q.shape[1], k.shape[1], mask.is_causal):
        return "cuDNN's gradients may overflow where the number of keys is 64 more than a multiple of 128"
    return None


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """Queries `[B, Tq, H, D]` over keys and values `[B, Tk, K, D]` by cuDNN, causally or over all keys."""
    training = needs_grad(q, k, v)
    if training:
        if split_large.exceeds_int32(q, k, v):
            attend = partial(cudnn_attention, mask=mask, score_mod=score_mod)
            return split_large.attend_in_halves(attend, q, k, v)
        q, k, v = split_large.make_dense(q), split_large.make_dense(k), split_large.make_dense(v)
    q, k, v = (x.to(compute_dtype(x)) for x in (q, k, v))
    return call_cudnn(q, k, v, score_mod.scale, mask.is_causal, training)


def call_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, training: bool) -> Tensor:
    """The call itself; heads that share keys and values read them without a copy."""
    y = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, training, 0.0, causal, False, scale=scale
    )[0]
    return y.transpose(1, 2)


def gradients_may_overflow(queries: int, keys: int, causal: bool) -> bool:
    """Whether gradients may be NaN where scores are far below zero.

    The keys that pad a tile of 128 have a score of 0 in the backward pass, whose weight is then beyond float32, if half
    of the tile is real and no causal mask hides the rest; or if there is one query.

    >>> gradients_may_overflow(704, 704, causal=False), gradients_may_overflow(704, 704, causal=True)
    (True, False)
    """
    return queries == 1 or (not causal and keys % 128 == 64)


def sdpa_may_overflow(q: Tensor, k: Tensor, causal: bool) -> bool:
    """Whether SDPA might choose cuDNN where its gradients overflow, of queries `[B, H, Tq, D]` over `[B, K, Tk, D]`."""
    return q.is_cuda and gradients_may_overflow(q.shape[2], k.shape[2], causal) and available()[0]


def other_backends() -> list[SDPBackend]:
    """The backends other than cuDNN that SDPA may choose."""
    return [backend for backend, on in zip(OTHER_BACKENDS, backend_flags(), strict=True) if on] or [SDPBackend.MATH]


def backend_flags() -> tuple[bool, ...]:
    """Which of `OTHER_BACKENDS` are switched on."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def available() -> tuple[bool, bool]:
    """Whether cuDNN's attention can run on the current device, and whether for any number of tokens."""
    if not torch.cuda.is_available():
        return False, False
    suits, any_length = supported_on(torch.cuda.current_device())
    return suits and not must_be_deterministic() and torch.backends.cuda.cudnn_sdp_enabled(), any_length


@functools.cache
def supported_on(device: int) -> tuple[bool, bool]:
    """Whether cuDNN has attention for a device, and whether for any number of tokens."""
    version = torch.backends.cudnn.version() or 0
    return torch.cuda.get_device_capability(device)[0] in (9, 10) and version >= 90000, version > 91500


# Constants to the compiler: what torch.compiler.assume_constant_result says, which would import all of it.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]
backend_flags._dynamo_marked_constant = True  # type: ignore[attr-defined]

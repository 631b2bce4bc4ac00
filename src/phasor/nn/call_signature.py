"""What a call of a block depends on besides its input and weights: its contexts, and the settings of torch."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phasor.nn.positions.base import Position
from phasor.ops import dispatch
from phasor.ops.attention import Mask
from phasor.ops.attention.cudnn import backend_flags
from phasor.ops.custom_op import PLAIN_TENSORS
from phasor.ops.replay import UnrecordableError

SIGNATURE = "signature"  # what a mask keeps of a call, beside its own results
MAX_NUMBERS = 4096
SCALARS = (bool, int, float, str, NoneType, torch.dtype, torch.device)


class Signature(NamedTuple):
    """The tensors of a call besides the block's input and weights, and a number for all else that it depends on."""

    tensors: tuple[Tensor, ...]
    number: int
    forward: object  # another one in every forward
    environment: Environment


class Numbers:
    """A number for each of the keys that were seen last; none is given twice."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], int] = {}
        self.next = 0

    def __getitem__(self, key: tuple[Any, ...]) -> int:
        number = self.known.get(key)
        if number is None:
            if len(self.known) >= MAX_NUMBERS:
                self.known.clear()
            self.next += 1
            number = self.known[key] = self.next
        return number


NUMBERS = Numbers()


def signature_of(contexts: tuple[Any, ...]) -> Signature | None:
    """What a call of a block depends on, found once for all blocks of a forward that share the parts of contexts.

    None where a call does more than to compute the block's output, or depends on what is not known to be the same.
    """
    now: list[Any] = []
    for ctx in contexts:
        if ctx is not None:
            if ctx.update_kv or ctx.stores_kv or ctx.cross_kv or ctx.weights is not None or ctx.sum_steps or ctx.decays:
                return None
            now += ctx.position, ctx.prepared, ctx.positions, ctx.key_positions, ctx.memory, ctx.sink_positions
            now += (kept for name, kept in ctx.mask.memo.items() if name != SIGNATURE)
    first, *others = (ctx.mask for ctx in contexts if ctx is not None)
    now += others
    known, signature = first.memo.get(SIGNATURE, ((), None))
    if len(known) != len(now) or not all(map(operator.is_, known, now)):
        signature = new_signature(first, now)
        first.memo[SIGNATURE] = now, signature
    found: Signature | None = signature
    return found


def new_signature(mask: Mask, parts: list[Any]) -> Signature | None:
    """The signature of calls with a mask and other parts; None if some part is not known to be all that matters."""
    tensors: dict[tuple[Any, ...], Tensor] = {}
    try:
        key = flat([mask, *parts], tensors)
    except UnrecordableError:
        return None
    if not all(map(is_aligned, tensors.values())):
        return None
    now = environment()
    return Signature(tuple(tensors.values()), NUMBERS[*key, now], object(), now)


def flat(value: Any, tensors: dict[tuple[Any, ...], Tensor]) -> Any:
    """A value as a key, in which tensors are layouts and where they come in `tensors`, to which they are added."""
    if isinstance(value, Tensor):
        if type(value) not in PLAIN_TENSORS:
            raise UnrecordableError(f"a {type(value).__name__} is no plain tensor")
        same = value.data_ptr(), value.shape, value.stride(), value.dtype, value.requires_grad
        place = list(tensors).index(same) if same in tensors else len(tensors)
        tensors.setdefault(same, value)
        return place, value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, Mask):
        return flat([getattr(value, f.name) for f in dataclasses.fields(value) if f.name != "memo"], tensors)
    if isinstance(value, Position):
        if value.num_sums:
            raise UnrecordableError("positions are running sums")
        settings = [x for module in value.modules() for name, x in vars(module).items() if not name.startswith("_")]
        own = *(x for x in settings if isinstance(x, SCALARS)), *value.parameters(), *value.buffers()
        return id(value), *(flat(x, tensors) for x in own)
    if isinstance(value, tuple | list):
        return type(value), *(flat(x, tensors) for x in value)
    if dataclasses.is_dataclass(value):
        return type(value), *(flat(getattr(value, f.name), tensors) for f in dataclasses.fields(value))
    if isinstance(value, SCALARS):
        return type(value), value
    raise UnrecordableError(f"a {type(value).__name__} decides what is computed")


def is_aligned(x: Tensor) -> bool:
    """Whether a tensor begins at an address that kernels are compiled for."""
    return not x.is_cuda or x.data_ptr() % 16 == 0


def setting_key(value: Any) -> Any:
    """An attribute of a module as a key: scalars and configurations by their value, other objects by identity.

    >>> setting_key(0.5)
    (<class 'float'>, 0.5)
    """
    if isinstance(value, Tensor | list | dict | set):
        raise UnrecordableError(f"a {type(value).__name__} that is an attribute of a module may change")
    by_value = isinstance(value, (*SCALARS, frozenset)) or dataclasses.is_dataclass(value)
    return type(value), value if by_value and isinstance(value, Hashable) else id(value)


class Environment(NamedTuple):
    """The settings of torch and phasor that operations are chosen by."""

    forced_path: dispatch.ForcedPath | None
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    backends: tuple[bool, ...]  # of SDPA
    is_deterministic: bool
    allow_tf32: bool


def environment() -> Environment:
    """The settings as they are now."""
    cuda = torch.backends.cuda
    return Environment(
        dispatch.forced_path(),
        tuple((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cuda", "cpu")),
        (*backend_flags(), cuda.cudnn_sdp_enabled()),
        dispatch.must_be_deterministic(),
        cuda.matmul.allow_tf32,
    )


@contextmanager
def in_environment(was: Environment) -> Iterator[None]:
    """A context in which operations are chosen as they were where those settings were found."""
    known = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION
    with ExitStack() as stack:
        stack.enter_context(dispatch.force_path(was.forced_path))
        for name, enabled, dtype in was.autocast:
            stack.enter_context(torch.autocast(name, dtype, enabled))
        stack.enter_context(sdpa_kernel([b for b, enabled in zip(known, was.backends, strict=True) if enabled]))
        yield

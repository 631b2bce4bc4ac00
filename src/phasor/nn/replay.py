"""Blocks that are recorded once and replayed, forward and backward: for the host a block is then one operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _DisableAutocast
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from phasor.nn.block_parts import BlockParts
from phasor.nn.call_signature import Signature, in_environment, is_aligned, signature_of
from phasor.ops.custom_op import PLAIN_TENSORS, needs_dispatcher
from phasor.ops.dispatch import Dispatch, Path, always
from phasor.ops.replay import Recording, UnrecordableError, record

MIN_CALLS = 3  # calls with the same sizes before they are recorded: recording takes as long as some hundred calls
MAX_RECORDINGS = 64
TOLERANCE = 0.02  # of the largest element: some kernels add in any order
GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
RandomStates = tuple[Tensor, Tensor | None]
DEVICES = ("cuda",)  # elsewhere the host computes, and has nothing to wait for


@dataclass(slots=True)
class Call:
    """A call of a block, as it has to be repeated for gradients of gradients."""

    block: nn.Module
    parts: BlockParts
    number: int
    run: Callable[..., Tensor]
    contexts: tuple[Any, ...]
    signature: Signature
    random: RandomStates | None = None  # before the call, where it draws random numbers

    def repeat(self, inputs: tuple[Tensor, ...], contexts: tuple[Any, ...]) -> Tensor:
        """What the call computes of its inputs, by operations that have gradients."""
        weights = inputs[1 + len(self.signature.tensors) :]
        before = random_states(inputs[0])
        with self.parts.holding(weights), in_environment(self.signature.environment):
            if self.parts.has_changed(self.block) or self.parts.refresh(self.block) != self.number:
                raise RuntimeError("a block was changed between its forward and the gradient of its gradient")
            if self.random is not None:
                set_random_states(inputs[0], self.random)
            try:
                return self.run(inputs[0], *contexts)
            finally:
                set_random_states(inputs[0], before)


class Recordings:
    """The recordings of blocks that are built alike, by sizes, or why there is none; and how often sizes were seen."""

    def __init__(self) -> None:
        self.found: dict[tuple[Any, ...], Recording | str] = {}
        self.calls: dict[tuple[Any, ...], tuple[object, int]] = {}  # the last forward, and how many there were


class Replays:
    """The calls of a block, replayed where they were recorded. Copies of a block begin without recordings.

    >>> Replays().recordings.found
    {}
    """

    def __init__(self, recordings: Recordings | None = None) -> None:
        self.recordings = recordings or Recordings()
        self.parts: BlockParts | None = None

    def __reduce__(self) -> tuple[type[Replays], tuple[()]]:
        return Replays, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Replays:
        return Replays()

    def __call__(self, block: nn.Module, run: Callable[..., Tensor], x: Tensor, *contexts: Any) -> Tensor:
        """`run(x, *contexts)`, replayed where that was recorded."""
        if why_not(x) is not None or needs_plain_call(x):
            return run(x, *contexts)
        parts = self.parts
        if parts is None or parts.has_changed(block):
            parts = self.parts = BlockParts(block)
        number, signature = parts.refresh(block), signature_of(contexts)
        if number is None or signature is None:
            return run(x, *contexts)
        key = x.shape, x.stride(), x.dtype, x.device, x.requires_grad, number, signature.number
        recording = self.recordings.found.get(key)
        inputs = x, *signature.tensors, *parts.weights
        if recording is None and self.is_due(key, signature, inputs):
            recording = self.add(key, run, contexts, inputs)
        if not isinstance(recording, Recording) or not is_aligned(x):
            return run(x, *contexts)
        random = random_states(x) if recording.is_random and not is_captured() else None
        return replay(recording, Call(block, parts, number, run, contexts, signature, random), *inputs)

    def is_due(self, key: tuple[Any, ...], signature: Signature, inputs: tuple[Tensor, ...]) -> bool:
        """Whether there were enough calls like this one, of other forwards than this one."""
        calls = self.recordings.calls
        last, count = calls.get(key, (None, 0))
        if last is signature.forward or must_not_record(inputs):
            return False
        if len(calls) >= MAX_RECORDINGS:
            calls.clear()
        calls[key] = signature.forward, count + 1
        return count >= MIN_CALLS

    def add(
        self, key: tuple[Any, ...], run: Callable[..., Tensor], contexts: tuple[Any, ...], inputs: tuple[Tensor, ...]
    ) -> Recording | str:
        """Record a call; what comes of it is compared with another call before it is used."""
        found: Recording | str
        masks, before = [ctx.mask for ctx in contexts if ctx is not None], random_states(inputs[0])
        kept = [len(mask.memo) for mask in masks]
        contexts, inputs = cut_off(contexts, inputs, lambda x: x.detach().requires_grad_(x.requires_grad))
        try:
            found = record(lambda: run(inputs[0], *contexts), inputs)
            found = replace(found, is_random=not same_states(before, random_states(inputs[0])))
            if kept != [len(mask.memo) for mask in masks]:
                found = "it computes what the mask keeps for other blocks"
            elif not is_right(found, lambda x: run(x, *contexts), inputs):
                found = "what it replays is not what it computes"
        except UnrecordableError as error:
            found = str(error)
        except torch.OutOfMemoryError:
            found = "there is no memory to record it"
        except RuntimeError as error:  # such as an operation without a gradient
            found = f"recording it failed: {error}"
        finally:
            set_random_states(inputs[0], before)
        if len(self.recordings.found) >= MAX_RECORDINGS:
            self.recordings.found.clear()
        self.recordings.found[key] = found
        return found


def why_not(x: Tensor) -> str | None:
    """Why blocks with such an input are never replayed; None where they are, once they were called some times.

    >>> why_not(torch.zeros(1))
    'the tensors are not on a GPU'
    """
    if not torch.is_grad_enabled():
        return "no gradient is needed"
    return None if x.device.type in DEVICES else "the tensors are not on a GPU"


def needs_plain_call(x: Tensor) -> bool:
    """Whether torch or hooks have to see every operation, or the device is not the one that launches go to."""
    if needs_dispatcher() or type(x) not in PLAIN_TENSORS or any(getattr(torch_module, name) for name in GLOBAL_HOOKS):
        return True
    # Checkpointed code has to save the same tensors when it is repeated, by when there may be a recording.
    if forward_ad._current_level >= 0 or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return True
    return x.is_cuda and x.device.index != torch._C._cuda_getDevice()


def cut_off(
    contexts: tuple[Any, ...], inputs: tuple[Tensor, ...], cut: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Contexts and inputs in which what comes from other blocks is replaced by `cut` of it.

    Gradients would go on to those blocks otherwise, which may have weights of positions in common with this one.
    """
    inner = {id(x): cut(x) for x in (inputs[0], *(ctx.memory for ctx in contexts if ctx is not None)) if x is not None}
    contexts = tuple(
        ctx if ctx is None or ctx.memory is None else replace(ctx, memory=inner[id(ctx.memory)]) for ctx in contexts
    )
    return contexts, tuple(inner.get(id(x), x) for x in inputs)


def is_right(recording: Recording, run: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...]) -> bool:
    """Whether a recording computes what it was made of, for another input than it was made with."""
    with torch.no_grad():
        other = (inputs[0] * 0.75).requires_grad_(inputs[0].requires_grad)
    changed = (other, *inputs[1:])
    wanted = [i for i, x in enumerate(changed) if x.requires_grad]
    before = random_states(other)
    with torch.enable_grad():
        y = run(other)
    grad = torch.ones_like(y)
    set_random_states(other, before)
    with torch.no_grad(), _DisableAutocast():
        expected = torch.autograd.grad(y, [changed[i] for i in wanted], grad, allow_unused=True)
        z, saved = recording.forward(*changed)
        grads = recording.backward(grad, *saved)
        pairs = [(y, z), *((a, grads[i]) for a, i in zip(expected, wanted, strict=True))]
        return all(is_close(a, b) for a, b in pairs)


def random_states(x: Tensor) -> RandomStates:
    """The states of the generators of random numbers: the host's, and that of the device of `x`."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None


def same_states(a: RandomStates, b: RandomStates) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None)


def set_random_states(x: Tensor, states: RandomStates) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], x.device)


def is_close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if not a.numel():
        return a.shape == b.shape
    return a.shape == b.shape and a.dtype == b.dtype and bool((a - b).abs().max() <= TOLERANCE * a.abs().max())


def must_not_record(inputs: tuple[Tensor, ...]) -> bool:
    """Whether a CUDA graph is being captured, or weights have hooks, which would act on gradients in the recording."""
    return is_captured() or any(x.is_leaf and x._backward_hooks for x in inputs)


def is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, call: Call, *inputs: Tensor) -> Tensor:
        with _DisableAutocast():  # what it casts is recorded
            y, saved = recording.forward(*inputs)
        ctx.save_for_backward(inputs[0], *saved)
        ctx.recording, ctx.call, ctx.inputs = recording, call, inputs[1:]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *saved = ctx.saved_tensors
        grad, recording = grads[0], ctx.recording
        if torch.is_grad_enabled():  # gradients of gradients: autograd has to see the operations
            return None, None, *differentiate(ctx.call, (x, *ctx.inputs), grad)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = ctx.inputs = None  # a loss may be kept, and its graph with it
        if grad.stride() != recording.grad_stride or not is_aligned(grad):
            strided = torch.empty_strided(grad.shape, recording.grad_stride, dtype=grad.dtype, device=grad.device)
            grad = strided.copy_(grad)
        with _DisableAutocast():
            return None, None, *recording.backward(grad, *saved)


# Not its own `apply`, which prepares inputs for `torch.func`; there, nothing is replayed.
replay: Callable[..., Tensor] = super(torch.autograd.Function, _Replay).apply


class _Gate(torch.autograd.Function):
    """The identity; its gradient is None while the gate is closed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, closed: list[bool]) -> Tensor:
        ctx.closed = closed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None if ctx.closed[0] else grads[0], None


def differentiate(call: Call, inputs: tuple[Tensor, ...], grad: Tensor) -> list[Any]:
    """The gradients of all inputs that need one, by operations that have gradients themselves."""
    closed = [True]
    contexts, inputs = cut_off(call.contexts, inputs, lambda x: _Gate.apply(x, closed) if x.requires_grad else x)
    wanted = [i for i, x in enumerate(inputs) if x.requires_grad]
    y = call.repeat(inputs, contexts)
    grads = torch.autograd.grad(y, [inputs[i] for i in wanted], grad, create_graph=True, allow_unused=True)
    closed[0] = False
    found = dict(zip(wanted, grads, strict=True))
    return [found.get(i) for i in range(len(inputs))]


# How the operations of a block run, asked with its input.
BLOCK_RUNS = Dispatch(
    Path("recorded, then replayed with one autograd node", always, why_not), Path("one after the other", always)
)

"""Blocks that are recorded once and replayed, forward and backward: for the host a block is then one operation."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from phasor.nn.positions.base import Position
from phasor.ops import dispatch
from phasor.ops.attention import Mask
from phasor.ops.attention.cudnn import backend_flags
from phasor.ops.custom_op import PLAIN_TENSORS, needs_dispatcher
from phasor.ops.replay import Recording, UnrecordableError, record

MIN_CALLS = 3  # calls with the same sizes before they are recorded: recording takes as long as some hundred calls
MAX_RECORDINGS, MAX_NUMBERS = 64, 4096
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SIGNATURE = "signature"  # what a mask keeps of a call, beside its own results
TOLERANCE = 0.02  # of the largest element: some kernels add in any order
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
_anywhere = False


class Signature(NamedTuple):
    """The tensors of a call besides the block's input and weights, and a number for all else that it depends on."""

    tensors: tuple[Tensor, ...]
    number: int
    forward: object  # another one in every forward


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


class Parts:
    """The modules inside of a block with their weights and buffers, as they were found, and a number for what they are."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.modules = [module for module in block.modules() if module is not block]
        self.children = [module._modules for module in (block, *self.modules)]
        self.attributes = [vars(module) for module in self.modules]
        self.hooks = [own[name] for own in self.attributes for name in HOOKS]
        self.tensors = [own for module in self.modules for own in (module._parameters, module._buffers)]
        self.found: tuple[Any, ...] = ()
        self.number: int | None = None
        self.weights: list[Tensor] = []

    def refresh(self) -> int | None:
        """The number of what the modules and weights are now; None if calls of some module have to be seen."""
        if any(self.hooks) or any("forward" in own for own in self.attributes):
            return None
        self.weights = [w for own in self.tensors for w in own.values() if w is not None]
        addresses = [w.data_ptr() for w in self.weights]
        settings = [own["training"] for own in self.attributes]
        found = addresses, settings, list(map(type, self.modules)), [w.requires_grad for w in self.weights]
        if found != self.found:
            self.found, self.number = found, None
            if all(type(w) in PLAIN_TENSORS and not w._backward_hooks and is_aligned(w) for w in self.weights):
                layouts = [(w.shape, w.stride(), w.dtype, w.device, w.requires_grad) for w in self.weights]
                self.number = NUMBERS[*layouts, *settings, *map(type, self.modules)]
        return self.number

    def holds(self) -> bool:
        """Whether the block still has these modules."""
        children = (module for own in self.children for module in own.values() if module is not None)
        known = {id(module) for module in self.modules}
        return all(id(module) in known for module in children)


class Replays:
    """The recordings of blocks that are built alike, by sizes; copies of a model begin without any.

    >>> Replays().recordings
    {}
    """

    def __init__(self) -> None:
        self.recordings: dict[tuple[Any, ...], Recording | str] = {}  # or why there is none
        self.calls: dict[tuple[Any, ...], tuple[object, int]] = {}  # the last forward, and how many there were
        self.parts: dict[int, Parts] = {}  # by the identity of blocks

    def __reduce__(self) -> tuple[type[Replays], tuple[()]]:
        return Replays, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Replays:
        return Replays()

    def __call__(self, block: nn.Module, run: Callable[..., Tensor], x: Tensor, *contexts: Any) -> Tensor:
        """`run(x, *contexts)`, replayed where that was recorded."""
        if why_not(x) is not None:
            return run(x, *contexts)
        parts = self.parts_of(block)
        number, signature = parts.refresh(), signature_of(contexts)
        if number is None or signature is None:
            return run(x, *contexts)
        key = x.shape, x.stride(), x.dtype, x.device, x.requires_grad, number, signature.number
        recording = self.recordings.get(key)
        inputs = x, *signature.tensors, *parts.weights
        if recording is None and self.is_due(key, signature):
            recording = self.add(key, lambda x: run(x, *contexts), inputs, [ctx.mask for ctx in contexts if ctx])
        if not isinstance(recording, Recording) or not is_aligned(x):
            return run(x, *contexts)
        return replay(recording, run, contexts, *inputs)

    def parts_of(self, block: nn.Module) -> Parts:
        """The parts of a block as it is now."""
        parts = self.parts.get(id(block))
        if parts is None or parts.block is not block or not parts.holds():
            parts = self.parts[id(block)] = Parts(block)
        return parts

    def is_due(self, key: tuple[Any, ...], signature: Signature) -> bool:
        """Whether there were enough calls like this one, of other forwards than this one."""
        last, count = self.calls.get(key, (None, 0))
        if last is signature.forward or has_saved_tensor_hooks():
            return False
        if len(self.calls) >= MAX_RECORDINGS:
            self.calls.clear()
        self.calls[key] = signature.forward, count + 1
        return count >= MIN_CALLS

    def add(
        self, key: tuple[Any, ...], run: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...], masks: list[Mask]
    ) -> Recording | str:
        """Record a call; what comes of it is compared with another call before it is used."""
        found: Recording | str
        kept = [len(mask.memo) for mask in masks]
        try:
            with torch.random.fork_rng(devices=[inputs[0].device] if inputs[0].is_cuda else []):
                found = record(lambda: run(inputs[0]), inputs)
                if kept != [len(mask.memo) for mask in masks]:
                    found = "it computes what the mask keeps for other blocks"
                elif not is_right(found, run, inputs):
                    found = "what it replays is not what it computes"
        except UnrecordableError as error:
            found = str(error)
        except torch.OutOfMemoryError:
            found = "there is no memory to record it"
        if len(self.recordings) >= MAX_RECORDINGS:
            self.recordings.clear()
        self.recordings[key] = found
        return found


def why_not(x: Tensor) -> str | None:
    """Why blocks are not replayed; None where they may be."""
    if not torch.is_grad_enabled():
        return "no gradient is needed"
    if needs_dispatcher():
        return "torch has to see every operation"
    if not (x.is_cuda or _anywhere):
        return "the tensors are not on a GPU"
    if type(x) not in PLAIN_TENSORS or any(getattr(torch_module, name) for name in GLOBAL_HOOKS):
        return "the input is no plain tensor, or there are hooks for all modules"
    if x.is_cuda and x.device.index != torch._C._cuda_getDevice():
        return "the device is not the current one"
    return None


def signature_of(contexts: tuple[Any, ...]) -> Signature | None:
    """What a call of a block depends on, found once for all blocks of a forward that share the parts of contexts.

    None where a call does more than to compute the block's output, or depends on what is not known to be the same.
    """
    now: list[Any] = []
    for ctx in contexts:
        if ctx is not None:
            if ctx.update_kv or ctx.stores_kv or ctx.cross_kv or ctx.weights is not None or ctx.sum_steps or ctx.decays:
                return None
            now += ctx.mask, ctx.position, ctx.prepared, ctx.positions, ctx.key_positions, ctx.memory, ctx.sink_positions
            now += (kept for name, kept in ctx.mask.memo.items() if name != SIGNATURE)
    memo: dict[str, Any] = contexts[0].mask.memo
    known, signature = memo.get(SIGNATURE, ((), None))
    if len(known) != len(now) or not all(map(operator.is_, known, now)):
        signature = new_signature(now)
        memo[SIGNATURE] = now, signature
    return signature


def new_signature(parts: list[Any]) -> Signature | None:
    tensors: dict[tuple[Any, ...], Tensor] = {}
    try:
        key = flat(parts, tensors)
    except UnrecordableError:
        return None
    if not all(map(is_aligned, tensors.values())):
        return None
    return Signature(tuple(tensors.values()), NUMBERS[*key, *environment()], object())


def flat(value: Any, tensors: dict[tuple[Any, ...], Tensor]) -> Any:
    """A value as a key, in which tensors are layouts and where they come in `tensors`, to which they are added."""
    if isinstance(value, Tensor):
        if type(value) not in PLAIN_TENSORS:
            raise UnrecordableError(f"a {type(value).__name__} is no plain tensor")
        same = value.data_ptr(), value.shape, value.stride(), value.dtype
        place = list(tensors).index(same) if same in tensors else len(tensors)
        tensors.setdefault(same, value)
        return place, value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, Mask):
        return flat([getattr(value, f.name) for f in dataclasses.fields(value) if f.name != "memo"], tensors)
    if isinstance(value, Position):
        if value.num_sums:
            raise UnrecordableError("positions are running sums")
        return id(value)
    if isinstance(value, tuple | list):
        return type(value), *(flat(x, tensors) for x in value)
    if dataclasses.is_dataclass(value):
        return type(value), *(flat(getattr(value, f.name), tensors) for f in dataclasses.fields(value))
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    raise UnrecordableError(f"a {type(value).__name__} decides what is computed")


def is_aligned(x: Tensor) -> bool:
    """Whether a tensor begins at an address that kernels are compiled for."""
    return not x.is_cuda or x.data_ptr() % 16 == 0


def environment() -> tuple[Any, ...]:
    """The settings of torch and phasor that operations are chosen by."""
    cuda = torch.backends.cuda
    return (
        dispatch.forced_path(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("cpu"),
        dispatch.must_be_deterministic(),
        *backend_flags(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.allow_tf32,
    )


def is_right(recording: Recording, run: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...]) -> bool:
    """Whether a recording computes what it was made of, for another input than it was made with."""
    with torch.no_grad():
        other = (inputs[0] * 0.75).requires_grad_(inputs[0].requires_grad)
    changed = (other, *inputs[1:])
    wanted = [i for i, x in enumerate(changed) if x.requires_grad]
    torch.manual_seed(0)
    with torch.enable_grad():
        y = run(other)
    grad = torch.ones_like(y)
    expected = torch.autograd.grad(y, [changed[i] for i in wanted], grad, allow_unused=True)
    torch.manual_seed(0)
    with torch.no_grad():
        z, saved = recording.forward(*changed)
        grads = recording.backward(grad, *saved)
        pairs = [(y, z), *((a, grads[i]) for a, i in zip(expected, wanted, strict=True))]
        return all(is_close(a, b) for a, b in pairs)


def is_close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if not a.numel():
        return a.shape == b.shape
    return a.shape == b.shape and a.dtype == b.dtype and bool((a - b).abs().max() <= TOLERANCE * a.abs().max())


def has_saved_tensor_hooks() -> bool:
    """Whether tensors that autograd saves are given to hooks, as in checkpointed code, which would run while recording."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, run: Any, contexts: Any, *inputs: Tensor) -> Tensor:
        y, saved = recording.forward(*inputs)
        ctx.save_for_backward(inputs[0], *saved)
        ctx.recording, ctx.run, ctx.contexts, ctx.inputs = recording, run, contexts, inputs[1:]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *saved = ctx.saved_tensors
        grad, recording = grads[0], ctx.recording
        if torch.is_grad_enabled():  # gradients of gradients: autograd has to see the operations
            return None, None, None, *differentiate(ctx.run, ctx.contexts, (x, *ctx.inputs), grad)
        if grad.stride() != recording.grad_stride or not is_aligned(grad):
            grad = torch.empty_strided(grad.shape, recording.grad_stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return None, None, None, *recording.backward(grad, *saved)


# Not its own `apply`, which prepares inputs for `torch.func`; there, nothing is replayed.
replay: Callable[..., Tensor] = super(torch.autograd.Function, _Replay).apply  # type: ignore[misc]


def differentiate(run: Callable[..., Tensor], contexts: Any, inputs: tuple[Tensor, ...], grad: Tensor) -> list[Any]:
    """The gradients of all inputs that need one, by operations that have gradients themselves."""
    wanted = [i for i, x in enumerate(inputs) if x.requires_grad]
    y = run(inputs[0], *contexts)
    grads = torch.autograd.grad(y, [inputs[i] for i in wanted], grad, create_graph=True, allow_unused=True)
    found = dict(zip(wanted, grads, strict=True))
    return [found.get(i) for i in range(len(inputs))]

"""The context axis: rows of tokens cut over processes, which gather the keys and values of whole rows.

Each process takes a chunk from the front of a row and one from its back, so that under a causal mask all of them see
about as many keys. Positions, documents and masks are those of the whole row. Layers with a state gather what every
chunk makes of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.kv_cache.protocol import EncoderOutput
from phasor.nn.layer_step import LayerStep, Recurrence
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import Mask
from phasor.ops.running_sums import cumsum_tokens
from phasor.parallel.exchange import Axis, gather_tokens
from phasor.parallel.tokens import chunk_order, own_chunks
from phasor.transformer import Stack, Transformer


@dataclass(slots=True, eq=False)
class GatheredLayer(LayerStep):
    """One layer in one call: what its tokens keep is gathered from all processes."""

    axis: Axis
    order: Tensor
    inverse: Tensor

    def update(self, **new: Tensor) -> tuple[Tensor, ...]:
        first, *rest = new.values()
        if not rest or any(x.dtype != first.dtype or x.shape[:-1] != first.shape[:-1] for x in rest):
            return tuple(self._gather(x) for x in new.values())
        together = self._gather(torch.cat(tuple(new.values()), dim=-1))  # one exchange
        return together.split([x.shape[-1] for x in new.values()], dim=-1)

    def recur(self, recurrence: Recurrence, *tensors: Tensor, starts: Tensor | None) -> Tensor:
        """Every chunk says what it makes of any state; the state before a chunk of this process follows from those.

        What a chunk makes of a state is an affine function: its matrix is what it leaves of the identity where values
        are zero, and is computed beside its state, as more features of values.
        """
        heads = [x.chunk(2, dim=2) for x in tensors]
        begins = (None, None) if starts is None else starts.chunk(2, dim=1)
        chunks = [(tuple(x[i] for x in heads), begins[i]) for i in range(2)]
        affine = [append_transition(recurrence, *given, starts=first) for given, first in chunks]
        order = chunk_order(2 * self.axis.size, self.axis.size, self.order.device)
        every = gather_tokens(torch.stack(affine, dim=1), self.axis, order.argsort(), order)
        before = list(states_before(every, tensors[2].shape[-1]))
        own = self.axis.index, 2 * self.axis.size - 1 - self.axis.index
        outputs = [
            recurrence(*given, state=before[i], starts=first)[0] for i, (given, first) in zip(own, chunks, strict=True)
        ]
        return torch.cat(outputs, dim=2)

    def cumsum(self, x: Tensor) -> Tensor:
        own = self.inverse.chunk(self.axis.size)[self.axis.index]
        return cumsum_tokens(self._gather(x))[:, own]

    def _gather(self, x: Tensor) -> Tensor:
        """What all tokens of the rows have, in their order."""
        return gather_tokens(x, self.axis, self.order, self.inverse)


def append_transition(
    recurrence: Recurrence, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, starts: Tensor | None
) -> Tensor:
    """What a chunk makes of a state: `[B, H, key, value]` that it adds, and behind it a matrix `[B, H, key, key]`."""
    key, value = k.shape[-1], v.shape[-1]
    identity = torch.eye(key, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
    before = F.pad(identity, (value, 0)).expand(*v.shape[:2], key, value + key)
    after: Tensor = recurrence(q, k, F.pad(v, (0, key)), *gates, state=before, starts=starts)[1]
    return after


def states_before(affine: Tensor, value: int) -> Iterator[Tensor]:
    """The state before each chunk of a row, by what all chunks `[B, N, H, key, value + key]` make of one.

    >>> [float(state) for state in states_before(torch.tensor([3.0, 0.5]).expand(1, 3, 1, 1, 2), 1)]
    [0.0, 3.0, 4.5]
    """
    state = torch.zeros_like(affine[:, 0, ..., :value])
    for chunk in affine.unbind(1):
        yield state
        added, matrix = chunk.tensor_split((value,), dim=-1)
        state = matrix @ state + added


class GatheredKV:
    """Keys and values of whole rows, of which this process computes some: it stands where a cache does."""

    def __init__(self, axis: Axis, seq: SequenceInfo, layers: int, memory: EncoderOutput | None) -> None:
        self.axis, self.seq, self.layers = axis, seq, layers
        self.memory, self.cross = memory, [None] * layers  # cross-attention projects its own
        self.inverse = chunk_order(seq.rows.shape[-1], axis.size, seq.rows.device)
        self.own, self.order = self.inverse.chunk(axis.size)[axis.index], self.inverse.argsort()

    def begin(self, seq: SequenceInfo, mask: Mask) -> list[GatheredLayer]:
        """A step per layer, which all attend to the keys of whole rows."""
        whole = self.seq
        among_all = replace(
            mask,
            key_mask=whole.attention_mask,
            key_document_ids=whole.document_ids,
            order=whole.order,
            query_index=self.own[None],
        )
        return [GatheredLayer(among_all, whole.rows, self.axis, self.order, self.inverse)] * self.layers

    def commit(self) -> None:
        """Nothing is kept for a later call."""

    def local_info(self) -> SequenceInfo:
        """What positions and masks need to know of this process's tokens."""
        seq, own = self.seq, self.own
        length = seq.length[..., own.cpu()] if isinstance(seq.length, Tensor) else seq.length
        first = seq.origin()
        masks = {name: getattr(seq, name) for name in ("attention_mask", "document_ids", "order")}
        return replace(
            seq,
            positions=seq.positions[..., own],
            length=length,
            first=first if first.shape[-1] == 1 else first[:, own],
            **{name: None if x is None else x[:, own] for name, x in masks.items()},
        )


def cut_rows(model: Transformer, axis: Axis) -> None:
    """Have a model compute this process's tokens of every row that it is given whole."""

    def take_tokens(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return own_chunks(args[0], axis.index, axis.size), *args[1:]

    def enter(stack: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert isinstance(stack, Stack)
        x, seq = args
        gathered = GatheredKV(axis, seq, len(stack.layers), given.get("memory"))
        types = given.get("token_types")
        more = {"cache": gathered} | ({} if types is None else {"token_types": types[:, gathered.own]})
        return (x, gathered.local_info()), given | more

    def leave(stack: nn.Module, args: tuple[Any, ...], hidden: Tensor) -> Tensor:
        inverse = chunk_order(hidden.shape[1] * axis.size, axis.size, hidden.device)
        return gather_tokens(hidden, axis, inverse.argsort(), inverse)

    for embedding in (model.tokens, model.source_tokens, model.per_layer):
        if embedding is not None:
            embedding.register_forward_pre_hook(take_tokens)
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.register_forward_pre_hook(enter, with_kwargs=True)
    if model.encoder is not None and model.decoder is not None:
        model.encoder.register_forward_hook(leave)  # its output is what the whole target attends to

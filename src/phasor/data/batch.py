"""A training batch: the tensors that one forward pass takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of tokens `[B, T]`, the target of each, and how much each counts.

    - `tokens`: what the model reads (an encoder-decoder's decoder: the target, shifted), int64.
    - `targets`: what to predict at each token, int64; `weights`: 1.0 where it counts, 0.0 at padding (float32).
    - `document_ids`: one id per token where rows are packed; tokens attend within their own document.
    - `positions`: one per token where they are not counted from 0 in each document, and the `length` that their
      frequencies are planned for.
    - `attention_mask`, `token_types`: of rows of one text each, True where a token is real, and which text of a pair.
    - `candidates`, `candidate_mask`: the texts that belong to a row or do not, `[B, K, S]`, and where they are real.
    - `trained`, `reference`: of preference pairs, 1.0 where a target is of a reply, and the log-probabilities of the
      replies by the reference `[B, D]` (0 where a row has less); `weights [B, D / 2]` then are those of pairs.
    - `source`, `source_attention_mask`: the other side of a pair `[B, S]`, and True where its tokens are real.
    - `repeated`, `whole_count`: of a share of a batch, how many rows at its end only repeat another one, and how many
      tokens are predicted in the whole batch.

    Padding is at the end of rows. In packed rows it is a separate document; in a decoder's rows nothing before it
    sees it; its weight is 0.

    >>> batch = Batch(tokens=torch.ones(2, 3).long(), targets=torch.ones(2, 3).long(), weights=torch.ones(2, 3))
    >>> batch.count, batch.share(1, 2).tokens.shape
    (6.0, torch.Size([1, 3]))
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    document_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    token_types: Tensor | None = None
    candidates: Tensor | None = None
    candidate_mask: Tensor | None = None
    source: Tensor | None = None
    source_attention_mask: Tensor | None = None
    positions: Tensor | None = None
    trained: Tensor | None = None
    reference: Tensor | None = None
    length: int | None = None
    repeated: int = 0
    whole_count: float | None = None

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> Batch:
        """A batch of numpy arrays, by name."""
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return cls(**tensors)

    @property
    def count(self) -> float:
        """How many tokens are predicted, by their weights."""
        return float(self.weights.sum())

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What a model takes by position: tokens, or a source and then the target's tokens."""
        return (self.tokens,) if self.source is None else (self.source, self.tokens)

    @property
    def sequence_args(self) -> dict[str, Any]:
        """What a model takes by name: document ids and positions, or the attention mask of a text or source."""
        if self.attention_mask is not None:
            types = {} if self.token_types is None else {"token_types": self.token_types}
            return {"attention_mask": self.attention_mask, **types}
        if self.source is None:
            return {"document_ids": self.document_ids, "positions": self.positions, "length": self.length}
        return {"attention_mask": self.source_attention_mask}

    def to(self, device: torch.device | str) -> Batch:
        """The same batch elsewhere; the host does not wait for it."""
        return self.map(lambda value: value.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in memory from which a GPU copies while the host continues."""
        return self.map(Tensor.pin_memory)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with every tensor changed by a function."""
        changed: dict[str, Any] = {name: change(value) for name, value in self.tensors().items()}
        return dataclasses.replace(self, **changed)

    def share(self, index: int, parts: int) -> Batch:
        """Every `parts`-th row from `index` on: what one of several processes takes.

        All shares have as many rows. Where the rows do not suffice, the first one is repeated with weight 0.
        """
        if not 0 <= index < parts:
            raise ValueError(f"a share is one of 0 to {parts - 1}, not {index}")
        rows = len(self.tokens)
        taken = torch.arange(index, -(-rows // parts) * parts, parts)
        tensors: dict[str, Any] = {name: value[taken.where(taken < rows, 0)] for name, value in self.tensors().items()}
        tensors["weights"] = tensors["weights"] * (taken < rows)[:, None]
        repeated = int((taken >= rows).sum())
        return dataclasses.replace(self, **tensors, repeated=repeated, whole_count=self.count)

    def pad_to_multiple(self, multiple: int) -> Batch:
        """The same with rows whose length is a multiple of some number; padding is as above.

        >>> batch = Batch(tokens=torch.ones(2, 3).long(), targets=torch.ones(2, 3).long(), weights=torch.ones(2, 3))
        >>> batch.pad_to_multiple(4).document_ids.tolist()
        [[0, 0, 0, 1], [0, 0, 0, 1]]
        """
        sides: dict[str, Any] = {}
        if self.source is not None and (missing := -self.source.shape[1] % multiple):
            sides = {name: pad_rows(getattr(self, name), missing) for name in ("source", "source_attention_mask")}
        if more := -self.tokens.shape[1] % multiple:
            names = [name for name in ("tokens", "targets", "weights", "positions") if getattr(self, name) is not None]
            sides |= {name: pad_rows(getattr(self, name), more) for name in names}
            if self.source is None:
                ids = torch.zeros_like(self.tokens) if self.document_ids is None else self.document_ids
                sides["document_ids"] = pad_rows(ids, more, value=int(ids.max()) + 1)
        return dataclasses.replace(self, **sides) if sides else self

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def pad_rows(x: Tensor, more: int, value: float = 0) -> Tensor:
    """Rows `[B, T]` with some more tokens at their end."""
    return F.pad(x, (0, more), value=value)

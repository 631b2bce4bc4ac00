"""One layer in one call: what its tokens keep, by name, and what all tokens that it attends to have kept.

Attention and position schemes declare what they keep by `cached_per_token`, and store it by `LayerStep.update`; a
state, declared by `cached_per_sequence`, by `LayerStep.store`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phasor.ops.attention import Mask
from phasor.ops.linear_attention import linear_attention_step
from phasor.ops.running_sums import cumsum_tokens

# Given queries, keys, values and gates, the state before them and where documents begin: outputs and the last state.
Recurrence = Callable[..., tuple[Tensor, Tensor]]


@dataclass(slots=True, eq=False)
class LayerStep:
    """A call without a cache: its own tokens are all there are. The steps of caches override the methods."""

    mask: Mask
    key_positions: Tensor | None  # [B or 1, S]
    counted: bool = field(default=False, kw_only=True)  # whether they are known to count the tokens of each document
    # Where a layer leaves what later layers take of it, which have the same list: keys and values, or an index.
    shared: list[Tensor] | None = field(default=None, kw_only=True)
    # What the layer keeps of each sequence, `[B, ...]` by name; None without a cache.
    states: dict[str, Tensor] | None = field(default=None, kw_only=True)

    def update(self, **new: Tensor) -> tuple[Tensor, ...]:
        """Store what the tokens of this call keep, `[B, T, ...]` by name, and return it for all keys, `[B, S, ...]`."""
        return tuple(new.values())

    def last(self, name: str) -> Tensor | None:
        """What the last token before this call kept, `[B, ...]`; zeros in rows without one, None without a cache."""
        return None

    def state(self, name: str) -> Tensor | None:
        """What the layer keeps of each sequence before this call, `[B, ...]`; None without a cache."""
        if self.states is None:
            return None
        kept = self.states[name]
        return kept.clone() if torch.is_grad_enabled() else kept  # `store` writes over what a backward pass may need

    def store(self, **new: Tensor) -> None:
        """Keep the states after this call, `[B, ...]` by name."""
        if self.states is not None:
            for name, x in new.items():
                self.states[name].copy_(x.detach())

    def recur(self, recurrence: Recurrence, *tensors: Tensor, starts: Tensor | None) -> Tensor:
        """What a recurrence gives for the tokens of this call, of tensors `[B, H, T, ...]`; its state is kept.

        That of a single token is updated where it is.
        """
        state = self.state("state")
        if state is not None and tensors[0].shape[2] == 1 and not torch.is_grad_enabled():
            q, k, v, log_decay, *others = tensors
            y = linear_attention_step(q, k, v, log_decay, others[0] if others else None, state, starts)
        else:
            y, state = recurrence(*tensors, state=state, starts=starts)
        self.store(state=state)
        return y

    def cumsum(self, x: Tensor) -> Tensor:
        """The sum of `x` `[B, T, ...]` over the tokens of this call up to each of them."""
        return cumsum_tokens(x)

    def sum_from_keys(self, x: Tensor, queries: Tensor, keys: Tensor, mask: Mask) -> Tensor:
        """The sum of `x` `[B, H, queries, keys]` over the keys from each of them to the last, both given by index.

        >>> x = torch.tensor([[[[1.0, 2.0, 3.0]]]])
        >>> index = torch.arange(3)
        >>> LayerStep(Mask(), None).sum_from_keys(x, index[:1], index, Mask()).tolist()
        [[[[6.0, 5.0, 3.0]]]]
        """
        if mask.key_index is None:
            return x.flip(-1).cumsum(-1).flip(-1)
        last_first = mask.key_index[:, keys].argsort(-1, descending=True)[:, None, None].expand_as(x)
        sums = x.gather(-1, last_first).cumsum(-1)
        return torch.zeros_like(x).scatter(-1, last_first, sums)


@dataclass(slots=True, eq=False)
class CrossStep(LayerStep):
    """A layer's cross-attention: the encoder's output `[B, S, dim]`, and what the layer has computed from it.

    `kept` is filled by the first call with a cache, and read by later ones. It is None without a cache.
    """

    hidden: Tensor
    kept: dict[str, Tensor] | None = None

    def project(self, compute: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What the layer computes from the encoder's output, once for all calls with a cache."""
        if self.kept is None:
            return compute(self.hidden)
        if not self.kept:
            self.kept.update(compute(self.hidden))
        return self.kept

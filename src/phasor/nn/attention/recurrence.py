"""How a recurrence goes through the tokens of rows: from document to document, and past padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phasor.nn.attention.base import CalledOperation, StandIn
from phasor.nn.layer_step import LayerStep
from phasor.ops.attention import Mask
from phasor.ops.attention.mask import PreparedMask
from phasor.ops.linear_attention import CAUSAL_CONVOLUTION, causal_convolution


@dataclass(frozen=True)
class TokenScan:
    """The order in which tokens change a state: in rows with padding the real ones first.

    `starts`, `[B, T]`, is True where a document begins, and None where there is one in each row; `order` and `inverse`
    are the indices of tokens in the order of the scan, and back, and `real` says which of those are no padding, all
    `[B, T]` and None without padding. Where rows are cut over processes, padding stays where it is: `rows` is the scan
    of whole rows, of which this process has the tokens `own`, `[T]`.
    """

    starts: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    real: Tensor | None = None
    rows: TokenScan | None = None
    own: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Tokens `[B, T, ...]` in the order of the scan."""
        return x if self.order is None else take_tokens(x, self.order)

    def leave(self, y: Tensor) -> Tensor:
        """Results `[B, T, ...]` in the order of the tokens."""
        return y if self.inverse is None else take_tokens(y, self.inverse)

    def without_padding(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Values `[B, T, ...]`, zero for padding."""
        if self.real is None:
            return values
        return tuple(x * self.real.view(*self.real.shape, *[1] * (x.dim() - 2)) for x in values)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, step: LayerStep) -> Tensor:
        """The causal convolution of `x [B, T, C]` after the inputs before this call; the last ones are kept."""
        if self.rows is not None:
            (x,) = step.update(inputs=x)
            y, _ = self.rows.convolve_rows(self.rows.enter(x), weight, bias, None)
            return self.rows.leave(y)[:, self.own]
        y, last = self.convolve_rows(x, weight, bias, step.state("inputs"))
        step.store(inputs=last)
        return y

    def convolve_rows(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same, and the last inputs `[B, W - 1, C]` of each row, without padding."""
        y, last = causal_convolution(x, weight, bias, state, self.starts)
        if self.real is None:
            return y, last
        kept = weight.shape[1] - 1
        before = x.new_zeros(len(x), kept, x.shape[2]) if state is None else state.to(x.dtype)
        counts = self.real.sum(1, keepdim=True)
        index = counts + torch.arange(kept, device=x.device)  # [B, W - 1]
        last = take_tokens(torch.cat((before, x), dim=1), index)
        if self.starts is not None:
            documents = torch.cat((self.starts.new_zeros(len(x), kept), self.starts), dim=1).cumsum(1)
            last = last * (documents.gather(1, index) == documents.amax(1, keepdim=True))[..., None]
        return y, last

    def cut(self, own: Tensor) -> TokenScan:
        """The scan of some tokens `[T]` of whole rows, which stay in their order."""
        starts, real = (None if x is None else self.leave(x)[:, own] for x in (self.starts, self.real))
        return TokenScan(starts=starts, real=real, rows=self, own=own)


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of `[B, T, ...]` by their indices `[B, N]`."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def called_convolution(weight: Tensor, tokens: int, tensor: StandIn) -> CalledOperation:
    """The convolution of a row of that many tokens, as `phasor.backends` asks of it."""
    channels, width = weight.shape
    return CalledOperation(
        "short convolution", CAUSAL_CONVOLUTION, (tensor(1, tokens, channels), tensor(channels, width))
    )


def initialize_convolution(weight: Tensor, bias: Tensor | None) -> None:
    """As torch initializes a convolution of each channel `[C, W]` by itself.

    >>> weight = torch.zeros(50, 4)
    >>> initialize_convolution(weight, None)
    >>> bool((weight.abs() <= 0.5).all() and (weight != 0).any())
    True
    """
    bound = weight.shape[1] ** -0.5
    for x in (weight, bias):
        if x is not None:
            nn.init.uniform_(x, -bound, bound)


def prepare_scan(mask: Mask, kind: str) -> Mask:
    """A call's mask among its own tokens, with the order in which they change a state.

    >>> mask = Mask(causal=True, key_mask=torch.tensor([[False, True, True]]))
    >>> prepare_scan(mask, "gated-delta").prepared.scan.order.tolist()
    [[1, 2, 0]]
    """
    if mask.prefix_length is not None:
        raise ValueError(f"prefix_length is for models without {kind} attention, whose tokens see none after them")
    scan, real, documents = TokenScan(), mask.key_mask, mask.key_document_ids
    if real is not None:
        order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        scan = TokenScan(None, order, order.argsort(dim=1), real.gather(1, order))
    if documents is not None:
        documents = scan.enter(documents)
        starts = torch.zeros_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        scan = TokenScan(starts if scan.real is None else starts & scan.real, scan.order, scan.inverse, scan.real)
    if mask.query_index is not None:
        scan = scan.cut(mask.query_index[0])
    return mask.attach(PreparedMask(scan=scan))

"""The token embedding: a lookup, an optional projection to the model's width, and a scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.nn.checks import check_tokens
from phasor.nn.sequence import SequenceInfo
from phasor.ops.quantized import Matrix

UNMASKED_IN_TRAINING = 1 - 0.15 * 0.8  # the share of tokens that are not masked in training, in ESM-2 and in BERT


class Embedding(nn.Module):
    """The token embedding table. A tied head multiplies by the same table."""

    def __init__(self, model: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        config = model.embedding
        self.mask_token = config.mask_token
        self.scale = model.dim**0.5 if config.scale == "sqrt" else config.scale
        dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64) if config.round_scale else ()
        self.rounded_scale = {t: torch.tensor(self.scale, dtype=t, device="cpu").item() for t in dtypes}
        width = config.width or model.dim
        self.weight: Tensor = nn.Parameter(torch.empty(vocab_size, width))
        projects = config.width is not None and config.project == "tokens"
        self.project = nn.Linear(width, model.dim, bias=False) if projects else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the vectors."""
        return self.weight.dtype

    @property
    def table(self) -> Matrix:
        """The matrix that a tied head multiplies by."""
        return self.weight

    def scale_in(self, dtype: torch.dtype) -> float:
        """What vectors of this dtype are multiplied by."""
        return self.rounded_scale.get(dtype, self.scale)

    def places(self, tokens: Tensor) -> Tensor:
        """Tokens `[B, T]`, checked."""
        check_tokens(tokens, self.weight)
        return tokens

    def vectors(self, tokens: Tensor) -> Tensor:
        """The tokens' rows of the table."""
        return F.embedding(tokens, self.weight)

    def forward(self, tokens: Tensor, seq: SequenceInfo | None = None) -> Tensor:
        x = self.vectors(tokens)
        if self.mask_token is not None:
            x = x * unmasked_scale(tokens != self.mask_token, seq).to(x.dtype)[..., None]
        if self.project is not None:
            x = self.project(x)
        return x if self.scale == 1.0 else x * self.scale_in(x.dtype)


def unmasked_scale(unmasked: Tensor, seq: SequenceInfo | None = None) -> Tensor:
    """The scale of every token's vector `[B, T]`: 0 where it is masked, and else by how many of its sequence are not.

    >>> unmasked_scale(torch.tensor([[True, False, True, True]])).tolist()[0]
    [1.1733333333333333, 0.0, 1.1733333333333333, 1.1733333333333333]
    """
    counted = unmasked.double()
    real = torch.ones_like(counted) if seq is None or seq.attention_mask is None else seq.attention_mask.double()
    total, left = real, real * counted
    if seq is None or seq.document_ids is None:
        total, left = total.sum(-1, keepdim=True), left.sum(-1, keepdim=True)
    else:
        within = (seq.document_ids[:, :, None] == seq.document_ids[:, None, :]).double()
        total, left = ((within @ x[..., None]).squeeze(-1) for x in (total, left))
    return torch.where(unmasked, UNMASKED_IN_TRAINING * total / left, 0.0)

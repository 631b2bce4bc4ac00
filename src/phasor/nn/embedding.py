"""The token embedding: a lookup, an optional projection to the model's width, and a scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.ops.quantized import Matrix


class Embedding(nn.Module):
    """The token embedding table. A tied head multiplies by the same table."""

    def __init__(self, model: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        config = model.embedding
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

    def vectors(self, tokens: Tensor) -> Tensor:
        """The tokens' rows of the table."""
        return F.embedding(tokens, self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.vectors(tokens)
        if self.project is not None:
            x = self.project(x)
        return x if self.scale == 1.0 else x * self.scale_in(x.dtype)

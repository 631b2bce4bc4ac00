"""A vocabulary that grows: rows for new tokens, at the mean of the others."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.checkpoints.swap_positions import carry_over
from phasor.transformer import Transformer


def grow_vocabulary(model: Transformer, vocab_size: int) -> Transformer:
    """The model with a larger vocabulary; what belongs to new tokens is the mean over the tokens there were.

    So a new token has the mean vector, and the logit of the mean row of the head. `transformers` does the same in
    `resize_token_embeddings`, with noise of a billionth of the rows' covariance.

    >>> from phasor.config import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=5, dim=4, num_layers=1, num_heads=1))
    >>> grown = grow_vocabulary(model, 7)
    >>> torch.equal(grown.tokens.weight[6], model.tokens.weight.mean(0))
    True
    """
    if vocab_size < model.config.vocab_size:
        raise ValueError(f"the vocabulary has {model.config.vocab_size} tokens, and can only grow, not to {vocab_size}")
    with torch.device("meta"):
        grown = Transformer(model.config.replace(vocab_size=vocab_size))
    shapes = {name: x.shape for name, x in grown.state_dict().items()}
    with torch.no_grad():
        grown.load_state_dict({name: grow_rows(x, shapes[name]) for name, x in model.state_dict().items()}, assign=True)
    carry_over(model, grown)
    return grown


def grow_rows(x: Tensor, shape: torch.Size) -> Tensor:
    """A weight with as many rows as a shape has, new ones at the mean of the others; as it is where it has them."""
    if x.shape == shape:
        return x
    mean = x.mean(0, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
    return torch.cat([x, mean.expand(shape[0] - len(x), *x.shape[1:])])

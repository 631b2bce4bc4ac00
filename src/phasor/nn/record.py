"""Intermediate results of a forward that a caller asks for."""

from __future__ import annotations

from torch import Tensor

from phasor.config.schema import quote, unknown

KEEPS = ("hidden", "attention", "cross_attention", "router")


class Record:
    """Asks a forward to keep intermediate results; the lists have one entry per layer.

    `hidden` is the input of every block and then the stack's output, `attention` and `cross_attention` are
    weights `[B, H, T, S]`, `router` the logits `[B, T, experts]` of every mixture of experts. In an
    encoder-decoder these are the decoder's, and `record.encoder` has the encoder's. `pooled` is the pooler's
    output where the model has a pooler.

    >>> import torch
    >>> from phasor import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig(vocab_size=50, dim=32, num_layers=2, num_heads=4))
    >>> record = Record("hidden", "attention")
    >>> logits = model(torch.randint(0, 50, (1, 7)), record=record)
    >>> len(record.hidden), record.attention[0].shape
    (3, torch.Size([1, 4, 7, 7]))
    """

    def __init__(self, *keep: str) -> None:
        for name in keep:
            if name not in KEEPS:
                raise unknown("thing to record", name, KEEPS)
        self.hidden: list[Tensor] | None = [] if "hidden" in keep else None
        self.attention: list[Tensor] | None = [] if "attention" in keep else None
        self.cross_attention: list[Tensor] | None = [] if "cross_attention" in keep else None
        self.router: list[Tensor] | None = [] if "router" in keep else None
        self.pooled: Tensor | None = None
        self.keep = keep
        self.encoder: Record = self


def as_record(record: Record | None) -> Record:
    if not isinstance(record, Record | None):
        raise ValueError(f"record must be a Record of what to keep, not {quote(record)}")
    return Record() if record is None else record

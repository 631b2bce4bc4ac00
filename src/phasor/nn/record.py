"""Intermediate results of a forward that a caller asks for."""

from __future__ import annotations

from torch import Tensor

from phasor.config.schema import quote, unknown

KEEPS = ("hidden", "attention", "cross_attention", "router")


class Record:
    """Asks a forward to keep intermediate results; the lists have one entry per layer.

    `hidden` is the input of every block and then the stack's output, `attention` and `cross_attention` are
    weights `[B, H, T, S]` (layers that keep a state in place of keys have none, and no entry), `router` the logits
    `[B, T, experts]` of every mixture of experts. In an encoder-decoder these are the decoder's, and
    `record.encoder` has the encoder's. `pooled` is the pooler's output where the model has a pooler.

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

    def add_hidden(self, x: Tensor) -> None:
        """Keep hidden states, where they are asked for."""
        if self.hidden is not None:
            self.hidden.append(x)

    def per_layer(self, layers: int) -> list[Record]:
        """An empty record for each layer, so that one compiled block serves them all; itself where nothing is kept."""
        return [Record(*self.keep) if self.keep else self for _ in range(layers)]

    def collect(self, layers: list[Record]) -> None:
        """Add what the layers have kept, in their order."""
        for name in ("attention", "cross_attention", "router") if self.keep else ():
            kept = getattr(self, name)
            if kept is not None:
                kept.extend(x for layer in layers for x in getattr(layer, name))


def as_record(record: Record | None) -> Record:
    if not isinstance(record, Record | None):
        raise ValueError(f"record must be a Record of what to keep, not {quote(record)}")
    return Record() if record is None else record

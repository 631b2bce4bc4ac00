"""The log-probabilities of the replies of preference pairs, in a batch or in all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.data.batch import Batch
from phasor.data.packed import PairedRows
from phasor.data.store import Progress
from phasor.nn.log_probs import token_log_probs
from phasor.nn.record import Record
from phasor.transformer import Transformer


def reply_log_probs(model: Transformer, batch: Batch, record: Record | None = None) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the replies of a batch, summed over their tokens, and how many these are; `[B, D]`."""
    assert batch.document_ids is not None
    assert batch.trained is not None
    assert batch.reference is not None
    assert model.head is not None
    hidden = model(*batch.inputs, record=record, head=False, **batch.sequence_args)
    values = token_log_probs(model.head, hidden, model.tokens.table, batch.targets)  # [B, T]
    documents = torch.arange(batch.reference.shape[1], device=hidden.device)
    own = (batch.document_ids[:, :, None] == documents) & (batch.trained > 0)[:, :, None]  # [B, T, D]
    return torch.where(own, values[:, :, None], 0.0).sum(1), own.sum(1)


@torch.no_grad()
def log_probs_of(
    model: Transformer,
    rows: PairedRows,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[None]],
    progress: Progress,
) -> NDArray[np.float32]:
    """The log-probabilities of both replies of every pair, `[examples, 2]`."""
    found = np.zeros((len(rows.store), 2), np.float32)
    for index in range(rows.per_epoch):
        progress("reading the reference", index, rows.per_epoch)
        batch = rows.make_batch(0, index).to(device)
        with precision():
            sums = reply_log_probs(model, batch)[0].float().cpu().numpy()
        for members, values in zip(rows.examples(0, index), sums, strict=False):  # a batch may lack a row
            found[members] = values[: 2 * len(members)].reshape(-1, 2)
    return found

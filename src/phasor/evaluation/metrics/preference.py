"""The metrics of models that were trained on preferences."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from phasor.checkpoints import load
from phasor.checkpoints.resize import grow_vocabulary
from phasor.data.batches import Batches
from phasor.data.packed import PairedRows
from phasor.evaluation.metrics.texts import EncodedTexts
from phasor.evaluation.run import TrainedRun
from phasor.generation.translation import Progress
from phasor.nn.mode import eval_mode
from phasor.parallel.loss import LossCall
from phasor.training.objectives.preference import Preference
from phasor.training.objectives.reply_log_probs import log_probs_of


def preference_metrics(trained: TrainedRun, texts: EncodedTexts, num_beams: int, report: Progress) -> dict[str, Any]:
    """The loss of a pair, its margin of rewards, and the share of pairs whose preferred reply has the greater one."""
    batches = Batches(texts.store, trained.recipe, special=trained.special, shuffled=False)
    rows, count = cast(PairedRows, batches.source), batches.per_epoch
    objective, work = Preference(trained.recipe), batches.per_epoch
    if trained.recipe.preference.needs_reference:
        work = 2 * count
        rows.reference = reference_log_probs(trained, rows, lambda done: report(done, work))
    sums = torch.zeros(3, dtype=torch.float64)
    for index in range(count):
        batch = batches[index].to(trained.device)
        loss = objective.mean_loss(trained.model, batch, LossCall(training=False))
        assert objective.measured is not None
        sums += torch.cat((loss[None], objective.measured)).double().cpu() * batch.count
        report(work - count + index + 1, work)
    loss, margin, accuracy = (sums / len(texts.store)).tolist()
    return {"reward_accuracy": accuracy, "reward_margin": margin, "loss": loss, "pairs": len(texts.store)}


def reference_log_probs(trained: TrainedRun, rows: PairedRows, report: Callable[[int], None]) -> NDArray[np.float32]:
    """The log-probabilities of the reference that the run names, whose folder has to be there still."""
    folder = trained.recipe.preference.reference or trained.recipe.init_from
    if folder is None:
        raise ValueError(
            f"the reference of {trained.folder} is its fresh model, which is not kept: only a run with init_from or "
            "preference.reference is evaluated"
        )
    reference = load(folder, device=trained.device, dtype=trained.model.tokens.weight.dtype)
    if reference.config.vocab_size < trained.model.config.vocab_size:
        reference = grow_vocabulary(reference, trained.model.config.vocab_size)
    with eval_mode(reference):
        return log_probs_of(reference, rows, trained.device, nullcontext, lambda what, done, total: report(done))

"""Tiny runs for the tests of training: data made by code, and a run in a separate process."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from unittest import mock

import torch
import torch.utils.tensorboard  # here, so that processes that begin with this module have it
from device import DEVICE
from tokenizers import Tokenizer, models

from phasor import files
from phasor.config.recipe import Recipe
from phasor.data import store
from phasor.data.batch import Batch
from phasor.data.tokenizers import SpecialIds
from phasor.training import loop
from phasor.training.datasets import Datasets
from phasor.training.progress import TrainingProgress
from phasor.training.trainer import Trainer

VOCABULARY, ROWS, LENGTH = 23, 3, 17
SMALL = {"dim": 24, "num_heads": 3, "num_layers": 2, "position": "rotary", "norm": "rmsnorm"}


class Documents:
    """Rows packed with two documents each, shuffled anew every epoch: batches that are functions of their number."""

    per_epoch = 4

    def __init__(self, seed=0, slow=0.0):
        self.seed, self.slow = seed, slow

    def __getitem__(self, index):
        time.sleep(self.slow)
        epoch, within = divmod(index, self.per_epoch)
        order = torch.randperm(self.per_epoch, generator=torch.Generator().manual_seed(self.seed + epoch))
        generator = torch.Generator().manual_seed(1000 + int(order[within]))
        start = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
        tokens = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY  # a rule that can be learned
        documents = (torch.arange(LENGTH) >= 7 + within).long().expand(ROWS, LENGTH)
        weights = torch.ones(ROWS, LENGTH)
        weights[:, 7 + within - 1] = 0.0  # the last token of the first document predicts nothing
        return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights, document_ids=documents)


def tokenizer():
    names = ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>", *(f"t{i}" for i in range(5, VOCABULARY))]
    return Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))


def recipe(out, **changes):
    """A small run with dropout; `changes` are fields by their dotted names, with __ for the dot."""
    data = {
        "model": SMALL | {"dropout": {"residual": 0.1, "attention": 0.1}},
        "train": {"steps": 12, "evaluate_every": 4, "log_every": 1, "batch_tokens": 64, "device": DEVICE.type},
        "data": {"sequence_length": 32},
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "cosine", "warmup": 2},
        "save": {"every": 2, "keep": 2},
        "out": str(out),
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        inner = data
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return Recipe.from_dict(data)


class Notes(TrainingProgress):
    """Keeps what a run says, and stops for nobody."""

    def __init__(self, each=None):
        self.said, self.losses, self.validations, self.each = [], {}, {}, each

    def on_message(self, message):
        self.said.append(message)

    def on_step(self, report):
        self.losses[report.step] = report.loss
        if self.each is not None:
            self.each(report.step)

    def on_evaluation(self, step, loss):
        self.validations[step] = loss


class StopAt:
    """Sends this process a signal after some step."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def __call__(self, step):
        if step == self.step:
            os.kill(os.getpid(), self.number)


def stand_in(recipe, folder, progress, *known, **how):
    train, valid = Documents(recipe.train.seed, **how), Documents(99, **how)
    return Datasets(tokenizer=tokenizer(), special=SpecialIds(), train=train, valid=valid)


def run(recipe, *, resume=False, notes=None, break_at=(), **how):
    """Train on the data above; the losses of the steps `break_at`, counted from 0, are infinite."""
    loss, seed, now = Trainer.loss, Trainer.seed, [0]

    def note_step(self, step, part):
        now[0] = step
        seed(self, step, part)

    def break_loss(self, batch):
        return loss(self, batch) * (float("inf") if now[0] in break_at else 1.0)

    with (
        mock.patch.object(loop, "load_datasets", lambda *given: stand_in(*given, **how)),
        mock.patch.object(Trainer, "loss", break_loss),
        mock.patch.object(Trainer, "seed", note_step),
    ):
        return loop.train(recipe, resume, Notes() if notes is None else notes)


def run_alone(text, resume, slow, report):
    """The same as the whole of a process, whose disk is `slow` too; its exit code is the run's."""
    torch.set_num_threads(1)
    fsync = files.fsync
    files.fsync = lambda path: (time.sleep(slow), fsync(path))
    notes = Notes(each=lambda step: Path(report).write_text(json.dumps({"step": step})))
    result = run(Recipe.from_json(text), resume=resume, notes=notes, slow=slow)
    os._exit(result.exit_code)


def prepare_alone(text, folder, note, others):
    """Prepare data as the whole of a process that leaves a note when all is written, and waits for others to."""
    write = store.write

    def waiting(*given):
        write(*given)
        Path(note).touch()
        while not all(Path(other).exists() for other in others):
            time.sleep(0.005)

    store.write = waiting
    store.prepare(Recipe.from_json(text), folder)

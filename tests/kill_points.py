"""Tiny runs of every task in separate processes, killed at the n-th operation on the files of their run."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import matplotlib.backends.backend_agg  # noqa: F401  # like the next two: processes that begin with this module have it
import torch
import torch._dynamo
import torch.utils.tensorboard

import phasor
from phasor import files
from phasor.config.recipe import Recipe
from phasor.data.tokenizers import byte_tokenizer
from phasor.training.loop import train
from phasor.training.progress import TrainingProgress

WORDS = ("one", "two", "three", "four", "five")
LINES = [f"{a} and {b} make {c}" for a in WORDS for b in WORDS for c in WORDS]
MODEL = {"dim": 16, "num_heads": 2, "num_layers": 1, "dropout": {"residual": 0.1}}
TASKS: dict[str, dict[str, Any]] = {
    "language": {"task": "lm", "model": MODEL | {"position": "rotary"}},
    "masked": {"task": "mlm", "model": MODEL | {"position": "learned"}},
    "translation": {"task": "translation", "model": MODEL | {"position": "sinusoidal"}},
    "experts": {
        "task": "lm",
        "model": MODEL | {"feedforward": {"experts": {"num_experts": 3, "top_k": 2}}},
    },
    "chat": {"task": "chat", "model": MODEL | {"position": "rotary"}},
    "preference": {"task": "preference", "model": MODEL | {"position": "rotary"}, "preference": {"beta": 0.5}},
    "classify": {"task": "classify", "model": MODEL | {"shape": "encoder", "position": "learned"}},
    "embed": {"task": "embed", "model": MODEL | {"shape": "encoder", "position": "learned"}},
    "distill": {"task": "distill", "model": MODEL | {"position": "rotary"}, "distill": {"teacher": "base"}},
    "adapter": {"task": "lm", "init_from": "base", "lora": {"rank": 2, "dropout": 0.1}},
    "adapter preference": {"task": "preference", "init_from": "base", "lora": {"rank": 2, "dropout": 0.1}},
}
DATA: dict[str, dict[str, Any]] = {  # what differs from a text with a document per line
    "translation": {"train": "pairs.tsv"},
    "chat": {"train": "replies.jsonl", "chat_template": "plain"},
    "preference": {"train": "replies.jsonl", "chat_template": "plain"},
    "adapter preference": {"train": "replies.jsonl", "chat_template": "plain"},
    "classify": {"train": "labels.jsonl"},
    "embed": {"train": "similar.jsonl"},
}
WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.chmod"}


def write_texts(folder: Path) -> None:
    (folder / "lines.txt").write_text("".join(f"{line}\n" for line in LINES))
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line[::-1]}\n" for line in LINES))
    with (folder / "replies.jsonl").open("w") as file:
        for line in LINES:
            prompt, _, reply = line.rpartition(" ")
            sides = {"completion": f" {reply}", "chosen": f" {reply}", "rejected": " six"}
            file.write(json.dumps({"prompt": prompt, **sides}) + "\n")
    labels = [{"text": line, "label": line.rpartition(" ")[2]} for line in LINES]
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
    similar = [{"anchor": line, "positive": line[::-1]} for line in LINES]
    (folder / "similar.jsonl").write_text("".join(json.dumps(row) + "\n" for row in similar))


def write_base(folder: Path) -> Path:
    """The model that adapters are trained on, and that is a teacher."""
    torch.manual_seed(5)
    base = phasor.Transformer(phasor.ModelConfig(vocab_size=261, position="rotary", **MODEL))
    base.tokenizer = byte_tokenizer()
    phasor.save(base, folder / "base")
    return folder / "base"


def recipe(task: str, folder: Path, out: str, base: Path | None = None) -> Recipe:
    """Four steps, each with a checkpoint, evaluated twice, with averaged weights."""
    own = DATA.get(task, {"train": "lines.txt", "document": "line"})
    data = {"tokenizer": "bytes", "sequence_length": 48} | own | {"train": str(folder / own["train"])}
    fields = json.loads(json.dumps(TASKS[task]).replace('"base"', json.dumps(str(base))))
    return Recipe.from_dict(
        fields
        | {
            "data": data,
            "train": {"steps": 4, "evaluate_every": 2, "log_every": 1, "batch_tokens": 96, "ema_decay": 0.9}
            | {"device": "cpu"},
            "save": {"every": 1, "keep": 2},
            "out": str(folder / out),
        }
    )


class KillAt:
    """Counts the operations on files below a folder, and kills this process before one of them.

    Of an even one that flushes a file, half of the file is lost first, as if the kill had come while it was written.
    """

    def __init__(self, folder: str, point: int | None) -> None:
        self.folder, self.point, self.count = folder, point, 0
        self.fsync, self.exchange = files.fsync, files.exchange
        files.fsync, files.exchange = self.on_fsync, self.on_exchange
        sys.addaudithook(self.on_event)

    def on_event(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in WATCHED or not isinstance(given[0], str | bytes | os.PathLike):
            return
        if event == "open" and (given[2] or 0) & (os.O_WRONLY | os.O_RDWR) == 0:
            return
        if os.fsdecode(given[0]).startswith(self.folder):
            self.step()

    def on_fsync(self, path: Path) -> None:
        self.step(path)
        self.fsync(path)

    def on_exchange(self, first: Path, second: Path) -> bool:
        self.step()
        return self.exchange(first, second)

    def step(self, path: Path | None = None) -> None:
        self.count += 1
        if self.count == self.point:
            if path is not None and path.is_file() and self.count % 2 == 0:
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(text: str, resume: bool, point: int | None, report: str) -> None:
    """A run as the whole of a process; it is killed at a point, or else reports how many there were."""
    torch.set_num_threads(1)
    made = Recipe.from_json(text)
    assert made.out is not None
    kill = KillAt(made.out, point)
    result = train(made, resume, TrainingProgress())
    Path(report).write_text(json.dumps({"points": kill.count, "status": result.status}))
    os._exit(result.exit_code)

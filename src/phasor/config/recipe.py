"""Recipes: the whole configuration of a training run. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from phasor.config.classify import ClassifyConfig
from phasor.config.distill import DistillConfig
from phasor.config.embed import EmbedConfig
from phasor.config.lora import LoRAConfig
from phasor.config.mixture import MixtureSource
from phasor.config.model import ModelConfig
from phasor.config.preference import PreferenceConfig
from phasor.config.schedules import CosineSchedule, ScheduleConfig
from phasor.config.schema import Config, names, not_negative, positive, quote, unknown
from phasor.config.tasks import TASKS, Task, tasks_with
from phasor.config.text_files import from_json, read_text
from phasor.config.yaml_text import from_yaml

RECIPE_BYTES = 1 << 20
LoggerName = Literal["tensorboard", "wandb", "trackio"]

MAX_WORKERS, MAX_VOCAB_SIZE = 256, 1 << 24
GENERATED = ("python", "dates", "recall", "docstrings")  # formats that need no files


class DataConfig(Config):
    """What to train on, and how it becomes tokens.

    `train` is a file or a folder; it is left out with a `format` that generates its own data ("python", "dates",
    "recall", "docstrings"). `mixture` has several sources in its place, each with the weight of its tokens.
    `train_target` is the other side of a parallel text in two files. Without `valid`, `validation_fraction` of the
    examples is held out by a hash of their text, so that no example is on both sides. `document` says what one
    document of a plain text file is. `tokenizer` is "bytes", "bpe", "unigram" or a folder; "auto" is that of
    `init_from` where there is one, else "bpe". Another than that of `init_from` needs `replace_tokenizer`, unless it
    is a folder's. `sequence_length` is the number of tokens per row, and the most that a
    side of a pair or a conversation may have; `too_long` says what happens to longer ones, `if_empty` to those with an
    empty side or turn. `chat_template` is a file, "chatml" or "plain"; without it conversations are written by the
    template of the tokenizer's folder. `train_on` says which of their tokens are predicted.
    `positions` are "ordinary", counted from 0 in each document, or drawn anew for every document of a row, below
    `positions_to`. "skipped" (PoSE) cuts the document in two at random and moves the second part by a random distance;
    validation keeps ordinary positions. "randomized" draws and sorts as many as there are tokens. "coupled" is for
    arithmetic: digits of equal significance share a position, counted from a random one in training.
    Pairs are padded to a multiple of `pad_to_multiple_of` tokens, so that batches have few shapes. `cache` is a
    folder that keeps tokenized data between runs, `workers` is the number of threads that prefetch batches.

    >>> DataConfig(train="notes.txt", sequence_length=64).tokenizer
    'auto'
    """

    train: str | None = None
    mixture: tuple[MixtureSource, ...] = ()
    train_target: str | None = None
    valid: str | None = None
    valid_target: str | None = None
    validation_fraction: float = 0.01
    format: Literal["auto", "text", "jsonl", "parquet", "tsv", "python", "dates", "recall", "docstrings"] = "auto"
    document: Literal["file", "line", "paragraph"] = "file"
    field: str = "text"
    errors: Literal["strict", "replace"] = "strict"
    tokenizer: str = "auto"
    replace_tokenizer: bool = False
    vocab_size: int = 8000
    share_vocabulary: bool = True
    sequence_length: int = 256
    positions: Literal["ordinary", "skipped", "randomized", "coupled"] = "ordinary"
    positions_to: int | None = None
    too_long: Literal["refuse", "skip", "truncate"] = "refuse"
    if_empty: Literal["refuse", "skip"] = "refuse"
    chat_template: str | None = None
    train_on: Literal["replies", "all"] = "replies"
    pad_to_multiple_of: int = 1
    cache: str | None = None
    workers: int = 0

    def check(self) -> None:
        positive(self, "vocab_size", "sequence_length", "positions_to", "pad_to_multiple_of")
        self._check_positions()
        not_negative(self, "workers")
        if self.workers > MAX_WORKERS:
            raise ValueError(f"DataConfig.workers must be at most {MAX_WORKERS}, not {self.workers}")
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"DataConfig.vocab_size must be at most {MAX_VOCAB_SIZE}, not {self.vocab_size}")
        for name in ("train", "train_target", "valid", "valid_target", "cache", "tokenizer", "field", "chat_template"):
            if getattr(self, name) == "":
                raise ValueError(f"DataConfig.{name} must not be empty text")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"DataConfig.validation_fraction must be between 0 and 1, not {self.validation_fraction}")
        for name in ("train", "valid"):
            if getattr(self, f"{name}_target") is not None and getattr(self, name) is None:
                raise ValueError(f"DataConfig.{name}_target needs DataConfig.{name}, the other side of the text")
        self._check_mixture()
        if self.generates_data and (self.train or self.valid or self.mixture):
            raise ValueError(
                f"DataConfig.format is {self.format!r}, which generates its own data: leave train, valid and "
                "mixture out"
            )

    def _check_mixture(self) -> None:
        for name in ("train", "train_target"):
            if self.mixture and getattr(self, name) is not None:
                raise ValueError(f"DataConfig.mixture takes the place of DataConfig.{name}: give one of them")
        paths = [source.path for source in self.mixture]
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"DataConfig.mixture names {twice[0]} twice: give it a weight")

    @property
    def sources(self) -> tuple[str | None, ...]:
        """What is trained on: the sources of the mixture, or the one; None where the format generates its data."""
        return tuple(source.path for source in self.mixture) or (self.train,)

    def _check_positions(self) -> None:
        kind, to = self.positions, self.positions_to
        if kind == "ordinary" and to is not None:
            raise ValueError(
                "DataConfig.positions_to is for DataConfig.positions 'skipped', 'randomized' or 'coupled'; "
                "'ordinary' ones have no range"
            )
        if kind in ("skipped", "randomized") and to is None:
            raise ValueError(f"DataConfig.positions {kind!r} needs DataConfig.positions_to, the end of their range")
        if kind in ("skipped", "randomized") and to is not None and to <= self.sequence_length:
            raise ValueError(
                f"DataConfig.positions_to ({to}) must be greater than DataConfig.sequence_length "
                f"({self.sequence_length}), or no position can be left out"
            )

    @property
    def generates_data(self) -> bool:
        """Whether the format needs no files."""
        return self.format in GENERATED


class OptimizerConfig(Config):
    """AdamW: peak learning rate, betas, epsilon, weight decay of matrices, and rounding of bfloat16 parameters.

    The kind "muon" is Muon with its `momentum` for the matrices of blocks, scaled to the size of AdamW's updates, and
    AdamW for embeddings, heads, norms, biases and routed experts.
    Rounded to nearest, bfloat16 parameters lose every change below 1/512 of their value; "stochastic" rounding, on a
    GPU, rounds up or down at random so that changes are kept on average.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    rounding: Literal["nearest", "stochastic"] = "nearest"
    momentum: float = 0.95

    def check(self) -> None:
        positive(self, "lr", "eps")
        not_negative(self, "weight_decay")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"OptimizerConfig.{name} must be in [0, 1), not {getattr(self, name)}")
        if self.kind == "muon" and self.rounding == "stochastic":
            raise ValueError("OptimizerConfig.rounding 'stochastic' is for the kind 'adamw', not for 'muon'")


class TrainConfig(Config):
    """How long to train, in what batches, and in what precision.

    An optimizer step takes `gradient_accumulation_steps` batches of at most `batch_tokens` tokens. `steps` counts
    optimizer steps; without `steps` and `epochs` a run makes one epoch. The `precision` "auto" is bfloat16 autocast
    on a GPU and float32 elsewhere; "float8" computes the matrix products of blocks in 8 bits, except routers and
    experts, and the rest in bfloat16. `param_dtype` is the dtype of parameters: bfloat16 halves the memory, and
    loses changes below 1/256 of a parameter. `compile` has torch.compile generate the code of blocks; None does on a
    GPU alone. On a GPU `cuda_graphs` captures the step of each batch shape as a CUDA
    graph, so that the device does not wait for the host; `deterministic` has it give the same bits in every run, as a
    CPU does by itself, without the attention kernels that cannot. Weights whose names match a shell pattern of
    `freeze` are not trained, and have no optimizer state. Of a run that trains an adapter, `param_dtype` is the dtype
    of the frozen base, and what is trained is in float32. `base_weights` holds the projections of that base in 8 bits
    or in NF4, as QLoRA has it.

    >>> TrainConfig(epochs=2.5, gradient_accumulation_steps=2).num_steps(batches_per_epoch=9)
    12
    """

    steps: int | None = None
    epochs: float | None = None
    batch_tokens: int = 4096
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ema_decay: float | None = None
    precision: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool | None = None
    cuda_graphs: bool = False
    deterministic: bool = False
    activation_checkpointing: bool = False
    freeze: tuple[str, ...] = ()
    base_weights: Literal["int8", "nf4"] | None = None
    max_skips: int = 10
    patience: int | None = None
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 200
    device: str = "auto"

    def check(self) -> None:
        positive(
            self,
            "steps",
            "epochs",
            "batch_tokens",
            "gradient_accumulation_steps",
            "max_grad_norm",
            "log_every",
            "evaluate_every",
            "patience",
        )
        not_negative(self, "z_loss", "max_skips", "seed")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("TrainConfig.steps and TrainConfig.epochs both say how long to train: give one of them")
        if self.cuda_graphs and self.gradient_accumulation_steps > 1:
            raise ValueError(
                "TrainConfig.cuda_graphs captures steps of one batch: set TrainConfig.gradient_accumulation_steps to 1"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"TrainConfig.label_smoothing must be in [0, 1), not {self.label_smoothing}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"TrainConfig.ema_decay must be between 0 and 1, not {self.ema_decay}")
        if self.ema_decay is not None and self.param_dtype != "float32":
            raise ValueError(
                "TrainConfig.ema_decay averages in the parameters' dtype: leave TrainConfig.param_dtype at float32"
            )

    def num_steps(self, batches_per_epoch: int) -> int:
        """The number of optimizer steps of a run whose epochs have `batches_per_epoch` batches."""
        if self.steps is not None:
            return self.steps
        steps = (1.0 if self.epochs is None else self.epochs) * batches_per_epoch / self.gradient_accumulation_steps
        if steps >= 1 << 63:
            raise ValueError(f"TrainConfig.epochs is {self.epochs:g}, which is more steps than can be counted")
        return max(1, math.ceil(steps))


class SaveConfig(Config):
    """When to save a checkpoint, how many to keep, and whether the model is the best of them or the last.

    The best is the one with the lowest validation loss. It is kept in any case.
    """

    every: int = 200
    keep: int = 3
    best: bool = True

    def check(self) -> None:
        positive(self, "every", "keep")


class MeshConfig(Config):
    """How the processes that `torchrun` starts share a run: as a mesh of four axes, `tensor` innermost.

    Weights, gradients and optimizer state are cut over the processes along `shard` (FSDP), and held once for each of
    the `replicate` groups; along both axes each process takes different rows of a batch. Along `context` each row of
    tokens is cut, along `tensor` the heads, hidden features and experts of each block. Without `shard` it is what is
    left of the processes.

    >>> MeshConfig(replicate=2, tensor=2).sizes(8)
    (2, 2, 1, 2)
    """

    replicate: int = 1
    shard: int | None = None
    context: int = 1
    tensor: int = 1

    def check(self) -> None:
        positive(self, "replicate", "shard", "context", "tensor")

    def sizes(self, processes: int) -> tuple[int, int, int, int]:
        """The sizes of all axes for some processes; one sentence about what would fit where they do not."""
        others = {name: getattr(self, name) for name in ("replicate", "context", "tensor")}
        given = math.prod(others.values())
        shard = processes // given if self.shard is None else self.shard
        if given * shard == processes:
            return self.replicate, shard, self.context, self.tensor
        needed = given * (self.shard or 1)
        if processes == 1:
            raise ValueError(
                f"{self.describe(others)} asks for {needed} processes, and this is one: "
                f"start them with torchrun --nproc-per-node {needed} -m phasor train"
            )
        if self.shard is None:
            raise ValueError(
                f"{self.describe(others)} must divide the number of processes, which is {processes}: "
                f"{processes // given * given or given} processes would fit"
            )
        raise ValueError(
            f"{self.describe(others)} must be the number of processes, which is {processes}: "
            "without MeshConfig.shard it is what is left"
        )

    def describe(self, others: Mapping[str, int]) -> str:
        """The axes that are given, as a product."""
        sizes = {name: size for name, size in others.items() if size > 1}
        sizes |= {} if self.shard is None else {"shard": self.shard}
        return " x ".join(f"MeshConfig.{name} ({size})" for name, size in sizes.items())


class Recipe(Config):
    """A whole training run. `model` holds a "preset" and any fields of ModelConfig, nested as there.

    >>> recipe = Recipe(model={"preset": "gpt-2", "dim": 64, "position": {"kind": "rotary"}}, schedule="wsd")
    >>> Recipe.from_json(recipe.to_json()) == recipe
    True
    """

    task: Task = "lm"
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = CosineSchedule()
    save: SaveConfig = SaveConfig()
    parallel: MeshConfig = MeshConfig()
    lora: LoRAConfig | None = None
    classify: ClassifyConfig = ClassifyConfig()
    embed: EmbedConfig = EmbedConfig()
    distill: DistillConfig = DistillConfig()
    preference: PreferenceConfig = PreferenceConfig()
    loggers: tuple[LoggerName, ...] = ("tensorboard",)
    init_from: str | None = None
    out: str | None = None

    def check(self) -> None:
        known = ["preset", *names(ModelConfig)]
        for name in self.model:
            if name not in known:
                raise unknown("field of Recipe.model", name, known)
        for name in ("out", "init_from"):
            if getattr(self, name) == "":
                raise ValueError(f"Recipe.{name} must name a folder, not ''")
        if self.init_from is not None and "preset" in self.model:
            raise ValueError(f"the model comes from {self.init_from}: leave model.preset out")
        if self.lora is not None and self.init_from is None:
            raise ValueError("Recipe.lora trains an adapter of a model that is there: name it in Recipe.init_from")
        if self.train.base_weights is not None and self.lora is None:
            raise ValueError(
                f"TrainConfig.base_weights {self.train.base_weights!r} is for the frozen base of an adapter: "
                "set Recipe.lora, as by --lora.rank 16"
            )
        if self.train.batch_tokens < self.data.sequence_length:
            raise ValueError(
                f"TrainConfig.batch_tokens ({self.train.batch_tokens}) must not be less than "
                f"DataConfig.sequence_length ({self.data.sequence_length}): a batch holds at least one row"
            )
        if self.optimizer.kind == "muon" and self.train.cuda_graphs:
            raise ValueError(
                "TrainConfig.cuda_graphs does not capture OptimizerConfig.kind 'muon': leave one of them out"
            )
        self._check_data()
        self._check_settings()
        learned = ("bpe", "unigram") if self.init_from is not None else ("auto", "bpe", "unigram")
        if self.data.positions == "coupled" and self.data.tokenizer in learned:
            raise ValueError(
                "DataConfig.positions 'coupled' needs one token per digit: set DataConfig.tokenizer to 'bytes'"
            )

    def _check_settings(self) -> None:
        """Refuse settings of another task."""
        for task, takes in TASKS.items():
            name = takes.settings
            if name and task != self.task and getattr(self, name) != type(getattr(self, name))():
                raise ValueError(f"Recipe.{name} is for the task {task!r}, not for {self.task!r}")
        if self.task == "distill" and self.distill.teacher is None:
            raise ValueError("the task 'distill' needs DistillConfig.teacher, the folder of a model to learn from")

    def _check_data(self) -> None:
        """Refuse data that the task does not read."""
        data, takes = self.data, TASKS[self.task]
        if data.generates_data and data.format not in takes.generates:
            raise ValueError(
                f"the format {data.format!r} is for {tasks_with(data.format)}, not for the task {self.task!r}"
            )
        for name in ("train_target", "valid_target"):
            if getattr(data, name) is not None and not takes.parallel:
                raise ValueError(f"DataConfig.{name} is for translation, not for the task {self.task!r}")
        for name in ("chat_template", "train_on"):
            if getattr(data, name) != getattr(DataConfig(), name) and not takes.turns:
                raise ValueError(f"DataConfig.{name} is for conversations, not for the task {self.task!r}")
        if data.too_long == "truncate" and not takes.turns:
            raise ValueError(f"DataConfig.too_long 'truncate' is for conversations, not for the task {self.task!r}")
        if self.task == "preference" and data.train_on != "replies":
            raise ValueError("DataConfig.train_on is 'replies' for preferences, which compare replies")
        if data.positions != "ordinary" and not takes.positions:
            raise ValueError(
                f"DataConfig.positions {data.positions!r} is for rows of text, not for the task {self.task!r}"
            )

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """A recipe from a YAML or JSON file."""
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"a recipe is read from a file given by its path, not from {quote(path)}")
        return cls.from_mapping(read_recipe(path), path)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], path: str | Path) -> Self:
        """A recipe from the mapping in a file; errors begin with the file's name."""
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, not validated yet."""
    text = read_text(path, "the recipe", RECIPE_BYTES)
    data = from_json(text, path) if Path(path).suffix == ".json" else from_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ValueError(f"the recipe {path} must hold a mapping of fields, not {quote(data)}")
    return data


DEFAULT = Recipe(
    task="lm",
    model={
        "preset": "llama-2",
        "dim": 128,
        "hidden_dim": 384,
        "num_layers": 4,
        "num_heads": 4,
        "max_length": 512,
        "embedding": {"tied": True},
    },
    data=DataConfig(format="python", tokenizer="bpe", vocab_size=1024, sequence_length=128, validation_fraction=0.02),
    train=TrainConfig(steps=850, batch_tokens=1024, evaluate_every=425),
    optimizer=OptimizerConfig(lr=2e-3),
    schedule=CosineSchedule(warmup=50),
    save=SaveConfig(every=425),
)
"""What `phasor train` runs without arguments: a small decoder on the standard library's sources."""

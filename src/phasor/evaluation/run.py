"""A trained run, loaded: its recipe, its model and its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phasor.checkpoints.chat_template import ChatTemplate
from phasor.checkpoints.folder import CONFIG
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.open_model import open_model
from phasor.checkpoints.run_checkpoint import is_checkpoint
from phasor.checkpoints.runs import DATA, MARKER, MODEL, RunMarker, is_run
from phasor.checkpoints.stored_adapters import Adapters, stored_adapter
from phasor.config import ModelConfig
from phasor.config.classify import ClassifyConfig
from phasor.config.distill import DistillConfig
from phasor.config.recipe import DataConfig, Recipe, TrainConfig
from phasor.config.tasks import Task
from phasor.data.encoding import Tokenizers
from phasor.data.store import TEXT_FILES, load_prepared_data
from phasor.data.tokenizers import SpecialIds, special_of
from phasor.parallel.processes import JoinedProcesses, Processes
from phasor.training.objectives import OBJECTIVES, objective_of
from phasor.transformer import Transformer

LONGEST = 1024  # tokens of a piece of a document, for a model without a recipe


@dataclass(frozen=True)
class TrainedRun:
    """A run's model, and where its weights are from: "model", or the name of a checkpoint.

    `processes` are those that the model is cut over.
    """

    folder: Path
    recipe: Recipe
    model: Transformer
    special: SpecialIds
    weights: str
    processes: Processes = field(default_factory=Processes)

    @property
    def tokenizers(self) -> Tokenizers:
        """The tokenizers of both sides and their special tokens."""
        source = self.model.source_tokenizer
        target = self.model.tokenizer
        return Tokenizers(target, target if source is None else source, self.special, self.model.chat_template)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.tokens.weight.device

    def valid_texts(self) -> list[tuple[str, ...]]:
        """The examples the run was validated with."""
        if not is_run(self.folder):
            raise ValueError(
                f"{self.folder} is a model and no run, so it has no validation data: give data to evaluate on"
            )
        prepared = load_prepared_data(self.folder / DATA, TEXT_FILES)
        if prepared is None:
            raise ValueError(
                f"the data of {self.folder} are no longer in {self.folder / DATA}: give a file to evaluate on"
            )
        return prepared.valid_texts()


def open_run(
    folder: Path,
    device: str = "auto",
    checkpoint: str | int | None = None,
    processes: JoinedProcesses | None = None,
    part: str | None = None,
    adapter: Adapters | None = None,
) -> TrainedRun:
    """A run with the model it ended with, or with a checkpoint of it; a model's folder counts as a run without data.

    Before a run has ended that is its best checkpoint; `checkpoint` asks for "best", "last" or a step. With several
    processes the model is cut over them. `part` and `adapter` are as for `phasor.load`.
    """
    marker = RunMarker.read(folder)
    if marker is None:
        return open_model_folder(folder, device, checkpoint, processes, part, adapter)
    recipe = Recipe.from_mapping(marker.recipe, folder / MARKER)
    prepared = load_prepared_data(folder / DATA, TEXT_FILES)
    model, place = open_model(folder, device, checkpoint=checkpoint, part=part, adapter=adapter, processes=processes)
    assert place is not None
    if model.tokenizer is None:
        why = "" if place.name == MODEL else f", since the data of {folder} are no longer in {folder / DATA}"
        raise ValueError(f"{place} has no tokenizer{why}")
    special = special_of(model.tokenizer, place) if prepared is None else prepared.special
    model.chat_template = ChatTemplate.read(place) if prepared is None else prepared.template
    return TrainedRun(folder, recipe, model, special, place.name, processes or Processes())


def open_model_folder(
    folder: Path,
    device: str,
    checkpoint: str | int | None,
    processes: JoinedProcesses | None,
    part: str | None,
    adapter: Adapters | None,
) -> TrainedRun:
    """A model folder of any format, with the task that its shape is for."""
    place = resolve_folder(folder)
    what = f"the folder of a run, which would have a {MARKER}"
    if not (is_checkpoint(place) or (place / CONFIG).exists() or stored_adapter(place, verify=False)):
        raise ValueError(f"{folder} is neither {what}, nor of a model, with a {CONFIG}")
    if checkpoint is not None:
        raise ValueError(f"{folder} is not {what}, and a checkpoint is that of a run")
    model, _ = open_model(folder, device, part=part, adapter=adapter, processes=processes)
    if model.tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer, and evaluation reads text")
    task = task_of(model.config)
    length = min([model.config.max_length, LONGEST, *known_limits(model)])
    data = DataConfig(sequence_length=length, too_long="skip", format="auto")
    train = TrainConfig(batch_tokens=max(length, TrainConfig().batch_tokens))
    recipe = task_recipe(task, model.config, data=data, train=train)
    return TrainedRun(folder, recipe, model, special_of(model.tokenizer, place), MODEL, processes or Processes())


def task_of(config: ModelConfig) -> Task:
    """The first task that trains models of this shape with this head.

    >>> task_of(ModelConfig(vocab_size=9, dim=4, num_layers=1, num_heads=1))
    'lm'
    """
    fits = [task for task, objective in OBJECTIVES.items() if config.shape in objective.shapes]
    objectives = {task: objective_of(task_recipe(task, config)) for task in fits}
    return next((task for task, each in objectives.items() if each.head_why_not(config) is None), fits[0])


def task_recipe(task: Task, config: ModelConfig, **fields: Any) -> Recipe:
    """The recipe of a model without one, by what its head says."""
    of_words = config.head.kind == ClassifyConfig(of="token").head and task == "classify"
    teacher = DistillConfig(teacher=MODEL) if task == "distill" else DistillConfig()
    return Recipe(task=task, classify=ClassifyConfig(of="token" if of_words else "sequence"), distill=teacher, **fields)


def known_limits(model: Transformer) -> list[int]:
    """The numbers of positions that a model's schemes allow, where they have a limit."""
    schemes = (model.config.input_position, *model.config.layer_positions())
    return [scheme.max_positions for scheme in schemes if scheme.max_positions is not None]

"""Runs that are resumed: the checkpoint to continue from, and what has to be the same as before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phasor.checkpoints.hub import COMMIT, HubName, pin_commit
from phasor.checkpoints.runs import MODEL, RunMarker
from phasor.config import ModelConfig
from phasor.config.recipe import Recipe
from phasor.config.schema import name_some
from phasor.config.tasks import TASKS
from phasor.parallel.processes import Processes
from phasor.training.build import check_mesh, check_model
from phasor.training.run import RunFolder, choose_run_folder
from phasor.training.state import TrainingState, checkpoints, describe_changes, load_newest, read_checkpoint

# What may not change in a run that is resumed: the order of the data and what is saved follow from these.
FIXED = ("seed", "batch_tokens", "gradient_accumulation_steps", "ema_decay")
# What changes nothing where no step is left.
OF_STEPS = ("max_grad_norm", "label_smoothing", "z_loss", "precision", "param_dtype")
FREE_DATA = ("cache", "workers")


def pin_models(recipe: Recipe, resume: bool) -> Recipe:
    """The recipe with the commits of models that it names on the hub: those with which a resumed run began."""
    marker = RunMarker.read(choose_run_folder(recipe, resume)) if resume else None
    if marker is None:
        return with_models(recipe, [name and pin_commit(name) for name in models_of(recipe)])
    began = models_of(Recipe.from_dict(marker.recipe))
    pairs = zip(models_of(recipe), began, strict=True)
    return with_models(recipe, [before if same_repository(given, before) else given for given, before in pairs])


def models_of(recipe: Recipe) -> tuple[str | None, str | None, str | None]:
    """The models that a recipe names: the one that it begins with, the teacher and the reference.

    >>> models_of(Recipe(init_from="Qwen/Qwen3-0.6B"))
    ('Qwen/Qwen3-0.6B', None, None)
    """
    return recipe.init_from, recipe.distill.teacher, recipe.preference.reference


def with_models(recipe: Recipe, names: Sequence[str | None]) -> Recipe:
    """The recipe with other names of its models."""
    base, teacher, reference = names
    distill, preference = recipe.distill.replace(teacher=teacher), recipe.preference.replace(reference=reference)
    return recipe.replace(init_from=base, distill=distill, preference=preference)


def same_repository(given: str | None, began: str | None) -> bool:
    """Whether a name on the hub, without a commit, is that of the repository with which a run began."""
    name, before = (None if each is None or os.path.lexists(each) else HubName.parse(each) for each in (given, began))
    return name is not None and before is not None and name.name == before.name and not COMMIT.fullmatch(name.revision)


def is_restarted(recipe: Recipe, processes: Processes) -> bool:
    """Whether `torchrun` has started the processes of this run again: then it continues."""
    return processes.from_first(RunMarker.read(choose_run_folder(recipe, resume=True)) is not None)


def shared_state(run: RunFolder, processes: Processes) -> TrainingState | None:
    """The checkpoint to resume from: the first process chooses it and compares every byte, the others read it."""
    state = resumed_state(run, processes.size) if processes.is_first else None
    step, place = processes.from_first((0, None) if state is None else (state.step, str(state.folder)))
    return state if processes.is_first or place is None else read_checkpoint(step, Path(place))


def resumed_state(run: RunFolder, processes: int) -> TrainingState | None:
    """The newest whole checkpoint of a run; None where it has none yet, and an error where all are damaged."""
    state = load_newest(run.checkpoints, run.notify)
    if state is not None:
        check_same(state.values["fixed"], fixed_fields(run.recipe), run.path)
        check_mesh(ModelConfig.from_dict(state.values["fixed"]["model"]), run.recipe, processes)
    elif existing := checkpoints(run.checkpoints):
        raise ValueError(
            f"none of the {len(existing)} checkpoints in {run.checkpoints} is whole, so {run.path} cannot be resumed; "
            "overwriting it starts from the beginning"
        )
    elif os.path.lexists(run.path / MODEL):
        raise ValueError(
            f"{run.path} has a model and no checkpoint to resume from: continue from its weights in another folder "
            "(init_from), or overwrite it to start from the beginning"
        )
    elif (saved := run.saved_step()) is not None:
        raise ValueError(
            f"{run.path} has been trained to a checkpoint of step {saved} at least, and {run.checkpoints} "
            "holds none: bring it back (is its disk mounted?), or overwrite the run to start from the beginning"
        )
    else:
        check_model(run.recipe, processes)
        run.notify(f"{run.path} has no checkpoint yet: the run starts from the beginning")
    return state


def fixed_fields(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe has to be the same in a run that is resumed, besides the model."""
    fields, settings = recipe.to_dict(), TASKS[recipe.task].settings
    return {
        "task": recipe.task,
        "optimizer_kind": recipe.optimizer.kind,
        "init_from": recipe.init_from,
        "model_fields": fields["model"] if recipe.init_from is not None else None,
        "lora": fields["lora"],
        "base_weights": fields["train"]["base_weights"],
        "freeze": fields["train"]["freeze"] or None,
        "data": {name: value for name, value in fields["data"].items() if name not in FREE_DATA},
        "train": {name: fields["train"][name] for name in FIXED},
    } | ({} if settings is None else {settings: fields[settings]})


def comparable(fixed: dict[str, Any]) -> dict[str, Any]:
    """What may not change, without what follows from it: the trained length, which older runs did not record."""
    kind = {"optimizer_kind": fixed.get("optimizer_kind", "adamw")}
    return fixed | kind | {"model": {name: value for name, value in fixed["model"].items() if name != "trained_length"}}


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Refuse to resume where something is no longer what it was."""
    changed = describe_changes({name: before.get(name) for name in now}, now)
    if changed:
        listed = name_some(changed, 5, separator="; ")
        raise ValueError(f"{folder} cannot be resumed with another recipe: {listed}")


def check_steps_left(run: RunFolder, step: int, steps: int) -> None:
    """Refuse another way of training for a run that has all of its steps behind it: its weights are of the first."""
    if step < steps:
        return
    before, now = (
        {"optimizer": recipe["optimizer"], "schedule": recipe["schedule"]}
        | {"train": {name: recipe["train"].get(name) for name in OF_STEPS}}
        for recipe in (Recipe.from_dict(run.marker.recipe).to_dict(), run.recipe.to_dict())
    )
    if changed := describe_changes(before, now):
        listed = name_some(changed, 5, separator="; ")
        raise ValueError(
            f"{run.path} has all of its {steps} steps behind it, and none is left for what is new: {listed}; give more "
            "train.steps, or another folder to train from the beginning"
        )

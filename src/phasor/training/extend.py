"""Extend the context of a model: another configuration, and short fine-tuning where it is asked for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasor.checkpoints.hf import choose_family
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.load import is_hf, load
from phasor.checkpoints.runs import RunMarker
from phasor.checkpoints.save import FORMATS, save
from phasor.checkpoints.swap_positions import carry_over, swap_config
from phasor.checkpoints.tensors import fingerprint_model
from phasor.config import ModelConfig
from phasor.config.recipe import DataConfig, OptimizerConfig, Recipe, SaveConfig, TrainConfig
from phasor.config.schedules import ConstantSchedule
from phasor.config.schema import check_integer, unknown
from phasor.config.text_files import path_of
from phasor.models.extensions import (
    DROP,
    check_extendable,
    extend_config,
    fold_extension,
    original_length,
    trained_length,
)
from phasor.progress import Progress
from phasor.training.loop import train as train_recipe
from phasor.training.progress import TrainingProgress
from phasor.training.result import Status
from phasor.training.state import describe_changes

METHODS = ("linear", "ntk", "yarn", "longrope", DROP)
POSITIONS = ("ordinary", "skipped")
STEPS, LR, WARMUP = 400, 2e-5, 20  # YaRN's own, for models of 7 and 13 billion parameters
BATCH_TOKENS = 1 << 14  # the fewest per step, unless told otherwise
SAVE_EVERY = 50
RECOMPUTE = 8192  # rows longer than this recompute the activations of blocks


@dataclass(frozen=True)
class Extended:
    """What came of `extend`; a run that was stopped or diverged has written no `destination`."""

    destination: Path
    method: str
    original_length: int
    max_length: int
    trained_length: int
    run: Path | None = None
    status: Status = "finished"
    exit_code: int = 0
    loss: float | None = None


def extend(
    model: str | Path,
    destination: str | Path,
    *,
    to: int,
    method: str = "yarn",
    train: str | Path | None = None,
    valid: str | Path | None = None,
    steps: int = STEPS,
    positions: str = "ordinary",
    format: str | None = None,
    run: str | Path | None = None,
    lr: float = LR,
    batch_tokens: int | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: TrainingProgress | None = None,
    saving: Callable[[str], Progress] | None = None,
    **fields: Any,
) -> Extended:
    """Write a model that is to read `to` tokens, by a method: "linear", "ntk", "yarn", "longrope" or "drop".

    The factor of an extension follows from `to` and the length the model was trained at; `fields` are its other
    fields. "drop" removes the positions (as in DroPE), of use after training alone. Without `train` only the
    configuration changes, and every weight is as it was. With `train`, a text, the model is fine-tuned for `steps`
    steps: on rows of `to` tokens, or with `positions="skipped"` on rows of the trained length whose positions lie
    below `to` (PoSE). The run is kept in `run`, by default beside the destination; the same call resumes it where it
    was stopped, and is refused after the model or the learning rate has changed.

    `format` is "phasor" or "hf", by default that of the model. Special tokens, tokenizer, generation settings and dtype
    are the model's.

    >>> import tempfile
    >>> from phasor import Transformer, load, preset, save
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, trained_length=512))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, f"{folder}/short")
    ...     extended = extend(f"{folder}/short", f"{folder}/long", to=4096, method="yarn")
    ...     config = load(f"{folder}/long").config
    >>> extended.max_length, config.position.extension.factor, config.position.extension.original_length
    (4096, 8.0, 512)
    """
    folder = resolve_folder(model)
    destination = path_of(destination)
    format = ("hf" if is_hf(folder) else "phasor") if format is None else format
    check_options(to, method, positions, format, train)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists already: name a new folder")
    bar = saving or (lambda what: lambda done, total: None)
    source = load(folder, progress=bar("reading"))
    config = target_config(source.config, method, to, fields)
    written = swap_config(source, exportable(config, format))
    if format == "hf":
        choose_family(written)  # a model that transformers does not have is refused before it is trained

    def describe(found: ModelConfig, **how: Any) -> Extended:
        lengths = original_length(config), found.max_length, trained_length(found)
        return Extended(destination, method, *lengths, **how)

    if train is None:
        if method == DROP:
            warnings.warn("a model without its positions needs training: give a text to train on", stacklevel=2)
        save(written, destination, format, progress=bar("writing"))
        return describe(written.config)
    run = path_of(run) if run is not None else destination.with_name(f"{destination.name}-run")
    if run.resolve() == destination.resolve():
        raise ValueError(f"run and destination are the same folder, {run}: name another one for the run")
    if destination.resolve() in run.resolve().parents:
        raise ValueError(f"run {run} is inside of the folder to write, {destination}: name another one for the run")
    recipe = fine_tuning(source.config, config, positions, to).replace(
        init_from=str(folder), out=str(run), optimizer=OptimizerConfig(lr=lr, weight_decay=0.0)
    )
    recipe = with_texts(recipe, train, valid, steps, batch_tokens, seed, device)
    begun = RunMarker.read(run)
    if begun is not None:
        check_begun(begun, recipe, folder)
    result = train_recipe(recipe, begun is not None, progress)
    if result.status == "finished":
        trained = load(run, dtype=next(source.parameters()).dtype)
        carry_over(source, trained)
        written = swap_config(trained, exportable(trained.config, format))
        save(written, destination, format, progress=bar("writing"))
    return describe(written.config, run=run, status=result.status, exit_code=result.exit_code, loss=result.loss)


def check_options(to: object, method: object, positions: object, format: object, train: object) -> None:
    """Refuse options that do not exist, or not together."""
    if not isinstance(method, str) or method not in METHODS:
        raise unknown("method", method, METHODS)
    if not isinstance(positions, str) or positions not in POSITIONS:
        raise unknown("positions", positions, POSITIONS)
    if not isinstance(format, str) or format not in FORMATS:
        raise unknown("format", format, FORMATS)
    check_integer("to", to)
    if positions == "skipped" and train is None:
        raise ValueError("positions skipped is for training: give a text to train on")
    if positions == "skipped" and method == DROP:
        raise ValueError("positions skipped and the method 'drop' exclude each other: it removes all positions")


def target_config(config: ModelConfig, method: str, to: int, fields: dict[str, Any]) -> ModelConfig:
    """The configuration to write, or one sentence about why this model cannot be extended so far."""
    if config.shape != "decoder":
        raise ValueError(f"the context of a decoder can be extended, and this model is an {config.shape}")
    check_extendable(config)
    if to <= trained_length(config):
        raise ValueError(
            f"to must be greater than the {trained_length(config):,} tokens the model was trained at, not {to:,}"
        )
    extended = extend_config(config, method, to, **fields)
    if extended.max_length < to:
        raise ValueError(
            f"factor {fields['factor']:g} reaches {extended.max_length:,} tokens, fewer than the {to:,} asked for"
        )
    return extended


def exportable(config: ModelConfig, format: str) -> ModelConfig:
    """The same computation as a format can say it: transformers has no NTK-aware scaling, and any base."""
    return fold_extension(config) if format == "hf" else config


def fine_tuning(source: ModelConfig, config: ModelConfig, positions: str, to: int) -> Recipe:
    """The recipe that fine-tunes a model with another configuration, in rows of the length that positions ask for."""
    fields = config.to_dict()
    skipped = positions == "skipped"
    length = trained_length(source) if skipped else to
    return Recipe(
        model={name: fields[name] for name in ("position", "layers", "max_length")},
        data=DataConfig(
            sequence_length=length, positions="skipped" if skipped else "ordinary", positions_to=to if skipped else None
        ),
        train=TrainConfig(batch_tokens=max(length, BATCH_TOKENS), activation_checkpointing=length > RECOMPUTE),
        save=SaveConfig(every=SAVE_EVERY, keep=1, best=False),
    )


def with_texts(
    recipe: Recipe,
    train: str | Path,
    valid: str | Path | None,
    steps: int,
    batch_tokens: int | None,
    seed: int,
    device: str,
) -> Recipe:
    """The recipe with what to train on, and for how long."""
    texts = {"train": str(path_of(train, "a text")), "valid": None if valid is None else str(path_of(valid, "a text"))}
    options = {"steps": steps, "seed": seed, "device": device}
    options |= {} if batch_tokens is None else {"batch_tokens": batch_tokens}
    recipe = recipe.replace(data=recipe.data.replace(**texts), train=recipe.train.replace(**options))
    return recipe.replace(schedule=ConstantSchedule(warmup=min(WARMUP, math.ceil(steps / 10))))


def check_begun(begun: RunMarker, recipe: Recipe, source: Path) -> None:
    """Refuse to continue a run that began with another model, or with another optimizer: its weights are not these."""
    changes = describe_changes(begun.recipe["optimizer"], recipe.to_dict()["optimizer"], "optimizer")
    if begun.saved is not None and begun.recipes[0].get("source") != fingerprint_model(source):
        changes.insert(0, f"the files of {source} are not those it began with")
    if changes:
        raise ValueError(
            f"{begun.folder} holds a run of other settings: {'; '.join(changes)}; name another folder for the run, or "
            "delete this one"
        )

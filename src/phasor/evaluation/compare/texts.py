"""One scheme of a comparison on texts: train a decoder at a length, then measure its loss to 16 times that length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phasor.checkpoints.load import read_config
from phasor.checkpoints.runs import MODEL, RunMarker
from phasor.config.recipe import DataConfig, OptimizerConfig, Recipe, SaveConfig, TrainConfig
from phasor.config.schedules import ConstantSchedule, CosineSchedule
from phasor.config.schema import name_some
from phasor.data.store import prepare
from phasor.evaluation.compare.schemes import ComparedScheme, model_fields
from phasor.evaluation.compare.settings import CompareSettings
from phasor.evaluation.length_settings import STRIDE
from phasor.evaluation.lengths import evaluate_lengths
from phasor.evaluation.rows import cut_rows, encode_documents
from phasor.generation.translation import Progress
from phasor.models.extensions import extend_config
from phasor.training.build import model_config
from phasor.training.extend import fine_tuning
from phasor.training.loop import train
from phasor.training.progress import TrainingProgress
from phasor.training.result import TrainingResult
from phasor.training.state import describe_changes

HELD_OUT = 0.1  # of the documents
TUNED = 5  # fine-tuning has a fifth of the steps, at a fifth of the learning rate


def text_recipe(settings: CompareSettings, scheme: ComparedScheme, seed: int, out: Path) -> Recipe:
    """The recipe of one run: all but the positions is the same for every scheme, the order of the data too."""
    sizes = settings.sizes
    return Recipe(
        model=model_fields(sizes.model, scheme, settings.length, settings.length, settings.lengths[-1]),
        data=DataConfig(
            train=settings.data,
            valid=settings.valid,
            format="python" if settings.data is None else "auto",
            tokenizer=settings.tokenizer,
            vocab_size=sizes.vocab_size,
            sequence_length=settings.length,
            validation_fraction=HELD_OUT,
            cache=str(out / "data"),
        ),
        train=TrainConfig(
            steps=settings.steps,
            batch_tokens=max(sizes.batch_tokens, settings.length),
            evaluate_every=settings.steps,
            seed=seed,
            device=settings.device,
        ),
        optimizer=OptimizerConfig(lr=sizes.lr),
        schedule=CosineSchedule(warmup=max(1, settings.steps // 20)),
        save=SaveConfig(every=max(1, settings.steps // 4), keep=1, best=False),
    )


def scheme_recipe(settings: CompareSettings, scheme: ComparedScheme, seed: int, out: Path, base: Path | None) -> Recipe:
    """The recipe of a scheme; one with a method fine-tunes the run in `base` at the largest length."""
    recipe = text_recipe(settings, scheme, seed, out)
    if base is None:
        return recipe
    assert scheme.method is not None
    to, steps = settings.lengths[-1], max(1, settings.steps // TUNED)
    source = read_config(base / MODEL)
    wanted = extend_config(source, scheme.method, to, **dict(scheme.fields))
    tuning = fine_tuning(source, wanted, "ordinary", to)
    return tuning.replace(
        init_from=str(base / MODEL),
        data=recipe.data.replace(sequence_length=to, tokenizer="auto"),
        train=recipe.train.replace(
            steps=steps, evaluate_every=steps, batch_tokens=max(recipe.train.batch_tokens, to),
            activation_checkpointing=tuning.train.activation_checkpointing,
        ),
        optimizer=OptimizerConfig(lr=settings.sizes.lr / TUNED, weight_decay=0.0),
        schedule=ConstantSchedule(warmup=max(1, steps // 10)),
    )  # fmt: skip


def check_schemes(settings: CompareSettings, out: Path) -> None:
    """Refuse a scheme that the model cannot have, or that ends before the largest length; before anything is read."""
    if all(scheme.keeps_state for scheme in settings.schemes):
        raise ValueError(
            "on texts all schemes are compared with a window of the trained length, and layers with a state have none: "
            "give a scheme without them too, such as rotary"
        )
    for scheme in settings.schemes:
        try:
            config = model_config(text_recipe(settings, scheme, 0, out), vocab_size=1)
        except ValueError as error:
            raise ValueError(f"the scheme {scheme.name!r} cannot be compared: {error}") from None
        for position in (config.input_position, *config.layer_positions()):
            limit = position.max_positions
            if limit is not None and limit < settings.lengths[-1]:
                raise ValueError(
                    f"the scheme {scheme.name!r} has {limit:,} positions, and a length of {settings.length:,} is "
                    f"measured to {settings.lengths[-1]:,} tokens"
                )


def prepare_texts(settings: CompareSettings, out: Path, progress: TrainingProgress) -> str:
    """Tokenize the texts, once for all schemes; a hash of the tokens. Texts that are too short are refused."""
    recipe = text_recipe(settings, settings.schemes[0], 0, out)
    prepared = prepare(recipe, out / "data", progress.on_prepare, notify=progress.on_message)
    special = prepared.special
    texts = (text for (text,) in prepared.valid_texts())
    documents = encode_documents(prepared.tokenizer, special.bos, special.eos, texts)
    cut_rows(documents, settings.lengths[-1], settings.rows, settings.join, "the validation data")  # or refused
    return prepared.fingerprint


def drop_local_settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without places and devices, which may change between two parts of a run."""
    data, training = recipe["data"] | {"cache": None}, recipe["train"] | {"device": None}
    return recipe | {"out": None, "init_from": None, "data": data, "train": training}


def train_recipe(recipe: Recipe, folder: Path, progress: TrainingProgress) -> TrainingResult | None:
    """Train a recipe in a folder to its end, from where it stands; None where that was done before.

    A run of another recipe is refused.
    """
    recipe = recipe.replace(out=str(folder))
    marker = RunMarker.read(folder)
    given = drop_local_settings(recipe.to_dict())
    if marker is not None and (changes := describe_changes(drop_local_settings(marker.recipe), given)):
        raise ValueError(f"{folder} is a run of another recipe ({name_some(changes, 3)}): move it away")
    if marker is not None and (folder / MODEL).exists():
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    return train(recipe, marker is not None, progress)


def measure_run(
    settings: CompareSettings, folder: Path, extensions: list[str], progress: Progress | None
) -> dict[str, Any]:
    """The loss of a run by length, as `evaluate_lengths` has it."""
    return evaluate_lengths(
        folder,
        lengths=list(settings.lengths),
        extensions=extensions,
        protocol=settings.protocol,
        stride=min(STRIDE, settings.length),
        join=settings.join,
        limit=settings.rows,
        device=settings.device,
        progress=progress,
    )

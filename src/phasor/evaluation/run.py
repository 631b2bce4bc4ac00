"""A trained run, loaded: its recipe, its model and its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from phasor.checkpoints import load
from phasor.checkpoints.folder import CONFIG, read_json
from phasor.config import ModelConfig
from phasor.config.generation import SpecialTokens
from phasor.config.recipe import Recipe
from phasor.data.encoding import Tokenizers
from phasor.data.store import TEXT_FILES, PreparedData, load_prepared_data
from phasor.data.tokenizers import SpecialIds, special_of
from phasor.training.datasets import DATA
from phasor.training.state import TrainingState, load_newest
from phasor.transformer import Transformer

RECIPE, MODEL, CHECKPOINTS = "recipe.json", "model", "checkpoints"


@dataclass(frozen=True)
class TrainedRun:
    """A run's model, and where its weights are from: "model", or the name of a checkpoint."""

    folder: Path
    recipe: Recipe
    model: Transformer
    special: SpecialIds
    weights: str

    @property
    def tokenizers(self) -> Tokenizers:
        """The tokenizers of both sides and their special tokens."""
        source = self.model.source_tokenizer
        return Tokenizers(self.model.tokenizer, self.model.tokenizer if source is None else source, self.special)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.tokens.weight.device

    def valid_texts(self) -> list[tuple[str, ...]]:
        """The examples the run was validated with."""
        prepared = load_prepared_data(self.folder / DATA, TEXT_FILES)
        if prepared is None:
            raise ValueError(
                f"the data of {self.folder} are no longer in {self.folder / DATA}: give a file to evaluate on"
            )
        return prepared.valid_texts()


def is_run(folder: Path) -> bool:
    """Whether a folder is one that `train` writes to."""
    return (folder / RECIPE).is_file()


def open_run(folder: Path, device: torch.device) -> TrainedRun:
    """A run with the model it ended with, or with its newest whole checkpoint if it has not ended."""
    if not is_run(folder):
        raise ValueError(f"{folder} is not the folder of a run: it has no {RECIPE}")
    recipe = Recipe.from_mapping(read_json(folder / RECIPE), folder / RECIPE)
    prepared = load_prepared_data(folder / DATA, TEXT_FILES)
    place = folder / MODEL
    if (place / CONFIG).is_file():
        model = load(place, device)
        if model.tokenizer is None:
            raise ValueError(f"{place} has no tokenizer")
        special = special_of(model.tokenizer, place) if prepared is None else prepared.special
        return TrainedRun(folder, recipe, model, special, MODEL)
    state = load_newest(folder / CHECKPOINTS)
    if state is None:
        raise ValueError(f"{folder} has neither a model nor a whole checkpoint: it has not been trained that far")
    if prepared is None:
        raise ValueError(f"the data of {folder} are no longer in {folder / DATA}, and its checkpoints need them")
    return TrainedRun(folder, recipe, from_checkpoint(state, prepared).to(device), prepared.special, state.folder.name)


def from_checkpoint(state: TrainingState, prepared: PreparedData) -> Transformer:
    """The model of a checkpoint, with the average of its weights where there is one."""
    with torch.device("meta"):
        model = Transformer(ModelConfig.from_dict(state.values["fixed"]["model"]))
    model.load_state_dict(state.tensors["model"] | state.tensors.get("ema", {}), assign=True)
    model.special = SpecialTokens.from_dict(state.values["special"])
    model.tokenizer = prepared.tokenizer
    if prepared.source_tokenizer is not prepared.tokenizer:
        model.source_tokenizer = prepared.source_tokenizer
    return model.eval()

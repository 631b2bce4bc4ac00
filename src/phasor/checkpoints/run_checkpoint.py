"""The model in a checkpoint of a run, which can be used as that of a model folder can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from phasor.adapters import DEFAULT
from phasor.checkpoints.adapter_folder import StoredAdapter, parse_adapter
from phasor.checkpoints.folder import WEIGHTS, read_json, read_tokenizers
from phasor.checkpoints.hf import Origin
from phasor.checkpoints.opened import OpenedModel
from phasor.checkpoints.runs import DATA, TOKENIZER_FOLDER, VALUES
from phasor.checkpoints.tensors import Tensors
from phasor.config import ModelConfig
from phasor.config.generation import SpecialTokens
from phasor.manifest import Manifest
from phasor.transformer import Transformer

AVERAGE = "ema.safetensors"


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is the checkpoint of a run."""
    manifest = Manifest.read(folder)
    return manifest is not None and manifest.kind == "checkpoint"


def read_checkpoint_config(folder: Path) -> ModelConfig:
    """The model configuration of a checkpoint."""
    return ModelConfig.from_dict(read_json(folder / VALUES)["values"]["fixed"]["model"])


def tokenizer_folder(folder: Path) -> Path:
    """Where the tokenizer of a model folder is: in it, or beside a checkpoint, in the data of its run."""
    return folder.parent.parent / DATA if is_checkpoint(folder) else folder


def read_checkpoint_adapter(folder: Path) -> StoredAdapter | None:
    """The adapter in a checkpoint of a run that trains one."""
    values = read_json(folder / VALUES)["values"]
    if values.get("adapter") is None:
        return None
    adapter, config = parse_adapter(values["adapter"], folder / VALUES)
    with Tensors(folder, weights_file(folder)) as opened:
        tensors = {name.replace(f".lora.{DEFAULT}.", ".lora."): opened.get(name) for name in opened.names}
    return StoredAdapter(folder, adapter.base, adapter, tensors, config, lambda model: read_extras(model, folder))


def weights_file(folder: Path) -> str:
    """The file of a checkpoint with its weights, or with their average where there is one."""
    return AVERAGE if (folder / AVERAGE).exists() else WEIGHTS


def read_extras(model: Transformer, folder: Path) -> None:
    """Give a model the special tokens, settings for generation and tokenizers of a checkpoint's run."""
    values = read_json(folder / VALUES)["values"]
    model.special = SpecialTokens.from_dict(values["special"])
    model.generation_settings = values.get("generation", {})
    read_tokenizers(model, tokenizer_folder(folder))


@contextmanager
def open_checkpoint(folder: Path, dtype: torch.dtype | None) -> Iterator[OpenedModel]:
    """The model of a checkpoint, with the average of its weights where there is one, and the tokenizers of its run."""
    with torch.device("meta"):
        model = Transformer(read_checkpoint_config(folder))
    read_extras(model, folder)
    model.origin = Origin("phasor", folder.parent.parent / TOKENIZER_FOLDER, model.config)
    with Tensors(folder, weights_file(folder)) as tensors:
        yield OpenedModel(model, dtype or tensors.main_dtype(), lambda name, device: tensors.get(name), tensors.release)

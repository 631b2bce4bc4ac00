"""The model in a checkpoint of a run, which can be used as that of a model folder can."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from phasor.checkpoints.folder import read_json, read_tokenizers
from phasor.checkpoints.hf import Origin
from phasor.checkpoints.runs import DATA, TOKENIZER_FOLDER, VALUES
from phasor.config import ModelConfig
from phasor.config.generation import SpecialTokens
from phasor.manifest import read_manifest
from phasor.transformer import Transformer


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is the checkpoint of a run."""
    manifest = read_manifest(folder)
    return manifest is not None and manifest.kind == "checkpoint"


def read_checkpoint_config(folder: Path) -> ModelConfig:
    """The model configuration of a checkpoint."""
    return ModelConfig.from_dict(read_json(folder / VALUES)["values"]["fixed"]["model"])


def tokenizer_folder(folder: Path) -> Path:
    """Where the tokenizer of a model folder is: in it, or beside a checkpoint, in the data of its run."""
    return folder.parent.parent / DATA if is_checkpoint(folder) else folder


def load_checkpoint_model(folder: Path, device: torch.device | str, dtype: torch.dtype | None) -> Transformer:
    """The model of a checkpoint, with the average of its weights where there is one, and the tokenizers of its run."""
    values = read_json(folder / VALUES)["values"]
    with torch.device("meta"):
        model = Transformer(read_checkpoint_config(folder))
    tensors = load_file(folder / "model.safetensors")
    if (folder / "ema.safetensors").exists():
        tensors |= load_file(folder / "ema.safetensors")
    model.load_state_dict({name: x.to(device, dtype) for name, x in tensors.items()}, assign=True)
    model.special = SpecialTokens.from_dict(values["special"])
    model.generation_settings = values.get("generation", {})
    read_tokenizers(model, tokenizer_folder(folder))
    model.origin = Origin("phasor", folder.parent.parent / TOKENIZER_FOLDER, model.config)
    return model.requires_grad_(True).eval()

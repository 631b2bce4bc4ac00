"""Load a model from a folder: phasor's own format, or a Hugging Face one of any known family."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from phasor.artifacts import ArtifactFolder
from phasor.checkpoints.adapter_folder import add_adapters
from phasor.checkpoints.folder import CONFIG, read_json
from phasor.checkpoints.hf import open_hf, read_hf_config
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.native import open_native, read_native_config
from phasor.checkpoints.opened import OpenedModel
from phasor.checkpoints.run_checkpoint import is_checkpoint, open_checkpoint, read_checkpoint_config
from phasor.checkpoints.stored_adapters import Adapters, resolve_base
from phasor.checkpoints.swap_positions import swap_positions
from phasor.checkpoints.text_part import PARTS
from phasor.config import Extension, ModelConfig, PositionConfig
from phasor.config.schema import quote, unknown
from phasor.device import resolve_device
from phasor.progress import Progress
from phasor.transformer import Transformer

STORED = "stored"  # quantized weights as a folder has them


def load(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    position: PositionConfig | str | Mapping[str, Any] | None = None,
    extension: Extension | str | Mapping[str, Any] | None = None,
    adapter: Adapters | None = None,
    part: str | None = None,
    weights: str | None = None,
    strict: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Transformer:
    """Read a model folder, phasor's own or a Hugging Face one: the model in evaluation mode, in the file's dtype.

    The folder of a run stands for its model, or for its best checkpoint before there is one; a checkpoint's own folder
    is read as well. What is no folder here is the name of a model on the Hugging Face hub, "OWNER/NAME" or
    "OWNER/NAME@REVISION", whose files are fetched into the hub's cache. `progress` is called with (bytes done, bytes in
    all) while they are fetched, and again while they are read.

    `dtype` asks for another dtype, `position` and `extension` for another position scheme or rotary extension than the
    model was saved with (`extension="none"` for none). Weights that still apply are kept, and
    `model.newly_initialized` lists those that are not from the file. Fields of a Hugging Face config.json that have no
    effect in `transformers` have none here: a warning names them, or `strict` refuses them. A folder that phasor wrote
    is compared with its manifest, byte by byte, unless `verify` is False.

    The folder of an adapter, phasor's own or PEFT's, stands for its base with the adapter. `adapter` is the folder of
    one for this base, or several by name, each with a weight: `{"a": folder, "b": (folder, 0.5)}`. They are added up,
    and `set_adapters` changes which are in use. An adapter that records the hash of its base's weights is refused on
    others, unless `verify` is False.

    Weights of a quantized Hugging Face folder are dequantized. With `weights="stored"` those that a kernel can take
    stay in 8 or 4 bits, with the same values; a warning names the others.

    >>> import tempfile
    >>> from phasor import preset, save
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder)
    ...     load(folder, dtype=torch.bfloat16).tokens.weight.dtype
    torch.bfloat16
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype such as torch.bfloat16, not {quote(dtype)}")
    device = resolve_device(device)
    folder = resolve_folder(folder, progress=progress)
    options: dict[str, Any] = {"part": part, "weights": weights, "strict": strict, "verify": verify}
    with pause_gc(), open_folder(folder, dtype, adapter=adapter, **options) as opened:
        model = opened.load(device, progress)
    if position is None and extension is None:
        return model
    if model.adapters:
        raise ValueError("a model with adapters keeps the positions that they were trained with: merge them first")
    return swap_positions(model, position, extension)


@contextmanager
def open_folder(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    adapter: Adapters | None = None,
    part: str | None = None,
    weights: str | None = None,
    strict: bool = False,
    verify: bool = True,
) -> Iterator[OpenedModel]:
    """A model folder of any format without its weights, which can be read one by one; options as for `load`."""
    folder, stored = resolve_base(resolve_folder(folder), adapter, verify=verify)
    with open_whole(folder, dtype, part=part, weights=weights, strict=strict, verify=verify) as opened:
        yield add_adapters(opened, stored) if stored else opened


@contextmanager
def open_whole(
    folder: Path, dtype: torch.dtype | None, *, part: str | None, weights: str | None, strict: bool, verify: bool
) -> Iterator[OpenedModel]:
    """The folder of a model that is no adapter."""
    check_part(folder, part)
    if weights is not None and not (isinstance(weights, str) and weights == STORED):
        raise unknown("weights", weights, [STORED])
    trained = is_checkpoint(folder)
    if verify:
        ArtifactFolder(folder, "checkpoint" if trained else "model").verify()
    if trained:
        opened = open_checkpoint(folder, dtype)
    elif is_hf(folder):
        opened = open_hf(folder, dtype, strict=strict, part=part, keep_stored=weights is not None)
    else:
        opened = open_native(folder, dtype)
    with opened as model:
        yield model


def check_part(folder: Path, part: str | None) -> None:
    """Refuse a part that a folder cannot have."""
    if part is None:
        return
    if not isinstance(part, str) or part not in PARTS:
        raise unknown("part", part, PARTS)
    if not is_hf(folder):
        raise ValueError(f"{folder} has no parts: those are of multimodal Hugging Face folders")


def read_config(folder: str | Path, part: str | None = None) -> ModelConfig:
    """The model configuration of a folder of any format, or of one part of it; of an adapter, that of its base."""
    folder, stored = resolve_base(resolve_folder(folder, files="config"), verify=False)
    for each, _ in stored.values():
        if each.model is not None:
            return each.model
    check_part(folder, part)
    if is_checkpoint(folder):
        return read_checkpoint_config(folder)
    ArtifactFolder(folder, "model").verify([CONFIG])
    return read_hf_config(folder, part) if is_hf(folder) else read_native_config(folder)


# Fields of Hugging Face configurations, of which phasor's own have none.
HF_FIELDS = ("architectures", "transformers_version", "hidden_size", "num_hidden_layers", "d_model", "n_embd")


def is_hf(folder: Path) -> bool:
    """Whether a folder is in the Hugging Face format; one that holds no model is refused."""
    if is_checkpoint(folder):
        return False
    if not folder.is_dir():
        raise ValueError(f"{folder} {'is a file, and a model is a folder' if folder.exists() else 'does not exist'}")
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} is not a model folder: it has no {CONFIG}")
    config = read_json(folder / CONFIG)
    if not config:
        raise ValueError(f"{folder / CONFIG} is empty: it has neither Hugging Face's model_type nor fields of phasor")
    if "model_type" not in config and any(name in config for name in HF_FIELDS):
        raise ValueError(
            f"{folder / CONFIG} has no model_type, by which a Hugging Face configuration names its family "
            "(phasor families lists them)"
        )
    return "model_type" in config


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause garbage collection: loading makes no garbage, and a scan takes as long as loading a small model."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

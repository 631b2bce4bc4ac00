"""Model folders in and out, whatever family they are of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from phasor.checkpoints.folder import CONFIG, read_json, replaced
from phasor.checkpoints.hf import load_hf, read_hf_config, resolved, save_hf
from phasor.checkpoints.native import load_native, read_native_config, save_native
from phasor.checkpoints.swap import swap_positions
from phasor.checkpoints.tensors import Progress
from phasor.config import ModelConfig
from phasor.config.extensions import Extension
from phasor.config.positions import PositionConfig
from phasor.config.schema import shown, unknown
from phasor.model import Transformer

FORMATS = {"phasor": save_native, "hf": save_hf}


def save(model: Transformer, folder: str | Path, format: str = "phasor", *, progress: Progress | None = None) -> None:
    """Write a model's folder; one that is there already is replaced whole, or left as it was if anything fails.

    The format "hf" writes what `transformers` loads, as a family that computes the same; where there is none, the
    error says what keeps it from being one.

    >>> import tempfile
    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)).eval()
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder, format="hf")
    ...     torch.equal(load(folder)(tokens), model(tokens))
    True
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    with replaced(folder) as staged:
        FORMATS[format](model, staged, progress)


def load(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    position: PositionConfig | str | Mapping[str, Any] | None = None,
    extension: Extension | str | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Transformer:
    """Read a model folder, phasor's own or a Hugging Face one: the model in evaluation mode, in the file's type.

    `dtype` asks for another type, `position` and `extension` for other positions than it was saved with
    (`extension="none"` for none); weights stay where they still mean something, and `model.fresh` lists what is new.

    >>> import tempfile
    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder)
    ...     load(folder, dtype=torch.bfloat16).tokens.weight.dtype
    torch.bfloat16
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point type such as torch.bfloat16, not {shown(dtype)}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {device!s} cannot be used: {str(error).splitlines()[0]}") from None
    folder = resolved(folder)
    model = (load_hf if is_hf(folder) else load_native)(folder, device, dtype, progress)
    if position is None and extension is None:
        return model
    return swap_positions(model, position, extension)


def read_config(folder: str | Path) -> ModelConfig:
    """The model configuration of a folder, whatever family it is of."""
    folder = resolved(folder)
    return read_hf_config(folder) if is_hf(folder) else read_native_config(folder)


def is_hf(folder: Path) -> bool:
    """Whether a folder is a Hugging Face one."""
    return "model_type" in read_json(folder / CONFIG)

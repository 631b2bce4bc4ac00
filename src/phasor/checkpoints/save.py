"""Save a model to a folder: phasor's own format, or what transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasor.checkpoints.folder import model_folder
from phasor.checkpoints.hf import save_hf
from phasor.checkpoints.native import save_native
from phasor.checkpoints.tensors import Progress
from phasor.config.schema import name_some, quote, unknown
from phasor.quantization import has_quantized_weights, quantize_like
from phasor.transformer import Transformer

FORMATS = {"phasor": save_native, "hf": save_hf}


def save(model: Transformer, folder: str | Path, format: str = "phasor", *, progress: Progress | None = None) -> None:
    """Write a model folder atomically: an existing one is replaced as a whole, or left as it was if anything fails.

    Only a folder that phasor wrote is replaced, or the one that the model was loaded from.

    The format "hf" writes what `transformers` loads, as a family that computes the same; where there is none, the
    error says which part of the model no family has. Quantized weights are saved as they are, in the format "phasor".

    >>> import tempfile, torch
    >>> from phasor import load, preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)).eval()
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder, format="hf")
    ...     torch.equal(load(folder)(tokens), model(tokens))
    True
    """
    if not isinstance(format, str) or format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if not isinstance(model, Transformer):
        raise ValueError(f"only a phasor.Transformer can be saved, not {quote(model)}")
    check_quantization(model, format)
    with model_folder(folder, None if model.origin is None else model.origin.folder).replace() as staged:
        FORMATS[format](model, staged, progress)


def check_quantization(model: Transformer, format: str) -> None:
    """Refuse quantized weights that cannot be written, or could not be loaded again.

    >>> from phasor import preset, quantize
    >>> small = quantize(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)))
    >>> check_quantization(small, "phasor")
    """
    if not has_quantized_weights(model):
        return
    if format != "phasor":
        raise ValueError(f"quantized weights are saved in the format phasor, not {format}: save the original model")
    with torch.device("meta"):
        expected = quantize_like(Transformer(model.config), model).state_dict()
    found = model.state_dict()
    other = [name for name in expected | found if layout(expected.get(name)) != layout(found.get(name))]
    if other:
        raise ValueError(
            f"a quantized model with parts of its own cannot be saved: {name_some(other)}; save the original model"
        )


def layout(x: Tensor | None) -> tuple[Any, ...]:
    """The shape of a tensor, and its dtype where that is an integer one."""
    return () if x is None else (x.shape, None if x.is_floating_point() else x.dtype)

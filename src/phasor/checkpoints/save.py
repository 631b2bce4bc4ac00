"""Save a model to a folder: phasor's own format, or what transformers loads."""

from __future__ import annotations

from pathlib import Path

from phasor.checkpoints.folder import replacing_folder
from phasor.checkpoints.hf import save_hf
from phasor.checkpoints.native import save_native
from phasor.checkpoints.tensors import Progress
from phasor.config.schema import quote, unknown
from phasor.quantization import has_int8_weights
from phasor.transformer import Transformer

FORMATS = {"phasor": save_native, "hf": save_hf}


def save(model: Transformer, folder: str | Path, format: str = "phasor", *, progress: Progress | None = None) -> None:
    """Write a model folder atomically: an existing one is replaced as a whole, or left as it was if anything fails.

    Only a folder that phasor wrote is replaced, or the one that the model was loaded from.

    The format "hf" writes what `transformers` loads, as a family that computes the same; where there is none, the
    error says which part of the model no family has.

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
    if has_int8_weights(model):
        raise ValueError(
            "a model with int8 weights cannot be saved: save the original model, and quantize it after loading"
        )
    with replacing_folder(folder, None if model.origin is None else model.origin.folder) as staged:
        FORMATS[format](model, staged, progress)

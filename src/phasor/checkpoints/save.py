"""Save a model to a folder: phasor's own format, or what transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from phasor.checkpoints.folder import model_folder
from phasor.checkpoints.hf import save_hf
from phasor.checkpoints.native import find_misfits, save_native
from phasor.checkpoints.tensors import TYPES
from phasor.config.progress import Progress
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
    check_savable(model, format)
    with model_folder(folder, None if model.origin is None else model.origin.folder).replace() as staged:
        FORMATS[format](model, staged, progress)


def check_savable(model: Transformer, format: str) -> None:
    """Refuse weights that cannot be written in a format, or could not be loaded again.

    >>> from phasor import preset, quantize
    >>> small = quantize(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)))
    >>> check_savable(small, "phasor")
    """
    is_quantized = has_quantized_weights(model)
    if is_quantized and format != "phasor":
        raise ValueError(f"quantized weights are saved in the format phasor, not {format}: save the original model")
    with torch.device("meta"):
        like = Transformer(model.config)
        expected = (quantize_like(like, model) if is_quantized else like).state_dict()
    found, buffers = model.state_dict(), dict(model.named_buffers())
    if empty := [name for name, x in found.items() if x.is_meta]:
        raise ValueError(f"a model on the meta device has no weights to save: {name_some(empty, 5)}")
    wrong = find_misfits(shapes(expected), shapes(found))
    wrong += [
        f"{name} is {x.dtype}, not {expected[name].dtype}"
        for name, x in found.items()
        if name in buffers and name in expected and x.dtype != expected[name].dtype
    ]
    if wrong:
        raise ValueError(
            "a model with other tensors than its configuration's cannot be saved: "
            f"{name_some(wrong, 5, separator='; ')}"
        )
    dtypes = {x.dtype: name for name, x in found.items() if name not in buffers}
    if len(dtypes) > 1 or not dtypes.keys() <= {*TYPES.values()}:
        given = " and ".join(f"{dtype} ({name})" for dtype, name in dtypes.items())
        known = ", ".join(map(str, TYPES.values()))
        raise ValueError(
            f"weights are saved in one dtype, one of {known}, not {given}: convert the model with model.to(dtype)"
        )


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in tensors.items()}

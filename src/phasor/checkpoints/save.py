"""Save a model to a folder: phasor's own format, or what transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from phasor.adapters import Adapter, BaseModel
from phasor.checkpoints.adapter_folder import write_adapter
from phasor.checkpoints.folder import CONFIG, adapter_folder, model_folder
from phasor.checkpoints.hf import save_hf
from phasor.checkpoints.native import find_misfits, save_native
from phasor.checkpoints.peft import write_peft
from phasor.checkpoints.tensors import TYPES, fingerprint_weights
from phasor.config.schema import name_some, quote, unknown
from phasor.progress import Progress
from phasor.quantization import has_quantized_weights, quantize_like
from phasor.transformer import Transformer

FORMATS = {"phasor": save_native, "hf": save_hf}
ADAPTER_FORMATS = {"phasor": write_adapter, "peft": write_peft}


def save(
    model: Transformer,
    folder: str | Path,
    format: str = "phasor",
    *,
    adapter: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a model folder atomically: an existing one is replaced as a whole, or left as it was if anything fails.

    Only a folder that phasor wrote is replaced, or the one that the model was loaded from.

    The format "hf" writes what `transformers` loads, as a family that computes the same; where there is none, the
    error says which part of the model no family has. Quantized weights are saved as they are, in the format "phasor".

    Of a model with adapters the adapter is saved, without the base: by its name where there are several, in the format
    "phasor", which names the base by its folder and the hash of its weights, or in "peft". `phasor.merge` makes a whole
    model of both.

    >>> import tempfile, torch
    >>> from phasor import load, preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)).eval()
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder, format="hf")
    ...     torch.equal(load(folder)(tokens), model(tokens))
    True
    """
    if not isinstance(format, str) or format not in FORMATS | ADAPTER_FORMATS:
        raise unknown("format", format, FORMATS | ADAPTER_FORMATS)
    if not isinstance(model, Transformer):
        raise ValueError(f"only a phasor.Transformer can be saved, not {quote(model)}")
    if model.adapters or adapter is not None:
        save_adapter(model, folder, format, adapter)
        return
    check_savable(model, format)
    with model_folder(folder, None if model.origin is None else model.origin.folder).replace() as staged:
        FORMATS[format](model, staged, progress)


def save_adapter(model: Transformer, folder: str | Path, format: str, name: str | None = None) -> None:
    """Write one of a model's adapters to a folder, which is replaced if it holds an adapter that phasor wrote."""
    if name is None and len(model.adapters) > 1:
        raise ValueError(f"the model has the adapters {', '.join(model.adapters)}: say which to save (adapter)")
    chosen = next(iter(model.adapters), "") if name is None else name
    if chosen not in model.adapters:
        raise unknown("adapter", chosen, model.adapters)
    if format not in ADAPTER_FORMATS:
        raise ValueError(
            f"adapters are saved in the format {' or '.join(ADAPTER_FORMATS)}: merge them to save {format!r}"
        )
    name_base(model, chosen)
    with adapter_folder(folder).replace() as staged:
        ADAPTER_FORMATS[format](model, staged, chosen)


def name_base(model: Transformer, name: str) -> None:
    """Note what the base of an adapter is, where that is not known yet: the folder that the model was loaded from."""
    adapter: Adapter = model.adapters[name]
    if adapter.base is None and model.origin is not None and (model.origin.folder / CONFIG).is_file():
        folder = model.origin.folder
        adapter.base = BaseModel(folder=str(folder), sha256=fingerprint_weights(folder))


def check_savable(model: Transformer, format: str) -> None:
    """Refuse weights that cannot be written in a format, or could not be loaded again.

    >>> from phasor import preset, quantize
    >>> small = quantize(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)))
    >>> check_savable(small, "phasor")
    """
    if format not in FORMATS:
        raise ValueError(f"the format {format!r} is for adapters, and this model has none")
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

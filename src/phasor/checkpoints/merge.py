"""Merge adapters into the weights of their base, as a whole model in the base's format."""

from __future__ import annotations

from pathlib import Path

from phasor.adapters import merge_adapters
from phasor.checkpoints.folder import model_folder
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.load import is_hf, load
from phasor.checkpoints.save import FORMATS, check_savable
from phasor.checkpoints.stored_adapters import Adapters
from phasor.config.text_files import path_of
from phasor.progress import Progress


def merge(
    base: str | Path,
    adapter: Adapters,
    out: str | Path,
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write the model that a base is with its adapter, or with several, as `load` takes them: its weights and all.

    It is in the format and the dtype of the base, which does not change. A tied head becomes a separate matrix where an
    adapter changes it, or changes the token embedding alone.

    >>> import tempfile, torch
    >>> from phasor import LoRAConfig, Transformer, load, preset, save
    >>> from phasor.adapters import add_adapter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50)), f"{folder}/base")
    ...     model = load(f"{folder}/base")
    ...     _ = add_adapter(model, LoRAConfig(rank=4))
    ...     save(model, f"{folder}/adapter")
    ...     merge(f"{folder}/base", f"{folder}/adapter", f"{folder}/merged")
    ...     load(f"{folder}/merged").adapters
    {}
    """
    source = resolve_folder(base)
    destination = path_of(out)
    if destination.resolve() == source.resolve():
        raise ValueError(f"{source} cannot be merged onto itself: name another folder")
    model = load(source, adapter=adapter, verify=verify, progress=progress)
    merge_adapters(model)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(
                f"with the adapter {name} is not finite: its weight or alpha is too large, or it is damaged"
            )
    format = "hf" if is_hf(source) else "phasor"
    check_savable(model, format)
    with model_folder(destination).replace() as staged:
        FORMATS[format](model, staged, None)

"""`open_model`: the model that a command or a function was given, by a folder or as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.load import load
from phasor.checkpoints.runs import CHECKPOINTS, checkpoints, is_run
from phasor.checkpoints.stored_adapters import Adapters
from phasor.config.text_files import path_of
from phasor.device import resolve_device
from phasor.transformer import Transformer

ATTEMPTS = 5  # to read a checkpoint before it is deleted


class LoadingProcesses(Protocol):
    """Processes that load a model together, each of them its shards (`phasor.parallel.processes`)."""

    @property
    def is_first(self) -> bool: ...

    def from_first(self, value: Any) -> Any: ...

    def load(
        self, folder: Path, dtype: torch.dtype | None, part: str | None = None, adapter: Adapters | None = None
    ) -> Transformer: ...


def open_model(
    model: str | Path | Transformer,
    device: torch.device | str = "auto",
    dtype: torch.dtype | None = None,
    *,
    checkpoint: str | int | None = None,
    part: str | None = None,
    weights: str | None = None,
    adapter: Adapters | None = None,
    processes: LoadingProcesses | None = None,
) -> tuple[Transformer, Path | None]:
    """The model of a run, of a checkpoint or of a model folder of any format, and the folder of its weights.

    A run stands for its model, or for its best checkpoint before there is one; `checkpoint` asks for "best", "last" or
    a step. `part`, `weights` and `adapter` are as for `load`. A model that is loaded already is given back; it stays
    where it is unless a device is named. With `processes` the model of a folder is cut over them.

    >>> import tempfile
    >>> from phasor import preset, save
    >>> model = Transformer(preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=50))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder)
    ...     open_model(folder, "cpu")[0].config == open_model(model)[0].config
    True
    """
    if isinstance(model, Transformer):
        if adapter is not None or checkpoint is not None or part is not None or dtype not in (None, model.tokens.dtype):
            raise ValueError(
                "a checkpoint, a part, a dtype and an adapter are for the folder of a model, and not for a model"
            )
        return model if device == "auto" else model.to(resolve_device(device)), None
    run = path_of(model)
    if processes is not None:  # the first one chooses the checkpoint, which may be gone when the others look
        chosen = processes.is_first and is_run(run)
        place = processes.from_first(str(resolve_folder(run, checkpoint)) if chosen else None)
        place = resolve_folder(model, checkpoint) if place is None else Path(place)
        return processes.load(place, dtype, part, adapter), place
    device = resolve_device(device)
    for _ in range(ATTEMPTS):  # a run that is being trained may delete a checkpoint meanwhile
        before = checkpoints(run / CHECKPOINTS)
        try:
            place = resolve_folder(model, checkpoint)
            return load(place, device, dtype, part=part, weights=weights, adapter=adapter), place
        except (OSError, ValueError):
            if checkpoints(run / CHECKPOINTS) == before:
                raise
    raise ValueError(f"the checkpoints of {run} are deleted faster than they can be read")

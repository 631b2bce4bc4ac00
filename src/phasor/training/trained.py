"""What of a model is trained: all of it, what no pattern freezes, or an adapter over a frozen base."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from phasor.adapters import (
    DEFAULT,
    BaseModel,
    adapter_names,
    adapter_weights,
    add_adapter,
    attach,
    initial_magnitudes,
    is_adapter_weight,
    split_rows,
)
from phasor.checkpoints.adapter_folder import parse_adapter
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.runs import VALUES
from phasor.checkpoints.stored_adapters import check_hash, stored_adapter
from phasor.checkpoints.tensors import fingerprint_weights
from phasor.config.recipe import Recipe
from phasor.config.schema import name_some, quote
from phasor.parallel.cuts import check_parts
from phasor.training.state import TrainingState
from phasor.transformer import Transformer


def check_adapter(recipe: Recipe) -> None:
    """Refuse to train on top of an adapter, and to cut a quantized base over the heads of a layer."""
    if recipe.init_from is not None and stored_adapter(resolve_folder(recipe.init_from), verify=False) is not None:
        raise ValueError(
            f"{recipe.init_from} is an adapter: merge it into its base first (phasor merge), and train that"
        )
    if recipe.train.base_weights is not None and recipe.parallel.tensor > 1:
        raise ValueError(
            f"a base in {recipe.train.base_weights} is whole on every process, and not cut over heads: leave "
            "parallel.tensor or train.base_weights out"
        )


def choose_weights(model: Transformer, recipe: Recipe, state: TrainingState | None, *, verify: bool = True) -> None:
    """Let those weights of a model have gradients that a recipe trains, the ones of its adapter among them.

    With `verify` the base of an adapter is compared with the hash in the checkpoint of a run that is resumed.
    """
    if recipe.lora is not None:
        begin_adapter(model, recipe, state, verify=verify)
    frozen = match_names(model, recipe.train.freeze, "TrainConfig.freeze")
    for name, weight in model.named_parameters():
        if name in frozen:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ValueError(f"TrainConfig.freeze leaves nothing to train: {', '.join(recipe.train.freeze)}")


def begin_adapter(model: Transformer, recipe: Recipe, state: TrainingState | None, *, verify: bool) -> None:
    """Add an adapter, fresh or as a checkpoint describes it, and freeze the base but for what is trained whole.

    What is trained is in float32, with a base of any dtype.
    """
    assert recipe.lora is not None
    assert recipe.init_from is not None
    folder = resolve_folder(recipe.init_from)
    if state is None:
        torch.manual_seed(recipe.train.seed)
        adapter = add_adapter(model, recipe.lora, dtype=torch.float32)
        adapter.base = BaseModel(folder=name_base(recipe.init_from, folder), sha256=fingerprint_weights(folder))
    else:
        adapter, _ = parse_adapter(state.values["adapter"], state.folder / VALUES)
        attach(model, adapter, dtype=torch.float32)
        if verify and adapter.base is not None:
            check_hash(adapter.base, folder, f"the run in {state.folder.parent.parent} began")
    whole = match_names(model, recipe.lora.modules_to_save, "LoRAConfig.modules_to_save") | {*model.newly_initialized}
    for name, weight in model.named_parameters():
        weight.requires_grad_(is_adapter_weight(name) or name in whole)
        if name in whole:
            weight.data = weight.data.float()
    adapter.whole = tuple(name for name, _ in model.named_parameters() if name in whole)


def name_base(given: str, folder: Path) -> str:
    """What an adapter calls its base: the name on a hub as it was given, or the path of a folder."""
    return str(folder.resolve()) if Path(given).exists() else given


def match_names(model: Transformer, patterns: Iterable[str], where: str) -> set[str]:
    """The weights whose names match a shell pattern; one that matches none is refused with the nearest names.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=16, num_heads=2, num_layers=1, vocab_size=50))
    >>> sorted(match_names(model, ["*.norms.0.*"], "train.freeze"))
    ['decoder.blocks.0.residual.norms.0.bias', 'decoder.blocks.0.residual.norms.0.weight']
    """
    names = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(f"{where} {quote(pattern)} matches no weight; the nearest names are {name_some(near)}")
        found |= matched
    return found


def saved_names(model: Transformer) -> list[str]:
    """The tensors of a model that a checkpoint holds: all of them, or those of its adapter."""
    state = list(model.state_dict())
    if not model.adapters:
        return state
    held = set(adapter_names(model).values())
    return [name for name in state if name in held]


def with_adapter(
    model: Transformer, recipe: Recipe, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a base one after another, and those of the fresh adapter of a model on the meta device.

    They have the bits of an adapter that is added to a model in memory. The model may be cut before they are read.
    """
    rows = split_rows(model)
    check_parts(model, rows, recipe.parallel.tensor)
    fresh = adapter_weights(model, DEFAULT, rows)

    def read() -> Iterator[tuple[str, Tensor]]:
        torch.manual_seed(recipe.train.seed)
        yield from fresh
        for name, weight in weights:
            yield name, weight
            yield from initial_magnitudes(model, DEFAULT, rows, name, weight)

    return read()

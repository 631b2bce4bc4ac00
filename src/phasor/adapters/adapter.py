"""What an adapter consists of, and the names that its tensors have in a model and in files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from phasor.config.lora import Kind
from phasor.config.schema import Config, check_integer
from phasor.transformer import Transformer

WHOLE = "whole"  # the one part of a layer that was not fused of several
DEFAULT = "default"  # the name of an adapter that is given none


class PartConfig(Config):
    """The update of one part of a layer: its rank, alpha, and number of rows where the layer has others."""

    rank: int
    alpha: float
    rows: int | None = None

    def check(self) -> None:
        check_integer("PartConfig.rank", self.rank)
        if self.rows is not None:
            check_integer("PartConfig.rows", self.rows)


class BaseModel(Config):
    """The model that an adapter is for: its folder as it was given, and the hash of its weights."""

    folder: str
    sha256: str


@dataclass
class Adapter:
    """What an adapter consists of: the parts of each layer, and the names of weights that it has whole.

    Of an adapter that was loaded the latter are in `saved`, and the base's in `originals` while it is in use; one that
    is trained has them in the model.
    """

    kind: Kind
    dropout: float
    layers: dict[str, dict[str, PartConfig]]
    base: BaseModel | None = None
    whole: tuple[str, ...] = ()
    saved: dict[str, Tensor] = field(default_factory=dict)
    originals: dict[str, Tensor] = field(default_factory=dict)
    peft: dict[str, Any] | None = None  # its adapter_config.json, where it was read from PEFT's files


def is_adapter_weight(name: str) -> bool:
    """Whether a tensor of a model belongs to an adapter, by its name.

    >>> is_adapter_weight("tokens.lora.default.whole.A"), is_adapter_weight("tokens.weight")
    (True, False)
    """
    return ".lora." in name


def adapter_names(model: Transformer, name: str = DEFAULT) -> dict[str, str]:
    """The names of an adapter's tensors in a model, by those that its files have: without the adapter's own.

    >>> from phasor import LoRAConfig, add_adapter, preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> _ = add_adapter(model, LoRAConfig(targets=("embedding",)), "mine")
    >>> adapter_names(model, "mine")
    {'tokens.lora.whole.A': 'tokens.lora.mine.whole.A', 'tokens.lora.whole.B': 'tokens.lora.mine.whole.B'}
    """
    middle = f".lora.{name}."
    updates = {key.replace(middle, ".lora."): key for key in model.state_dict() if middle in key}
    return updates | {key: key for key in model.adapters[name].whole}


def adapter_tensors(model: Transformer, name: str) -> dict[str, Tensor]:
    """The tensors of an adapter under the names that its files have."""
    held = dict(model.state_dict()) | model.adapters[name].saved
    return {theirs: held[ours] for theirs, ours in adapter_names(model, name).items()}

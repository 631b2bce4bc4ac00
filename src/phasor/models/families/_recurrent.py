"""Layers with a state among layers of softmax attention, in config.json and in the order of tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from phasor.config import AttentionConfig, ModelConfig
from phasor.config.recurrent import RecurrentAttentionConfig, StateSizes
from phasor.models.entries import Draft, FieldEntry, get_path, unsupported_part
from phasor.models.fields import Fields, json_repr
from phasor.models.layer_types import FULL
from phasor.models.layout import Layout, Piece
from phasor.nn.attention.softmax.config import SoftmaxAttentionConfig

LINEAR = "linear_attention"
OLD_TYPES = {"attention": FULL, "mamba": LINEAR}  # as older files name them


class StateLayers(FieldEntry):
    """`layer_types`, and the sizes of those with a state; stands below all other fields of attention and norms.

    `sizes` are their names of those, ours, and what they are where a file has none.
    """

    type_name: ClassVar[str] = LINEAR  # of a layer with a state

    def __init__(self, kind: type[AttentionConfig], sizes: dict[str, tuple[str, Any]]) -> None:
        self.kind, self.sizes = kind, sizes

    def usual_types(self, f: Fields, layers: int) -> list[str]:
        """The types of layers where a file has no list."""
        return [self.type_name] * layers

    def listed_types(self, f: Fields, name: str, layers: int) -> list[str]:
        """The types of layers."""
        types = f.get(name, self.usual_types(f, layers))
        types = [OLD_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
        if len(types) != layers or not all(kind in (self.type_name, FULL) for kind in types):
            either = f"{self.type_name} or {FULL}"
            raise ValueError(f"{f.file}: {name} must be {layers} times {either}, not {json_repr(types)}")
        return types

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        config = draft.config()
        types = self.listed_types(f, name, config.num_layers)
        sizes = {ours: f.get(theirs, default) for theirs, (ours, default) in self.sizes.items()}
        with_state = self.kind(**sizes | self.more_sizes(f, config, sizes))
        draft.layers["attention"] = [with_state if kind == self.type_name else config.attention for kind in types]

    def more_sizes(self, f: Fields, config: ModelConfig, sizes: dict[str, Any]) -> dict[str, Any]:
        """What follows from other fields."""
        return {"norm_eps": get_path(config, "norm.eps")}

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        attentions = [config.layer(i).attention for i in range(config.num_layers)]
        for attention in attentions:
            if not isinstance(attention, self.kind | SoftmaxAttentionConfig):
                raise unsupported_part(attention)
        types = [self.type_name if attention.keeps_state else FULL for attention in attentions]
        with_state = next((attention.resolve(config) for attention in attentions if attention.keeps_state), None)
        sizes = {theirs: getattr(with_state, ours, default) for theirs, (ours, default) in self.sizes.items()}
        return {name: types} | sizes


@dataclass(frozen=True)
class ByKeyHead(Layout):
    """Some of what attention with a state projects, one after the other, where ours is ordered by key head.

    `makes` says what a key head of ours consists of: its query, its key, and the values, gates `z`, write strengths `b`
    and decays `a` of its heads. `between` are the dimensions of size 1 that theirs has behind the first.
    """

    parts: str
    makes: str
    between: tuple[int, ...] = ()
    sizes: StateSizes | None = None

    def for_layer(self, model: ModelConfig, index: int) -> Layout | None:
        attention = model.layer(index).attention
        assert isinstance(attention, RecurrentAttentionConfig)
        return replace(self, sizes=attention.sizes(model))

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        assert self.sizes is not None
        heads, key_heads, key, value = self.sizes
        shared = heads // key_heads
        widths = {"q": key, "k": key, "v": shared * value, "z": shared * value, "b": shared, "a": shared}
        by_head = ours.unflatten(0, (key_heads, -1)).split([widths[part] for part in self.makes], dim=1)
        views = dict(zip(self.makes, by_head, strict=True))
        return [Piece(views[part], (key_heads * widths[part], *self.between, *ours.shape[1:])) for part in self.parts]

"""The field `layer_types`: which layers attend to a window of tokens, and which to all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from phasor.config import ModelConfig
from phasor.models.entries import Draft, FieldEntry
from phasor.models.fields import Fields, json_repr
from phasor.nn.positions import NoPositionConfig, RotaryConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_type(window: int | None) -> str:
    """The type of a layer with this window."""
    return FULL if window is None else SLIDING


class LayerTypes(FieldEntry):
    """`layer_types`, and the window of the local layers: `default` where the field `window` is null, or else `absent`.

    `is_local` says which layers they are where the file has no list. With a `switch`, windows are off unless
    `use_sliding_window` is true. In an encoder, their window is the width of both sides.
    """

    def __init__(
        self,
        is_local: Callable[[Fields, Draft, int], bool],
        *,
        window: str = "sliding_window",
        default: int | None = None,
        absent: int | None = None,
        switch: bool = False,
    ) -> None:
        self.is_local, self.window, self.switch = is_local, window, switch
        self.default, self.absent = default, absent

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        config, window = draft.config(), None
        if not self.switch or f.get("use_sliding_window", False):
            window = f.get(self.window, self.default if self.window in f.data else self.absent)
        if config.shape == "encoder" and isinstance(window, int):
            window = window // 2 + 1
        listed = self.switch and (window is None or name in f)
        usual = [SLIDING if not listed and self.is_local(f, draft, i) else FULL for i in range(config.num_layers)]
        types = f.get(name, usual)
        if not isinstance(types, list) or len(types) != len(usual) or not all(t in (FULL, SLIDING) for t in types):
            raise ValueError(f"{f.file}: {name} must be {len(usual)} times {FULL} or {SLIDING}, not {json_repr(types)}")
        if SLIDING in types and window is None:
            raise ValueError(f"{f.file}: {name} has {SLIDING}, but there is no {self.window} in use")
        draft.layers["attention.window"] = [window if t == SLIDING else None for t in types]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        windows = [config.layer(i).attention.window for i in range(config.num_layers)]
        fields: dict[str, Any] = {name: [layer_type(window) for window in windows]}
        if self.switch:
            fields["use_sliding_window"] = SLIDING in fields[name]
        window = next((window for window in windows if window is not None), None)
        if window is None:
            return fields
        return fields | {self.window: 2 * (window - 1) if config.shape == "encoder" else window}


class RotaryInWindows(LayerTypes):
    """`layer_types`, below `rope_parameters`: layers with a window are rotary, and the others have no positions.

    In a model whose window is null, all layers are `without_window`.
    """

    def __init__(
        self,
        is_local: Callable[[Fields, Draft, int], bool],
        *,
        absent: int,
        without_window: Literal["none", "rotary"] = "none",
    ) -> None:
        super().__init__(is_local, absent=absent)
        self.all_rotary = without_window == "rotary"

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        super().read(f, name, draft)
        if self.all_rotary and self.window in f.data and self.window not in f:
            return
        rotary, windows = draft["position"], draft.layers["attention.window"]
        draft.layers["position"] = [NoPositionConfig() if window is None else rotary for window in windows]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        fields = super().write(name, config)
        if self.window not in fields and self.all_rotary:
            is_rotary = isinstance(config.layer(0).position, RotaryConfig)
            fields[self.window] = None if is_rotary else config.max_length
        return fields

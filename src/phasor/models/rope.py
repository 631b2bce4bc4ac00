"""Read and write the rotary parameters of config.json.

Newer files have one `rope_parameters` dictionary, perhaps one per layer type; older ones `rope_theta` with
`rope_scaling`, whose key for the kind was `type`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import Draft, FieldEntry, require_kind
from phasor.models.fields import Fields, json_repr
from phasor.models.layer_types import FULL, layer_type
from phasor.nn.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    MultiSectionConfig,
    ProportionalScaling,
    RotaryConfig,
    YaRN,
)
from phasor.nn.positions.rotary.config import Pairing
from phasor.nn.positions.rotary.scaling import RotaryScaling

# Their names for what an extension's fields say.
YARN = {
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


class RopeParameters(FieldEntry):
    """`rope_parameters`: the rotary scheme of all layers; the arguments are those of `read_rotary`."""

    def __init__(
        self,
        base: float = 10000.0,
        partial: float | None = None,
        pairing: Pairing = "half",
        usual: dict[str, Any] | None = None,
    ) -> None:
        self.base, self.partial, self.pairing, self.usual = base, partial, pairing, usual

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        draft["position"] = self.scheme(f, draft, self.base, self.partial)

    def scheme(self, f: Fields, draft: Draft, base: float, partial: float | None) -> RotaryConfig:
        config = draft.config()
        return read_rotary(
            f,
            config.attention.rotated_width(config),
            config.max_length,
            base=base,
            partial=partial,
            pairing=self.pairing,
            usual=self.usual,
        )

    def check(self, config: ModelConfig) -> None:
        self.rotary(config)

    def rotary(self, config: ModelConfig) -> RotaryConfig:
        """The rotary scheme of a model, which has to have one."""
        return require_kind(config.position, RotaryConfig)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        whole = {} if self.partial is None else {"partial_rotary_factor": 1.0}
        return {name: whole | write_rotary(self.rotary(config), config)}


class MultiSectionParameters(RopeParameters):
    """`rope_parameters` of time, height and width: with `mrope_section`, by default the sections of `scheme`."""

    def __init__(self, scheme: MultiSectionConfig, base: float = 10000.0, partial: float | None = None) -> None:
        super().__init__(base, partial, scheme.pairing)
        self.sections = scheme

    def scheme(self, f: Fields, draft: Draft, base: float, partial: float | None) -> RotaryConfig:
        rope = f.inside(parameters(f, None, {}), "rope_parameters.")
        given = rope.get("mrope_section", list(self.sections.sections or ()))
        if len(given) != 3 or not all(type(size) is int for size in given):
            raise ValueError(f"{f.file}: mrope_section must be three numbers of pairs, not {json_repr(given)}")
        others = {name: value for name, value in rope.data.items() if not name.startswith("mrope_")}
        if rope.get("rope_type", rope.get("type", None)) == "mrope":  # as older files have it
            others["rope_type"] = "default"
        inner = f.inside(f.data | {"rope_parameters": others, "rope_scaling": None})
        plain = super().scheme(inner, draft, base, partial)
        f.taken |= inner.taken
        sections = tuple(given)
        if self.sections.interleaved:
            rope.expect("mrope_interleaved", True)
            pairs = plain.rotary_dim_of(draft.config().head_dim) // 2
            later = [len(range(axis, min(3 * given[axis], pairs), 3)) for axis in (1, 2)]  # no more than there are
            sections = (pairs - sum(later), *later)
        return self.sections.replace(
            sections=sections, base=plain.base, rotary_dim=plain.rotary_dim, extension=plain.extension
        )

    def check(self, config: ModelConfig) -> None:
        require_kind(config.position, MultiSectionConfig)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        position = require_kind(config.position, MultiSectionConfig)
        sections: dict[str, Any] = {"mrope_section": list(position.with_defaults(config.head_dim).sections or ())}
        if position.interleaved:
            sections["mrope_interleaved"] = True
        return {name: super().write(name, config)[name] | sections}


class RopeParametersByLayer(FieldEntry):
    """`rope_parameters` with a rotary scheme for each layer type; stands below the entry for `layer_types`.

    `bases` are the fields of older files with the base of a layer type, None where there are none, and their defaults;
    `rope_scaling` of those files goes into the `scaled` types. `usual` are the parameters where a file has none.
    """

    def __init__(
        self,
        bases: dict[str, tuple[str | None, float]],
        scaled: Iterable[str] = (),
        usual: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.bases, self.scaled, self.usual = bases, scaled, usual or dict.fromkeys(bases)

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        config, schemes = draft.build(), {}
        layers = [config.layer(i) for i in range(config.num_layers)]
        widths = {layer_type(layer.attention.window): layer.attention.rotated_width(config) for layer in layers}
        given, scaling = f.get(name, self.usual), f.get("rope_scaling", {}) if self.scaled else {}
        if not given.keys() <= self.bases.keys() or not all(isinstance(own, dict | None) for own in given.values()):
            raise ValueError(f"{f.file}: {name} must have {' and '.join(self.bases)}, not {json_repr(given)}")
        for kind, (field, default) in self.bases.items():
            own = (given.get(kind) or {"rope_type": "default"}) | (scaling if kind in self.scaled else {})
            base = default if field is None else f.get(field, default)
            width = widths.get(kind, config.head_dim)
            schemes[kind] = read_rotary(f.inside({name: own}), width, config.max_length, base=base)
        draft["position"] = schemes[FULL]
        draft.layers["position"] = [schemes[layer_type(window)] for window in draft.layers["attention.window"]]

    def check(self, config: ModelConfig) -> None:
        require_kind(config.position, RotaryConfig)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        layers = [config.layer(i) for i in range(config.num_layers)]
        schemes = {FULL: write_rotary(require_kind(config.position, RotaryConfig), config)}
        for position, attention, _ in layers:
            own = write_rotary(require_kind(position, RotaryConfig), config.with_heads_of(attention))
            schemes[layer_type(attention.window)] = own
        return {name: schemes}


def read_rotary(
    f: Fields,
    head_dim: int,
    max_length: int,
    *,
    base: float = 10000.0,
    pairing: Pairing = "half",
    partial: float | None = None,
    usual: dict[str, Any] | None = None,
    layer_type: str | None = None,
) -> RotaryConfig:
    """The rotary scheme a file asks for; `base` and `partial` are the family's own defaults.

    A family without `partial` rotates whole heads; `usual` are its parameters where a file has none.
    """
    rope = f.inside(parameters(f, layer_type, usual or {}), "rope_parameters.")
    base = rope.get("rope_theta", f.get("rope_theta", base))
    share = rope.get("partial_rotary_factor", f.get("partial_rotary_factor", 1.0 if partial is None else partial))
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.get("type", None)
    extension = read_extension(rope, kind, max_length, f.get("original_max_position_embeddings", None))
    if isinstance(extension, ProportionalScaling):
        extension, share = extension.replace(fraction=share), 1.0
    elif partial is None and share != 1:
        raise ValueError(
            f"{f.file}: partial_rotary_factor = {json_repr(share)} is not this family's: it rotates whole heads"
        )
    rope.finish()
    dim = int(head_dim * share)
    return RotaryConfig(base=base, pairing=pairing, rotary_dim=None if dim == head_dim else dim, extension=extension)


def parameters(f: Fields, layer_type: str | None, usual: dict[str, Any]) -> dict[str, Any]:
    """The file's rotary parameters; those of one layer type where layer types differ."""
    found = f.get("rope_scaling", None) or f.get("rope_parameters", usual)
    f.get("rope_parameters", None)
    if not isinstance(found, dict):
        raise ValueError(f"{f.file}: rope_parameters must be an object, not {json_repr(found)}")
    nested = {name: value for name, value in found.items() if isinstance(value, dict)}
    if nested and layer_type is None and len({str(value) for value in nested.values()}) > 1:
        raise ValueError(
            f"{f.file}: rope_parameters differ by layer type ({', '.join(nested)}), which phasor "
            "does not know of this family"
        )
    if nested:
        return nested.get(layer_type or next(iter(nested))) or {}
    return found


def read_extension(rope: Fields, kind: str, max_length: int, original: int | None) -> RotaryScaling | None:
    """An extension by their name for it."""

    def original_length() -> int:
        inside = rope.get("original_max_position_embeddings", None)
        length = next(n for n in (original, inside, max_length) if n is not None)
        if type(length) is not int or length < 1:
            raise ValueError(
                f"{rope.file}: original_max_position_embeddings must be an integer of at least 1, "
                f"not {json_repr(length)}"
            )
        return length

    def factor(length: int) -> float:
        given = rope.get("factor", None)
        return max_length / length if given is None else given

    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=rope.get("factor"))
    if kind == "dynamic":
        rope.get("original_max_position_embeddings", None)  # not what their formula reads
        return DynamicNTKScaling(factor=rope.get("factor"), original_length=max_length)
    if kind == "yarn":
        length = original_length()
        given = {ours: rope.get(theirs, None) for ours, theirs in YARN.items()}
        given["truncate"] = rope.flag("truncate", True)
        given = {name: value for name, value in given.items() if value is not None}
        return YaRN(factor=factor(length), original_length=length, **given)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return Llama3Scaling(original_length=original_length(), **{name: rope.get(name) for name in names})
    if kind in ("longrope", "su"):
        length = original_length()
        return LongRoPE(
            short_factor=rope.get("short_factor"),
            long_factor=rope.get("long_factor"),
            original_length=length,
            factor=factor(length),
            attention=rope.get("attention_factor", None),
        )
    if kind == "proportional":
        return ProportionalScaling(fraction=1.0, factor=rope.get("factor", 1.0))
    known = "default, linear, dynamic, yarn, llama3, longrope, proportional"
    raise ValueError(f"{rope.file}: phasor does not know rope_type = {json_repr(kind)}; known: {known}")


def write_rotary(position: RotaryConfig, model: ModelConfig) -> dict[str, Any]:
    """`rope_parameters` for a scheme; raises where the field has no name for it."""
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": position.base}
    most = model.rotated_width(position)
    width = position.rotary_dim_of(most)
    if width != most:
        fields["partial_rotary_factor"] = partial_rotary_factor(width, most)
    extension = position.extension
    if isinstance(extension, LinearScaling):
        fields |= {"rope_type": "linear", "factor": extension.factor}
    elif isinstance(extension, DynamicNTKScaling):
        if extension.original_length != model.max_length:
            raise ValueError(
                "transformers' dynamic NTK starts at the model's max_length, which must be original_length"
            )
        fields |= {"rope_type": "dynamic", "factor": extension.factor}
    elif isinstance(extension, YaRN):
        default = YaRN(factor=1.0, original_length=1)
        changed = {
            YARN[name]: getattr(extension, name) for name in YARN if getattr(extension, name) != getattr(default, name)
        }
        fields |= {"rope_type": "yarn", "factor": extension.factor, **changed}
        fields["original_max_position_embeddings"] = extension.original_length
    elif isinstance(extension, Llama3Scaling):
        fields |= {"rope_type": "llama3", "original_max_position_embeddings": extension.original_length}
        fields |= {name: getattr(extension, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    elif isinstance(extension, LongRoPE):
        fields["rope_type"] = "longrope"
        fields |= {"short_factor": list(extension.short_factor), "long_factor": list(extension.long_factor)}
        fields["original_max_position_embeddings"] = extension.original_length
        if extension.factor != model.max_length / extension.original_length:  # what its absence means
            fields["factor"] = extension.factor
        if extension.attention is not None:
            fields["attention_factor"] = extension.attention
    elif isinstance(extension, ProportionalScaling):
        fields |= {"rope_type": "proportional", "partial_rotary_factor": extension.fraction}
        if extension.factor != 1:  # what its absence means
            fields["factor"] = extension.factor
    elif extension is not None:
        raise ValueError(f"transformers has no name for the extension {extension.kind!r}")
    return fields


def partial_rotary_factor(width: int, head_dim: int) -> float:
    """The rotated share of a head, as a number that gives the same rotary dimension back.

    >>> [w for w in range(2, 129, 2) if int(128 * partial_rotary_factor(w, 128)) != w]
    []
    """
    share = width / head_dim
    return share if int(head_dim * share) == width else math.nextafter(share, 1.0)

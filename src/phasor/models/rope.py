"""Read and write the rotary parameters of config.json.

Newer files have one `rope_parameters` dictionary, perhaps one per layer type; older ones `rope_theta` with
`rope_scaling`, whose key for the kind was `type`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

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

ORIGINAL = "original_max_position_embeddings"
THEIRS = {"original_length": ORIGINAL, "attention": "attention_factor", "fraction": "partial_rotary_factor"}


class RopeType(NamedTuple):
    """An extension under its name in `rope_type`: the fields that are always written, and those that have defaults.

    Fields have the same names, or those of `THEIRS`. A file may leave out a factor that is the ratio of the lengths,
    where `factor_by_length`.
    """

    extension: type[RotaryScaling]
    written: tuple[str, ...]
    optional: tuple[str, ...] = ()
    factor_by_length: bool = False


RAMP = ("beta_fast", "beta_slow", "truncate", "attention", "mscale", "mscale_all_dim")
LONG = RopeType(
    LongRoPE, ("short_factor", "long_factor", "original_length"), ("factor", "attention"), factor_by_length=True
)
ROPE_TYPES = {
    "linear": RopeType(LinearScaling, ("factor",)),
    "dynamic": RopeType(DynamicNTKScaling, ("factor",)),
    "yarn": RopeType(YaRN, ("factor", "original_length"), RAMP, factor_by_length=True),
    "llama3": RopeType(Llama3Scaling, ("factor", "original_length", "low_freq_factor", "high_freq_factor")),
    "longrope": LONG,
    "su": LONG,
    "proportional": RopeType(ProportionalScaling, ("fraction",), ("factor",)),
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
    extension = read_extension(rope, kind, max_length, f.get(ORIGINAL, None), share)
    if isinstance(extension, ProportionalScaling):
        share = 1.0
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


def read_extension(
    rope: Fields, kind: str, max_length: int, original: int | None, fraction: float
) -> RotaryScaling | None:
    """An extension by their name for it; `original` and `fraction` are those of the whole file."""
    if kind == "default":
        return None
    if kind not in ROPE_TYPES:
        known = ", ".join(["default", *(name for name in ROPE_TYPES if name != "su")])
        raise ValueError(f"{rope.file}: phasor does not know rope_type = {json_repr(kind)}; known: {known}")
    rope_type = ROPE_TYPES[kind]
    found: dict[str, Any] = {}
    if kind == "dynamic":
        rope.get(ORIGINAL, None)  # not what their formula reads
        found["original_length"] = max_length
    elif "original_length" in rope_type.written:
        found["original_length"] = length = read_original_length(rope, original, max_length)
        if rope_type.factor_by_length:
            factor = rope.get("factor", None)
            found["factor"] = max_length / length if factor is None else factor
    if "fraction" in rope_type.written:
        found["fraction"] = fraction
    if "truncate" in rope_type.optional:
        found["truncate"] = rope.flag("truncate", True)
    found |= {name: rope.get(THEIRS.get(name, name)) for name in rope_type.written if name not in found}
    others = {name: rope.get(THEIRS.get(name, name), None) for name in rope_type.optional if name not in found}
    return rope_type.extension(**found, **{name: value for name, value in others.items() if value is not None})


def read_original_length(rope: Fields, original: int | None, max_length: int) -> int:
    """The length before the extension: by the file, by its rotary parameters, or else the model's."""
    length = next(n for n in (original, rope.get(ORIGINAL, None), max_length) if n is not None)
    if type(length) is not int or length < 1:
        raise ValueError(f"{rope.file}: {ORIGINAL} must be an integer of at least 1, not {json_repr(length)}")
    return length


def write_rotary(position: RotaryConfig, model: ModelConfig) -> dict[str, Any]:
    """`rope_parameters` for a scheme; raises where the field has no name for it."""
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": position.base}
    most = model.rotated_width(position)
    width = position.rotary_dim_of(most)
    if width != most:
        fields["partial_rotary_factor"] = partial_rotary_factor(width, most)
    return fields if position.extension is None else fields | write_extension(position.extension, model.max_length)


def write_extension(extension: RotaryScaling, max_length: int) -> dict[str, Any]:
    """The fields of an extension, by their names; those that say what their absence means are left out."""
    kind, rope_type = next((item for item in ROPE_TYPES.items() if item[1].extension is type(extension)), (None, None))
    if rope_type is None:
        raise ValueError(f"transformers has no name for the extension {extension.kind!r}")
    given = extension.to_dict()
    if kind == "dynamic" and given["original_length"] != max_length:
        raise ValueError("transformers' dynamic NTK starts at the model's max_length, which must be original_length")
    usual = {field.name: field.default for field in dataclasses.fields(extension)}
    if rope_type.factor_by_length:
        usual["factor"] = max_length / given["original_length"]
    kept = [*rope_type.written, *(name for name in rope_type.optional if given[name] != usual[name])]
    return {"rope_type": kind, **{THEIRS.get(name, name): given[name] for name in kept}}


def partial_rotary_factor(width: int, head_dim: int) -> float:
    """The rotated share of a head, as a number that gives the same rotary dimension back.

    >>> [w for w in range(2, 129, 2) if int(128 * partial_rotary_factor(w, 128)) != w]
    []
    """
    share = width / head_dim
    return share if int(head_dim * share) == width else math.nextafter(share, 1.0)

"""What a model's positions do, pair by pair; and how two configurations differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasor.config import Extension, ModelConfig, PositionConfig
from phasor.config.positions import RotaryPair
from phasor.config.schema import check_integer, differences, json_value, quote, summary
from phasor.config.text_files import from_json, read_text
from phasor.models.extensions import trained_length
from phasor.models.presets import preset


@dataclass(frozen=True)
class SchemeReport:
    """One position scheme of a model: what it is, which layers it serves, and its pairs if it rotates."""

    kind: str
    line: str
    acts_on: tuple[str, ...]
    layers: tuple[int, ...]
    shift_invariant: bool
    depends_on_length: bool
    max_positions: int | None
    settings: dict[str, Any]
    trained_length: int
    original_length: int  # before the extension
    length: int
    attention_factor: float
    pairs: tuple[RotaryPair, ...]


@dataclass(frozen=True)
class Explanation:
    """The position schemes of one model; `differences` lists what another model has otherwise."""

    name: str
    schemes: tuple[SchemeReport, ...]
    other: Explanation | None = None
    differences: tuple[tuple[str, Any, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON; infinities become null."""
        return json_value(self)


def explain(
    config: ModelConfig | str | Path,
    other: ModelConfig | str | Path | None = None,
    *,
    extension: Extension | None = None,
    length: int | None = None,
    part: str | None = None,
) -> Explanation:
    """Explain the positions of a model, or of two and their difference.

    A model is a `ModelConfig`, "preset:NAME", the path of a configuration file or of a folder that holds one, or a
    name on the Hugging Face hub. `extension` replaces the rotary extension of the first. `length` is the sequence
    length to explain for, where it matters; by default the maximum length of the model. `part` is the part of a
    multimodal folder ("text").

    >>> rotary = explain("preset:llama-3.1").schemes[0]
    >>> rotary.attention_factor, len(rotary.pairs), rotary.pairs[0].effect, rotary.pairs[63].effect
    (1.0, 64, 'kept', 'slowed 8 times')
    >>> explain("preset:llama-2", "preset:llama-3.1").differences[0]
    ('vocab_size', 32000, 128256)
    """
    name, first = resolve_model(config, part)
    if extension is not None:
        first = first.with_extension(extension)
        name = f"{name} with {extension.kind}"
    if length is not None:
        check_integer("length", length)
    if other is None:
        return Explanation(name, scheme_reports(first, length))
    other_name, second = resolve_model(other)
    return Explanation(
        name,
        scheme_reports(first, length),
        Explanation(other_name, scheme_reports(second, length)),
        tuple(differences(first.to_dict(), second.to_dict())),
    )


def resolve_model(config: ModelConfig | str | Path, part: str | None = None) -> tuple[str, ModelConfig]:
    """A model's name and configuration, from a configuration, a preset's name or a file, or of a part of a folder."""
    if part is not None:
        if isinstance(config, ModelConfig) or str(config).startswith("preset:"):
            raise ValueError("a part is that of a multimodal folder, and not of a configuration or preset")
        from phasor.checkpoints.load import read_config

        return str(config), read_config(config, part)
    if isinstance(config, ModelConfig):
        return f"{config.shape}, {config.num_layers} layers", config
    if isinstance(config, Path):
        config = str(config)
    if not isinstance(config, str):
        raise ValueError(f"a model is a ModelConfig, preset:NAME or a path, not {quote(config)}")
    if config.startswith("preset:"):
        return config.removeprefix("preset:"), preset(config.removeprefix("preset:"))
    path = Path(config)
    if any((path / name).is_file() for name in ("run.json", "state.json")):  # a run, or one of its checkpoints
        from phasor.checkpoints.load import read_config

        return str(path), read_config(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        from phasor.checkpoints.hub import resolve_folder
        from phasor.checkpoints.load import read_config

        if (place := resolve_folder(path, files="config")) != path:
            return str(path), read_config(place)
        what = "neither a configuration file nor a folder with config.json; a preset is named preset:NAME"
        raise ValueError(f"{config} is {what}")
    try:
        text = read_text(file)
        if path.is_dir() and ('"model_type"' in text or not from_json(text, file)):
            from phasor.checkpoints.load import read_config  # loads torch, which phasor's own files do not need

            return str(path), read_config(path)
        return str(path), ModelConfig.from_json(text)
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: {error}".replace(f"{file}: {file}", str(file))) from None


def scheme_reports(config: ModelConfig, length: int | None) -> tuple[SchemeReport, ...]:
    """The reports of all position schemes that a model uses."""
    used: dict[PositionConfig, list[int]] = {}
    if "input" in config.position.acts_on:
        used[config.input_position] = []
    for index in range(config.num_layers):
        used.setdefault(config.layer(index).position, []).append(index)
    if len(used) > 1:
        used = {p: layers for p, layers in used.items() if p.acts_on or config.layers}
    return tuple(scheme_report(config, position, tuple(layers), length) for position, layers in used.items())


def scheme_report(
    config: ModelConfig, position: PositionConfig, layers: tuple[int, ...], length: int | None
) -> SchemeReport:
    """The report of one position scheme and the layers that use it."""
    tokens = config.max_length if length is None else length
    return SchemeReport(
        kind=position.kind,
        line=summary(type(position)),
        acts_on=position.acts_on,
        layers=layers,
        shift_invariant=position.shift_invariant,
        depends_on_length=position.depends_on_length,
        max_positions=position.max_positions,
        settings={k: v for k, v in position.to_dict().items() if k != "kind"},
        trained_length=trained_length(config, position),
        original_length=config.original_length(position),
        length=tokens,
        attention_factor=math.prod(part.attention_factor(tokens) for part in position.parts),
        pairs=tuple(pair for part in position.parts for pair in part.rotary_pairs(config, tokens)),
    )


def format_layers(layers: tuple[int, ...]) -> str:
    """Layer numbers as ranges.

    >>> format_layers((0, 1, 2, 3, 5))
    'layers 0-3, 5'
    """
    if not layers:
        return "once, before the first layer"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "layers " + ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

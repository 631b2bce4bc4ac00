"""The view "extension": what each method of extending a context does to the pairs of a rotary scheme.

Pairs, wavelengths and attention factors are those of `phasor explain`. Nothing here needs torch but `similarity`, and
`open_config` for the files of Hugging Face families.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from phasor.config import Extension, ModelConfig
from phasor.config.positions import RotaryPair
from phasor.config.schema import Choice, Config, differences, fields, json_value, summary, unknown
from phasor.inspect.explain import SchemeReport, format_layers, scheme_report
from phasor.lab.endpoints import MAX_HEAD_DIM, MAX_POSITION, FieldError, LabRequest, bounded_field, register
from phasor.lab.rotary_model import RotaryModel, read_model_config, rotary_models, rotary_presets, smallest_model
from phasor.models.extensions import NONE, extend_config
from phasor.models.presets import PRESETS
from phasor.nn.positions import RotaryConfig
from phasor.nn.positions.rotary.scaling import RotaryScaling

MODEL, OTHER = "model", "other"  # rows beside those of the methods: the model as it is, and the one it is compared with
FACTOR = 8.0  # how many times further, where the model does not say
POINTS, NEARBY = 120, 16  # of the similarity: distances, and how many of those nearby are averaged
CONFIG_BYTES = 1 << 20  # of a config.json
PLACEHOLDERS: dict[str, dict[str, Any]] = {"proportional": {"fraction": 0.5}}  # for fields without a default
EFFECTS = ("kept", "blended", "slowed", "faster", "still")
TOLERANCE = 1e-9  # shares of a rotation, and ratios, that differ by less are the same number rounded twice


class PresetsRequest(LabRequest):
    """It has no fields."""


class OpenRequest(LabRequest):
    """A preset by its name, or the text of a config.json."""

    preset: str | None = None
    text: str | None = bounded_field(None, 0, CONFIG_BYTES)

    def check(self) -> None:
        super().check()
        if (self.preset is None) == (self.text is None):
            raise FieldError("preset", "give either the name of a preset or the text of a config.json")
        if self.text is not None and len(self.text.encode("utf-8", "surrogatepass")) > CONFIG_BYTES:
            raise FieldError("text", "a config.json may have 1 MB, and this text has more")


class MethodsRequest(LabRequest):
    """A model, how many times further it is to read, the methods, and the fields of each that are not at rest.

    `base`, `head_dim` and `trained_length` stand for the model's own where they are given. `other` is a second model.
    """

    model: RotaryModel = RotaryModel()
    base: float | None = bounded_field(None, 1.0, 1e15)
    head_dim: int | None = bounded_field(None, 2, MAX_HEAD_DIM)
    trained_length: int | None = bounded_field(None, 1, MAX_POSITION)
    factor: float | None = bounded_field(None, 1.0, float(1 << 20))
    methods: tuple[str, ...] = bounded_field((NONE, "linear", "ntk", "yarn"), max_items=16)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    other: RotaryModel | None = None

    def check(self) -> None:
        super().check()
        for method in (*self.methods, *self.fields):
            if method not in method_names():
                raise FieldError("methods", str(unknown("method", method, method_names())))
        for method, given in self.fields.items():
            if not isinstance(given, Mapping):
                raise FieldError(f"fields.{method}", f"the fields of {method} must be an object")


@dataclass(frozen=True)
class Row:
    """A method (or a model as it is): the configuration it leads to, and the layers that rotate."""

    id: str
    config: ModelConfig
    layers: tuple[int, ...]

    @property
    def position(self) -> RotaryConfig:
        return rotary_position(self.config)

    def report(self, length: int) -> SchemeReport:
        """What `phasor explain` says of the scheme for a text of some length."""
        return scheme_report(self.config, self.position, self.layers, length)

    def frequencies(self, length: int) -> list[Decimal]:
        return self.position.frequencies(self.position.rotary_dim_of(self.config.rotated_width(self.position)), length)


def method_names() -> list[str]:
    """The methods that keep rotary positions, by their names.

    >>> method_names()[:3]
    ['none', 'linear', 'ntk']
    """
    return [NONE, *Extension.kinds]


def list_presets(request: PresetsRequest) -> list[dict[str, str]]:
    """The presets with rotary positions, each with a line about it.

    >>> [one["name"] for one in list_presets(PresetsRequest())][:2]
    ['roformer', 'llama-2']
    """
    return [{"name": name, "line": summary(PRESETS[name])} for name in rotary_presets()]


def open_config(request: OpenRequest) -> dict[str, Any]:
    """The rotary schemes of a preset or of a config.json, each as a `RotaryModel` with what is shown of it.

    >>> opened = open_config(OpenRequest(preset="llama-3.1"))["schemes"][0]
    >>> opened["factor"], opened["extension"], opened["layers"]
    (16.0, 'llama3', 'layers 0-31')
    """
    if request.text is None:
        models = rotary_models(RotaryModel(preset=str(request.preset)).config())  # refuses presets without rotary
    else:
        models = read_text(request.text)
    schemes = []
    for model, layers in models:
        kept = {"preset": request.preset} if request.text is None else short_form(model)
        schemes.append({"model": kept, "layers": format_layers(layers), **model_settings(model.config())})
    return {"schemes": schemes}


def read_text(text: str) -> list[tuple[RotaryModel, tuple[int, ...]]]:
    """The rotary models in the text of a config.json; every mistake in it is one of the field `text`."""
    try:
        return rotary_models(read_model_config(text))
    except (ValueError, ArithmeticError) as error:
        raise FieldError("text", str(error)) from error


def short_form(record: Config) -> dict[str, Any]:
    """A record as plain data, fields at their defaults left out: what stands in the URL for an opened file.

    >>> short_form(RotaryModel(position=RotaryConfig(base=1e6), max_length=8192))
    {'position': {'kind': 'rotary', 'base': 1000000.0}, 'max_length': 8192}
    """
    kind = {"kind": record.kind} if isinstance(record, Choice) else {}
    given = {f.name: getattr(record, f.name) for f in fields(type(record)) if getattr(record, f.name) != f.default}
    return kind | {name: short_form(v) if isinstance(v, Config) else v for name, v in given.items()}


def model_settings(config: ModelConfig) -> dict[str, Any]:
    """What is shown of a model: its head, base and lengths, and how many times further its extension reads."""
    position = rotary_position(config)
    original = config.original_length(position)
    return {
        "base": position.base,
        "head_dim": config.head_dim,
        "rotary_dim": position.rotary_dim_of(config.rotated_width(position)),
        "trained_length": original,
        "max_length": config.max_length,
        "factor": max(1.0, config.max_length / original),
        "extension": None if position.extension is None else position.extension.kind,
    }


def rotary_position(config: ModelConfig) -> RotaryConfig:
    position = config.extendable_position()
    if not isinstance(position, RotaryConfig):
        raise ValueError(f"this model has no rotary positions to extend: its positions are {position.kind!r}")
    return position


def one_sentence(function: Callable[..., Any]) -> Callable[..., Any]:
    """Report values beyond the range of floats as a mistake in the request."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ArithmeticError:
            raise ValueError("these settings give frequencies beyond what float64 holds: use smaller numbers") from None

    return run


def chosen_model(request: MethodsRequest) -> tuple[ModelConfig, bool]:
    """The model with the settings of the request, and whether it is still the model as it was opened."""
    config = request.model.config()
    position = rotary_position(config)
    own = model_settings(config)
    given = {name: getattr(request, name) for name in ("base", "head_dim", "trained_length")}
    if all(value is None or value == own[name] for name, value in given.items()):
        return config, True
    wanted = own | {name: value for name, value in given.items() if value is not None}
    whole = wanted["head_dim"] != own["head_dim"]
    plain = position.replace(base=wanted["base"], extension=None, **({"rotary_dim": None} if whole else {}))
    try:
        return smallest_model(plain, wanted["head_dim"], wanted["trained_length"]), False
    except ValueError as error:
        raise FieldError("head_dim" if whole else "base", str(error)) from error


def rows_of(request: MethodsRequest) -> tuple[list[Row], dict[str, Any]]:
    """The rows of a request, and the settings they share."""
    config, as_opened = chosen_model(request)
    settings = model_settings(config)
    trained = settings["trained_length"]
    reach = settings["factor"] if settings["extension"] and settings["factor"] > 1 else FACTOR
    factor = reach if request.factor is None else request.factor
    length = round(trained * factor)
    if length > MAX_POSITION:
        raise FieldError("factor", f"{trained:,} tokens times {factor:g} are more than 2^36, the most that is shown")
    settings |= {"factor": factor, "length": length, "as_opened": as_opened}
    layers = rotary_layers(config)
    rows = [
        Row(method, extend(config, method, length, request.fields.get(method, {})), layers)
        for method in request.methods
    ]
    if (as_opened and settings["extension"]) or request.other is not None:
        rows.append(Row(MODEL, config, layers))
    if request.other is not None:
        other = request.other.config()
        rows.append(Row(OTHER, other, rotary_layers(other)))
    return rows, settings


def rotary_layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers that use the scheme which an extension changes."""
    position = config.extendable_position()
    if config.position == position and not config.layers:
        return tuple(range(config.num_layers))
    return tuple(i for i in range(config.num_layers) if config.layer(i).position == position)


def extend(config: ModelConfig, method: str, length: int, given: Mapping[str, Any]) -> ModelConfig:
    """A model extended by a method; a mistake names the field of the method."""
    try:
        extended = extend_config(config, method, length, **PLACEHOLDERS.get(method, {}) | dict(given))
        position = rotary_position(extended)
        position.rotary_dim_of(extended.rotated_width(position))
        return extended
    except ValueError as error:
        match = re.match(r"\w+\.(\w+)", str(error))
        named = f".{match.group(1)}" if match and match.group(1) in given else ""
        raise FieldError(f"fields.{method}{named}", str(error)) from error


@one_sentence
def explain_methods(request: MethodsRequest) -> dict[str, Any]:
    """What each method does to the pairs: the report of `phasor explain`, and the angles that training never saw.

    >>> answer = explain_methods(MethodsRequest())
    >>> [(row["id"], row["counts"]["new"]) for row in answer["rows"]]
    [('none', 18), ('linear', 0), ('ntk', 17), ('yarn', 0)]
    """
    rows, settings = rows_of(request)
    length = settings["length"]
    reports = [row.report(length) for row in rows]
    answer = {**settings, "rows": [plain_row(row, report) for row, report in zip(rows, reports, strict=True)]}
    if request.other is not None:
        model, other = (comparable(report) for report in reports[-2:])
        answer["differences"] = [{"field": f, MODEL: a, OTHER: b} for f, a, b in differences(model, other)]
    return answer


def comparable(report: SchemeReport) -> dict[str, Any]:
    """What two models are compared by, beside their pairs."""
    numbers = {
        "rotated_pairs": len(report.pairs),
        "trained_length": report.original_length,
        "attention_factor": report.attention_factor,
    }
    return {"kind": report.kind} | report.settings | {"extension": report.settings["extension"] or {}} | numbers


def plain_row(row: Row, report: SchemeReport) -> dict[str, Any]:
    """A row as plain data: the report with a list per field of its pairs, their angles, how many are of which kind."""
    extension, pairs = row.position.extension, report.pairs
    full = full_factor(extension, report)
    effects = [effect_of(pair, full) for pair in pairs]
    angles = [pair_angles(pair, report.length) for pair in pairs]
    counts = Counter(effects)
    return {
        "id": row.id,
        "extension": None if extension is None else extension.kind,
        "report": json_value(dataclasses.replace(report, pairs=())),
        "pairs": {
            name: [json_value(getattr(pair, name)) for pair in pairs] for name in RotaryPair.__dataclass_fields__
        },
        "effects": effects,
        "angles": {name: [angle[i] for angle in angles] for i, name in enumerate(("seen", "reached", "new"))},
        "counts": {
            **{effect: counts[effect] for effect in EFFECTS},
            "new": sum(new > 0 for _, _, new in angles),
        },
    }


def full_factor(extension: RotaryScaling | None, report: SchemeReport) -> float:
    """How much slower a pair is that an extension slows as far as it goes."""
    if extension is None:
        return 1.0
    if extension.has_end:
        return float(getattr(extension, "factor", 1.0))
    return max(1.0, report.length / report.original_length)


def pair_angles(pair: RotaryPair, length: int) -> tuple[float, float, float]:
    """The shares of a rotation that a pair went through in training, and goes through now; and what is new of these.

    >>> from phasor.inspect.explain import explain
    >>> [round(share, 3) for share in pair_angles(explain("preset:llama-2").schemes[0].pairs[48], 32768)]
    [0.652, 1.0, 0.348]
    """
    seen = min(1.0, pair.rotations)
    reached = min(1.0, length * pair.extended_frequency / (2 * math.pi))
    new = reached - seen
    return seen, reached, new if new > TOLERANCE else 0.0


def effect_of(pair: RotaryPair, full: float) -> str:
    """kept, blended (slowed in part), slowed (as far as the method goes), faster or still."""
    if math.isinf(pair.slowed):
        return "still"
    if abs(pair.slowed - 1) < TOLERANCE:
        return "kept"
    if pair.slowed < 1:
        return "faster"
    return "slowed" if pair.slowed >= full * (1 - TOLERANCE) else "blended"


@one_sentence
def similarity(request: MethodsRequest) -> dict[str, Any]:
    """The mean cosine of a token with itself by distance, for each method; cosines of exact phases.

    Where distances are many it is the mean over some of those nearby: single ones are noise from the fast pairs.

    >>> answer = similarity(MethodsRequest(methods=("none",)))
    >>> answer["distances"][:3], answer["rows"][0]["similarity"][0]
    ([0, 1, 2], 1.0)
    """
    import torch

    from phasor.nn.positions.phase import cos_sin_of, increments

    rows, settings = rows_of(request)
    groups = nearby_distances(settings["length"])
    sizes = torch.tensor([len(group) for group in groups])
    positions = torch.tensor([distance for group in groups for distance in group])[:, None]
    which = torch.arange(len(groups)).repeat_interleave(sizes)
    found = []
    for row in rows:
        cos, _ = cos_sin_of(positions, torch.tensor(increments(row.frequencies(settings["length"]))), torch.float64)
        sums = torch.zeros(len(groups), dtype=torch.float64).index_add(0, which, cos.mean(-1))
        found.append({"id": row.id, "similarity": (sums / sizes).tolist()})
    shared = {name: settings[name] for name in ("trained_length", "length")}
    return {**shared, "distances": [group[len(group) // 2] for group in groups], "rows": found}


def nearby_distances(length: int) -> list[list[int]]:
    """Groups of neighboring distances from 0 to a length, each a constant factor further, of at most `NEARBY`.

    >>> nearby_distances(6)
    [[0], [1], [2], [3], [4], [5], [6]]
    >>> nearby_distances(1 << 20)[-1][-1] == 1 << 20
    True
    """
    ends = sorted({round(length ** (i / POINTS)) for i in range(POINTS + 1)})
    groups = [[0]]
    for start, end in zip([0, *ends], ends, strict=False):
        count = min(NEARBY, end - start)
        groups.append(sorted({end - (end - start) * i // count for i in range(count)}))
    return groups


register("extension", "presets", PresetsRequest, list_presets)
register("extension", "open", OpenRequest, open_config)
register("extension", "methods", MethodsRequest, explain_methods)
register("extension", "similarity", MethodsRequest, similarity)

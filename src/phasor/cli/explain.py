"""`phasor explain`: what a model's positions do, pair by pair."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from phasor.cli.options import (
    ON_HUB,
    add_checkpoint,
    add_extension_fields,
    add_part,
    choose_weights,
    declare_options,
    extension_classes,
    given_fields,
)
from phasor.cli.output import print_json, show_table, show_text
from phasor.cli.streams import print_text
from phasor.inspect.explain import format_layers

if TYPE_CHECKING:
    from phasor.inspect.explain import Explanation, SchemeReport


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what a model's positions do, pair by pair; given two models, also how they differ."
    parser.add_argument(
        "config",
        help=f"preset:NAME, a configuration file, a model folder, a run, or {ON_HUB}",
    )
    add_checkpoint(parser)
    add_part(parser)
    parser.add_argument("other", nargs="?", help="a second model to compare with")
    options = {
        "--extension KIND": "replace the rotary extension (see: phasor kinds extensions)",
        "--length N": "the sequence length to explain for, where it matters",
        "--audit": "say instead what other engines will make of the rotary settings of a Hugging Face folder, with "
        "reports of it; the exit code is 1 where an error is among the findings",
        "--json": "print JSON",
    }
    declare_options(parser, options)
    add_extension_fields(parser)


def run(given: argparse.Namespace) -> int:
    if given.audit:
        return run_audit(given)
    from phasor.inspect.explain import explain, resolve_model
    from phasor.models.extensions import make_extension

    config = choose_weights(given.config, given.checkpoint)
    fields = given_fields(given, *extension_classes())
    if fields and given.extension is None:
        raise ValueError(f"--{next(iter(fields)).replace('_', '-')} belongs to an extension: add --extension KIND")
    extension = (
        make_extension(given.extension, resolve_model(config, given.part)[1], **fields) if given.extension else None
    )
    explanation = explain(config, given.other, extension=extension, length=given.length, part=given.part)
    if given.json:
        print_json(explanation.to_dict())
        return 0
    for one in (explanation,) if explanation.other is None else (explanation, explanation.other):
        for scheme in one.schemes:
            show_scheme(one.name, scheme)
            if explanation.other is None and scheme.pairs:
                show_pairs(scheme)
    if explanation.other is not None:
        show_differences(explanation, explanation.other)
    return 0


def run_audit(given: argparse.Namespace) -> int:
    """Print what other engines make of a folder."""
    from phasor.inspect.audit import audit

    others = ("other", "extension", "length", "part", "checkpoint")
    named = [name for name in (*others, *given_fields(given, *extension_classes())) if getattr(given, name) is not None]
    if named:
        raise ValueError(f"--audit is of one folder as it is, and does not go with {named[0].replace('_', '-')}")
    found = audit(given.config)
    if given.json:
        print_json(found.to_dict())
        return int(found.has_errors)
    for one in found.findings:
        show_text(
            f"{one.severity}: {one.field}", [one.what, f"instead: {one.instead}", f"seen in {', '.join(one.seen)}"]
        )
    if not found.findings:
        print_text(f"{found.name}: no findings")
    return int(found.has_errors)


def show_scheme(name: str, scheme: SchemeReport) -> None:
    settings = format_settings(scheme.settings)
    lines = [
        scheme.line,
        f"acts on {' and '.join(scheme.acts_on) or 'nothing'}; {format_layers(scheme.layers)}",
        f"settings: {settings}" if settings else "",
        f"shift-invariant: {'yes' if scheme.shift_invariant else 'no'}; "
        f"depends on length: {'yes' if scheme.depends_on_length else 'no'}; "
        f"positions: {scheme.max_positions or 'no end'}",
    ]
    if scheme.pairs:
        same = scheme.original_length == scheme.trained_length
        before = "" if same else f" ({scheme.original_length:,} before the extension)"
        lines.append(
            f"trained length {scheme.trained_length:,}{before}; "
            f"explained for {scheme.length:,} tokens; "
            f"attention factor {scheme.attention_factor:.6g}"
        )
    show_text(f"{name}: {scheme.kind}", [line for line in lines if line])


def format_settings(settings: dict[str, Any]) -> str:
    """Settings in a line, those at rest left out."""
    said = []
    for key, value in settings.items():
        if isinstance(value, dict):
            said.append(f"{key} {value['kind']} ({format_settings({k: v for k, v in value.items() if k != 'kind'})})")
        elif value not in (None, False):
            said.append(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(said)


def show_pairs(scheme: SchemeReport) -> None:
    axes = len({pair.axis for pair in scheme.pairs}) > 1
    heads = ["pair", *(["axis"] if axes else []), "frequency", "wavelength", "rotations", "extension", "new wavelength"]
    rows = [
        [
            pair.index,
            *([pair.axis] if axes else []),
            f"{pair.frequency:.6g}",
            f"{pair.wavelength:,.1f}",
            f"{pair.rotations:,.3f}",
            pair.effect,
            "never rotates" if pair.extended_frequency == 0 else f"{pair.extended_wavelength:,.1f}",
        ]
        for pair in scheme.pairs
    ]
    title = f"radians per token, tokens per rotation, rotations in {scheme.original_length:,} tokens"
    show_table(title, heads, rows)


def show_differences(one: Explanation, other: Explanation) -> None:
    changes = [[where, *(json.dumps(x, ensure_ascii=False) for x in both)] for where, *both in one.differences]
    show_table("what differs", ["field", one.name, other.name], changes)
    rotated, others = ([scheme for scheme in x.schemes if scheme.pairs] for x in (one, other))
    for a, b in zip(rotated, others, strict=False):
        if len(a.pairs) != len(b.pairs):
            continue
        layers = f" ({format_layers(a.layers)} and {format_layers(b.layers)})"
        which = "" if len(rotated) == len(others) == 1 else layers
        rows = []
        for p, q in zip(a.pairs, b.pairs, strict=True):
            ratio = "-" if q.extended_frequency == 0 else f"{p.extended_frequency / q.extended_frequency:.6g}"
            rows.append([p.index, f"{p.extended_frequency:.6g}", f"{q.extended_frequency:.6g}", ratio])
        show_table(f"frequencies, pair by pair{which}", ["pair", one.name, other.name, "ratio"], rows)

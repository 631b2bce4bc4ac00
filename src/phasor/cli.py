"""The command line: parse, call one library function, print."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from phasor import __version__

if TYPE_CHECKING:
    from phasor.explanation import Explanation, Scheme
    from phasor.generation import Generated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, or 2 for a mistake in what was asked, told in one sentence."""
    parser = build_parser()
    try:
        given = parser.parse_args(arguments)
        if given.command is None:
            parser.print_help()
        else:
            given.command(given)
    except BrokenPipeError:
        sys.stderr.close()
    except (ValueError, OSError) as error:
        print(f"phasor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one sentence, like all others."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="phasor", description="One Transformer, every part a choice, positions exact at any length.")
    parser.add_argument("--version", action="version", version=f"phasor {__version__}")
    parser.set_defaults(command=None)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")

    kinds = verbs.add_parser("kinds", help="list the choices for a part", description="List the choices for a part.")
    kinds.add_argument("group", nargs="?", help="positions, extensions, norms, ...; all groups if left out")
    kinds.add_argument("--json", action="store_true", help="print JSON")
    kinds.set_defaults(command=run_kinds)

    explain = verbs.add_parser(
        "explain",
        help="show what a model's positions do, pair by pair",
        description="Show what a model's positions do, pair by pair; given two models, also how they differ.",
    )
    explain.add_argument("config", help="preset:NAME, a configuration file, or a model folder")
    explain.add_argument("other", nargs="?", help="a second model to compare with")
    explain.add_argument(
        "--extension", metavar="KIND", help="replace the rotary extension (see: phasor kinds extensions)"
    )
    explain.add_argument("--length", type=int, metavar="N", help="the sequence length to explain for, where it matters")
    explain.add_argument("--json", action="store_true", help="print JSON")
    add_fields(explain, "fields of the extension", *extension_classes())
    explain.set_defaults(command=run_explain)

    convert = verbs.add_parser(
        "convert",
        help="write a model folder in another format",
        description="Write a Hugging Face folder as phasor's, or phasor's as a Hugging Face one.",
    )
    convert.add_argument("source", help="a model folder, or an entry of the hub's cache, by folder or as OWNER/NAME")
    convert.add_argument("destination", help="the folder to write; a model folder that is there is replaced")
    convert.add_argument("--format", metavar="FORMAT", help="phasor or hf; the other one than the source if left out")
    convert.add_argument("--dtype", metavar="TYPE", help="write another type: float32, bfloat16, float16, float64")
    convert.add_argument("--position", metavar="KIND", help="another position scheme (see: phasor kinds positions)")
    convert.add_argument(
        "--extension", metavar="KIND", help="another rotary extension, or none (see: phasor kinds extensions)"
    )
    convert.add_argument("--check", action="store_true", help="write only if transformers computes the same logits")
    convert.add_argument("--json", action="store_true", help="print JSON")
    add_fields(convert, "fields of the extension", *extension_classes())
    convert.set_defaults(command=run_convert)

    generate = verbs.add_parser(
        "generate",
        help="continue a prompt with a model folder",
        description="Continue a prompt; text where the folder has a tokenizer, token ids otherwise.",
    )
    generate.add_argument("folder", help="a model folder")
    generate.add_argument("--prompt", metavar="TEXT", help="the prompt; read from standard input if left out")
    generate.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    generate.add_argument("--stream", action="store_true", help="print the text as it comes")
    generate.add_argument("--draft", metavar="FOLDER", help="a smaller model that guesses ahead")
    generate.add_argument("--device", default="cpu", help="where to run: cpu, cuda, ...")
    generate.add_argument("--json", action="store_true", help="print JSON: tokens, their log-probabilities, text")
    add_fields(generate, "how tokens are chosen", generation_class(), helps=generation_options())
    generate.set_defaults(command=run_generate)
    return parser


def extension_classes() -> list[type[Any]]:
    from phasor.config.extensions import Extension

    return list(Extension.kinds.values())


def generation_class() -> type[Any]:
    from phasor.config.generation import GenerationConfig

    return GenerationConfig


def generation_options() -> dict[str, str]:
    from phasor.config.generation import OPTIONS

    return OPTIONS


def add_fields(
    parser: argparse.ArgumentParser, title: str, *classes: type[Any], helps: dict[str, str] | None = None
) -> None:
    """An option for every field of some configurations; left out, a field keeps its default."""
    group = parser.add_argument_group(title)
    for name, read in readers(*classes).items():
        kind = {"boolean": "TRUE|FALSE", "numbers": "N,N,...", "words": "TEXT,..."}.get(read.__name__, "N")
        line = (helps or {}).get(name)
        group.add_argument(f"--{name.replace('_', '-')}", type=read, metavar=kind, default=argparse.SUPPRESS, help=line)


def given_fields(given: argparse.Namespace, *classes: type[Any]) -> dict[str, Any]:
    """The fields that were given on the command line."""
    return {name: getattr(given, name) for name in readers(*classes) if hasattr(given, name)}


def readers(*classes: type[Any]) -> dict[str, Any]:
    """Every field of some configurations, with how to read it from text."""
    from phasor.config.schema import field_types, names

    simple = {bool: boolean, int: whole, float: number}
    found: dict[str, Any] = {}
    for cls in classes:
        for name in names(cls):
            hint = field_types(cast(Any, cls))[name]
            choices = [a for a in (typing.get_args(hint) or (hint,)) if a is not type(None)]
            lists = [a for a in (hint, *choices) if typing.get_origin(a) is tuple]
            if lists:
                found[name] = (
                    words if any(str in (x, *typing.get_args(x)) for x in typing.get_args(lists[0])) else numbers
                )
            else:
                found[name] = next(simple[a] for a in choices if a in simple)
    return found


def boolean(text: str) -> bool | str:
    """True or false; anything else is for the configuration to judge."""
    return {"true": True, "false": False}.get(text.lower(), text)


def whole(text: str) -> int | None:
    return None if text == "none" else int(text)


def number(text: str) -> float:
    return float(text)


def numbers(text: str) -> list[float] | list[int]:
    parts = text.split(",")
    return (
        [int(p) for p in parts] if all(p.strip().lstrip("-").isdecimal() for p in parts) else [float(p) for p in parts]
    )


def words(text: str) -> list[int | str]:
    """Tokens by number, texts by anything else, between commas; backslash escapes as in Python strings.

    >>> words("2,end,。")
    [2, 'end', '。']
    """
    return [int(p) if p.isdecimal() else unescaped(p) for p in text.split(",")]


def unescaped(text: str) -> str:
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape")


def run_kinds(given: argparse.Namespace) -> None:
    from phasor.choices import GROUPS, described_kinds

    groups = [given.group] if given.group else list(GROUPS)
    found = {group: described_kinds(group) for group in groups}
    if given.json:
        print_json(found[given.group] if given.group else found)
        return
    for group, lines in found.items():
        table = new_table(group, ["kind", "what it is"])
        for kind, line in lines.items():
            table.add_row(kind, line)
        show(table)


def run_explain(given: argparse.Namespace) -> None:
    from phasor.explanation import explain, make_extension, named

    fields = given_fields(given, *extension_classes())
    if fields and given.extension is None:
        raise ValueError(f"--{next(iter(fields)).replace('_', '-')} belongs to an extension: add --extension KIND")
    extension = make_extension(given.extension, named(given.config)[1], **fields) if given.extension else None
    found = explain(given.config, given.other, extension=extension, length=given.length)
    if given.json:
        print_json(found.to_dict())
        return
    for one in (found,) if found.other is None else (found, found.other):
        for scheme in one.schemes:
            show_scheme(one.name, scheme)
            if found.other is None and scheme.pairs:
                show_pairs(scheme)
    if found.other is not None:
        show_differences(found, found.other)


def run_convert(given: argparse.Namespace) -> None:
    from phasor.checkpoints import convert
    from phasor.checkpoints.conversion import read_config
    from phasor.explanation import make_extension

    fields = given_fields(given, *extension_classes())
    if fields and given.extension in (None, "none"):
        raise ValueError(f"--{next(iter(fields)).replace('_', '-')} belongs to an extension: add --extension KIND")
    extension = given.extension
    if extension not in (None, "none"):
        extension = make_extension(extension, read_config(given.source), **fields)
    found = convert(
        given.source,
        given.destination,
        given.format,
        dtype=floating(given.dtype),
        position=given.position,
        extension=extension,
        check=given.check,
        progress=Bar,
    )
    if given.json:
        print_json({"destination": given.destination, "check": None if found is None else dataclasses.asdict(found)})
        return
    print(f"written: {given.destination}")
    if found is not None:
        print(
            f"transformers computes the same logits of {found.tokens} random tokens: "
            f"the largest difference is {found.largest:.1e}, where they spread by {found.size:.2g}"
        )


def floating(name: str | None) -> Any:
    """A floating-point type of torch by its name."""
    import torch

    known = ("float32", "bfloat16", "float16", "float64")
    if name is not None and name not in known:
        raise ValueError(f"--dtype must be one of {', '.join(known)}, not {name!r}")
    return None if name is None else getattr(torch, name)


class Bar:
    """A line on standard error that shows how far a piece of work is; nothing where nobody watches."""

    def __init__(self, what: str) -> None:
        self.what, self.shown = what, ""

    def __call__(self, done: int, total: int) -> None:
        share = done / max(total, 1)
        line = f"{self.what} {'█' * round(30 * share):░<30} {100 * share:3.0f} %"
        if line != self.shown and sys.stderr.isatty():
            print(f"\r{line}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
        self.shown = line


def run_generate(given: argparse.Namespace) -> None:
    import time

    from phasor.checkpoints import load
    from phasor.generation import generate, stream

    fields = given_fields(given, generation_class())
    if given.prompt is not None and given.prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if given.stream and given.json:
        raise ValueError("give --stream or --json, not both: JSON is complete only at the end")
    model = load(given.folder, device=given.device)
    draft = None if given.draft is None else load(given.draft, device=given.device)
    prompt = read_prompt(given, model.tokenizer is not None)
    begun = time.perf_counter()
    if given.stream:
        count = sum(show_step(step) for step in stream(model, prompt, draft=draft, details=True, **fields))
        print()
    else:
        found = generate(model, prompt, draft=draft, details=True, **fields)
        several = found if isinstance(found, list) else [found]
        count = sum(len(one.tokens) for one in several)
        if given.json:
            print_json([dataclasses.asdict(one) for one in several])
        for one in () if given.json else several:
            print(one.text if one.text is not None else " ".join(map(str, one.tokens)))
    took = time.perf_counter() - begun
    print(f"{count} tokens in {took:.2f} s, {count / took:.1f} a second", file=sys.stderr)


def show_step(step: Generated) -> int:
    """Print what a step of a stream gave; how many tokens that was."""
    text = "".join(f"{token} " for token in step.tokens) if step.text is None else step.text
    print(text, end="", flush=True)
    return len(step.tokens)


def read_prompt(given: argparse.Namespace, textual: bool) -> str | list[int]:
    """The prompt from the command line, a file or standard input: text, or token ids for a folder without tokenizer."""
    if given.prompt is not None:
        text = given.prompt
    elif given.prompt_file is not None:
        try:
            with open(given.prompt_file, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{given.prompt_file} cannot be read: {error}") from None
    else:
        text = sys.stdin.read()
    if textual:
        return text
    ids = text.replace(",", " ").split()
    if not all(i.isdecimal() for i in ids):
        raise ValueError(f"{given.folder} has no tokenizer, so the prompt must be token ids such as '1 2 3'")
    return [int(i) for i in ids]


def show_scheme(name: str, scheme: Scheme) -> None:
    settings = worded(scheme.settings)
    lines = [
        scheme.line,
        f"acts on {' and '.join(scheme.acts_on) or 'nothing'}; {spans(scheme.layers)}",
        f"settings: {settings}" if settings else "",
        f"shift-invariant: {'yes' if scheme.shift_invariant else 'no'}; "
        f"depends on length: {'yes' if scheme.depends_on_length else 'no'}; "
        f"positions: {scheme.max_positions or 'no end'}",
    ]
    if scheme.pairs:
        lines.append(
            f"trained length {scheme.trained_length:,}; explained for {scheme.length:,} tokens; "
            f"attention factor {scheme.attention_factor:.6g}"
        )
    show_text(f"{name}: {scheme.kind}", [line for line in lines if line])


def worded(settings: dict[str, Any]) -> str:
    """Settings in a line, those at rest left out."""
    said = []
    for key, value in settings.items():
        if isinstance(value, dict):
            said.append(f"{key} {value['kind']} ({worded({k: v for k, v in value.items() if k != 'kind'})})")
        elif value not in (None, False):
            said.append(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(said)


def show_pairs(scheme: Scheme) -> None:
    axes = len({pair.axis for pair in scheme.pairs}) > 1
    heads = ["pair", *(["axis"] if axes else []), "frequency", "wavelength", "turns", "extension", "new wavelength"]
    table = new_table(f"radians per token, tokens per turn, turns in {scheme.trained_length:,} tokens", heads)
    for pair in scheme.pairs:
        axis = [str(pair.axis)] if axes else []
        table.add_row(
            str(pair.index),
            *axis,
            f"{pair.frequency:.6g}",
            f"{pair.wavelength:,.1f}",
            f"{pair.turns:,.3f}",
            pair.effect,
            "never turns" if pair.extended_frequency == 0 else f"{pair.extended_wavelength:,.1f}",
        )
    show(table)


def show_differences(one: Explanation, other: Explanation) -> None:
    table = new_table("what differs", ["field", one.name, other.name])
    for where, a, b in one.differences:
        table.add_row(where, json.dumps(a, ensure_ascii=False), json.dumps(b, ensure_ascii=False))
    show(table)
    turning, others = ([scheme for scheme in x.schemes if scheme.pairs] for x in (one, other))
    for a, b in zip(turning, others, strict=False):
        if len(a.pairs) != len(b.pairs):
            continue
        which = "" if len(turning) == len(others) == 1 else f" ({spans(a.layers)} and {spans(b.layers)})"
        table = new_table(f"frequencies, pair by pair{which}", ["pair", one.name, other.name, "ratio"])
        for p, q in zip(a.pairs, b.pairs, strict=True):
            ratio = "-" if q.extended_frequency == 0 else f"{p.extended_frequency / q.extended_frequency:.6g}"
            table.add_row(str(p.index), f"{p.extended_frequency:.6g}", f"{q.extended_frequency:.6g}", ratio)
        show(table)


def spans(layers: tuple[int, ...]) -> str:
    """Layer numbers as ranges: `layers 0-3, 5`."""
    if not layers:
        return "once, before the first layer"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "layers " + ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=dataclasses.asdict))


def console() -> Any:
    try:
        from rich.console import Console
    except ImportError:
        raise ValueError("tables need the package rich: pip install 'phasor[cli]', or add --json") from None
    return Console(width=None if sys.stdout.isatty() else 140)


def new_table(title: str, heads: list[str]) -> Any:
    console()
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for head in heads:
        right = head in ("pair", "axis", "frequency", "wavelength", "turns", "new wavelength", "ratio")
        table.add_column(head, justify="right" if right else "left", overflow="fold")
    return table


def show(table: Any) -> None:
    console().print(table)


def show_text(title: str, lines: list[str]) -> None:
    screen = console()
    screen.print(f"\n[bold]{title}[/bold]", highlight=False)
    for line in lines:
        screen.print(f"  {line}", highlight=False)

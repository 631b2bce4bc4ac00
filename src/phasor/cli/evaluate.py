"""`phasor evaluate`: how good a trained model is."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from phasor.cli.options import ON_HUB, add_adapters, add_checkpoint, add_part, chosen_adapters, declare_options
from phasor.cli.output import Bar, check_loss, print_json
from phasor.cli.parallel import add_mesh, join_command, processes_argument, refuse_processes

if TYPE_CHECKING:
    from phasor.parallel.processes import JoinedProcesses

# Further evaluations, each chosen by the option of its name: a module with OPTIONS, `run(given)`, and in
# SHARED the names of the options below that it takes besides its own; another mode may be one of them.
MODES = {
    "lengths": "phasor.cli.evaluate_lengths",
    "retrieval": "phasor.cli.evaluate_retrieval",
    "stream": "phasor.cli.evaluate_stream",
}
TRANSLATION = ("target", "num_beams")  # options that no mode takes
RUN_OPTIONS = {
    "--data FILE": "evaluate on this instead of the run's validation data",
    "--target FILE": "the other side of a parallel text in two files",
    "--num-beams N": "number of beams for translation (5)",
    "--limit N": "evaluate on the first N examples, rows (--lengths) or tokens (--stream)",
}
SEVERAL_MODES = {
    "--lengths N,N,...": "lengths in tokens; 8k is 8,192",
    "--extension NAME,...": "models to compare: own (as saved, the default), none, linear, ntk, yarn, sinks, ...; a "
    "window of the trained length is always beside them",
    "--factor largest|per-length|N": "factor of an extension: one for all lengths, that of the largest (the default), "
    "or one per length, or N",
    "--out FOLDER": "write a report, or the state of a stream",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluate a trained model on its validation data or on other data: perplexity and bits per byte of a language "
        "model, BLEU and chrF of a translation, accuracy on masked tokens. With --lengths, the loss by length; "
        "with --retrieval, what is found in long prompts; with --stream, the loss of one long file."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"the folder of a run; with --data or a mode also a model folder of any format, or {ON_HUB}",
    )
    add_checkpoint(parser)
    add_part(parser)
    add_adapters(parser)
    declare_options(parser, RUN_OPTIONS)
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto is a GPU where there is one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    groups = {"several": (parser.add_argument_group("with several modes"), SEVERAL_MODES)}
    for name, module in MODES.items():
        groups[name] = parser.add_argument_group(f"with --{name}"), importlib.import_module(module).OPTIONS
    for group, table in groups.values():  # of options that are absent unless given
        declare_options(group, table, default=argparse.SUPPRESS)
    add_mesh(parser)
    options = {name: {a.dest: a.option_strings[0] for a in group._group_actions} for name, (group, _) in groups.items()}
    parser.set_defaults(mode_options=options)


def run(given: argparse.Namespace) -> None:
    with join_command(given) as processes:
        mode = choose_mode(given)
        if mode is None:
            evaluate_run(given, processes)
        else:
            refuse_processes(processes, f"--{mode_name(mode)}")
            mode.run(given)


def mode_name(module: ModuleType) -> str:
    """The option of a mode."""
    return next(name for name, where in MODES.items() if where == module.__name__)


def choose_mode(given: argparse.Namespace) -> ModuleType | None:
    """The module of the mode that was asked for; None without one. Options that it does not take are refused."""
    modules = {name: importlib.import_module(module) for name, module in MODES.items() if hasattr(given, name)}
    others = {name for mode, module in modules.items() for name in module.SHARED if name != mode}
    chosen = [name for name in modules if name not in others]
    if len(chosen) > 1:
        raise ValueError(f"--{chosen[0]} and --{chosen[1]} are two evaluations: give one of them")
    mode = chosen[0] if chosen else None
    takes = set() if mode is None else {*given.mode_options[mode], *modules[mode].SHARED}
    for of, options in given.mode_options.items():
        for name, option in options.items():
            if hasattr(given, name) and name not in takes:
                modes = " or ".join(f"--{each}" for each in ([of] if of in MODES else MODES))
                raise ValueError(f"{option} is for {modes}" if mode is None else f"{option} does not go with --{mode}")
    if mode is None:
        return None
    if given.adapter is not None:
        raise ValueError(f"--adapter does not go with --{mode}: give the folder of the adapter as the model")
    for name in TRANSLATION:
        if getattr(given, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for translation, and does not go with --{mode}")
    if given.data is not None and "data" not in takes:
        raise ValueError(f"--data does not go with --{mode}")
    return modules[mode]


def evaluate_run(given: argparse.Namespace, processes: JoinedProcesses | None) -> None:
    """Print the metrics of a model."""
    from phasor.evaluation import evaluate

    if given.target is not None and given.data is None:
        raise ValueError("--target needs --data, the other side of the text")
    metrics = evaluate(
        given.model,
        given.data,
        given.target,
        num_beams=5 if given.num_beams is None else given.num_beams,
        limit=given.limit,
        checkpoint=given.checkpoint,
        part=given.part,
        adapter=chosen_adapters(given.adapter),
        device=given.device,
        progress=Bar("evaluating"),
        **processes_argument(processes),
    )
    if given.json:
        print_json(metrics)
    else:
        width = max(map(len, metrics), default=0)
        for name, value in metrics.items():
            print(f"{name.replace('_', ' '):<{width}}  {format_value(value)}")
    if "loss" in metrics:
        check_loss(metrics["loss"])


def format_value(value: Any) -> str:
    """
    >>> format_value(3.14159265), format_value(120000), format_value("char"), format_value(None)
    ('3.1416', '120,000', 'char', '-')
    """
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)

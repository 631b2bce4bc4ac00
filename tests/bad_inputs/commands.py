"""Command lines that are mistakes. `{model}`, `{run}`, `{text}`, `{file}`, `{empty}` and `{out}` are filled in."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config.overrides import fields_of, takes_text, without_none
from phasor.config.recipe import Recipe
from phasor.config.schema import Config

HALF = "\udcff"  # how Python passes on an argument that is not UTF-8
FOLDERS = ["{out}/missing", "{file}", "{empty}", "", "/", "\0", HALF, "a" * 5000, "-", "{model}/config.json", "no/such"]
NUMBERS = ["", "x", "nan", "1e999", "9" * 30, "[1]", HALF, "1,2", "0x10", "--"]
TRAIN = [
    *("train", "--data.train", "{text}", "--data.document", "line", "--data.tokenizer", "bytes", "--model.dim", "16"),
    *("--model.num_layers", "1", "--model.num_heads", "2", "--model.hidden_dim", "32", "--data.sequence_length", "16"),
    *("--train.batch_tokens", "16", "--train.steps", "1", "--train.device", "cpu", "--out", "{out}/run"),
]
GENERATE = ["generate", "{model}", "--prompt", "1 2 3", "--max-new-tokens", "2"]
# Values that an option does not take; the other options take no number below 0.
GENERATION = {
    "--temperature": ["-1", "inf"],
    "--top-k": ["-1", "1.5"],
    "--top-p": ["-0.1", "1.1", "0"],
    "--min-p": ["-0.1", "1.1"],
    "--typical-p": ["-0.1", "1.1"],
    "--max-new-tokens": ["-1", "0", "1.5"],
    "--num-beams": ["-1", "0", "1.5"],
    "--num-return-sequences": ["-1", "0", "1.5", "3"],
    "--repetition-penalty": ["-1", "0"],
    "--seed": ["1.5", "99999999999999999999999"],
    "--length-penalty": ["inf"],
    "--penalty-alpha": ["-1", "2"],
}


def leaves(hint: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """Every field of a recipe that holds a value, by its dotted name."""
    for name, inner in fields_of(hint).items():
        plain = without_none(inner)
        if isinstance(plain, type) and issubclass(plain, Config) and len(path) < 2:
            yield from leaves(plain, (*path, name))
        else:
            yield ".".join((*path, name)), inner


def commands() -> dict[str, list[str]]:
    found: list[list[str]] = [
        ["nothing"],
        ["--nothing"],
        ["kinds", "x"],
        ["kinds", HALF],
        ["kinds", "a", "b"],
        ["recipes", "x"],
        ["recipes", "show"],
        ["recipes", "show", "x"],
        ["recipes", "show", "../dates"],
        ["recipes", "show", HALF],
        ["explain"],
        ["explain", "preset:"],
        ["explain", "preset:x"],
        ["explain", f"preset:{HALF}"],
        ["explain", "preset:llama-2", "--length", "0"],
        ["explain", "preset:llama-2", "--length", "-5"],
        ["explain", "preset:gpt-2", "--extension", "yarn", "--factor", "2"],
        ["explain", "preset:llama-2", "--extension", "x"],
        ["explain", "preset:llama-2", "--extension", "yarn"],
        ["explain", "preset:llama-2", "--factor", "2"],
        ["plan"],
        ["plan", "--model", "preset:x"],
        ["plan", "--model", "{empty}"],
        ["plan", "--model", "{model}", "--devices", "0"],
        ["plan", "--model", "{model}", "--devices", "4", "--mesh", "tensor=4"],
        ["plan", "--model", "{model}", "--mesh", "x"],
        ["plan", "--model", "{model}", "--mesh", HALF],
        ["plan", "--model", "{model}", "--context", "1t"],
        ["plan", "--model", "{model}", "--batch-tokens", "-1"],
        ["plan", "--model", "{model}", "--rows", "0"],
        ["plan", "--model", "{model}", "--device", "x"],
        ["plan", "--model", "{model}", "--activation-checkpointing", "x"],
        ["generate"],
        ["generate", "{model}", "--prompt", "hello"],
        ["generate", "{model}", "--prompt", ""],
        ["generate", "{model}", "--prompt", "99"],
        ["generate", "{model}", "--prompt", "-1"],
        ["generate", "{model}", "--prompt", HALF],
        ["generate", "{model}", "--prompt", "1", "--prompt-file", "{text}"],
        ["generate", "{model}", "--prompt-file", "{out}/missing"],
        ["generate", "{model}", "--prompt-file", "{empty}"],
        ["generate", "{model}", "--prompt-file", "{binary}"],
        [*GENERATE, "--stream", "--json"],
        [*GENERATE, "--stream", "--num-beams", "2"],
        [*GENERATE, "--weights", "int3"],
        [*GENERATE, "--draft", "{out}/missing"],
        [*GENERATE, "--num-beams", "2", "--temperature", "1"],
        ["convert", "{model}"],
        ["convert", "{model}", "{out}/new", "--format", "x"],
        ["convert", "{model}", "{out}/new", "--dtype", "int8"],
        ["convert", "{model}", "{out}/new", "--position", "x"],
        ["convert", "{model}", "{out}/new", "--extension", "x"],
        ["convert", "{model}", "{out}/new", "--factor", "2"],
        ["convert", "{model}", "{file}"],
        ["convert", "{model}", "{notes}"],
        ["convert", "{model}", "{model}/config.json"],
        ["evaluate"],
        ["evaluate", "{run}", "--target", "{text}"],
        ["evaluate", "{run}", "--limit", "0"],
        ["evaluate", "{run}", "--limit", "-3"],
        ["evaluate", "{run}", "--data", "{out}/missing"],
        ["evaluate", "{run}", "--data", "{empty}"],
        ["evaluate", "{run}", "--data", "{binary}"],
        ["evaluate", "{run}", "--lengths", "0"],
        ["evaluate", "{run}", "--lengths", "4m"],
        ["evaluate", "{run}", "--lengths", "8", "--extension", "yarm"],
        ["evaluate", "{run}", "--lengths", "8", "--protocol", "first"],
        ["evaluate", "{run}", "--lengths", "8", "--factor", "0.5"],
        ["evaluate", "{run}", "--lengths", "8", "--out", "{text}"],
        ["evaluate", "{run}", "--lengths", "1000k"],
        ["evaluate", "{run}", "--protocol", "last"],
        ["translate"],
        ["translate", "{run}", "hello"],
        ["translate", "{run}", HALF],
        ["translate", "{run}", "hello", "--file", "{text}"],
        ["translate", "{run}", "--file", "{out}/missing"],
        ["translate", "{run}", "--file", "{binary}"],
        ["translate", "{run}", "hello", "--out", "{empty}"],
        ["translate", "{run}", "hello", "--out", "{out}/missing/x"],
        ["bench", "x"],
        ["bench", "--read", "{out}/missing"],
        ["bench", "--read", "{text}"],
        ["bench", "--read", "{model}/config.json"],
        ["verify"],
        ["train", "{out}/missing.yaml"],
        ["train", "{empty}"],
        ["train", "{binary}"],
        ["train", "{text}"],
        ["train", "nothing"],
        ["train", HALF],
        ["train", "\0"],
        ["train", "--train.stepz", "3"],
        ["train", "--trian.steps", "3"],
        ["train", "--train", "3"],
        ["train", "--model.position.kind", "x"],
        ["train", "--model.preset", "x"],
        ["train", "--resume", "--out", "{out}/missing"],
        [*TRAIN, "--train.steps", "2", "--train.epochs", "2"],
        [*TRAIN, "--data.train", "{out}/missing"],
        [*TRAIN, "--data.train", "{empty}"],
        [*TRAIN, "--data.train", "{binary}"],
        [*TRAIN, "--data.train", "/dev/null"],
        [*TRAIN, "--data.format", "tsv"],
        [*TRAIN, "--data.format", "jsonl"],
        [*TRAIN, "--data.document", "x"],
        [*TRAIN, "--data.tokenizer", "{out}/missing"],
        [*TRAIN, "--data.tokenizer", "{empty}"],
        [*TRAIN, "--init_from", "{out}/missing"],
        [*TRAIN, "--init_from", "{empty}"],
        [*TRAIN, "--out", "{file}"],
        [*TRAIN, "--task", "translation"],
        [*TRAIN, "--train.batch_tokens", "1"],
    ]
    for verb in ("generate", "convert", "evaluate", "translate", "explain", "verify"):
        more = {"generate": ["--prompt", "1"], "convert": ["{out}/new"], "translate": ["hello"]}.get(verb, [])
        folders = FOLDERS[:-2] if verb == "explain" else FOLDERS  # which reads a configuration file too
        found += [[verb, folder, *more] for folder in folders]
        found += [
            [verb, "--nothing"],
            [verb, "{model}", *more, "--nothing", "3"],
            [verb, "{model}", *more, f"--{HALF}"],
        ]
    for option, wrong in GENERATION.items():
        huge = "9" * 30  # too much for an integer only
        others = [value for value in NUMBERS if value != huge or "1.5" in wrong]
        found += [[*GENERATE, f"{option}={value}"] for value in (*wrong, *others)]
    for device in ("meta", "x", "", "cuda:99", "cpu:x", HALF, "0", "cuda:-1", "vulkan"):
        found += [[*GENERATE, f"--device={device}"], [*TRAIN, f"--train.device={device}"]]
        found += [["evaluate", "{run}", f"--device={device}"], ["translate", "{run}", "hello", f"--device={device}"]]
    for verb, options in {
        "evaluate": ["--num-beams", "--limit"],
        "translate": ["--num-beams", "--max-new-tokens", "--batch-tokens", "--length-penalty"],
    }.items():
        more = ["hello"] if verb == "translate" else []
        found += [[verb, "{run}", *more, f"{option}={value}"] for option in options for value in NUMBERS]
    for name, hint in leaves(Recipe):
        values = ["{a: [", "{x: {y: 1}}", HALF]
        if not takes_text(hint):
            values += ["", "x y", "[[1]]"]
        if name.startswith("model.") or takes_text(hint):
            values = [value for value in values if value != HALF]
        found += [[*TRAIN, f"--{name}={value}"] for value in values if name not in FREE]
    return {f"{i}-{' '.join(c for c in command if c not in TRAIN)[:60]!a}": command for i, command in enumerate(found)}


# Any text is a value of these.
FREE = {"out", "init_from", "data.field", "data.cache"}

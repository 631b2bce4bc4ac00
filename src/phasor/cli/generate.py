"""`phasor generate`: a prompt continued."""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from phasor.cli.options import (
    ON_HUB,
    STORED,
    add_adapters,
    add_checkpoint,
    add_extension_fields,
    add_fields,
    add_part,
    add_positions,
    add_weights,
    chosen_adapters,
    chosen_extension,
    declare_options,
    given_fields,
    parse_dtype,
    quantized_bits,
)
from phasor.cli.output import print_json
from phasor.cli.parallel import add_mesh, from_first, join_command, refuse_processes
from phasor.cli.streams import check_argument, print_text, read_file, read_lines, read_stdin
from phasor.config.generation import OPTIONS, GenerationConfig
from phasor.config.generation_settings import merge_options

if TYPE_CHECKING:
    from phasor.generation import Generated
    from phasor.parallel.processes import JoinedProcesses
    from phasor.transformer import Transformer

WARMUP_STEPS = 3  # the prompt, the step that is compiled, and one that repeats it

PROMPT_OPTIONS = {
    "--prompt TEXT": "the prompt; read from standard input if left out",
    "--prompt-file FILE": "read the prompt from a file",
    "--prompts FILE": "several prompts, one per line of a file (- is standard input); each result is printed on one "
    "line, with backslashes and line ends in it as escapes",
    "--stream": "print the text as it comes",
    "--draft FOLDER": "a smaller model for speculative decoding",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continue a prompt; text where the folder has a tokenizer, token ids otherwise. What the options leave open is "
        "as the folder's generation_config.json says. Control characters are printed as escapes on a terminal, and as "
        "they are into a pipe or file."
    )
    parser.add_argument("folder", help=f"a model folder, a run, or {ON_HUB}")
    declare_options(parser, PROMPT_OPTIONS)
    add_model_options(parser)
    declare_options(parser, {"--json": "print JSON: tokens, their log-probabilities, text"})
    add_fields(parser, "how tokens are chosen", GenerationConfig, helps=OPTIONS)
    add_extension_fields(parser)
    add_mesh(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options of `read_model`: which weights of a folder, where, and as what."""
    add_checkpoint(parser)
    add_part(parser)
    add_adapters(parser)
    declare_options(parser, {"--dtype DTYPE": "load another dtype: float32, bfloat16, float16, float64"})
    parser.add_argument("--device", default="cpu", help="where to run: cpu, cuda, ... (default: %(default)s)")
    add_positions(parser)
    add_weights(
        parser,
        "quantize the large weights to 8 or 4 bits, or keep those of a quantized folder in the bits in which they are "
        "stored; by default they are dequantized",
        "nf4",
        STORED,
    )


def run(given: argparse.Namespace) -> None:
    with join_command(given) as processes:
        continue_prompts(given, processes)


def continue_prompts(given: argparse.Namespace, processes: JoinedProcesses | None) -> None:
    """Continue the prompt or prompts, and print what comes; several processes run the same steps."""
    from phasor.generation import generate, stream

    fields = given_fields(given, GenerationConfig)
    sources = {"--prompt": given.prompt, "--prompt-file": given.prompt_file, "--prompts": given.prompts}
    named = [option for option, value in sources.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"give {' or '.join(named)}, not both")
    if given.stream and given.json:
        raise ValueError("give --stream or --json, not both: JSON is complete only at the end")
    if given.stream and given.prompts is not None:
        raise ValueError("give --stream or --prompts, not both: a stream continues one prompt")
    adapter = chosen_adapters(given.adapter)
    model = read_model(given.folder, given, processes, given.checkpoint, given.part, adapter=adapter, swaps=True)
    draft = None if given.draft is None else read_model(given.draft, given, processes)
    options = merge_options(model.generation_settings, None, fields)
    if "seed" in fields and not options.samples:
        raise ValueError("--seed is for sampling, and this decodes greedily: add --temperature, or leave --seed out")
    prompt = from_first(processes, lambda: read_prompts(given, model.tokenizer is not None))
    if processes is not None and options.samples and options.seed is None:
        count = 1 if given.prompts is None else len(prompt)
        fields["seed"] = from_first(processes, lambda: [random.getrandbits(31) for _ in range(count)])
    compiling = compile_steps(model, prompt, draft, fields) if options.compile else 0.0
    begun = time.perf_counter()
    if given.stream:
        count = sum(show_step(step) for step in stream(model, prompt, draft=draft, details=True, **fields))
        print()
    else:
        results = generate(model, prompt, draft=draft, details=True, **fields)
        generated = flatten(results)
        check_finite(generated)
        count = sum(len(one.tokens) for one in generated)
        if given.json:
            print_json(results if isinstance(results, list) else [results])
        for one in () if given.json else generated:
            text = one.text if one.text is not None else " ".join(map(str, one.tokens))
            print_text(text if given.prompts is None else one_line(text))
    took = time.perf_counter() - begun
    before = f", after {compiling:.1f} s of compiling" if compiling else ""
    print(f"{count} tokens in {took:.2f} s, {count / took:.1f} tokens/s{before}", file=sys.stderr)
    if given.prompts is None:
        prompt, results = [prompt], [count if given.stream else results]
    lengths = [one if isinstance(one, int) else max(len(new.tokens) for new in flatten(one)) for one in results]
    warn_past_length(model, prompt, lengths)


def compile_steps(model: Transformer, prompt: Any, draft: Transformer | None, fields: dict[str, Any]) -> float:
    """Compile the decoding step by the first steps of a continuation; how long that took, in seconds."""
    import torch

    from phasor.generation.api import decode
    from phasor.generation.request import build_request
    from phasor.nn.mode import eval_mode

    begun = time.perf_counter()
    request = build_request(model, prompt, None, fields, draft=draft)
    with eval_mode(model, draft), torch.inference_mode():
        for _ in islice(decode(request), WARMUP_STEPS):
            pass
    return time.perf_counter() - begun


def flatten(results: Any) -> list[Generated]:
    """All results: one, or several for a prompt, or for each of several prompts."""
    return [one for inner in results for one in flatten(inner)] if isinstance(results, list) else [results]


def check_finite(generated: list[Generated]) -> None:
    """Refuse results of logits that are not finite: their tokens mean nothing."""
    if any(math.isnan(x) for one in generated for x in one.log_probabilities):
        raise ValueError(
            "the model's logits are not finite, so that its output means nothing: weights may be damaged, or their "
            "dtype too narrow"
        )


def one_line(text: str) -> str:
    """A text on one line, with escapes from which it can be restored.

    >>> print(one_line("a\\nb"))
    a\\nb
    """
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def read_model(
    folder: str,
    given: argparse.Namespace,
    processes: JoinedProcesses | None,
    checkpoint: str | None = None,
    part: str | None = None,
    adapter: dict[str, tuple[str, float]] | None = None,
    swaps: bool = False,
) -> Transformer:
    """The model of a folder, with weights of the dtype that was asked for, or cut over several processes.

    With `swaps` it has the position scheme and the extension that were asked for. Adapters are merged into weights that
    are quantized.
    """
    from phasor.adapters import merge_adapters
    from phasor.checkpoints.open_model import open_model
    from phasor.checkpoints.swap_positions import swap_positions

    for option in ("weights", "position", "extension"):
        if getattr(given, option) is not None:
            refuse_processes(processes, f"--{option} {getattr(given, option)}")
    kept = given.weights if given.weights == STORED else None
    device = given.device if given.weights == kept else "cpu"
    dtype = parse_dtype(given.dtype)
    chosen: dict[str, Any] = {"checkpoint": checkpoint, "part": part, "weights": kept, "processes": processes}
    chosen["adapter"] = adapter
    model, _ = open_model(folder, device, dtype, **chosen)
    extension = chosen_extension(given, lambda: model.config)
    if model.adapters and (given.weights != kept or given.position is not None or extension is not None):
        merge_adapters(model)
    if swaps and (given.position is not None or extension is not None):
        model = swap_positions(model, given.position, extension)
    if given.weights == kept:
        return model
    from phasor.device import resolve_device
    from phasor.quantization import quantize

    return quantize(model, quantized_bits(given.weights)).to(resolve_device(given.device))  # the small weights alone


def show_step(step: Generated) -> int:
    """Print the output of one step of a stream; the number of its tokens."""
    check_finite([step])
    text = "".join(f"{token} " for token in step.tokens) if step.text is None else step.text
    print_text(text, end="")
    return len(step.tokens)


def read_prompts(given: argparse.Namespace, textual: bool) -> Any:
    """The prompt, or a list of prompts: text, or token ids for a folder without tokenizer."""
    if given.prompts is None:
        text = read_prompt(given)
        return text if textual else parse_ids(text, given.folder)
    lines = read_lines(given.prompts, "the prompts, one per line")
    if not lines:
        raise ValueError(f"{given.prompts} has no prompts: there should be one per line")
    return lines if textual else [parse_ids(line, given.folder) for line in lines]


def read_prompt(given: argparse.Namespace) -> str:
    """The one prompt from the command line, a file or standard input."""
    if given.prompt is not None:
        return check_argument(given.prompt, "--prompt")
    if given.prompt_file is not None:
        return read_file(given.prompt_file)
    return read_stdin("the prompt")


def parse_ids(text: str, folder: str) -> list[int]:
    ids = text.replace(",", " ").split()
    if not all(i.isascii() and i.isdecimal() for i in ids):
        raise ValueError(f"{folder} has no tokenizer, so the prompt must be token ids such as '1 2 3'")
    return [int(i) for i in ids]


def warn_past_length(model: Transformer, prompts: list[Any], lengths: list[int]) -> None:
    """Say that a text has become longer than the model was made for, from prompts and numbers of new tokens."""
    config = model.config
    if config.shape != "decoder" or any(p.depends_on_length for p in config.layer_positions()):
        return
    read = [len(model.tokenizer.encode(p).ids) if isinstance(p, str) else len(p) for p in prompts]
    if any(old + new > config.max_length for old, new in zip(read, lengths, strict=True)):
        print(
            f"phasor: prompt and output are longer than the {config.max_length:,} tokens that the model is made for; "
            "what comes after them may be of little use",
            file=sys.stderr,
        )

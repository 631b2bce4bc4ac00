"""`phasor generate`: a prompt continued."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from phasor.cli.options import add_fields, given_fields
from phasor.cli.output import print_json
from phasor.config.generation import OPTIONS, GenerationConfig

if TYPE_CHECKING:
    from phasor.generation import Generated
    from phasor.transformer import Transformer


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Continue a prompt; text where the folder has a tokenizer, token ids otherwise."
    parser.add_argument("folder", help="a model folder")
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt; read from standard input if left out")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")
    parser.add_argument("--draft", metavar="FOLDER", help="a smaller model for speculative decoding")
    parser.add_argument("--device", default="cpu", help="where to run: cpu, cuda, ...")
    parser.add_argument(
        "--weights",
        choices=["int8"],
        help="quantize the large weights to this dtype; by default they keep the folder's",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: tokens, their log-probabilities, text")
    add_fields(parser, "how tokens are chosen", GenerationConfig, helps=OPTIONS)


def run(given: argparse.Namespace) -> None:
    from phasor.generation import generate, stream

    fields = given_fields(given, GenerationConfig)
    if given.prompt is not None and given.prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if given.stream and given.json:
        raise ValueError("give --stream or --json, not both: JSON is complete only at the end")
    model = read_model(given.folder, given)
    draft = None if given.draft is None else read_model(given.draft, given)
    prompt = read_prompt(given, model.tokenizer is not None)
    begun = time.perf_counter()
    if given.stream:
        count = sum(show_step(step) for step in stream(model, prompt, draft=draft, details=True, **fields))
        print()
    else:
        results = generate(model, prompt, draft=draft, details=True, **fields)
        generated = results if isinstance(results, list) else [results]
        count = sum(len(one.tokens) for one in generated)
        if given.json:
            print_json(generated)
        for one in () if given.json else generated:
            print(one.text if one.text is not None else " ".join(map(str, one.tokens)))
    took = time.perf_counter() - begun
    print(f"{count} tokens in {took:.2f} s, {count / took:.1f} tokens/s", file=sys.stderr)


def read_model(folder: str, given: argparse.Namespace) -> Transformer:
    """The model of a folder, with weights of the dtype that was asked for."""
    from phasor.checkpoints import load

    if given.weights is None:
        return load(folder, device=given.device)
    from phasor.device import resolve_device
    from phasor.quantization import quantize

    return quantize(load(folder), given.weights).to(resolve_device(given.device))  # which never holds the large ones


def show_step(step: Generated) -> int:
    """Print the output of one step of a stream; the number of its tokens."""
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

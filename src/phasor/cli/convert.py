"""`phasor convert`: a model folder in another format."""

from __future__ import annotations

import argparse

from phasor.cli.options import (
    ON_HUB,
    add_checkpoint,
    add_extension_fields,
    add_part,
    add_positions,
    add_weights,
    choose_weights,
    chosen_extension,
    declare_options,
    parse_dtype,
    quantized_bits,
)
from phasor.cli.output import Bar, print_json
from phasor.cli.streams import print_text

OPTIONS = {
    "--format FORMAT": "phasor or hf, of an adapter phasor or peft; by default the other one than the source's",
    "--dtype DTYPE": "write another dtype: float32, bfloat16, float16, float64",
    "--check": "write only if transformers has the same token ids and logits, of short texts and of one past windows "
    "and the trained length where that is affordable",
    "--check-length N": "the same with a text of N tokens",
    "--strict": "refuse a config.json with fields that have no effect",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a Hugging Face folder as phasor's, or phasor's as a Hugging Face one."
    parser.add_argument("source", help=f"a model folder, a run, or {ON_HUB}")
    add_checkpoint(parser)
    parser.add_argument("destination", help="the folder to write; a model folder that phasor wrote is replaced")
    declare_options(parser, OPTIONS)
    add_weights(parser, "write the large weights in 8 or 4 bits, in phasor's format", "nf4")
    add_positions(parser)
    add_part(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_extension_fields(parser)


def run(given: argparse.Namespace) -> None:
    from phasor.checkpoints import convert
    from phasor.checkpoints.load import read_config

    source = choose_weights(given.source, given.checkpoint)
    check = convert(
        source,
        given.destination,
        given.format,
        dtype=parse_dtype(given.dtype),
        position=given.position,
        extension=chosen_extension(given, lambda: read_config(source, given.part)),
        check=given.check if given.check_length is None else given.check_length,
        part=given.part,
        strict=given.strict,
        bits=None if given.weights is None else quantized_bits(given.weights),
        progress=Bar,
    )
    if given.json:
        print_json({"destination": given.destination, "check": check})
        return
    print_text(f"written: {given.destination}")
    if check is not None:
        print(
            f"transformers computes the same logits of {check.tokens} random tokens: "
            f"the largest difference is {check.largest:.1e}, where their standard deviation is {check.size:.2g}"
        )
        print(f"the longest text has {check.length:,} tokens" + "".join(f"; not crossed: {x}" for x in check.missed))
        for note in filter(None, (check.note, check.tokenizer)):
            print(f"note: {note}")

"""`phasor evaluate MODEL --stream FILE`: the loss on one sequence of any length."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from phasor.cli.options import given_options, parse_dtype
from phasor.cli.output import CLEAR, LINE_SECONDS, bar, check_loss, clock, print_json

if TYPE_CHECKING:
    from phasor.evaluation.stream import StreamProgress

SHARED = ("out",)
OPTIONS = {
    "--stream FILE": "read a text, or token ids (.bin, .tokens, .npy), as one sequence of any length in constant "
    "memory; --out saves the state, for --resume",
    "--chunk N": "tokens that are read at a time (4096, on a GPU 65536; fewer for a decaying scheme)",
    "--window N": "let layers attend to N tokens, where they attend to more",
    "--sinks N": "keep the first N tokens visible behind the window",
    "--offset N": "the position of the first token (0)",
    "--max-length N": "the tokens to hold in layers without a window (the model's length)",
    "--dtype DTYPE": "compute in another dtype: float32, bfloat16, ...",
    "--token-dtype DTYPE": "of .bin and .tokens: uint16 or uint32 (by the size of the vocabulary)",
    "--save-seconds X": "seconds between two states (60)",
    "--resume": "continue the stream in the folder of --out",
}


def run(given: argparse.Namespace) -> None:
    from phasor.evaluation import evaluate_stream

    names = ("chunk", "window", "sinks", "offset", "max_length", "token_dtype", "save_seconds", "out", "resume")
    display = StreamDisplay()
    result = evaluate_stream(
        given.model,
        given.stream,
        limit=given.limit,
        checkpoint=given.checkpoint,
        part=given.part,
        device=given.device,
        dtype=parse_dtype(getattr(given, "dtype", None)),
        progress=display.show,
        **given_options(given, *names),
    )
    display.close()
    if given.json:
        print_json(result)
    else:
        for line in format_result(result):
            print(line)
    check_loss(result["loss"])


class StreamDisplay:
    """The progress of a stream on standard error: a live line on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.live, self.shown = sys.stderr.isatty(), time.monotonic()

    def show(self, progress: StreamProgress) -> None:
        if self.live:
            print(f"{CLEAR}{format_progress(progress)}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.shown >= LINE_SECONDS:
            self.shown = time.monotonic()
            print(format_progress(progress), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Erase the live line."""
        if self.live:
            print(CLEAR, end="", file=sys.stderr, flush=True)


def format_progress(progress: StreamProgress) -> str:
    """One line of progress.

    >>> from phasor.evaluation.stream import StreamProgress
    >>> format_progress(StreamProgress(500_000, 1_000_000, 3.25, 1e5))
    '███████████████░░░░░░░░░░░░░░░  50 %  500,000 tokens  loss 3.2500  100,000 tokens/s  0:05 left'
    """
    line = f"{progress.tokens:,} tokens  loss {progress.loss:.4f}  {progress.tokens_per_second:,.0f} tokens/s"
    if not progress.expected:
        return line
    share = min(1.0, progress.tokens / progress.expected)
    left = max(0, progress.expected - progress.tokens) / max(progress.tokens_per_second, 1e-9)
    return f"{bar(share)} {100 * share:3.0f} %  {line}  {clock(min(left, 1e9))} left"


def format_result(result: dict[str, Any]) -> list[str]:
    """The result as lines, the curve by buckets of tokens."""
    at = f", resumed at {result['resumed_at']:,}" if result["resumed_at"] else ""
    lines = [
        f"tokens      {result['tokens']:,}{at}",
        f"loss        {result['loss']:.6f}",
        f"perplexity  {result['perplexity']:.5g}",
        f"speed       {result['tokens_per_second']:,.0f} tokens/s, {result['seconds']:,.1f} s",
        f"on          {result['device']} in {result['dtype']}",
        "",
        f"{'tokens before':>31}  {'loss':>9}",
    ]
    for bucket in result["curve"]:
        span = f"{bucket['first']:,} to {bucket['last']:,}"
        lines.append(f"{span:>31}  {bucket['loss']:>9.4f}")
    return lines

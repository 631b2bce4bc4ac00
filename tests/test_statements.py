"""Bounds and defaults in sentences of the pages: each is put together from the constants it is about, and looked up.

Findings are in test_findings.py, figures of tables in test_measurements.py.
"""

import math
import re

import pytest
from test_pages import ROOT, options_of, prose

import phasor
from phasor.checkpoints import template_worker
from phasor.checkpoints.chat_template import TEMPLATE_BYTES
from phasor.cli import VERBS
from phasor.cli.train import LONGEST_ROW, ROWS
from phasor.config import PositionConfig
from phasor.config.embed import EmbedConfig
from phasor.data.encoding import PIECE
from phasor.evaluation.compare import questions, settings, texts
from phasor.evaluation.intervals import LEVEL, binomial_interval
from phasor.evaluation.length_settings import STRIDE, TARGETS
from phasor.evaluation.retrieval.evaluate import DEPTHS, TRIALS
from phasor.evaluation.stream import GPU_CHUNK
from phasor.evaluation.variants import SINK_TOKENS
from phasor.generation.chat import REPLY_TOKENS
from phasor.generation.engine.memory import SHARE_OF_GPU, SHARE_OF_HOST
from phasor.generation.engine.prompt_list import MOST_ROWS
from phasor.generation.runners import fused
from phasor.lab import endpoints, server, workers
from phasor.lab.views.extension import CONFIG_BYTES
from phasor.nn.block import RECOMPILE_LIMIT
from phasor.nn.positions.fire.config import FIREConfig
from phasor.nn.positions.xpos.config import XPosConfig
from phasor.nn.positions.xpos.module import FLOAT16_SPANS
from phasor.ops.attention.blocks import BLOCK, MIN_BLOCK
from phasor.ops.quantized.frozen import MAX_ROWS
from phasor.parallel.hardware import (
    ATTENTION_SHARE,
    GIB,
    MATMUL_SHARE,
    MEMORY_SHARE,
    NETWORK_LATENCY,
    NETWORK_SHARE,
    NVLINK_SHARE,
    find_hardware,
)
from phasor.parallel.plan import BATCH_TOKENS
from phasor.serving.app import MOST_BYTES
from phasor.training.extend import LR, RECOMPUTE, WARMUP
from phasor.training.objectives.distillation import CHUNK


def power(value: int) -> str:
    return f"2^{math.log2(value):.0f}"


def listed(values: tuple[int, ...]) -> str:
    *first, last = (f"{value:,}" for value in values)
    return f"{', '.join(first)} and {last}"


def share(value: float) -> str:
    return f"{100 * value:.3g} %"


def models(sizes: dict[str, int]) -> str:
    layers = sizes["num_layers"]
    return f"{layers} layer{'s' if layers > 1 else ''} of {sizes['dim']} features"


def sizes_of(name: str) -> list[str]:
    """A column of the table of sizes in docs/compare.md."""
    texts = settings.SIZES[name]
    lines = [
        models(texts.model),
        f"BPE, {texts.vocab_size:,} tokens",
        f"{texts.length} tokens, {texts.steps:,} steps of {texts.batch_tokens:,}",
    ]
    for size, items in ((texts, "items"), (settings.size_for(name, "addition"), "digits")):
        problems = f"{size.task_length} {items}, {size.task_steps:,} steps of {size.task_rows} problems"
        lines += [models(size.task_model), problems]
    return lines


SIZE_ROWS = ["texts: model", "texts: vocabulary", "texts: trained at", "tasks: model", "tasks: trained to"]
SIZE_ROWS += ["`addition`: model", "`addition`: trained to"]
SMALL_AND_LARGE = dict(zip(SIZE_ROWS, zip(*map(sizes_of, settings.SIZES), strict=True), strict=True))

# Bounds, defaults and shares: sentences about constants.
CONSTANTS = {
    "docs/lab.md": [
        f"A head has at most {endpoints.MAX_HEAD_DIM} features, a matrix {power(endpoints.MAX_ELEMENTS)} elements, a "
        f"text {endpoints.MAX_TOKENS} tokens, a position is at most {power(endpoints.MAX_POSITION)}.",
        f"Requests are computed in worker processes, {['one', 'two'][server.COMPUTING - 1]} at once; "
        f"{workers.WAITING} wait",
        f"A computation has {server.SECONDS:.0f} seconds, and on Linux {server.MEMORY / GIB:.0f} GiB of memory",
        f"bounded by {server.FOLDER_SECONDS / 60:.0f} minutes alone",
        f"A `config.json` that is posted has at most {CONFIG_BYTES / 2**20:.0f} MiB",
    ],
    "docs/serving.md": [
        f"a body above {MOST_BYTES / 2**20:.0f} MiB",
        f"into a {['fifth', 'quarter'][SHARE_OF_HOST == 1 / 4]} of the host's memory, or "
        f"{['half', 'four fifths'][SHARE_OF_GPU == 4 / 5]} of what a GPU has free.",
    ],
    "docs/checkpoints.md": [
        f"with {template_worker.SECONDS:.0f} s of the processor per text, {template_worker.MEMORY / 2**20:.0f} MiB of "
        f"memory and {template_worker.OUTPUT:,} characters.",
        f"so is one of more than {TEMPLATE_BYTES / 2**20:.0f} MiB.",
    ],
    "docs/generation.md": [
        f"More than {MOST_ROWS} prompts are computed by an [engine](serving.md#the-engine), {MOST_ROWS} at once:",
        f"by default what the folder says, or else {REPLY_TOKENS:,} or what is left",
        f"a Triton kernel multiplies up to {MAX_ROWS} rows by the weights as they are",
    ],
    "docs/fine-tuning.md": [
        f"Up to {MAX_ROWS} rows on a GPU are multiplied by a Triton kernel",
        f"Logits are held for {CHUNK:,} tokens at a time.",
        f"with its scale of {EmbedConfig().scale:.0f}.",
    ],
    "docs/training.md": [
        f"Rows are as long as it was trained at, up to {LONGEST_ROW:,} tokens, {['three', 'four'][ROWS - 3]} to a "
        "batch",
    ],
    "docs/long-context.md": [
        f"AdamW, learning rate {LR:g} (`--lr`), no weight decay, {WARMUP} steps of warmup.".replace("e-0", "e-"),
        f"Rows of more than {RECOMPUTE:,} tokens recompute their activations.",
        f"such a window with the first {SINK_TOKENS} tokens visible",
        f"`--targets` tokens of each row ({TARGETS}, or half of the smallest length)",
        f"move by `--stride` ({STRIDE})",
        f"**Intervals** have the level {share(LEVEL)}, by Student's t.",
        f"Intervals are Wilson's, at {share(LEVEL)}.",
        f"`--trials` prompts ({TRIALS})",
        f"`--depths` places ({DEPTHS})",
        f"{TRIALS} of {TRIALS} is {share(round(binomial_interval(TRIALS, TRIALS).low, 2))} to 100 %.",
        f"in pieces of whole lines of at most {PIECE:,} characters",
        f"in chunks of {GPU_CHUNK:,}, which is the default on a GPU",
    ],
    "docs/compare.md": [
        f"The loss is measured at {listed(settings.LENGTHS)} times the trained length",
        f"tested on problems of {listed(settings.SIZES_TESTED)} times as many",
        f"The default is `{settings.TEXT_SCHEMES}`.",
        *(f"| {row} | {SMALL_AND_LARGE[row][0]} | {SMALL_AND_LARGE[row][1]} |" for row in SMALL_AND_LARGE),
        f"bases of {listed(questions.BASES)}; that of `rotary` is 10,000",
        f"A {['tenth', 'fifth'][texts.HELD_OUT > 0.1]} of the documents is held out",
    ],
    "docs/parallel.md": [
        f"**Time** is matrix products at {share(MATMUL_SHARE)} of the device's peak and attention at "
        f"{share(ATTENTION_SHARE)}, masks respected",
        f"NVLink reaches {share(round(NVLINK_SHARE, 2))} of its bandwidth, and the network between nodes "
        f"{share(round(NETWORK_SHARE, 2))}, with {1e6 * NETWORK_LATENCY:.0f} us per node and call.",
        f"A device fills {share(MEMORY_SHARE)} of its memory at most.",
        f"`--batch-tokens` tokens, {BATCH_TOKENS >> 20}m by default.",
        f"The usable memory of a device is {find_hardware('h200').usable / GIB:.1f} GiB.",
    ],
    "docs/positions.md": [
        f"Up to the position `L` ({FIREConfig().threshold:.0f} at first)",
        f"a sequence that spans more than {XPosConfig().max_positions:,} positions",
        f"Attention goes in blocks of {BLOCK} queries, {MIN_BLOCK} with gradients, over all of their keys",
        f"computed block by block, for {MIN_BLOCK} queries at a time in training,",
        f"`decay` is the {XPosConfig().decay:.0f};",
        f"`c` is {XPosConfig().max_positions // (2 * FLOAT16_SPANS):,} after the first position of the row or document",
    ],
    "docs/design.md": [
        f"**Blocks** process the queries {BLOCK} at a time.",
        f"compiling a block raises that limit to {RECOMPILE_LIMIT}.",
    ],
}


@pytest.mark.parametrize(("page", "said"), [(page, said) for page, all_said in CONSTANTS.items() for said in all_said])
def test_sentences_about_bounds_and_defaults(page, said):
    assert said in prose(page)


def test_the_guide_names_the_schemes_that_no_fused_kernel_of_decoding_computes():
    page = (ROOT / "docs" / "guide" / "choosing.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| attention in the fused kernels"))
    said = row.split("|")[2]
    groups = {
        "several axes": ("axial", "mrope"),
        "products with vectors": ("shaw", "transformerxl", "cope", "disentangled"),
    }
    named = {kind for group, kinds in groups.items() if group in said for kind in kinds}
    found = set()
    for kind in PositionConfig.kinds.keys() - {"combined"}:
        sizes = {"dim": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 9, "max_length": 16}
        model = phasor.Transformer(phasor.preset("llama-2", **sizes, position=kind))
        if fused.attention_why_not(*fused.layers_of(model.decoder)[0]) is not None:
            found.add(kind)
    assert named | set(re.findall(r"`(\w+)`", said)) == found


def commands_with(option: str) -> str:
    *first, last = (f"`{verb}`" for verb in VERBS if option in options_of(verb)[0])
    return f"{', '.join(first)} and {last}"


def test_sentences_name_the_commands_that_take_an_option():
    assert f"`phasor {commands_with('--adapter').removeprefix('`')} take `--adapter FOLDER`" in prose(
        "docs/fine-tuning.md"
    )
    assert f"`--part text` in the commands {commands_with('--part')}, takes" in prose("docs/checkpoints.md")

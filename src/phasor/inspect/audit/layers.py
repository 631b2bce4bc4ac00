"""Rules about what part of a head is rotated, by which positions, and in which layers."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.inspect.audit.finding import Finding
from phasor.inspect.audit.settings import PARTIAL, SECTIONS, RopeConfig

ROTARY_DIM = ("codegen", "gptj", "moss")  # families whose own field rotary_dim is
LOCAL_BASE = "rope_local_base_freq"


def rotary_dim(rope: RopeConfig) -> Iterator[Finding]:
    """Partial rotation by a field that only the code of a folder reads."""
    width = rope.config.get("rotary_dim")
    stated = PARTIAL in rope.config or any(PARTIAL in block.fields for block in rope.blocks)
    if width is not None and not stated and rope.config.get("model_type") not in ROTARY_DIM:
        yield Finding(
            "error",
            "rotary_dim",
            f"readers that know {PARTIAL} alone rotate whole heads, by other frequencies and in other pairs",
            f"{PARTIAL}, which is rotary_dim over head_dim",
            ("huggingface/transformers#48241",),
        )


def partial_twice(rope: RopeConfig) -> Iterator[Finding]:
    """Partial rotation that is stated in two places."""
    outside = rope.config.get(PARTIAL)
    for block in rope.new:
        if outside is not None and block.fields.get(PARTIAL) not in (None, 1.0) and block.layer_type is None:
            same = outside == block.fields[PARTIAL]
            yield Finding(
                "warning" if same else "error",
                PARTIAL,
                "it stands at the top level and in the block"
                + (": an engine applied both, one after the other" if same else ", with two values"),
                "the block alone",
                ("vllm-project/vllm#29966",),
            )


def partial_inside(rope: RopeConfig) -> Iterator[Finding]:
    """Partial rotation that stands only where transformers 5 has it."""
    for block in rope.new:
        if PARTIAL not in rope.config and block.fields.get(PARTIAL) not in (None, 1.0):
            yield Finding(
                "warning",
                f"{block.name}.{PARTIAL}",
                "readers of the older form look at the top level, and rotate whole heads",
                f"{PARTIAL} at the top level, for such a reader",
                ("vllm-project/vllm#29966", "PaddlePaddle/PaddleFormers#3367"),
            )


def partial_sections(rope: RopeConfig) -> Iterator[Finding]:
    """Partial rotation together with several rows of positions."""
    for block in rope.blocks:
        if SECTIONS in block.fields and block.partial < 1:
            yield Finding(
                "warning",
                f"{block.name}.{PARTIAL}",
                "an engine whose path for several rows of positions does not know it rotates whole heads",
                "nothing else: compare logits",
                ("AI-Hypercomputer/maxtext#4616",),
            )


def sections_sum(rope: RopeConfig) -> Iterator[Finding]:
    """Sections that do not cover the rotated pairs."""
    for block in rope.blocks:
        sections = block.sections
        if sections is not None and block.pairs is not None and sum(sections) != block.pairs:
            yield Finding(
                "error",
                f"{block.name}.{SECTIONS}",
                f"its sum is {sum(sections)}, and {block.pairs} pairs of a head are rotated: engines stop, or each "
                "fits the sections in another way",
                f"sections with the sum {block.pairs}",
                ("pytorch/torchtitan#4286", "sgl-project/sglang#19144"),
            )


def interleaved_sections(rope: RopeConfig) -> Iterator[Finding]:
    """Interleaved sections that a cycle of three rows cannot give."""
    for block in rope.blocks:
        sections = block.sections
        if block.fields.get("mrope_interleaved") and sections is not None and len(sections) == 3:
            pairs = sum(sections)
            given = [sum(i % 3 == axis and i // 3 < sections[axis] for i in range(pairs)) for axis in (1, 2)]
            if given != sections[1:]:
                yield Finding(
                    "error",
                    f"{block.name}.{SECTIONS}",
                    f"sections {sections} cannot be interleaved: pairs go to rows in turn, which gives "
                    f"{[pairs - sum(given), *given]}",
                    "sections that a cycle over the rows gives",
                    ("ohdearquant/lattice#1507",),
                )


def sections_kind(rope: RopeConfig) -> Iterator[Finding]:
    """A kind that is no kind: several rows of positions are asked for by their sections."""
    for block in rope.blocks:
        if block.kind == "mrope":
            yield Finding(
                "note",
                f"{block.name}.rope_type",
                f"transformers 5 takes mrope for default, and {SECTIONS} alone counts",
                f"default with {SECTIONS}, for transformers 5; mrope for engines that read type",
                ("huggingface/transformers#48671",),
            )


def sliding_layers(rope: RopeConfig) -> Iterator[Finding]:
    """An extension for all layers of a model with windows."""
    layers = rope.config.get("layer_types")
    has_windows = isinstance(layers, list) and "sliding_attention" in layers
    for block in rope.blocks:
        if has_windows and block.layer_type is None and block.kind != "default":
            yield Finding(
                "warning",
                block.name,
                "layers with a window are extended in some engines and versions, and not in others",
                "a block for each type of layer, default for sliding_attention if it was trained so",
                ("huggingface/transformers#45945",),
            )


def local_base(rope: RopeConfig) -> Iterator[Finding]:
    """Another base in layers with a window, in a separate field."""
    if LOCAL_BASE in rope.config:
        yield Finding(
            "warning",
            LOCAL_BASE,
            "engines that do not read it take one base, or one extension, for all layers",
            "a block for sliding_attention in rope_parameters too",
            ("ggml-org/llama.cpp#14367", "vllm-project/vllm#29111", "huggingface/candle#2891"),
        )


RULES = (
    *(rotary_dim, partial_twice, partial_inside, partial_sections, sections_sum, interleaved_sections, sections_kind),
    *(sliding_layers, local_base),
)

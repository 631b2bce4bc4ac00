"""Rules about where rotary settings stand and under which names: what readers of another form do not find."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.inspect.audit.finding import Finding
from phasor.inspect.audit.settings import NEW, OLD, THETA, USUAL_THETA, RopeConfig

INTEGERS = ("factor", "beta_fast", "beta_slow")  # that older checks wanted to be written with a point


def theta_inside(rope: RopeConfig) -> Iterator[Finding]:
    """The base moved into `rope_parameters`, where readers of the older form do not look."""
    bases = {block.number(THETA) for block in rope.new} - {None, USUAL_THETA}
    if THETA not in rope.config and bases:
        shown = " and ".join(f"{base:,.0f}" for base in sorted(filter(None, bases)))
        yield Finding(
            "warning",
            f"{NEW}.{THETA}",
            f"readers of the older form find no {THETA} beside it, and rotate by base 10,000 in place of {shown}",
            f"{THETA} at the top level too, with the same value"
            + (" as the layers with full attention" if rope.is_nested else ""),
            ("vllm-project/vllm#42624", "deepspeedai/DeepSpeed#8345"),
        )


def theta_twice(rope: RopeConfig) -> Iterator[Finding]:
    """Two values of the base, of which engines take one or the other."""
    outside = rope.theta
    for block in rope.new:
        inside = block.number(THETA)
        if block.layer_type is None and outside is not None and inside not in (None, outside):
            yield Finding(
                "error",
                THETA,
                f"it is {outside:,.0f} at the top level and {inside:,.0f} in {NEW}: some engines let the former "
                "overwrite the latter",
                "the same value in both places",
                ("vllm-project/vllm#42624",),
            )


def scaling_inside(rope: RopeConfig) -> Iterator[Finding]:
    """An extension that stands only where transformers 5 has it."""
    for block in rope.new:
        if not rope.old and block.kind != "default":
            yield Finding(
                "warning",
                block.name,
                f"readers of {OLD} do not find {block.kind} there, and compute without it",
                f"the same block as {OLD} too",
                ("sgl-project/sglang#26187",),
            )


def scaling_twice(rope: RopeConfig) -> Iterator[Finding]:
    """Two blocks that disagree."""
    for old in rope.old:
        for new in rope.new:
            compared = (old.kind, old.factor), (new.kind, new.factor)
            if old.layer_type == new.layer_type and compared[0] != compared[1]:
                yield Finding(
                    "error",
                    OLD,
                    f"it says {old.kind} and {new.name} {new.kind}, or another factor: an engine that moves the former "
                    "over the latter computes something else",
                    "one block, or the same in both",
                    ("vllm-project/vllm#28542",),
                )


def type_missing(rope: RopeConfig) -> Iterator[Finding]:
    """The kind under its newer name alone."""
    for block in rope.blocks:
        if block.kind != "default" and "type" not in block.fields:
            yield Finding(
                "note",
                f"{block.name}.rope_type",
                "older readers know this field as type, and stop without it",
                "type too, with the same value",
                ("ml-explore/mlx-examples#909", "microsoft/KBLaM#37", "meta-llama/llama3#299"),
            )


def rope_type_missing(rope: RopeConfig) -> Iterator[Finding]:
    """The kind under its older name alone."""
    for block in rope.blocks:
        if "type" in block.fields and "rope_type" not in block.fields:
            yield Finding(
                "note",
                f"{block.name}.type",
                "newer readers know this field as rope_type; some versions stop without it",
                "rope_type too, with the same value",
                ("huggingface/transformers#32167",),
            )


def types_differ(rope: RopeConfig) -> Iterator[Finding]:
    """Two names of one field with two values."""
    for block in rope.blocks:
        names = {str(block.fields[name]) for name in ("type", "rope_type") if name in block.fields}
        if len(names) > 1 or (names & {"default"} and "mrope_section" in block.fields and "type" in block.fields):
            yield Finding(
                "error",
                f"{block.name}.type",
                f"it is {block.fields.get('type')!r} and rope_type {block.fields.get('rope_type')!r}: an engine that "
                "reads the one computes something else than one that reads the other",
                "the same value under both names, mrope where there is an mrope_section",
                ("modelscope/ms-swift#2340",),
            )


def former_name(rope: RopeConfig) -> Iterator[Finding]:
    """Names of kinds that only some engines know."""
    for block in rope.blocks:
        if block.kind == "su":
            yield Finding(
                "warning",
                f"{block.name}.type",
                "su is the former name of longrope, and engines know one or the other",
                "longrope",
                ("ggml-org/llama.cpp#8262", "huggingface/text-generation-inference#2172"),
            )


def integers(rope: RopeConfig) -> Iterator[Finding]:
    """Numbers that older checks wanted to be floats."""
    for block in rope.blocks:
        found = [name for name in INTEGERS if type(block.fields.get(name)) is int]
        if found:
            yield Finding(
                "note",
                f"{block.name}.{found[0]}",
                f"{' and '.join(found)} written without a point: versions of transformers complain, the oldest refuse",
                f"{found[0]}: {block.number(found[0])}",
                ("huggingface/transformers#37134",),
            )


def blocks_per_layer_type(rope: RopeConfig) -> Iterator[Finding]:
    """Settings per type of layer, which readers of one set for all layers do not find."""
    if rope.is_nested:
        yield Finding(
            "warning",
            rope.blocks[0].name.partition(".")[0],
            "it has a block for each type of layer: an engine that reads one for all layers takes its defaults, or "
            "the block of another type",
            "nothing else: check that your engine reads layer types",
            ("vllm-project/speculators#649", "deepspeedai/DeepSpeed#8345"),
        )


def dropped_by_converter(rope: RopeConfig) -> Iterator[Finding]:
    """Architectures of which GGUF files lack YaRN."""
    kind = rope.config.get("model_type")
    for block in rope.blocks:
        if block.is_yarn and kind in ("qwen2_moe", "qwen3_moe"):
            yield Finding(
                "note",
                block.name,
                f"the converter to GGUF left YaRN out of {kind} at first",
                "a new conversion, or --rope-scaling yarn with its factor at the command line of llama.cpp",
                ("ggml-org/llama.cpp#13322",),
            )


RULES = (
    *(theta_inside, theta_twice, scaling_inside, scaling_twice, type_missing, rope_type_missing, types_differ),
    *(former_name, integers, blocks_per_layer_type, dropped_by_converter),
)

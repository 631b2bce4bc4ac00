"""Rules about extensions of the context: which lengths and factors they are computed from, and by whom."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.inspect.audit.finding import Finding
from phasor.inspect.audit.settings import LENGTH, ORIGINAL, RopeConfig

NEEDED = {  # fields without which a kind is not defined
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


def original_missing(rope: RopeConfig) -> Iterator[Finding]:
    """YaRN without the length that its pairs are chosen by."""
    for block in rope.blocks:
        if block.kind in ("yarn", "longrope") and block.original is None:
            outside = rope.config.get(ORIGINAL)
            beside = f", which stands at the top level ({outside:,})" if isinstance(outside, int) else ""
            yield Finding(
                "warning" if beside else "error",
                f"{block.name}.{ORIGINAL}",
                f"it is not in the block{beside}: engines stop, or take {LENGTH} for it, and so slow other pairs",
                f"{ORIGINAL} in the block",
                ("NVIDIA-NeMo/Automodel#2652", "ROCm/aiter#4742"),
            )


def factor_and_length(rope: RopeConfig) -> Iterator[Finding]:
    """A factor that is not the ratio of the lengths."""
    for block in rope.blocks:
        if not block.is_yarn or block.original is None or block.factor is None or block.length is None:
            continue
        ratio = block.length / block.original
        if abs(ratio - block.factor) < 1e-6 * ratio:
            continue
        ignored = ", that is none" if ratio == 1 else ""
        yield Finding(
            "error" if ratio <= 1 else "warning",
            f"{block.name}.factor",
            f"it is {block.factor:g}, and {LENGTH} {block.length:,.0f} is {ratio:g} times {ORIGINAL}: versions of "
            f"transformers scale by {ratio:g}{ignored}, other engines by {block.factor:g}",
            f"{LENGTH} {block.factor * block.original:,.0f}, or a factor of {ratio:g}",
            ("huggingface/transformers#38224", "huggingface/transformers#33783"),
        )


def static_yarn(rope: RopeConfig) -> Iterator[Finding]:
    """YaRN is applied to texts of every length."""
    for block in rope.blocks:
        if block.is_yarn and (block.factor or 1) > 1:
            original = "the original length" if block.original is None else f"{block.original:,.0f} tokens"
            yield Finding(
                "note",
                block.name,
                f"engines apply it to short texts too: what is shorter than {original} is computed otherwise than it "
                "was trained",
                "no more factor than your texts need, or an engine that chooses it per request (phasor: DynamicYaRN)",
                ("sgl-project/sglang#6030", "vllm-project/vllm#18728"),
            )


def yarn_alias(rope: RopeConfig) -> Iterator[Finding]:
    """YaRN by a name of one's own, which is not recognized everywhere."""
    for block in rope.blocks:
        if "yarn" in block.kind and not block.is_yarn:
            yield Finding(
                "error",
                f"{block.name}.rope_type",
                f"{block.kind} is YaRN by another name: where that is not recognized, {LENGTH} is multiplied by the "
                "factor once more, and positions leave the table",
                "yarn",
                ("vllm-project/vllm#56446", "vllm-project/vllm#53634"),
            )


def dynamic(rope: RopeConfig) -> Iterator[Finding]:
    """Frequencies by the length, for which every engine takes another length."""
    for block in rope.blocks:
        if block.kind == "dynamic":
            yield Finding(
                "warning",
                block.name,
                "the length that it depends on is the longest text so far in transformers, with keys in the cache "
                "rotated by former frequencies, and in vLLM a constant that follows from the factor",
                "yarn or linear, which do not depend on the length; or an engine with a stated length",
                ("vllm-project/vllm#41236", "huggingface/transformers#25104"),
            )


def below_trained_length(rope: RopeConfig) -> Iterator[Finding]:
    """A length that is shorter than the one before the extension."""
    for block in rope.blocks:
        short = block.original is not None and block.length is not None and block.length < block.original
        if short or (block.factor is not None and block.factor < 1):
            yield Finding(
                "error",
                LENGTH if short else f"{block.name}.factor",
                "the extended length is below the trained one: formulas of extensions then leave their range, down to "
                "powers of negative numbers",
                "no extension, or the length of the checkpoint",
                ("vllm-project/vllm#52665",),
            )


def fields_missing(rope: RopeConfig) -> Iterator[Finding]:
    """An extension without a field that defines it."""
    for block in rope.blocks:
        lacking = [name for name in NEEDED.get(block.kind, ()) if name not in block.fields]
        if lacking:
            yield Finding(
                "error",
                f"{block.name}.{lacking[0]}",
                f"{block.kind} needs {' and '.join(lacking)}: readers stop, or take their own defaults",
                f"all of {', '.join(NEEDED[block.kind])}",
                ("b4rtaz/distributed-llama#120",),
            )


def llama3(rope: RopeConfig) -> Iterator[Finding]:
    """The extension of Llama 3.1, which some read and do not apply."""
    for block in rope.blocks:
        if block.kind == "llama3":
            yield Finding(
                "note",
                block.name,
                "engines that leave it out answer short prompts well, and fail beyond the original length",
                "nothing else: compare a long prompt",
                ("unslothai/unsloth#6197", "lablup/mlxcel#1355"),
            )


def longrope_tables(rope: RopeConfig) -> Iterator[Finding]:
    """LongRoPE has two tables, for texts up to the original length and beyond."""
    for block in rope.blocks:
        if block.kind in ("longrope", "su"):
            yield Finding(
                "warning",
                f"{block.name}.long_factor",
                "engines with one table rotate short texts by the factors of long ones, or the other way round",
                "nothing else: check that your engine chooses by the length of a text",
                ("lablup/mlxcel#1358", "mlc-ai/mlc-llm#3375", "ggml-org/llama.cpp#24875"),
            )


def longrope_lists(rope: RopeConfig) -> Iterator[Finding]:
    """Lists that must have a factor for each rotated pair."""
    for block in rope.blocks:
        for name in ("short_factor", "long_factor"):
            given = block.fields.get(name)
            if isinstance(given, list) and block.pairs is not None and len(given) != block.pairs:
                yield Finding(
                    "error",
                    f"{block.name}.{name}",
                    f"it has {len(given)} factors, and {block.pairs} pairs of a head are rotated (partial rotation "
                    "counts)",
                    f"{block.pairs} factors, and partial_rotary_factor where a part of the head is rotated",
                    ("apache/tvm#18102", "mlc-ai/relax#337"),
                )


def longrope_factor(rope: RopeConfig) -> Iterator[Finding]:
    """The attention factor of LongRoPE follows from lengths where no factor is given."""
    for block in rope.blocks:
        if block.kind in ("longrope", "su") and block.factor is None:
            yield Finding(
                "note",
                f"{block.name}.factor",
                f"the attention factor follows from {LENGTH} over {ORIGINAL}, so that an engine started for a shorter "
                "length may scale otherwise; readers that take the factor stop without it",
                "factor and attention_factor as numbers",
                ("lm-sys/FastChat#3907",),
            )


def softmax_scale(rope: RopeConfig) -> Iterator[Finding]:
    """DeepSeek's YaRN, which scales the softmax too."""
    for block in rope.blocks:
        if block.number("mscale_all_dim"):
            yield Finding(
                "warning",
                f"{block.name}.mscale_all_dim",
                "it scales the softmax by its square besides cos and sin: engines left that out, or took mscale for it",
                "nothing else: compare logits beyond the first position",
                ("NVIDIA/Megatron-LM#1429", "huggingface/transformers#47435", "onnxruntime/mobius#548"),
            )


def truncate(rope: RopeConfig) -> Iterator[Finding]:
    """YaRN whose bounds are not rounded."""
    for block in rope.blocks:
        if block.is_yarn and block.fields.get("truncate") is False:
            where = ", and transformers in a block of a layer type" if block.layer_type is not None else ""
            yield Finding(
                "warning",
                f"{block.name}.truncate",
                f"engines that do not know it round the bounds{where}: frequencies of pairs between them differ",
                "nothing else: it is part of how the model was trained",
                ("vllm-project/vllm#27722", "sgl-project/sglang#14270"),
            )


RULES = (
    *(
        original_missing,
        factor_and_length,
        static_yarn,
        yarn_alias,
        dynamic,
        below_trained_length,
        fields_missing,
        llama3,
    ),
    *(longrope_tables, longrope_lists, longrope_factor, softmax_scale, truncate),
)

"""Benchmarks: phasor on this machine, compared with other installed libraries and with the machine's own limit.

Every result is compared with a plain reference in a higher precision before it is timed, and a wrong one has no time.
"""

from __future__ import annotations

# Nothing here loads torch: the command line lists the workloads in its help.
WORKLOADS = {
    "rotary": "rotate queries and keys, forward and with the backward pass",
    "positions": "the same with explicit positions, one per token, as in packed rows",
    "attention": "causal attention",
    "window": "causal sliding-window attention",
    "alibi": "causal attention with ALiBi's bias",
    "t5": "causal attention with T5's bias",
    "prefill": "causal attention over a long prompt",
    "train": "a training step of a Llama-shaped model",
    "train-long": "a training step on long sequences",
    "decode": "greedy decoding of one prompt",
    "decode-batch": "greedy decoding of many prompts at once",
    "families": "ten families beside transformers: forward and backward, and decoding",
}
FULL_WORKLOADS = tuple(name for name in WORKLOADS if name != "families")  # what runs where all are
DEFAULT_WORKLOADS = ("rotary", "attention", "window", "train", "decode")  # what runs where none is named
FAMILIES = (
    "llama",
    "gpt-2",
    "gemma-2",
    "gemma-3",
    "bloom",
    "mixtral",
    "qwen-3-moe",
    "gpt-oss",
    "modernbert",
    "marian",
)

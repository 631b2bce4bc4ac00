"""How fast phasor is on this machine, beside whatever else is installed and beside the machine's own limit.

Every result is compared with a plain reference in a higher precision before it is timed, and a wrong one has no time.
"""

from __future__ import annotations

# Nothing here loads torch: the command line lists the works in its help.
WORKS = {
    "rotary": "turn queries and keys, forward and with the backward pass",
    "positions": "the same with a position of its own for every token, as in packed rows",
    "attention": "causal attention",
    "window": "causal attention through a sliding window",
    "alibi": "causal attention with ALiBi's bias",
    "t5": "causal attention with T5's bias",
    "prefill": "causal attention over a long prompt",
    "train": "an update of a Llama-shaped model",
    "train-long": "an update on long sequences",
    "decode": "greedy decoding of one prompt",
    "decode-batch": "greedy decoding of many prompts at once",
}
SHORT = ("rotary", "attention", "window", "train", "decode")  # what runs where nothing is chosen

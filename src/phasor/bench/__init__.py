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
    "backward": "forward and backward of a Llama-shaped model, in turn with transformers",
    "train": "a training step of a Llama-shaped model",
    "train-long": "a training step on long sequences",
    "decode": "greedy decoding of one prompt",
    "decode-batch": "greedy decoding of many prompts at once",
    "families": "ten families beside transformers: forward and backward, and decoding",
}
FULL_WORKLOADS = tuple(name for name in WORKLOADS if name != "families")  # what runs where all are
# Each runs alone, has settings (`--set`), and a result in its own format.
STUDIES = {
    "rotary-kernels": "rotary kernels beside Liger, torch.compile and transformers, single tokens included",
    "attention-kernels": "SDPA's backends, FlexAttention and phasor's kernel, in TFLOP/s",
    "schemes": "attention with every position scheme beside plain attention, under any mask",
    "sparse": "sparse attention beside full attention and FlexAttention",
    "linear-attention": "gated delta rule and retention beside full attention and flash-linear-attention",
    "scaling": "time and memory of attention against the length",
    "fused": "cross-entropy, norms, gated activations, float8 and AdamW beside torch, torch.compile and Liger",
    "train-gpu": "training a Llama of 1.04 B parameters step after step beside transformers and Liger",
    "train-cpu": "training a small GPT on a CPU: phasor train beside plain torch and transformers' Trainer",
    "lora": "training adapters on a frozen Llama of 1.04 B and of 8 B parameters, and in NF4, beside PEFT and Liger",
    "decode-gpu": "greedy decoding of that model, weights in bfloat16, int8 and int4, beside transformers' generate",
    "decode-schemes": "a decoding step with every position scheme beside rotary, over a long cache",
    "latent": "latent attention: decoding steps and training beside the limit, torch's paths and transformers",
    "decode-cpu": "greedy decoding on a CPU beside transformers' generate, and the cost of a token by length",
    "serving": "many requests at once: the engine beside one after the other, static batches and transformers",
    "quantized": "greedy decoding on a CPU with 8-bit and 4-bit weights beside transformers and CTranslate2",
    "loading": "loading a sharded checkpoint: time and peak memory beside transformers",
    "stream": "reading one long text in chunks through a sliding-window cache beside transformers",
    "host": "processor time and operations per layer of ten families beside transformers",
}
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

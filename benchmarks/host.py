"""What an eager forward and backward cost on the host, by family: phasor and transformers on the same weights.

The models are so narrow that arithmetic takes next to no time: what is left is Python, and the dispatch of operations.
Logits and gradients are compared first. An operation is a call of torch's dispatcher that is no view; on a GPU
each is a kernel launch or more. Times are of this process's processor, the least of many alternating calls, so that
other load on the machine matters little.

    python benchmarks/host.py [--family gpt-2 ...] [--runs N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import phasor

LAYERS, DIM, HEADS, VOCAB, ROWS, TOKENS = 12, 64, 4, 100, 4, 8
TOLERANCE = 1e-4  # of the largest logit, or gradient
COMMON = {"vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
LLAMA = COMMON | {"intermediate_size": 2 * DIM, "num_key_value_heads": 2}
GEMMA = LLAMA | {"head_dim": DIM // HEADS, "query_pre_attn_scalar": DIM // HEADS, "sliding_window": 4}
GPT = {"vocab_size": VOCAB, "n_layer": LAYERS, "n_head": HEADS}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODERNBERT = COMMON | {"intermediate_size": 2 * DIM, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}
MARIAN = SPECIAL | {"vocab_size": VOCAB, "d_model": DIM, "decoder_start_token_id": 0, "max_position_embeddings": 64}
STACK = {"layers": LAYERS // 2, "attention_heads": HEADS, "ffn_dim": 2 * DIM}
MARIAN |= {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in STACK.items()}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "gpt-2": ("GPT2LMHeadModel", GPT | {"n_embd": DIM, "n_positions": 64}),
    "modernbert": ("ModernBertForMaskedLM", MODERNBERT | SPECIAL),
    "bloom": ("BloomForCausalLM", GPT | {"hidden_size": DIM}),
    "gemma-2": ("Gemma2ForCausalLM", GEMMA),
    "gemma-3": ("Gemma3ForCausalLM", GEMMA),
    "mixtral": ("MixtralForCausalLM", LLAMA | EXPERTS | {"num_local_experts": 4}),
    "qwen-3-moe": (
        "Qwen3MoeForCausalLM",
        LLAMA | EXPERTS | {"head_dim": DIM // HEADS, "num_experts": 4, "moe_intermediate_size": 2 * DIM},
    ),
    "gpt-oss": ("GptOssForCausalLM", LLAMA | EXPERTS | {"head_dim": DIM // HEADS, "num_local_experts": 4}),
    "marian": ("MarianMTModel", MARIAN),
}
Call = Callable[[], torch.Tensor]


class CountOperations(TorchDispatchMode):
    """How many operations run inside, views not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def pair(family: str, folder: str) -> tuple[phasor.Transformer, Any]:
    """A family's model of transformers, and ours as loaded from what it saved."""
    name, fields = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    theirs = cls(cls.config_class(**fields)).eval()
    theirs.save_pretrained(folder)
    return phasor.load(folder).float().eval(), theirs


def forward_calls(family: str, ours: phasor.Transformer, theirs: Any) -> tuple[Call, Call]:
    """The forward of each model on the same tokens, to logits."""
    source, target = torch.randint(3, VOCAB, (2, ROWS, TOKENS))
    if family == "marian":
        return (
            lambda: ours(source, target),
            lambda: theirs(input_ids=source, decoder_input_ids=target, use_cache=False).logits,
        )
    options = {} if family == "modernbert" else {"use_cache": False}
    return lambda: ours(source), lambda: theirs(input_ids=source, **options).logits


def check(family: str, tables: tuple[torch.Tensor, torch.Tensor], calls: tuple[Call, Call]) -> None:
    """Logits agree, and so do the gradients of the token tables, which depend on all others; or nothing is measured."""
    logits = [call() for call in calls]
    for out in logits:
        out.logsumexp(-1).mean().backward()
    gradients = [table.grad for table in tables]
    for what, (a, b) in {"logits": logits, "gradients": gradients}.items():
        difference = float((a - b).detach().abs().max() / b.detach().abs().max())
        if not difference < TOLERANCE:
            raise SystemExit(f"{family}: the {what} differ by {difference:.1e}, and nothing is measured")


def operations(call: Call) -> tuple[list[str], list[str]]:
    """The operations of a forward and of its backward."""
    with CountOperations() as forward:
        out = call()
    grad = torch.ones_like(out)
    with CountOperations() as backward:
        out.backward(grad)
    return forward.names, backward.names


def host_seconds(calls: tuple[Call, Call], runs: int) -> list[tuple[float, float]]:
    """The least processor time of a forward and of a backward, for each model, in alternating calls."""
    best = [(float("inf"), float("inf"))] * len(calls)
    for _ in range(runs):
        for index, call in enumerate(calls):
            begun = time.process_time()
            out = call()
            middle = time.process_time()
            out.backward(torch.ones_like(out))
            ended = time.process_time()
            best[index] = min(best[index][0], middle - begun), min(best[index][1], ended - middle)
    return best


def measure(family: str, runs: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        models = pair(family, folder)
    calls = forward_calls(family, *models)
    check(family, (models[0].tokens.weight, models[1].get_input_embeddings().weight), calls)
    row: dict[str, float] = {}
    seconds = host_seconds(calls, runs)
    for who, call, (forward, backward) in zip(("ours", "theirs"), calls, seconds, strict=True):
        counts = [len(names) / LAYERS for names in operations(call)]
        row |= {f"{who} ops forward": counts[0], f"{who} ops backward": counts[1]}
        row |= {f"{who} us forward": 1e6 * forward / LAYERS, f"{who} us backward": 1e6 * backward / LAYERS}
    row["ratio"] = sum(seconds[1]) / sum(seconds[0])
    return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options.add_argument("--runs", type=int, default=60)
    options.add_argument("--out", type=Path, help="a JSON file for the results")
    given = options.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"{'per layer':12} {'operations, forward + backward':>42} {'host microseconds, forward + backward':>50}")
    results = {}
    for family in given.family:
        row = results[family] = measure(family, given.runs)
        ops = [f"{row[f'{who} ops forward']:5.1f} + {row[f'{who} ops backward']:5.1f}" for who in ("ours", "theirs")]
        us = [f"{row[f'{who} us forward']:6.0f} + {row[f'{who} us backward']:6.0f}" for who in ("ours", "theirs")]
        text = f"{family:12} phasor {ops[0]}, transformers {ops[1]}   phasor {us[0]}, transformers {us[1]}"
        print(f"{text}   {row['ratio']:.2f} x", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

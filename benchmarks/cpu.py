"""Forward and backward of a Llama-shaped model on the CPU, beside transformers' own Llama in the same process.

Both models hold the same weights; the results are compared before anything is timed. Runs alternate, so
that whatever else the machine does falls on both, and the medians' ratio is what counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import phasor

SHAPE = {"dim": 512, "hidden_dim": 1408, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 32000}


def pair() -> tuple[phasor.Transformer, LlamaForCausalLM]:
    """Our model and theirs, with the same weights."""
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=SHAPE["dim"],
            intermediate_size=SHAPE["hidden_dim"],
            num_hidden_layers=SHAPE["num_layers"],
            num_attention_heads=SHAPE["num_heads"],
            num_key_value_heads=SHAPE["num_kv_heads"],
            vocab_size=SHAPE["vocab_size"],
            rms_norm_eps=1e-5,
            attn_implementation="sdpa",
        )
    )
    ours = phasor.Transformer(phasor.preset("llama-2", **SHAPE))
    state = theirs.state_dict()
    groups, width = SHAPE["num_kv_heads"], SHAPE["dim"] // SHAPE["num_heads"]
    mine = {"tokens.weight": state["model.embed_tokens.weight"], "head.weight": state["lm_head.weight"]}
    mine["decoder.norm.weight"] = state["model.norm.weight"]
    for i in range(SHAPE["num_layers"]):
        at, to = f"model.layers.{i}.", f"decoder.blocks.{i}."
        q, k, v = (state[f"{at}self_attn.{p}_proj.weight"].unflatten(0, (groups, -1, width)) for p in "qkv")
        mine[to + "attention.qkv.weight"] = torch.cat((q, k, v), dim=1).flatten(0, 2)
        mine[to + "attention.out.weight"] = state[at + "self_attn.o_proj.weight"]
        gate_up = [state[f"{at}mlp.{p}_proj.weight"] for p in ("gate", "up")]
        mine[to + "feedforward.up.weight"] = torch.cat(gate_up)
        mine[to + "feedforward.down.weight"] = state[at + "mlp.down_proj.weight"]
        mine[to + "residual.norms.0.weight"] = state[at + "input_layernorm.weight"]
        mine[to + "residual.norms.1.weight"] = state[at + "post_attention_layernorm.weight"]
    ours.load_state_dict(mine)
    return ours, theirs


def step(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    out = model(tokens)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    logits.float().logsumexp(-1).mean().backward()
    return time.perf_counter() - start, logits.detach()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=9)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--tokens", type=int, default=512)
    given = options.parse_args()
    ours, theirs = pair()
    tokens = torch.randint(0, SHAPE["vocab_size"], (given.batch, given.tokens))
    (_, a), (_, b) = step(ours, tokens), step(theirs, tokens)
    difference = float((a - b).abs().max() / b.abs().max())
    print(f"largest difference of the logits, relative: {difference:.1e}")
    if not difference < 1e-4:
        raise SystemExit("the two models disagree: nothing is timed")
    times: dict[str, list[float]] = {"phasor": [], "transformers": []}
    for _ in range(given.runs):
        times["phasor"].append(step(ours, tokens)[0])
        times["transformers"].append(step(theirs, tokens)[0])
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [p / t for p, t in zip(times["phasor"], times["transformers"], strict=True)]
    for name, value in medians.items():
        print(f"{name:13} {value * 1e3:8.1f} ms forward + backward (median of {given.runs})")
    ratio = medians["phasor"] / medians["transformers"]
    print(f"phasor / transformers: {ratio:.3f} (runs {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()

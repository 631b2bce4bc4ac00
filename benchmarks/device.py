"""The same model on a GPU and on the CPU: forward and backward in float32 and bfloat16, phases, and the cache.

Prints how far the GPU's results lie from a float64 forward on the CPU, beside how far the CPU's own lie in the
same type, and fails where the GPU is worse by more than a small factor.

    python benchmarks/device.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch

import phasor
from phasor.bench.checks import relative_error

SIZES: dict[str, Any] = {"vocab_size": 1000, "dim": 256, "num_layers": 4, "num_heads": 8, "max_length": 1024}
# ReLU's gradient jumps where an input rounds across zero, so models that have it are compared with a smooth one.
SMOOTH = {"feedforward": phasor.FeedForwardConfig(activation="gelu-tanh", bias=True)}
CASES: dict[str, dict[str, Any]] = {
    "llama-2 as on the CPU": {"dim": 512, "hidden_dim": 1408, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4},
    "llama-3.1": {},
    "llama-3.1 window 100": {"attention": phasor.SoftmaxAttentionConfig(window=100)},
    "llama-3.1 window 100 sinks 4": {"attention": phasor.SoftmaxAttentionConfig(window=100, sink_tokens=4)},
    "gpt-2": {},
    "bert": {},
    "roformer": {},
    "t5": SMOOTH,
    "transformer-base": SMOOTH,
    "palm": {},
    "grok-1": {},
    "bloom": {},
    "deepnet": SMOOTH,
}
ALLOWED = 4.0  # how many times the CPU's own rounding error the GPU may be off: another order of summation
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # an error below this is none, whatever the CPU's is


def case(name: str) -> phasor.Transformer:
    torch.manual_seed(0)
    changes = {**SIZES, **CASES[name], "dropout": phasor.DropoutConfig()}
    return phasor.Transformer(phasor.preset(name.split()[0], **changes)).double()


def run(model: phasor.Transformer, batch: list[torch.Tensor], about: dict[str, Any]) -> list[torch.Tensor]:
    """The output and the gradients of all weights, as one list of float64 CPU tensors."""
    model.zero_grad(set_to_none=True)
    out = model(*batch, **about)
    torch.manual_seed(1)
    weight = torch.randn(out.shape, dtype=torch.float64)
    (out * weight.to(out.device, out.dtype)).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [x.detach().double().cpu() for x in (out, *grads)]


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> tuple[float, float]:
    """Relative error of the output, and of all gradients taken together."""
    return relative_error(found[:1], expected[:1]), relative_error(found[1:], expected[1:])


def compare(name: str) -> list[dict[str, Any]]:
    model = case(name)
    rows, count = (4, 512) if name.endswith("CPU") else (2, 700)
    tokens = torch.randint(0, SIZES["vocab_size"], (rows, count), generator=torch.Generator().manual_seed(2))
    batch = [tokens, tokens[:, : count // 2]] if model.config.shape == "encoder-decoder" else [tokens]
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[1, -50:] = model.config.shape == "decoder"
    about = {"attention_mask": real} if model.config.shape != "decoder" else {}
    expected = run(model, batch, about)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        here = error(run(copy.deepcopy(model).to(dtype), batch, about), expected)
        there_model = copy.deepcopy(model).to("cuda", dtype)
        there = error(run(there_model, [x.cuda() for x in batch], {k: v.cuda() for k, v in about.items()}), expected)
        good = all(t <= max(ALLOWED * h, FLOOR[dtype]) for t, h in zip(there, here, strict=True))
        found.append({"model": name, "dtype": str(dtype)[6:], "cpu": here, "gpu": there, "equal": good})
    return found


def phases() -> dict[str, Any]:
    """Angles on the GPU against those on the CPU, and logits that do not mind an offset of 2^30."""
    at = torch.randint(0, 2**36, (4096,), generator=torch.Generator().manual_seed(3))
    rope = phasor.Rotary(head_dim=128)
    far = max(float((a.cpu() - b).abs().max()) for a, b in zip(rope.cos_sin(at.cuda()), rope.cos_sin(at), strict=True))
    model = case("llama-3.1").float().cuda()
    tokens = torch.randint(0, 1000, (1, 256), device="cuda")
    with torch.no_grad():
        near = model(tokens)
        moved = model(tokens, positions=torch.arange(256, device="cuda") + 2**30)
    return {
        "cos_sin, GPU against CPU": far,
        "logits moved by 2^30": float((moved - near).abs().max() / near.abs().max()),
    }


def cached_error() -> dict[str, float]:
    """Cached decoding against the full forward, on the GPU in float32."""
    found = {}
    for name in ("llama-3.1", "llama-3.1 window 100 sinks 4", "bloom", "grok-1"):
        model = case(name).float().cuda().eval()
        tokens = torch.randint(0, 1000, (2, 160), device="cuda")
        cache = model.new_cache(2, 160)
        with torch.no_grad():
            pieces = [model(tokens[:, :120], cache=cache)]
            pieces += [model(tokens[:, i : i + 1], cache=cache) for i in range(120, 160)]
            found[name] = float((torch.cat(pieces, dim=1) - model(tokens)).abs().max())
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    begun = time.perf_counter()
    rows = []
    for name in CASES:
        for row in compare(name):
            rows.append(row)
            cpu, gpu = (" ".join(f"{x:.1e}" for x in row[side]) for side in ("cpu", "gpu"))
            print(
                f"{row['model']:30} {row['dtype']:9} cpu {cpu}   gpu {gpu}   {'equal' if row['equal'] else 'NOT EQUAL'}"
            )
    angles, decoding = phases(), cached_error()
    print(angles)
    print("cached decoding against the full forward:", decoding)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "forward and backward, relative error of output and gradients against float64": rows,
        "phases": angles,
        "cached against full": decoding,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "device.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.perf_counter() - begun:.0f} s")
    wrong = [r["model"] for r in rows if not r["equal"]]
    if wrong or angles["cos_sin, GPU against CPU"] > 6.1e-8 or max(decoding.values()) > 1e-3:
        raise SystemExit(f"not equal within precision: {wrong or 'phases or cache'}")


if __name__ == "__main__":
    main()

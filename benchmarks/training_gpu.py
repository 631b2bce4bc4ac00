"""Tokens a second of training a Llama-shaped model of 1.04 billion weights on a GPU, with the peers in the same run.

Weights, batch, optimiser (fused AdamW, bfloat16 weights) and number of steps are the same for all. The first losses
from the same weights must agree before anything is timed. The limit is what the model's matrix products and attention
would take alone at the rates that torch's own kernels reach for a large product and for this attention.

    python benchmarks/training_gpu.py [--length 4096] [--tokens 16384] [--systems phasor liger ...] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import phasor
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.training.trainer import Trainer

VOCAB, DIM, HIDDEN, LAYERS, HEADS, GROUPS = 32000, 2048, 8192, 16, 32, 8
SYSTEMS = ("phasor", "phasor-float8", "liger", "transformers", "transformers-compiled")
WARM, RUNS, RATE = 4, 10, 1e-4


def config(length: int, layers: int = LAYERS) -> phasor.ModelConfig:
    return phasor.preset(
        "llama-2", vocab_size=VOCAB, dim=DIM, hidden_dim=HIDDEN, num_layers=layers, num_heads=HEADS,
        num_kv_heads=GROUPS, max_length=length, embedding={"tied": True},
    )  # fmt: skip


def tokens_of(seed: int, rows: int, length: int) -> torch.Tensor:
    """Texts with something to learn: every token follows from the one before it, but for a tenth."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.full((rows, length + 1), 7)
    noise = torch.rand(rows, length + 1, generator=generator) < 0.1
    steps[noise] = torch.randint(0, VOCAB, (int(noise.sum()),), generator=generator)
    return (steps.cumsum(-1) % VOCAB).cuda()


class Phasor:
    """The updates of `phasor train`: compiled blocks, captured as a CUDA graph."""

    def __init__(self, folder: Path, length: int, precision: str) -> None:
        fields = {"precision": precision, "weights": "bfloat16", "compile": True, "graphs": True, "clip": None}
        recipe = Recipe.from_dict(
            {"train": fields | {"device": "cuda"}, "optimiser": {"rate": RATE}, "schedule": "constant"}
        )
        self.trainer = Trainer(phasor.load(folder), recipe, steps=1000)
        self.step = 0

    def __call__(self, tokens: torch.Tensor) -> Callable[[], float]:
        weights = torch.ones(tokens[:, 1:].shape, device="cuda")
        batch = Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)
        pending = self.trainer.update(self.step, [batch], float(weights.numel()))
        self.step += 1
        return lambda: pending.update().loss


class Peer:
    """The model of transformers in a plain loop, with Liger's kernels where asked for."""

    def __init__(self, folder: Path, name: str) -> None:
        from transformers import AutoModelForCausalLM

        if name == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().train()
        self.model.config.use_cache = False
        self.forward = torch.compile(self.model) if name.endswith("compiled") else self.model
        self.optimiser = torch.optim.AdamW(self.model.parameters(), RATE, (0.9, 0.95), weight_decay=0.1, fused=True)

    def __call__(self, tokens: torch.Tensor) -> Callable[[], float]:
        # The labels are those of `shift_labels`, which need no shift; the others only ask for a loss.
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = self.forward(input_ids=inputs, labels=inputs, shift_labels=labels).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return lambda: float(loss.detach())


def build(name: str, folder: Path, length: int) -> Phasor | Peer:
    if name.startswith("phasor"):
        return Phasor(folder / "phasor", length, "float8" if name.endswith("8") else "bfloat16")
    return Peer(folder / "hf", name)


def measured(name: str, folder: Path, rows: int, length: int, curve: int) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    system = build(name, folder, length)
    batches = [tokens_of(seed, rows, length) for seed in range(4)]
    losses = [system(batches[i % 4]) for i in range(WARM)]
    found = [loss() for loss in losses]
    torch.cuda.synchronize()
    warm, times = time.perf_counter() - begun, []
    for i in range(RUNS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        system(batches[i % 4])
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    peak = torch.cuda.max_memory_allocated() / 2**30
    begun = time.perf_counter()
    later = [system(tokens_of(100 + i, rows, length)) for i in range(RUNS)]
    after = [loss() for loss in later]
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begun) / RUNS * 1000
    shown = [system(tokens_of(200 + i, rows, length))() for i in range(curve)]
    ms = statistics.median(times)
    return {
        "ms": round(ms, 2),
        "ms_by_the_clock": round(wall, 2),
        "tokens_per_s": round(rows * length / ms * 1000),
        "peak_gib": round(peak, 2),
        "warm_s": round(warm, 1),
        "first_losses": [round(x, 4) for x in found],
        "losses": [round(x, 4) for x in after + shown],
    }


def timed(f: Callable[[], Any], runs: int = 10) -> float:
    for _ in range(3):
        f()
    times = []
    for _ in range(runs):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        f()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def limit(rows: int, length: int) -> dict[str, float]:
    """Milliseconds of a step if it were its matrix products and its attention alone."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / timed(lambda: a @ b)
    head = DIM // HEADS
    q = torch.randn(rows, HEADS, length, head, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(rows, GROUPS, length, head, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    upstream = torch.randn_like(q)
    attention = timed(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).backward(upstream), 5
    )
    layer = DIM * (HEADS + 2 * GROUPS) * head + DIM * HEADS * head + 3 * DIM * HIDDEN
    products = 6 * (LAYERS * layer + VOCAB * DIM) * rows * length / rate
    return {"matmul_tflops": rate / 1e9, "products_ms": products, "attention_ms": LAYERS * attention}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--length", type=int, default=4096)
    options.add_argument("--tokens", type=int, default=16384)
    options.add_argument("--systems", nargs="*", choices=SYSTEMS, default=SYSTEMS[:4])
    options.add_argument("--curve", type=int, default=0, help="further steps whose losses are kept")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    rows = given.tokens // given.length
    found: dict[str, Any] = {}
    bounds = limit(rows, given.length)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = phasor.Transformer(config(given.length)).to(torch.bfloat16)
        weights = sum(weight.numel() for weight in model.parameters())
        phasor.save(model.cpu(), folder / "phasor")
        phasor.save(model, folder / "hf", format="hf")
        del model
        for system in given.systems:
            try:
                found[system] = measured(system, folder, rows, given.length, given.curve)
            except Exception as error:  # a peer that cannot run leaves the others to be compared
                print(f"{system}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
                torch._dynamo.reset()
            print(system, found[system], flush=True)
    first = {name: one["first_losses"] for name, one in found.items()}
    reference = next(iter(first.values()))
    for name, losses in first.items():
        loose = 0.05 if name.endswith("float8") else 0.01
        assert all(abs(a - b) < loose * b for a, b in zip(losses, reference, strict=True)), f"{name} differs: {first}"
    if given.out:
        size = {"length": given.length, "rows": rows, "weights": weights}
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        given.out.write_text(json.dumps(about | size | {"limit": bounds, "systems": found}, indent=1) + "\n")
    print(f"limit: {bounds}: {rows * given.length / sum(list(bounds.values())[1:]) * 1000:,.0f} tokens/s")
    for name, one in found.items():
        print(f"{name:24} {one['tokens_per_s']:8,} tokens/s  {one['ms']:8.1f} ms  {one['peak_gib']:6.1f} GiB")


if __name__ == "__main__":
    main()

"""Tokens per second of training a Llama-shaped model of 1.04 billion weights on a GPU, with the peers in the same run.

Weights, batches and optimizer (fused AdamW, bfloat16 weights) are the same for all. The first losses from the same
weights must agree, or nothing is printed. Steps are timed back to back, once the card is as warm and as slow as
training makes it; its power and clock meanwhile are noted. The limit is what the model's matmuls and its
attention take alone, by torch's own kernels and timed in the same way.

    python benchmarks/training_gpu.py [--length 4096] [--tokens 16384] [--systems phasor liger ...]
        [--curve 60 --text FILE] [--out FILE.json] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import gc
import gzip
import itertools
import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import phasor
from phasor.bench.sizes import FULL
from phasor.config.recipe import Recipe
from phasor.config.schedules import ConstantSchedule
from phasor.data.batch import Batch
from phasor.training.trainer import Trainer

DIM, HIDDEN, LAYERS, HEADS, GROUPS, VOCAB = (FULL.model[name] for name in FULL.model)
SYSTEMS = ("phasor", "phasor-float8", "liger", "transformers", "transformers-compiled")
WARM, REPEATS, SECONDS, LR = 4, 3, 1.5, 1e-4
SCHEDULE = ConstantSchedule(warmup=100)  # the first steps of AdamW would be its largest, and a matter of rounding


def config(length: int) -> phasor.ModelConfig:
    return phasor.preset("llama-2", **FULL.model, max_length=length, embedding={"tied": True})


class Texts:
    """Batches `[rows, length + 1]`: a file's bytes one after the other, or random tokens."""

    def __init__(self, file: Path | None, rows: int, length: int) -> None:
        self.rows, self.length, self.bytes = rows, length, None
        if file is not None:
            opener = gzip.open if file.suffix == ".gz" else open
            with opener(file, "rb") as stream:
                self.bytes = torch.frombuffer(bytearray(stream.read()), dtype=torch.uint8).cuda()

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self.rows * (self.length + 1)
        if self.bytes is None:
            generator = torch.Generator("cuda").manual_seed(index)
            return torch.randint(VOCAB, (self.rows, self.length + 1), generator=generator, device="cuda")
        start = index * size % (len(self.bytes) - size)
        return self.bytes[start : start + size].view(self.rows, -1).long()


class Phasor:
    """The steps of `phasor train`: compiled blocks, captured as a CUDA graph."""

    def __init__(self, folder: Path, precision: str) -> None:
        fields = {"precision": precision, "param_dtype": "bfloat16", "compile": True}
        fields |= {"cuda_graphs": True, "max_grad_norm": None}
        recipe = Recipe.from_dict(
            {"train": fields | {"device": "cuda"}, "optimizer": {"lr": LR}} | {"schedule": SCHEDULE.to_dict()}
        )
        self.trainer = Trainer(phasor.load(folder), recipe, steps=1000)
        self.step = 0

    def __call__(self, tokens: torch.Tensor) -> Callable[[], float]:
        weights = torch.ones(tokens[:, 1:].shape, device="cuda")
        batch = Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)
        handle = self.trainer.train_step(self.step, [batch], float(weights.numel()))
        self.step += 1
        return lambda: handle.result().loss


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
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LR, (0.9, 0.95), weight_decay=0.1, fused=True)
        self.step = 0

    def __call__(self, tokens: torch.Tensor) -> Callable[[], float]:
        # The labels are those of `shift_labels`, which need no shift; the others only ask for a loss.
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = self.forward(input_ids=inputs, labels=inputs, shift_labels=labels).loss
        loss.backward()
        self.optimizer.param_groups[0]["lr"] = SCHEDULE.lr_at(self.step, 1000, LR)
        self.step += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        return lambda: float(loss.detach())


def build(name: str, folder: Path) -> Phasor | Peer:
    if name.startswith("phasor"):
        return Phasor(folder / "phasor", "float8" if name.endswith("8") else "bfloat16")
    return Peer(folder / "hf", name)


class PowerMeter:
    """Median watts and megahertz of the card while in it; nothing where `nvidia-smi` is missing."""

    def __enter__(self) -> PowerMeter:
        self.found: dict[str, float] = {}
        card = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        command = ["nvidia-smi", "-i", card, "--query-gpu=power.draw.instant,clocks.sm,power.limit"]
        command += ["--format=csv,noheader,nounits", "-lms", "100"]
        there = shutil.which("nvidia-smi")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if there else None
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        self.process.terminate()
        said = (re.findall(r"\d+\.?\d*", line) for line in self.process.communicate()[0].splitlines())
        rows = [[float(x) for x in line] for line in said if len(line) == 3]  # a card may not know one of them
        if rows:
            watts, clock, limit = (statistics.median(column) for column in zip(*rows, strict=True))
            self.found = {"watts": watts, "mhz": clock, "limit_watts": limit}


def sustained_ms(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a call, one after the other: the median of stretches of SECONDS; and what the card did."""

    def stretch(count: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / count

    stretch(1)
    count = max(2, round(1000 * SECONDS / stretch(2)))
    stretch(count)
    with PowerMeter() as meter:
        ms = statistics.median(stretch(count) for _ in range(REPEATS))
    return {"ms": round(ms, 2)} | meter.found


def measure(name: str, folder: Path, texts: Texts, curve: int) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    system = build(name, folder)
    losses = [system(texts[i]) for i in range(max(WARM, curve))]
    found = [loss() for loss in losses]
    torch.cuda.synchronize()
    warm, batches = time.perf_counter() - begun, itertools.cycle([texts[i] for i in range(4)])
    took = sustained_ms(lambda: system(next(batches)))
    return took | {
        "tokens_per_s": round(texts.rows * texts.length / took["ms"] * 1000),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "warm_s": round(warm, 1),
        "losses": [round(x, 4) for x in found],
    }


def limit(rows: int, length: int) -> dict[str, Any]:
    """Milliseconds of a step if it were its matmuls, forward and backward, or its attention alone."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    head, tokens, slices = DIM // HEADS, rows * length, 4  # the logits of all tokens at once would be too large
    sizes = [(DIM, (HEADS + 2 * GROUPS) * head), (HEADS * head, DIM), (DIM, 2 * HIDDEN), (HIDDEN, DIM)]
    factors = [(drawn(tokens, i), drawn(o, i), drawn(tokens, o), LAYERS) for i, o in sizes]
    factors.append((drawn(tokens // slices, DIM), drawn(VOCAB, DIM), drawn(tokens // slices, VOCAB), slices))

    def products() -> None:
        for x, weight, grad, times in factors:
            for _ in range(times):
                torch.mm(x, weight.t())
                torch.mm(grad, weight)
                torch.mm(grad.t(), x)

    found: dict[str, Any] = {"products": sustained_ms(products)}
    flops = 6 * tokens * (LAYERS * sum(i * o for i, o in sizes) + VOCAB * DIM)
    found["products"]["tflops"] = round(flops / found["products"]["ms"] / 1e9)
    factors.clear()
    q = drawn(rows, HEADS, length, head).requires_grad_()
    k, v = (drawn(rows, GROUPS, length, head).requires_grad_() for _ in range(2))
    upstream = torch.randn_like(q)

    def attention() -> None:
        for _ in range(LAYERS):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(y, (q, k, v), upstream)

    found["attention"] = sustained_ms(attention)
    found["ms"] = round(found["products"]["ms"] + found["attention"]["ms"], 2)
    found["tokens_per_s"] = round(tokens / found["ms"] * 1000)
    return found


def draw(found: dict[str, Any], file: Path) -> None:
    """The losses of all systems, and how far each is from the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    first, reference = next(iter(found.items()))
    for name, one in found.items():
        above.plot(one["losses"], label=name, linewidth=1.2)
        if name != first:
            pairs = zip(one["losses"], reference["losses"], strict=True)
            below.plot([a / b - 1 for a, b in pairs], label=name, linewidth=1.2, color=above.lines[-1].get_color())
    above.set_ylabel("cross-entropy, nats per token")
    above.legend()
    below.set_ylabel(f"relative to {first}")
    below.axhline(0, color="gray", linewidth=0.8)
    below.set_xlabel("optimizer steps")
    figure.savefig(file, dpi=120)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--length", type=int, default=4096)
    options.add_argument("--tokens", type=int, default=16384)
    options.add_argument("--systems", nargs="*", choices=SYSTEMS, default=SYSTEMS[:4])
    options.add_argument("--curve", type=int, default=0, help="how many steps to take from the same weights first")
    options.add_argument("--text", type=Path, help="a file whose bytes are the tokens; random ones otherwise")
    options.add_argument("--out", type=Path)
    options.add_argument("--plot", type=Path, help="draw the losses of the first steps")
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    rows = given.tokens // given.length
    found: dict[str, Any] = {}
    bounds, texts = limit(rows, given.length), Texts(given.text, rows, given.length)
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
                found[system] = measure(system, folder, texts, given.curve)
            except Exception as error:  # a peer that cannot run leaves the others to be compared
                print(f"{system}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
                torch._dynamo.reset()
            print(f"{system}: losses {found[system]['losses'][:WARM]} ...", flush=True)
    reference = next(iter(found.values()))["losses"]
    for name, one in found.items():
        loose = 0.01 if name.endswith("float8") else 0.003
        pairs = list(zip(one["losses"], reference, strict=True))[:WARM]
        assert all(abs(a - b) < loose * b for a, b in pairs), f"{name} differs: {pairs}"
    if given.out:
        size = {"length": given.length, "rows": rows, "weights": weights}
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        given.out.write_text(json.dumps(about | size | {"limit": bounds, "systems": found}, indent=1) + "\n")
    if given.plot:
        draw(found, given.plot)
    parts = ("products", "attention")
    for name, one in [*((part, bounds[part]) for part in parts), ("limit: both", bounds), *found.items()]:
        rate, peak = one.get("tokens_per_s"), one.get("peak_gib")
        said = f"{rate:8,} tokens/s" if rate else f"{'':17}"
        said += f"  {one['ms']:8.1f} ms  " + (f"{peak:6.1f} GiB" if peak else f"{'':10}")
        print(f"{name:24} {said}  " + (f"{one['watts']:.0f} W, {one['mhz']:.0f} MHz" if "watts" in one else ""))


if __name__ == "__main__":
    main()

"""Tokens per second of training a Llama-shaped model of 1.04 billion weights on a GPU, with the peers in the same run.

Weights, batches and optimizer (fused AdamW, bfloat16 weights) are the same for all. The first losses from the same
weights must agree, or nothing is stated. Steps are timed back to back, once the card is as warm and as slow as
training makes it; its power and clock meanwhile are noted. The limit is what the model's matmuls and its
attention take alone, by torch's own kernels and timed in the same way.
"""

from __future__ import annotations

import copy
import gc
import gzip
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.bench.peers import is_installed, transformers_model, with_liger
from phasor.bench.power import sustained_ms
from phasor.bench.study import Study, first_line, format_field
from phasor.config import EmbeddingConfig
from phasor.config.recipe import Recipe
from phasor.config.schedules import ConstantSchedule
from phasor.config.schema import Config, unknown
from phasor.data.batch import Batch
from phasor.models.presets import preset
from phasor.training.trainer import Trainer
from phasor.transformer import Transformer

SYSTEMS = ("phasor", "phasor-float8", "liger", "transformers", "transformers-compiled")
WARM, LR = 4, 1e-4
SCHEDULE = ConstantSchedule(warmup=100)  # the first steps of AdamW would be its largest, and a matter of rounding


class TrainGPUSettings(Config):
    """Rows of `length` tokens, `tokens` in all; `curve` steps are taken from the same weights first.

    The tokens are the bytes of the file `text`, or random.
    """

    length: int = 4096
    tokens: int = 16384
    systems: tuple[str, ...] = SYSTEMS[:4]
    curve: int = 0
    text: str | None = None

    def check(self) -> None:
        for name in self.systems:
            if name not in SYSTEMS:
                raise unknown("system", name, SYSTEMS)


GPU = TrainGPUSettings()
CPU = TrainGPUSettings(length=64, tokens=128, systems=("phasor", "transformers"))
TINY = TrainGPUSettings(length=12, tokens=24, systems=("phasor", "transformers"))


class TokenBatches:
    """Batches `[rows, length + 1]`: a file's bytes one after the other, or random tokens."""

    def __init__(self, study: Study, rows: int, vocabulary: int) -> None:
        settings: Any = study.settings
        self.rows, self.length, self.device = rows, settings.length, study.device
        self.vocabulary, self.bytes = vocabulary, None
        if settings.text is not None:
            file = Path(settings.text)
            data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            self.bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def __getitem__(self, index: int) -> Tensor:
        size = self.rows * (self.length + 1)
        if self.bytes is None:
            generator = torch.Generator(self.device).manual_seed(index)
            shape = (self.rows, self.length + 1)
            return torch.randint(self.vocabulary, shape, generator=generator, device=self.device)
        start = index * size % (len(self.bytes) - size)
        return self.bytes[start : start + size].view(self.rows, -1).long()


class TrainerSteps:
    """The steps of a trainer, over tokens that are each predicted by those before."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.step = trainer, 0

    def __call__(self, tokens: Tensor) -> Callable[[], float]:
        weights = torch.ones(tokens[:, 1:].shape, device=tokens.device)
        batch = Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)
        handle = self.trainer.train_step(self.step, [batch], float(weights.numel()))
        self.step += 1
        return lambda: handle.result().loss


class PhasorSteps(TrainerSteps):
    """The steps of `phasor train`: on a GPU compiled blocks, captured as a CUDA graph."""

    def __init__(self, study: Study, source: Transformer, precision: str) -> None:
        fields = {"precision": precision, "param_dtype": study.machine.dtype_name, "compile": study.on_gpu}
        fields |= {"cuda_graphs": study.on_gpu, "max_grad_norm": None, "device": study.device.type}
        recipe = Recipe.from_dict({"train": fields, "optimizer": {"lr": LR}, "schedule": SCHEDULE.to_dict()})
        super().__init__(Trainer(copy.deepcopy(source), recipe, steps=1000))


class TransformersSteps:
    """The model of transformers in a plain loop, with Liger's kernels where asked for."""

    def __init__(self, study: Study, source: Transformer, name: str) -> None:
        self.model = transformers_model(source).to(study.device).train()
        if name == "liger":
            self.model = with_liger(self.model)
        self.model.config.use_cache = False
        self.forward: Any = torch.compile(self.model) if name.endswith("compiled") else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LR, (0.9, 0.95), weight_decay=0.1, fused=True)
        self.step = 0

    def __call__(self, tokens: Tensor) -> Callable[[], float]:
        # The labels are those of `shift_labels`, which need no shift; the others only ask for a loss.
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = self.forward(input_ids=inputs, labels=inputs, shift_labels=labels).loss
        loss.backward()
        self.optimizer.param_groups[0]["lr"] = SCHEDULE.lr_at(self.step, 1000, LR)
        self.step += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        return lambda: float(loss.detach())


def run(study: Study) -> None:
    settings: TrainGPUSettings = study.settings
    rows = settings.tokens // settings.length
    torch.manual_seed(0)
    with study.device:
        config = preset(
            "llama-2", **study.machine.sizes.model, max_length=settings.length, embedding=EmbeddingConfig(tied=True)
        )
        source = Transformer(config).to("cpu", study.machine.dtype)
    size = sum(weight.numel() for weight in source.parameters())
    study.result |= {"length": settings.length, "rows": rows, "weights": size}
    study.result["limit"] = limit(study, rows, study.machine.sizes.model)
    found = study.result["systems"] = {}
    for name in settings.systems:
        if name == "liger" and not is_installed("liger_kernel"):
            study.say("Liger is not installed: it is left out")
            continue
        try:
            found[name] = measure(study, name, source, TokenBatches(study, rows, config.vocab_size))
        except Exception as error:  # a peer that cannot run leaves the others to be compared
            study.say(f"{name}: {first_line(error, 300)}")
            continue
        finally:
            gc.collect()
            study.free()
            torch.compiler.reset()
        study.say(f"{name}: losses {found[name]['losses'][:WARM]} ...")
    check_losses(found)
    for name, one in {"limit": study.result["limit"], **found}.items():
        study.say(format_field(name, one))


def measure(study: Study, name: str, source: Transformer, batches: TokenBatches) -> dict[str, Any]:
    if study.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    system: Callable[[Tensor], Callable[[], float]]
    if name.startswith("phasor"):
        precision = "float8" if name.endswith("8") else study.machine.dtype_name
        system = PhasorSteps(study, source, precision)
    else:
        system = TransformersSteps(study, source, name)
    losses = [loss() for loss in [system(batches[i]) for i in range(max(WARM, study.settings.curve))]]
    study.machine.timer.wait()
    warm, cycle = time.perf_counter() - begun, itertools.cycle([batches[i] for i in range(4)])
    took = sustained_ms(study.machine.timer, lambda: system(next(cycle)))
    peak = torch.cuda.max_memory_allocated() / 2**30 if study.on_gpu else 0.0
    return took | {
        "tokens_per_s": round(batches.rows * batches.length / took["ms"] * 1000),
        "peak_gib": round(peak, 2),
        "warm_s": round(warm, 1),
        "losses": [round(x, 4) for x in losses],
    }


def check_losses(found: dict[str, Any]) -> None:
    """The first losses of all systems are those of the first one."""
    if not found:
        raise ValueError("no system could be timed")
    first, reference = next(iter(found.items()))
    for name, one in found.items():
        loose = 0.01 if name.endswith("float8") else 0.003
        pairs = list(zip(one["losses"], reference["losses"], strict=True))[:WARM]
        if not all(abs(a - b) < loose * b for a, b in pairs):
            raise ValueError(f"{name} has other losses than {first}: {pairs}")


def limit(study: Study, rows: int, sizes: dict[str, Any], trains_weights: bool = True) -> dict[str, Any]:
    """Milliseconds of a step if it were its matmuls, forward and backward, or its attention alone.

    Frozen weights are multiplied in the forward pass and for the gradients of their inputs alone.
    """
    length, timer = study.settings.length, study.machine.timer
    dim, hidden, layers, heads, kv_heads, vocabulary = (sizes[name] for name in sizes)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=study.device).to(study.machine.dtype)

    head, tokens, slices = dim // heads, rows * length, 4  # the logits of all tokens at once would be too large
    shapes = [(dim, (heads + 2 * kv_heads) * head), (heads * head, dim), (dim, 2 * hidden), (hidden, dim)]
    factors = [(drawn(tokens, i), drawn(o, i), drawn(tokens, o), layers) for i, o in shapes]
    factors.append((drawn(tokens // slices, dim), drawn(vocabulary, dim), drawn(tokens // slices, vocabulary), slices))

    def products() -> None:
        for x, weight, grad, times in factors:
            for _ in range(times):
                torch.mm(x, weight.t())
                torch.mm(grad, weight)
                if trains_weights:
                    torch.mm(grad.t(), x)

    found: dict[str, Any] = {"products": sustained_ms(timer, products)}
    flops = (6 if trains_weights else 4) * tokens * (layers * sum(i * o for i, o in shapes) + vocabulary * dim)
    found["products"]["tflops"] = round(flops / found["products"]["ms"] / 1e9)
    factors.clear()
    q = drawn(rows, heads, length, head).requires_grad_()
    k, v = (drawn(rows, kv_heads, length, head).requires_grad_() for _ in range(2))
    upstream = torch.randn_like(q)

    def attention() -> None:
        for _ in range(layers):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(y, (q, k, v), upstream)

    found["attention"] = sustained_ms(timer, attention)
    found["ms"] = round(found["products"]["ms"] + found["attention"]["ms"], 2)
    found["tokens_per_s"] = round(tokens / found["ms"] * 1000) if found["ms"] else 0
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """The losses of all systems, and how far each is from the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    first, reference = next(iter(result["systems"].items()))
    for name, one in result["systems"].items():
        above.plot(one["losses"], label=name, linewidth=1.2)
        if name != first:
            pairs = zip(one["losses"], reference["losses"], strict=True)
            below.plot([a / b - 1 for a, b in pairs], label=name, linewidth=1.2, color=above.lines[-1].get_color())
    above.set_ylabel("cross-entropy, nats per token")
    above.legend()
    below.set_ylabel(f"relative to {first}")
    below.axhline(0, color="gray", linewidth=0.8)
    below.set_xlabel("optimizer steps")
    figure.savefig(path, dpi=120)

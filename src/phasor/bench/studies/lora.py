"""Tokens per second and memory of training low-rank adapters on a frozen model, beside PEFT with Liger's kernels.

The base is in bfloat16 or in NF4 with double quantization. Before anything is timed, the loss and the gradients of
every adapter of a small model are compared with float64, and with PEFT's from the same weights. The timed models have
random weights. PEFT trains adapters in float32 under autocast, as transformers' Trainer has it, or in bfloat16. The
limit is what the matrix products of a step take, forward and by their inputs, and its attention, by torch's kernels.
"""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any

import torch
from torch import nn

from phasor.adapters import add_adapter
from phasor.bench.lora_peer import FLOAT32, PEFTSteps, check_against_peft, peft_why_not
from phasor.bench.lora_reference import check_against_float64
from phasor.bench.power import sustained_ms
from phasor.bench.sizes import LLAMA_8B
from phasor.bench.studies.train_gpu import TokenBatches, TrainerSteps, limit
from phasor.bench.study import Study, format_field
from phasor.config import EmbeddingConfig, ModelConfig
from phasor.config.lora import LoRAConfig
from phasor.config.recipe import Recipe
from phasor.config.schedules import ConstantSchedule
from phasor.config.schema import Config, unknown
from phasor.models.presets import preset
from phasor.nn.quantized import NF4, Quantization
from phasor.quantization import quantize_base
from phasor.training.trainer import Trainer
from phasor.transformer import Transformer

SYSTEMS = ("phasor", "peft", "peft-bfloat16")
BASES = ("plain", NF4)
SHAPES = ("1b", "8b")
WARM, LR = 3, 1e-4


class LoRASettings(Config):
    """Rows of `length` tokens, `tokens` in all, of models of some `shapes`, with the base as it is or in NF4."""

    length: int = 4096
    tokens: int = 16384
    rank: int = 16
    shapes: tuple[str, ...] = SHAPES
    bases: tuple[str, ...] = BASES
    systems: tuple[str, ...] = SYSTEMS
    cuda_graphs: bool = False
    text: str | None = None

    def check(self) -> None:
        for kind, given, known in (
            ("shape", self.shapes, SHAPES),
            ("base", self.bases, BASES),
            ("system", self.systems, SYSTEMS),
        ):
            for name in given:
                if name not in known:
                    raise unknown(kind, name, known)


GPU = LoRASettings()
CPU = LoRASettings(length=128, tokens=256, shapes=("1b",))
TINY = LoRASettings(length=12, tokens=24, rank=4, shapes=("1b",))


class AdapterSteps(TrainerSteps):
    """The steps of `phasor train` with adapters: compiled blocks on a GPU, the base frozen in the model's dtype."""

    def __init__(self, study: Study, config: ModelConfig, base: str) -> None:
        with study.device:
            model = Transformer(config).to(study.machine.dtype)
        if base == NF4:
            quantize_base(model, Quantization(NF4))
        add_adapter(model, LoRAConfig(rank=study.settings.rank), dtype=torch.float32)
        for name, weight in model.named_parameters():
            weight.requires_grad_(".lora." in name)
        fields = {"precision": study.machine.dtype_name, "compile": study.on_gpu, "device": study.device.type}
        fields |= {"cuda_graphs": study.settings.cuda_graphs, "max_grad_norm": None}
        schedule = ConstantSchedule(warmup=0).to_dict()
        recipe = Recipe.from_dict({"train": fields, "optimizer": {"lr": LR}, "schedule": schedule})
        super().__init__(Trainer(model, recipe, steps=1000))

    @property
    def model(self) -> nn.Module:
        return self.trainer.model


def run(study: Study) -> None:
    settings: LoRASettings = study.settings
    why_not = peft_why_not(study.on_gpu)
    if why_not is not None:
        study.say(why_not)
    study.result["checks"] = check(study, with_peft="peft is not" not in (why_not or ""))
    study.save()
    for shape in settings.shapes:
        sizes = LLAMA_8B if shape == "8b" else study.machine.sizes.model
        rows = settings.tokens // settings.length
        at_best = limit(study, rows, sizes, trains_weights=False)
        study.add_row({"shape": shape, "system": "limit", **at_best})
        config = shape_config(sizes, settings.length, tied=shape == "1b")
        for base, name in itertools.product(settings.bases, settings.systems):
            if name != "phasor" and why_not is not None and not why_not.startswith("Liger"):
                continue
            row: dict[str, Any] = {"shape": shape, "base": base, "system": name}
            with study.noting_failure(row):
                row |= measure(study, name, config, base)
                row["share_of_limit"] = round(at_best["ms"] / row["ms"], 3) if row["ms"] else 0.0
            gc.collect()
            study.free()
            torch.compiler.reset()
            study.add_row(row)
    study.result["beside_peft"] = ratios(study.result["rows"])
    for name, one in study.result["beside_peft"].items():
        study.say(format_field(name, one))


def shape_config(sizes: dict[str, Any], length: int, tied: bool) -> ModelConfig:
    """A model of Llama's architecture at given sizes."""
    return preset("llama-2", **sizes, max_length=length, embedding=EmbeddingConfig(tied=tied))


def check(study: Study, with_peft: bool) -> dict[str, Any]:
    """How far the loss and the gradients of a small model are from float64 and from PEFT, for each base."""
    found: dict[str, Any] = {}
    for base in study.settings.bases:
        errors = check_against_float64(study, base)
        if with_peft and base != NF4:  # which quantizes q, k and v apart from each other, and phasor as one matrix
            errors |= check_against_peft(study)
        found[base] = errors
        study.say(format_field(f"checked, {base}", errors))
    return found


def measure(study: Study, name: str, config: ModelConfig, base: str) -> dict[str, Any]:
    """Time and memory of training steps."""
    rows = study.settings.tokens // study.settings.length
    torch.manual_seed(0)
    system: Any
    if name == "phasor":
        system = AdapterSteps(study, config, base)
    else:
        system = PEFTSteps(study, config, base, FLOAT32 if name == "peft" else study.machine.dtype, LR)
    gc.collect()
    study.free()
    held = torch.cuda.memory_allocated() / 2**30 if study.on_gpu else 0.0
    if study.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    batches, begun = TokenBatches(study, rows, config.vocab_size), time.perf_counter()
    losses = [loss() for loss in [system(batches[i]) for i in range(WARM)]]
    study.machine.timer.wait()
    warm, cycle = time.perf_counter() - begun, itertools.cycle([batches[i] for i in range(WARM)])
    took = sustained_ms(study.machine.timer, lambda: system(next(cycle)))
    peak = torch.cuda.max_memory_allocated() / 2**30 if study.on_gpu else 0.0
    return took | {
        "tokens_per_s": round(rows * study.settings.length / took["ms"] * 1000),
        "weights_gib": round(held, 2),
        "peak_gib": round(peak, 2),
        "warm_s": round(warm, 1),
        "trained": sum(w.numel() for w in system.model.parameters() if w.requires_grad),
        "losses": [round(x, 4) for x in losses],
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """phasor's tokens per second and peak memory over those of PEFT, of the faster of its two ways, by shape and base.

    >>> row = {"shape": "1b", "base": "plain", "system": "phasor", "tokens_per_s": 300, "peak_gib": 2.0}
    >>> ratios([row, row | {"system": "peft", "tokens_per_s": 200, "peak_gib": 4.0}])
    {'1b, plain': {'tokens': 1.5, 'memory': 0.5}}
    """
    found: dict[str, dict[str, float]] = {}
    timed = [row for row in rows if "tokens_per_s" in row and "base" in row]
    for own in (row for row in timed if row["system"] == "phasor"):
        key = own["shape"], own["base"]
        others = [row for row in timed if row["system"] != "phasor" and (row["shape"], row["base"]) == key]
        if others:
            peer = max(others, key=lambda row: row["tokens_per_s"])
            memory = {"memory": round(own["peak_gib"] / peer["peak_gib"], 3)} if peer["peak_gib"] else {}
            found[", ".join(key)] = {"tokens": round(own["tokens_per_s"] / peer["tokens_per_s"], 3), **memory}
    return found

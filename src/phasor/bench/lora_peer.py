"""PEFT's adapters on a model of transformers with Liger's kernels, as the study of adapters times them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor.bench.lora_reference import TOLERANCE, loss_of, relative_error, small_case, updates_of
from phasor.bench.peers import is_installed, transformers_model, with_liger
from phasor.bench.study import Study
from phasor.config import ModelConfig
from phasor.nn.quantized import NF4

FLOAT32 = torch.float32
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def peft_why_not(on_gpu: bool) -> str | None:
    """What of PEFT and Liger is missing, in a sentence; None where both can be timed."""
    for package in ("transformers", "peft"):
        if not is_installed(package):
            return f"{package} is not installed: PEFT is left out"
    if not on_gpu:
        return "Liger needs a GPU: PEFT is timed without it"
    return None if is_installed("liger_kernel") else "Liger is not installed: PEFT is timed without it"


def with_peft(model: Any, rank: int, adapters_in_float32: bool) -> Any:
    """A model of transformers with LoRA of a rank on all projections, with alpha twice the rank as phasor's default."""
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(PROJECTIONS), lora_dropout=0.0)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=adapters_in_float32)


def quantize_linears(model: Any) -> Any:
    """The model with its projections in bitsandbytes' NF4 with double quantization, as QLoRA has it."""
    bitsandbytes = importlib.import_module("bitsandbytes")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.endswith(PROJECTIONS):
            weight = layer.weight
            held = bitsandbytes.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=weight.dtype,
                compress_statistics=True,
                quant_type="nf4",
                device="meta",
            )
            held.weight = bitsandbytes.nn.Params4bit(
                weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
            )
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, held.to(weight.device))
    model.is_loaded_in_4bit = True
    return model


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' Llama of these sizes, with random weights."""
    transformers = importlib.import_module("transformers")
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=config.embedding.tied,
        use_cache=False,
    )
    with device:
        return transformers.AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")


class PEFTSteps:
    """Steps of PEFT in a plain loop: adapters in float32 under autocast, or in the dtype of the model."""

    def __init__(self, study: Study, config: ModelConfig, base: str, adapters: torch.dtype, lr: float) -> None:
        dtype, device = study.machine.dtype, study.device
        model = random_model(config, device, dtype).train()
        if study.on_gpu and is_installed("liger_kernel"):
            model = with_liger(model)
        if base == NF4:
            model = quantize_linears(model)
        self.model = with_peft(model, study.settings.rank, adapters == FLOAT32)
        mixed = adapters == FLOAT32 and dtype != FLOAT32
        self.autocast: Callable[[], Any] = (
            (lambda: torch.autocast(device.type, dtype)) if mixed else contextlib.nullcontext
        )
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr, (0.9, 0.95), weight_decay=0.1, fused=True)

    def __call__(self, tokens: Tensor) -> Callable[[], float]:
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with self.autocast():
            loss = self.model(input_ids=inputs, labels=inputs, shift_labels=labels).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return lambda: float(loss.detach())


def check_against_peft(study: Study) -> dict[str, float]:
    """How far loss and gradients of a small model are from PEFT's with the same weights, within the tolerance."""
    case = small_case(study, "plain")
    model: Any = with_peft(transformers_model(case.plain).train(), 4, True)
    updates = updates_of(case)
    with torch.no_grad():
        for update in updates:
            layer = model.get_submodule(f"base_model.model.{update.module}")
            layer.lora_A["default"].weight.copy_(update.part.A)
            layer.lora_B["default"].weight.copy_(update.part.B[update.rows])
    inputs, labels = case.tokens[:, :-1].contiguous(), case.tokens[:, 1:].contiguous()
    loss = model(input_ids=inputs, labels=inputs, shift_labels=labels).loss
    loss.backward()
    errors = {"loss": float((loss_of(case) - loss.detach()).abs() / loss.detach()), "gradients": 0.0}
    for module, part, rows in updates:
        layer = model.get_submodule(f"base_model.model.{module}")
        pairs = ((part.A, layer.lora_A), (cast(Tensor, part.B.grad)[rows], layer.lora_B))
        for ours, theirs in pairs:
            found = cast(Tensor, ours.grad) if ours is part.A else ours
            errors["gradients"] = max(errors["gradients"], relative_error(found, theirs["default"].weight.grad))
    return {f"{name}, PEFT": study.check(name, error, TOLERANCE) for name, error in errors.items()}

"""The loss and the gradients of adapters by another's model: merged into the weights of transformers' in float64."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from phasor.adapters import add_adapter
from phasor.bench.peers import transformers_model
from phasor.bench.study import Study
from phasor.config import EmbeddingConfig
from phasor.config.lora import LoRAConfig
from phasor.models.families import family
from phasor.models.modules import fused_modules
from phasor.models.presets import preset
from phasor.nn.lora import LowRank
from phasor.nn.lora_hook import adapters_of
from phasor.nn.quantized import NF4, Quantization, QuantizedLinear
from phasor.quantization import projections, quantize_base
from phasor.transformer import Transformer

SIZES = {"dim": 128, "hidden_dim": 192, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 96}
TOKENS = (2, 256)  # as many rows as are multiplied by a quantized matrix with its update added
# float32 against float64, relative to the norm: sums of some hundred products, through two layers and back.
TOLERANCE = 1e-4


class SmallCase(NamedTuple):
    """A small model with adapters, the same without and unquantized, and tokens `[B, T + 1]`."""

    model: Transformer
    plain: Transformer
    tokens: Tensor


class Update(NamedTuple):
    """One update: the module of transformers that it is for, and which rows of its B are that module's, in order."""

    module: str
    part: LowRank
    rows: Tensor


def small_case(study: Study, base: str) -> SmallCase:
    """A model with random weights and adapters that are not zero."""
    torch.manual_seed(0)
    plain = Transformer(preset("llama-2", **SIZES, embedding=EmbeddingConfig(tied=True)))
    model = copy.deepcopy(plain)
    if base == NF4:
        quantize_base(model, Quantization(NF4))
        layers = zip(projections(plain), quantized_layers(model), strict=True)
        for (_, _, layer), held in layers:
            layer.weight.data = held.full_weight()
    add_adapter(model, LoRAConfig(rank=4))
    for name, weight in model.named_parameters():
        weight.requires_grad_(".lora." in name)
        if name.endswith(".B"):
            nn.init.normal_(weight, std=0.1)
    tokens = torch.randint(SIZES["vocab_size"], (TOKENS[0], TOKENS[1] + 1), device=study.device)
    return SmallCase(model.to(study.device), plain.to(study.device), tokens)


def quantized_layers(model: Transformer) -> list[QuantizedLinear]:
    """The quantized layers, in order."""
    return [part for part in model.modules() if isinstance(part, QuantizedLinear)]


def updates_of(case: SmallCase) -> list[Update]:
    """Every update of the model, by the modules of transformers."""
    found: list[Update] = []
    for name, modules in fused_modules(family("llama"), case.plain.config, case.plain.state_dict()).items():
        for lora in adapters_of(case.model.get_submodule(name)).values():
            for module in modules:
                every = torch.arange(lora.out_features)
                theirs = every if module.rows is None else module.rows
                for part in lora.updates:
                    own = every if part.rows is None else part.rows.long().cpu()
                    if set(own.tolist()) == set(theirs.tolist()):
                        place = {row: index for index, row in enumerate(own.tolist())}
                        found.append(Update(module.name, part, torch.tensor([place[row] for row in theirs.tolist()])))
    return found


def loss_of(case: SmallCase) -> Tensor:
    """The mean cross-entropy, with gradients left in the adapters."""
    targets = case.tokens[:, 1:]
    loss: Tensor = (
        case.model.train()
        .loss(case.tokens[:, :-1], targets=targets, weights=torch.ones(targets.shape, device=targets.device))
        .total
    )
    case.model.zero_grad(set_to_none=True)
    loss.backward()
    return loss.detach()


def check_against_float64(study: Study, base: str) -> dict[str, float]:
    """The errors of loss and gradients, which must be within the tolerance."""
    case = small_case(study, base)
    reference: Any = transformers_model(case.plain).double().requires_grad_(False)
    weights, leaves = {}, []
    for update in updates_of(case):
        A, B = (x.detach().double().requires_grad_() for x in (update.part.A, update.part.B))
        leaves.append((update.part, A, B))
        before = reference.get_parameter(f"{update.module}.weight")
        weights[f"{update.module}.weight"] = before + update.part.scale * (B @ A)[update.rows]
    inputs, labels = case.tokens[:, :-1].contiguous(), case.tokens[:, 1:].contiguous()
    logits = torch.func.functional_call(reference, weights, (inputs,)).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    errors = {"loss": float((loss_of(case) - loss.detach()).abs() / loss.detach())}
    errors["gradients"] = max(
        relative_error(cast(Tensor, ours.grad), cast(Tensor, theirs.grad))
        for part, A, B in leaves
        for ours, theirs in ((part.A, A), (part.B, B))
    )
    return {f"{name}, float64": study.check(name, error, TOLERANCE) for name, error in errors.items()}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))

"""The factors of an update in PEFT's order and shape, and in ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from phasor.adapters import matrix_shape
from phasor.checkpoints.peft_names import Target
from phasor.models import families
from phasor.nn.embedding import Embedding
from phasor.nn.lora import ExpertsLowRank, LoRA, LowRank
from phasor.nn.moe import Experts
from phasor.transformer import Transformer

PLAIN, OF_EMBEDDING = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE = "lora_magnitude_vector"


def factor_names(layer: Any) -> tuple[str, str]:
    """What PEFT calls the factors of a layer's update."""
    return OF_EMBEDDING if isinstance(layer, Embedding) else PLAIN


def saved_names(layer: Any) -> tuple[str, str]:
    """The same as names of tensors: those of linear layers are modules themselves."""
    return OF_EMBEDDING if isinstance(layer, Embedding) else ("lora_A.weight", "lora_B.weight")


def our_factors(
    factors: Mapping[str, Tensor], target: Target, model: Transformer, where: str
) -> tuple[dict[str, Tensor], int]:
    """A part's tensors out of those of a module in PEFT's file, and its rank."""
    layer = model.get_submodule(target.layer)
    first, second = factor_names(layer)
    if first not in factors or second not in factors:
        raise ValueError(f"{where} has {' and '.join(factors)}, and not both {first} and {second}")
    A, B = factors[first], factors[second]
    if isinstance(layer, Experts):
        experts, width, given = cast(Tensor, getattr(layer, target.part)).shape
        inputs, outputs = (given, width) if swaps_factors(model) else (width, given)
        rank = A.shape[0] // experts
        check_shape(A, (experts * rank, inputs), first, where)
        check_shape(B, (outputs, rank * experts), second, where)
        A, B = A.view(experts, rank, inputs), B.reshape(outputs, rank, experts).permute(2, 1, 0)
        if swaps_factors(model):
            return {"A": B.mT.contiguous(), "B": A.contiguous()}, rank
        if target.columns is not None:
            B = torch.empty_like(B).index_copy(-1, target.columns, B.contiguous())
        return {"A": A.mT.contiguous(), "B": B.contiguous()}, rank
    outputs, inputs = matrix_shape(model, layer)
    check_shape(A, (A.shape[0], inputs), first, where)
    check_shape(B, (outputs if target.rows is None else len(target.rows), A.shape[0]), second, where)
    found = {"A": A, "B": B}
    if MAGNITUDE in factors:
        found["magnitude"] = factors[MAGNITUDE].flatten()
    if target.rows is not None:
        found["rows"] = target.rows.int()
    return found, A.shape[0]


def check_shape(tensor: Tensor, expected: tuple[int, ...], name: str, where: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{where} has a {name} with the shape {list(tensor.shape)}, not {list(expected)}")


def swaps_factors(model: Transformer) -> bool:
    """Whether PEFT takes what the matrices of a model's experts multiply for what they give."""
    family = None if model.origin is None else model.origin.family
    return family in families.names() and families.family(cast(str, family)).swaps_expert_factors


def their_factors(
    lora: LoRA, target: Target, model: Transformer, where: str
) -> tuple[dict[str, Tensor], int, float] | None:
    """A module's tensors in PEFT's file, their rank and scale; None where the adapter does not update it."""
    layer = model.get_submodule(target.layer)
    names = saved_names(layer)
    if isinstance(layer, Experts):
        if target.part not in lora:
            return None
        part = cast(ExpertsLowRank, lora[target.part])
        A, B = part.A.detach(), part.B.detach()  # [experts, in, rank], [experts, rank, out]
        if swaps_factors(model):
            A, B = B.mT, A.mT
        elif target.columns is not None:
            B = B[..., target.columns.to(B.device)]
        A, B = A.mT.flatten(0, 1), B.permute(2, 1, 0).flatten(1)
        return dict(zip(names, (A, B), strict=True)), part.rank, part.scale
    rows = torch.arange(lora.out_features) if target.rows is None else target.rows
    used = [(part, rows_of(part, rows)) for part in lora.updates]
    used = [(part, own) for part, own in used if bool((own >= 0).any())]
    if not used:
        return None
    scale = used[0][0].scale
    A = torch.cat([part.A.detach() for part, _ in used])
    B = torch.cat([rows_with(part, own) * (part.scale / scale) for part, own in used], dim=1)
    found = dict(zip(names, (A, B), strict=True))
    if lora.has_magnitude:
        if any(bool((own < 0).any()) for _, own in used) and len(used) == 1:
            raise ValueError(f"{where} has magnitudes for some of the rows of a module alone, which PEFT has not")
        parts = [torch.where(own >= 0, cast(Tensor, p.magnitude).detach().cpu()[own], 0.0) for p, own in used]
        found[MAGNITUDE] = torch.stack(parts).sum(0)
    return found, sum(part.rank for part, _ in used), scale


def rows_of(part: LowRank, rows: Tensor) -> Tensor:
    """Which row of a part's B each of some rows of the layer is, or -1."""
    if part.rows is None:
        return rows
    held = part.rows.long().cpu()
    index = torch.full((max(int(held.max()), int(rows.max())) + 1,), -1)
    index[held] = torch.arange(len(held))
    return index[rows]


def rows_with(part: LowRank, own: Tensor) -> Tensor:
    """Rows of a part's B, zero where it has none."""
    B = part.B.detach().cpu()
    return torch.where((own >= 0)[:, None], B[own], 0.0)

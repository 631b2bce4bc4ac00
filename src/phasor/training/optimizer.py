"""Optimizers with weight decay on matrices alone, their state by name, and the moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phasor.config.recipe import OptimizerConfig
from phasor.nn.heads import LogitsHead
from phasor.nn.lora import ExpertsLowRank, LowRank
from phasor.nn.moe import Experts
from phasor.ops.adamw import AdamW, adamw_why_not
from phasor.training.muon import MuonAdamW, matrix_names

MATRICES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight",),
    Experts: ("up", "down"),
    LogitsHead: ("weight",),
    LowRank: ("A", "B"),
    ExpertsLowRank: ("A", "B"),
}


def decay_names(model: nn.Module) -> Iterator[str]:
    """The names of the weights with weight decay: projections, experts and an untied head.

    Norms, biases, embeddings and what positions learn are not among them.
    """
    for prefix, part in model.named_modules():
        names = next((names for kind, names in MATRICES.items() if isinstance(part, kind)), ())
        for name in names:
            if getattr(part, name) is not None:
                yield f"{prefix}.{name}" if prefix else name


class NamedWeights(Protocol):
    """Weights by name: those of a model, or the parts of them that a process holds."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    graphs: bool = False,
    seed: int = 0,
    weights: NamedWeights | None = None,
) -> AdamW:
    """Fused AdamW over the weights that require a gradient, or Muon beside it for the matrices of blocks.

    For CUDA graphs its learning rate is on the device.
    The seed is for stochastic rounding, where the configuration asks for it. `weights` are by default all of the model.

    >>> from phasor import preset, Transformer
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1))
    >>> [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    [(0.1, 5), (0.0, 4)]
    """
    decayed = set(decay_names(model))
    named = (model if weights is None else weights).named_parameters()
    trainable = {name: weight for name, weight in named if weight.requires_grad}
    matrices = set(matrix_names(model, trainable)) & decayed if config.kind == "muon" else set()
    if config.kind == "muon" and not matrices:
        raise ValueError("optimizer.kind muon is for matrices of blocks, and none of them is trained")

    def group(names: set[str], weight_decay: float) -> dict[str, Any]:
        return {"params": [w for name, w in trainable.items() if name in names], "weight_decay": weight_decay}

    groups = [group(decayed - matrices, config.weight_decay), group(trainable.keys() - decayed, 0.0)]
    betas = (config.beta1, config.beta2)
    if matrices:
        return MuonAdamW(group(matrices, config.weight_decay), groups, config.lr, betas, config.eps, config.momentum)
    groups = [group for group in groups if group["params"]]
    lr = torch.tensor(config.lr, device=next(iter(trainable.values())).device) if graphs else config.lr
    optimizer = AdamW(groups, lr, betas, config.eps, fused=True, capturable=graphs)
    if config.rounding == "stochastic":
        for weight in trainable.values():
            why = adamw_why_not(weight) if weight.dtype == torch.bfloat16 else "it is for bfloat16 weights"
            if why is not None:
                raise ValueError(f"optimizer.rounding stochastic: {why}")
        optimizer.seed = seed
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: NamedWeights) -> dict[str, Tensor]:
    """The optimizer's state of every weight, as `weight/name`."""
    return {
        f"{name}/{key}": tensor
        for name, weight in model.named_parameters()
        for key, tensor in optimizer.state.get(weight, {}).items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: NamedWeights, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`."""
    weights = dict(model.named_parameters())
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        # Cloned: what was read may lie in the mapped file of a checkpoint.
        optimizer.state[weights[name]][key] = tensor.to(weights[name].device, copy=True)


class EMA:
    """The exponential moving average of the trained weights, corrected for its bias (Kingma and Ba 2015, section 7.2).

    `average_t = decay average_{t-1} + (1 - decay) weights_t`, over `1 - decay^t`.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = EMA(model, 0.5)
    >>> for value in (1.0, 4.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     average.update(model)
    >>> average.weights["weight"].item()
    3.0
    """

    def __init__(self, model: NamedWeights, decay: float) -> None:
        self.decay = decay
        trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
        self.weights = {name: weight.detach().clone() for name, weight in trained}
        device = next(iter(self.weights.values())).device
        self.count = torch.zeros((), dtype=torch.float64, device=device)  # of updates

    @property
    def updates(self) -> int:
        """How many weights were averaged; a device is waited for."""
        return int(self.count)

    @torch.no_grad()
    def update(self, model: NamedWeights, changed: Tensor | None = None) -> None:
        """Add the weights after a step, unless `changed` is false: that is decided where the weights are."""
        happened = torch.ones_like(self.count) if changed is None else changed.to(self.count.dtype)
        self.count += happened
        share = happened * (1 - self.decay) / (1 - self.decay ** self.count.clamp(min=1))
        weights = dict(model.named_parameters())
        for name, average in self.weights.items():
            average.lerp_(weights[name], share.to(average.dtype))

    def restore(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Continue from a saved average."""
        self.count.fill_(updates)
        for name, weight in self.weights.items():
            weight.copy_(weights[name])


@contextmanager
def swap_weights(model: NamedWeights, ema: EMA | None) -> Iterator[None]:
    """Swap a model's weights with their average for the length of a `with`; does nothing without an average."""
    averages = {} if ema is None else ema.weights

    @torch.no_grad()
    def swap() -> None:
        for name, weight in model.named_parameters():
            if name not in averages:
                continue
            held = weight.clone()
            weight.copy_(averages[name])
            averages[name].copy_(held)

    swap()
    try:
        yield
    finally:
        swap()

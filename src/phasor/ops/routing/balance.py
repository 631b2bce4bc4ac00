"""What the balancing loss needs of routers: how often each expert was chosen, and the sum of its probabilities.

Many layers are computed at once. By kernels they are one launch in each direction, and nothing of the size of tokens by
experts is held beside the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.config import ExpertsConfig
from phasor.ops.custom_op import custom_op
from phasor.ops.dispatch import Dispatch, Path
from phasor.ops.routing.reference import route, score_experts
from phasor.ops.routing.routing import kernels_why_not


def expert_loads_ref(
    logits: Tensor, config: ExpertsConfig, correction: Tensor | None, counted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """How many tokens of `[L, N, experts]` chose each expert, and the sum of its probabilities: `[L, experts]` each.

    A token counts as often as `counted [N]` says, or once. Probabilities are scores over their sum; `correction` is
    `[L, 1, experts]`.

    >>> config = ExpertsConfig(num_experts=2, top_k=1)
    >>> [x.tolist() for x in expert_loads_ref(torch.zeros(1, 3, 2), config, None, torch.tensor([1.0, 0.0, 1.0]))]
    [[[2.0, 0.0]], [[1.0, 1.0]]]
    """
    scores = score_experts(logits, config)
    probabilities = scores if config.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
    _, chosen = route(logits, config, correction)  # [L, N, top_k]
    chose = torch.zeros_like(scores).scatter(-1, chosen, 1.0)  # [L, N, experts]
    if counted is not None:
        chose, probabilities = chose * counted[:, None], probabilities * counted[:, None]
    return chose.sum(1), probabilities.sum(1)


def expert_loads_by_kernel(
    logits: Tensor, config: ExpertsConfig, correction: Tensor | None, counted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same by Triton kernels."""
    chose, probabilities = expert_loads_op(logits, counted, config.top_k)
    return chose, probabilities


def loads_why_not(
    logits: Tensor, config: ExpertsConfig, correction: Tensor | None, counted: Tensor | None
) -> str | None:
    """Why no kernel computes these; None where one does."""
    tokens = logits.flatten(0, 1)
    return kernels_why_not(tokens, tokens, config, correction, 0, logits.shape[-1])


@custom_op("phasor::expert_loads")
def expert_loads_op(logits: Tensor, counted: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    from phasor.ops.routing.kernels import expert_loads

    return expert_loads(logits, counted, top_k)


@expert_loads_op.register_fake
def _(logits: Tensor, counted: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    loads = logits.new_empty((logits.shape[0], logits.shape[2]), dtype=torch.float32)
    return loads, torch.empty_like(loads)


@custom_op("phasor::expert_loads_backward")
def expert_loads_backward_op(grad: Tensor, logits: Tensor, counted: Tensor | None) -> Tensor:
    from phasor.ops.routing.kernels import expert_loads_backward

    return expert_loads_backward(grad, logits, counted)


@expert_loads_backward_op.register_fake
def _(grad: Tensor, logits: Tensor, counted: Tensor | None) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs.logits, inputs.counted)
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, _: None, grad: Tensor | None) -> dict[str, Tensor | None]:
    return {} if grad is None else {"logits": expert_loads_backward_op(grad, *ctx.saved_tensors)}


expert_loads_op.register_autograd(_backward, setup_context=_setup_context)

EXPERT_LOADS = Dispatch(
    Path("Triton kernels, all layers at once", expert_loads_by_kernel, loads_why_not),
    Path("torch", expert_loads_ref),
)

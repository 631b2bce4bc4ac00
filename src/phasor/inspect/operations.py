"""The operations of a model: each with its dispatch table, and the arguments that the table is asked with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phasor.generation.runners import FUSED, STEP_RUNNERS
from phasor.inspect.case import Case
from phasor.nn.adapted_linear import ADAPTED_LINEAR
from phasor.nn.attention.base import CalledOperation
from phasor.nn.feed_forward import ACTIVATE_PROJECT, FeedForward
from phasor.nn.moe import EXPERTS, Experts
from phasor.ops.adamw import ADAMW
from phasor.ops.attention import ATTENTION
from phasor.ops.cross_entropy import CROSS_ENTROPY
from phasor.ops.dispatch import Dispatch, Path, supports_all
from phasor.ops.glu import GLU
from phasor.ops.norm import NORM
from phasor.ops.quantized import QUANTIZED_LINEAR
from phasor.ops.routing import ROUTING
from phasor.ops.sparse_attention import SPARSE_ATTENTION
from phasor.training.float8 import FLOAT8_FEED_FORWARD, Float8FeedForward


@dataclass(frozen=True)
class Operation:
    """An operation of a model: its dispatch table, the table's arguments in a case, and which layers have it.

    An operation of the whole model, not of a layer, is looked at once.
    """

    name: str
    table: Dispatch
    args: Callable[[Case], tuple[Any, ...]]
    applies: Callable[[Case], bool]
    whole_model: bool = False


def fused_why_not(case: Case) -> str | None:
    """Why kernels of the fused decoding step do not read quantized weights; None where they do."""
    if not case.decodes:
        return "the model does not decode"
    runner, reasons = STEP_RUNNERS.explain(case.step_spec)
    return None if runner == FUSED.name else reasons.get(FUSED.name, f"steps are run by: {runner}")


# Decoding steps read quantized weights where the fused runner is chosen; elsewhere layers choose for each product.
QUANTIZED_WEIGHTS = Dispatch(
    Path("as they are in steps of few rows, else converted", supports_all, fused_why_not),
    Path("by layers", supports_all, inner=lambda case: QUANTIZED_LINEAR.explain(*case.quantized_args)),
)

CHOSEN = Dispatch(Path("torch, in blocks of queries", supports_all))

OPERATIONS = (
    Operation(
        "attention",
        ATTENTION,
        lambda case: case.attention_args(),
        lambda case: case.attend_shapes() is not None and not case.sparse,
    ),
    Operation(
        "attention after a cache",
        ATTENTION,
        lambda case: case.attention_args(case.cached),
        lambda case: (
            case.attend_shapes(case.cached) is not None and not case.sparse and case.decodes and case.length > 1
        ),
    ),
    Operation("attention to chosen tokens", CHOSEN, lambda case: (case,), lambda case: case.chooses),
    Operation("sparse attention", SPARSE_ATTENTION, lambda case: case.attention_args(), lambda case: case.sparse),
    Operation(
        "sparse attention after a cache",
        SPARSE_ATTENTION,
        lambda case: case.attention_args(case.cached),
        lambda case: case.sparse and case.decodes and case.length > 1,
    ),
    Operation(
        "cross-attention", ATTENTION, lambda case: case.cross_attention_args, lambda case: case.block.cross is not None
    ),
    Operation(
        "norm", NORM, lambda case: case.norm.operation_args(case.hidden), lambda case: case.config.norm.kind != "none"
    ),
    Operation(
        "gated activation",
        ACTIVATE_PROJECT,
        lambda case: (case.block.feedforward, case.projected),
        lambda case: case.layer.feedforward.gated and type(case.block.feedforward) is FeedForward,
    ),
    Operation(
        "gated activation",
        GLU,
        lambda case: (case.projected, case.layer.feedforward.activation.kind),
        lambda case: case.layer.feedforward.gated and isinstance(case.block.feedforward, Experts),
    ),
    Operation(
        "experts",
        EXPERTS,
        lambda case: (case.block.feedforward, *case.router_args),
        lambda case: isinstance(case.block.feedforward, Experts),
    ),
    Operation(
        "routing",
        ROUTING,
        lambda case: case.routing_args,
        lambda case: isinstance(case.block.feedforward, Experts),
    ),
    Operation(
        "gated activation in float8",
        FLOAT8_FEED_FORWARD,
        lambda case: (case.block.feedforward, case.hidden),
        lambda case: case.layer.feedforward.gated and isinstance(case.block.feedforward, Float8FeedForward),
    ),
    Operation(
        "frozen layer with an adapter",
        ADAPTED_LINEAR,
        lambda case: case.adapted_args,
        lambda case: case.training and case.precision is None,
        whole_model=True,
    ),
    Operation(
        "cross-entropy",
        CROSS_ENTROPY,
        lambda case: case.lm_head_args,
        lambda case: case.training and case.config.has_logits,
        whole_model=True,
    ),
    Operation("optimizer step", ADAMW, lambda case: case.optimizer_args, lambda case: case.training, whole_model=True),
    Operation(
        "decoding step",
        STEP_RUNNERS,
        lambda case: (case.step_spec,),
        lambda case: case.decodes,
        whole_model=True,
    ),
    Operation(
        "quantized weights, one row",
        QUANTIZED_WEIGHTS,
        lambda case: (case,),
        lambda case: case.weights is not None,
        whole_model=True,
    ),
)


def layer_operations(case: Case) -> Iterator[CalledOperation]:
    """The operations of a layer, those that its attention calls first."""
    yield from case.attention_operations
    for op in OPERATIONS:
        if not op.whole_model and op.applies(case):
            yield CalledOperation(op.name, op.table, op.args(case))


def model_operations(case: Case) -> Iterator[CalledOperation]:
    """The operations of the whole model, of which the case is a layer."""
    for op in OPERATIONS:
        if op.whole_model and op.applies(case):
            yield CalledOperation(op.name, op.table, op.args(case))

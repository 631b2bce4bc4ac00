"""The operations of a model: each with its dispatch table, and the arguments that the table is asked with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from phasor.generation.runners import STEP_RUNNERS
from phasor.inspect.case import Case
from phasor.nn.feed_forward import FeedForward
from phasor.nn.norm import LayerNorm
from phasor.nn.positions.rotary.module import Rotary
from phasor.ops import dispatch
from phasor.ops.adamw import ADAMW
from phasor.ops.attention import ATTENTION
from phasor.ops.cross_entropy import CROSS_ENTROPY
from phasor.ops.dispatch import Dispatch, Path
from phasor.ops.float8 import FLOAT8_MLP
from phasor.ops.glu import GLU, GLU_LINEAR
from phasor.ops.norm import NORM
from phasor.ops.rope import ROPE, ROPE_QKV
from phasor.training.float8 import Float8FeedForward


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


def case_only(case: Case) -> tuple[Case]:
    """The arguments of a table that is asked with the case itself."""
    return (case,)


def case_path(name: str, why_not: Callable[[Case], str | None] = dispatch.always) -> Path:
    """A path of a table that is asked with the case itself."""
    return Path(name, dispatch.always, why_not)


def case_paths(table: Dispatch, args: Callable[[Case], tuple[Any, ...]]) -> list[Path]:
    """The paths of an operation's own table, for a table that is asked with the case itself."""

    def bind(path: Path) -> Path:
        return case_path(path.name, lambda case: path.why_not(*args(case)))

    return [bind(path) for path in table.paths]


def rope_why_not(case: Case) -> str | None:
    """Why the kernel does not rotate queries and keys; None where it does."""
    scheme = case.position
    assert isinstance(scheme, Rotary)
    return scheme.why_not(case.seq, case.hidden)


def rope_qkv_why_not(case: Case) -> str | None:
    """Why the kernel does not read queries and keys from the projection; None where it does."""
    return rope_why_not(case) or case.block.attention.unfusable_reason


def norm_args(x: Tensor, module: nn.Module) -> tuple[Any, ...]:
    """What a norm is called with."""
    weights = getattr(module, "weight", None), getattr(module, "bias", None)
    return x, *weights, getattr(module, "eps", 0.0), getattr(module, "offset", 0.0), isinstance(module, LayerNorm)


def glu_args(case: Case) -> tuple[Tensor, str]:
    """What a gated activation is called with."""
    return case.projected, case.layer.feedforward.activation.kind


def fused_glu_why_not(case: Case) -> str | None:
    """Why the gated activation is not one operation with the projection after it; None where it is."""
    network = case.block.feedforward
    if not isinstance(network, FeedForward) or not network.fuses_glu:
        return "the network has experts, or its last projection a bias or dropout before it"
    x, activation = glu_args(case)
    return GLU_LINEAR.paths[0].why_not(x, case.tensor(case.config.dim, case.config.hidden_dim), activation)


def fused_float8_why_not(case: Case) -> str | None:
    """Why the feed-forward network is not one operation in float8; None where it is."""
    network = case.block.feedforward
    if not isinstance(network, Float8FeedForward) or not network.is_plain_glu:
        return "the network has experts, biases or dropout"
    weights = network.up.weight, network.down.weight
    return FLOAT8_MLP.paths[0].why_not(case.hidden, *weights, network.config.activation.kind)


def int8_why_not(case: Case) -> str | None:
    """Why int8 weights are converted before every matmul; None where decoding steps read them as they are."""
    return STEP_RUNNERS.paths[0].why_not(case.step_spec) if case.decodes else "the model does not decode"


# Where a layer decides between several operations, as between the rotation of a projection and that of its heads, its
# table here is made of theirs.
OPERATIONS = (
    Operation(
        "rotation",
        Dispatch(
            case_path(ROPE_QKV.paths[0].name, rope_qkv_why_not),
            case_path(ROPE.paths[0].name, rope_why_not),
            case_path(ROPE.paths[1].name),
        ),
        case_only,
        lambda case: "queries" in case.layer.position.acts_on,
    ),
    Operation("attention", ATTENTION, lambda case: case.attention_args, lambda case: True),
    Operation(
        "cross-attention", ATTENTION, lambda case: case.cross_attention_args, lambda case: case.block.cross is not None
    ),
    Operation(
        "query and key norm",
        NORM,
        lambda case: norm_args(case.queries, case.block.attention.q_norm),
        lambda case: case.layer.attention.qk_norm != "none",
    ),
    Operation(
        "norm", NORM, lambda case: norm_args(case.hidden, case.norm), lambda case: case.config.norm.kind != "none"
    ),
    Operation(
        "gated activation",
        Dispatch(case_path(GLU_LINEAR.paths[0].name, fused_glu_why_not), *case_paths(GLU, glu_args)),
        case_only,
        lambda case: case.layer.feedforward.gated and case.precision is None,
    ),
    Operation(
        "gated activation in float8",
        Dispatch(case_path(FLOAT8_MLP.paths[0].name, fused_float8_why_not), *case_paths(GLU, glu_args)),
        case_only,
        lambda case: case.layer.feedforward.gated and case.precision == "float8",
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
        "weights in int8",
        Dispatch(
            case_path("as they are in steps of few rows, else converted", int8_why_not),
            case_path("converted layer by layer"),
        ),
        case_only,
        lambda case: case.weights == "int8",
        whole_model=True,
    ),
)

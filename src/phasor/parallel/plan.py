"""A training step on many devices, on paper: which mesh, how much memory, how many bytes exchanged, how long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from phasor.config import ModelConfig
from phasor.config.schema import check_integer, quote, unknown
from phasor.parallel.cost import Costs, Exchange, StepTime
from phasor.parallel.hardware import Hardware, find_hardware
from phasor.parallel.memory import PARAM_BYTES, Memory, MicroBatches
from phasor.parallel.mesh import Mesh, mesh_why_not, meshes

UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
BATCH_TOKENS = 1 << 22
GRADIENT_SYNC = ("every", "last")
MOST_DEVICES = 1 << 20
MOST_ROWS = 1 << 10  # at once: more are no faster
LEAST_PARAMETERS = 1_000_000_000  # of the models that predicted times have been compared with


@dataclass(frozen=True)
class ParallelPlan:
    """One training step of a model on a mesh; bytes are those of one device, seconds those of the step.

    `rows` of `length` tokens are computed at once on each group of devices that reads the same rows, and
    `accumulation` times in a step. `bound_by` is what takes most of the step, or "memory" where it does not fit.
    """

    parameters: int
    hardware: Hardware
    mesh: Mesh
    suggested: bool
    length: int
    rows: int
    accumulation: int
    activation_checkpointing: bool
    memory: Memory
    exchange: Exchange
    seconds: StepTime
    mfu: float

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step, of all devices."""
        return self.rows * self.accumulation * self.mesh.data * self.length

    @property
    def tokens_per_second(self) -> float:
        return self.batch_tokens / self.seconds.total

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.hardware.usable

    @property
    def bound_by(self) -> str:
        return self.seconds.largest if self.fits else "memory"

    @property
    def note(self) -> str | None:
        """Where the predicted time does not apply, a sentence."""
        if self.parameters >= LEAST_PARAMETERS:
            return None
        return (
            f"times hold for models of a billion parameters and more: matrix products of one with {self.parameters:,} "
            "reach less of the peak, so that a step takes longer than this"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, for JSON."""
        return {
            "parameters": self.parameters,
            "device": self.hardware.name,
            "devices": self.mesh.devices,
            "mesh": asdict(self.mesh),
            "suggested": self.suggested,
            "context": self.length,
            "rows": self.rows,
            "accumulation": self.accumulation,
            "batch_tokens": self.batch_tokens,
            "activation_checkpointing": self.activation_checkpointing,
            "memory": asdict(self.memory) | {"usable": self.hardware.usable},
            "exchange": asdict(self.exchange) | {"total": self.exchange.total},
            "seconds": asdict(self.seconds) | {"total": self.seconds.total},
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "fits": self.fits,
            "bound_by": self.bound_by,
            "note": self.note,
        }


def plan(
    model: ModelConfig,
    *,
    devices: int = 1,
    context: int | str | None = None,
    mesh: Mesh | Mapping[str, int] | str | None = None,
    batch_tokens: int | str | None = None,
    rows: int | None = None,
    activation_checkpointing: bool | None = None,
    param_dtype: str = "float32",
    gradient_sync: str = "every",
    device: str = "h200",
    devices_per_node: int = 8,
) -> ParallelPlan:
    """Plan a training step of a model on some devices: memory, bytes exchanged, seconds, and what binds.

    `context` is the tokens of a row, by default the model's `max_length`; an encoder-decoder has as many of source and
    target. `mesh` gives the sizes of its axes, and what is left over is `shard`; without one the fastest that fits is
    suggested. A step has `batch_tokens` tokens (4m by default, and at least one row for each group of devices), in as
    many backward passes as memory asks for, or of `rows` rows each. Activation checkpointing is used where the step
    would not fit without. `gradient_sync` "last" sums gradients over devices in the last backward pass of a step alone,
    and keeps them whole until then. Numbers of tokens may end in k, m or g (1,024 of the one before).

    >>> from phasor.models.presets import preset
    >>> planned = plan(preset("llama-3.1"), devices=64, context="1m")
    >>> planned.mesh.devices, planned.batch_tokens, planned.fits
    (64, 4194304, True)
    """
    if not isinstance(model, ModelConfig):
        raise ValueError(f"plan takes a ModelConfig, not {quote(model)}")
    if check_integer("devices", devices) > MOST_DEVICES:
        raise ValueError(f"devices can be {MOST_DEVICES:,} at most, not {devices:,}")
    check_integer("devices_per_node", devices_per_node)
    if rows is not None:
        check_integer("rows", rows)
    if activation_checkpointing not in (None, True, False):
        raise ValueError(f"activation_checkpointing must be True, False or None, not {quote(activation_checkpointing)}")
    if param_dtype not in tuple(PARAM_BYTES):
        raise unknown("param_dtype", param_dtype, PARAM_BYTES)
    if gradient_sync not in GRADIENT_SYNC:
        raise unknown("gradient_sync", gradient_sync, GRADIENT_SYNC)
    length = model.max_length if context is None else parse_tokens("context", context)
    check_length(model, length)
    batch = BATCH_TOKENS if batch_tokens is None else parse_tokens("batch_tokens", batch_tokens)
    given = None if mesh is None else as_mesh(mesh, devices)
    if given is not None:
        reason = mesh_why_not(model, given, length)
        if reason is not None:
            raise ValueError(reason)
    planner = Planner(
        Costs(model, find_hardware(device), devices_per_node, param_dtype),
        length,
        batch,
        rows,
        [True, False] if activation_checkpointing is None else [activation_checkpointing],
        gradient_sync == "last",
    )
    return planner.suggest(devices) if given is None else planner.best([given])


@dataclass(frozen=True)
class Planner:
    """Plans of one model and batch, on meshes to choose from."""

    costs: Costs
    length: int
    batch_tokens: int
    rows: int | None
    checkpointing: list[bool]
    sync_last: bool

    def suggest(self, devices: int) -> ParallelPlan:
        """The best plan of all meshes that the model can be cut by."""
        total_rows = max(1, -(-self.batch_tokens // self.length))
        fitting = [
            mesh
            for mesh in meshes(devices, self.costs.per_node)
            if mesh_why_not(self.costs.model, mesh, self.length) is None
        ]
        if not fitting:
            raise ValueError(f"no mesh of {devices} devices cuts rows of {self.length:,} tokens evenly")
        # More groups of devices than rows would make the batch larger than asked for.
        within = [mesh for mesh in fitting if mesh.data <= total_rows]
        return replace(self.best(within or fitting), suggested=True)

    def best(self, choices: list[Mesh]) -> ParallelPlan:
        """The simplest of the fastest plans that fit, or else the one with the least memory."""
        plans = [each for mesh in choices for on in self.checkpointing for each in self.plans(mesh, on)]
        fitting = [each for each in plans if each.fits]
        if not fitting:
            return min(plans, key=lambda each: each.memory.peak)
        fastest = max(each.tokens_per_second for each in fitting)
        return max((each for each in fitting if each.tokens_per_second > 0.995 * fastest), key=prefer_simpler)

    def plans(self, mesh: Mesh, checkpointing: bool) -> Iterator[ParallelPlan]:
        """The plans on a mesh that fit, by the rows at once; that with the fewest where none fits."""
        for rows in self.row_choices(mesh):
            memory = self.costs.memory(mesh, rows, checkpointing=checkpointing, sync_last=self.sync_last)
            if memory.peak > self.costs.hardware.usable and rows.rows > 1 and self.rows is None:
                continue
            yield self.plan(mesh, checkpointing, rows, memory)

    def plan(self, mesh: Mesh, checkpointing: bool, rows: MicroBatches, memory: Memory) -> ParallelPlan:
        """The plan of these rows."""
        seconds = self.costs.seconds(mesh, rows, checkpointing=checkpointing, sync_last=self.sync_last)
        tokens = rows.rows * rows.accumulation * self.length / mesh.context / mesh.tensor
        return ParallelPlan(
            parameters=self.costs.parameters.total,
            hardware=self.costs.hardware,
            mesh=mesh,
            suggested=False,
            length=self.length,
            rows=rows.rows,
            accumulation=rows.accumulation,
            activation_checkpointing=checkpointing,
            memory=memory,
            exchange=self.costs.exchange(mesh, rows, checkpointing=checkpointing, sync_last=self.sync_last),
            seconds=seconds,
            mfu=tokens / seconds.total * self.costs.model_flops(self.length) / self.costs.hardware.flops,
        )

    def row_choices(self, mesh: Mesh) -> Iterator[MicroBatches]:
        """MicroBatches at once and how often, most at once first."""
        each = max(1, -(-self.batch_tokens // (self.length * mesh.data)))
        if self.rows is not None:
            yield MicroBatches(self.length, self.rows, -(-each // self.rows))
            return
        for rows in range(min(each, MOST_ROWS), 0, -1):
            if each % rows == 0:
                yield MicroBatches(self.length, rows, each // rows)


def prefer_simpler(each: ParallelPlan) -> tuple[int, int, int]:
    """What is preferred among plans of the same speed: fewer axes, no recomputation, fewer bytes exchanged."""
    axes = sum(size > 1 for size in asdict(each.mesh).values())
    return -axes, -int(each.activation_checkpointing), -each.exchange.total


def parse_tokens(name: str, tokens: int | str) -> int:
    """A number of tokens; 1k is 1,024, 1m 1,024k and 1g 1,024m.

    >>> parse_tokens("context", "1m"), parse_tokens("context", 6000)
    (1048576, 6000)
    """
    number = str(tokens).strip().lower()
    unit = UNITS.get(number[-1:], 1)
    digits = number[:-1] if unit > 1 else number
    if isinstance(tokens, bool) or not digits.isdecimal() or len(digits) > 15 or int(digits) < 1:
        raise ValueError(
            f"{name} is an integer of tokens from 1 on, or one with k, m or g such as 8k or 1m, not {quote(tokens)}"
        )
    return int(digits) * unit


def as_mesh(mesh: Mesh | Mapping[str, int] | str, devices: int) -> Mesh:
    """A mesh as it is given, of as many devices as there are."""
    if not isinstance(mesh, Mesh | Mapping | str):
        raise ValueError(f"mesh takes axes with their sizes such as shard=16,tensor=4, not {quote(mesh)}")
    return Mesh.parse(asdict(mesh) if isinstance(mesh, Mesh) else mesh, devices)


def check_length(model: ModelConfig, length: int) -> None:
    """Refuse rows that are longer than the model's positions reach."""
    for scheme in (model.input_position, *model.layer_positions()):
        if scheme.max_positions is not None and length > scheme.max_positions:
            raise ValueError(
                f"context {length:,} is more than the {scheme.max_positions:,} positions of the model's "
                f"{scheme.kind} scheme"
            )

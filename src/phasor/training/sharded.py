"""Training with several processes: each holds parts of the weights and takes some of the rows of every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasor.checkpoints.tensors import TensorSource, file_order
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.nn.block import set_up_compiler
from phasor.parallel.exchange import Axis
from phasor.parallel.load import prepare_inference, sharded_copy
from phasor.parallel.loss import local_loss
from phasor.parallel.processes import JoinedProcesses
from phasor.parallel.shards import Shards
from phasor.training.optimizer import NamedWeights, optimizer_tensors, restore_optimizer
from phasor.training.signals import StopSignal
from phasor.training.state import TrainingState, save_state
from phasor.training.trained import saved_names
from phasor.training.trainer import Trainer, derive_seed, gradient_of, precision_name
from phasor.transformer import Transformer


class ShardedTrainer(Trainer):
    """A `Trainer` that is one of several processes; together they do what it does alone.

    The model may be on the meta device, and `weights` whole ones to take its parts from.
    """

    def __init__(
        self,
        model: Transformer,
        recipe: Recipe,
        steps: int,
        processes: JoinedProcesses,
        stop: StopSignal,
        weights: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        self.processes, self.stop, self.initial = processes, stop, weights
        super().__init__(model, recipe, steps)
        axes = [Axis.of(processes.mesh, name) for name in ("shard", "replicate")]
        self.objective.row_axes = tuple(axis for axis in axes if axis.size > 1)

    def place(self, model: Transformer) -> Transformer:
        """The model in the dtype of its parameters; its blocks move to the device one by one, when FSDP cuts them."""
        model = model if model.adapters else model.to(getattr(torch, self.recipe.train.param_dtype))
        self.shards = Shards(model, self.processes.mesh)
        return model

    def compile(self, *, dynamic: bool) -> None:
        """Compile the forwards of blocks, and not the hooks around them that gather weights."""
        set_up_compiler()
        for block in self.model.blocks():
            setattr(block, "forward", torch.compile(block.forward, dynamic=dynamic))  # noqa: B010

    def shard(self) -> NamedWeights:
        """The parts of the weights that this process trains."""
        in_half = precision_name(self.recipe, self.device) != "float32"
        self.shards.shard(torch.bfloat16 if in_half else None).load(self.initial)
        self.copies = torch.tensor([float(self.shards.copies(name)) for name in self.names], device=self.device)
        return self.shards

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, part in self.shards.parts.items() if part.requires_grad)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shards.slices.shapes.values())

    def forward_backward(self, step: int, batches: Sequence[Batch], count: float) -> Tensor:
        """As of one process; the loss and the norms are those of all."""
        self.model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        metrics = torch.zeros(len(self.objective.metrics), device=self.device)
        for part, batch in enumerate(batches):
            if part > 0:
                self.seed(step, part)
            balance_share = 1.0 if len(batches) == 1 else (batch.whole_count or batch.count) / max(count, 1.0)
            with self.precision():
                loss = local_loss(
                    self.objective.mean_loss,
                    self.model,
                    batch,
                    count,
                    balance_share,
                    self.processes.sum,
                    self.shards.tokens,
                )
            loss.backward()
            total += loss.detach()
            if self.objective.measured is not None:
                metrics += self.objective.measured * (batch.weights.sum() / max(count, 1.0))
        self.shards.take_gradients()
        gradients = [gradient_of(self.shards.parts[name]) for name in self.names]
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        stopping = torch.full((1,), float(self.stop.signal is not None), device=self.device)
        squares = norms.square() / self.copies  # several processes have the same gradients
        sums = self.processes.sum(torch.cat((total[None], squares, metrics, stopping)))
        loss, squares, others = sums[:1], sums[1 : 1 + len(squares)], sums[1 + len(squares) :]
        norms = squares.sqrt()
        return torch.cat((loss, norms.norm()[None], norms, others))

    @torch.no_grad()
    def validation_loss(self, batches: Iterable[Batch], stopped: Callable[[], bool]) -> float | None:
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        with self.eval_mode():
            for batch in batches:
                if self.processes.any(self.stop.signal is not None):
                    self.stop.agree()
                    return None
                here = batch.share(*self.processes.share).to(self.device)
                total += local_loss(
                    self.objective.mean_loss,
                    self.model,
                    here,
                    1.0,
                    0.0,
                    self.processes.sum,
                    self.shards.tokens,
                    training=False,
                )
                count += batch.count
        return float(self.processes.sum(total)) / count if count else float("nan")

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """As of one process, in the precision of training: blocks are gathered in its dtype."""
        with super().eval_mode(), self.precision():
            self.shards.reshard()  # they may be those before the weights were swapped
            try:
                yield
            finally:
                self.shards.reshard()

    def sources(self) -> dict[str, list[TensorSource]]:
        """All tensors to save, in groups, put together when they are made; all processes have to make them."""
        own = optimizer_tensors(self.optimizer, self.shards)
        saved = self.processes.from_first(list(own))  # a process with no part of a weight has no state of it
        states = {path: own.get(path) for path in saved}
        names = saved_names(self.model)
        groups: dict[str, Mapping[str, Tensor | None]] = {
            "model": {name: self.shards.parts[name] for name in names},
            "optimizer": states,
        }
        if self.ema is not None:
            groups["ema"] = {name: self.ema.weights.get(name) for name in names}
        return {
            group: file_order(self._source(path, tensor) for path, tensor in tensors.items())
            for group, tensors in groups.items()
        }

    def _source(self, path: str, tensor: Tensor | None) -> TensorSource:
        name, _, key = path.partition("/")
        part = self.shards.parts[name].detach()
        if key == "step":  # the same everywhere
            step = torch.zeros((), dtype=torch.float32) if tensor is None else tensor
            return TensorSource(path, torch.float32, (), lambda: step)
        make = partial(self.shards.gather, name, part if tensor is None else tensor)
        return TensorSource(path, part.dtype, self.shards.shapes[name], make)

    def save(self, folder: Path, step: int, values: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step: the first process writes, the others give their parts."""
        groups = self.sources()
        if self.processes.is_first:
            save_state(folder, step, groups, values)
        else:
            for sources in groups.values():
                for source in sources:
                    source.make()
        self.processes.from_first(step)

    def inference_model(self) -> Transformer:
        return prepare_inference(self.model) if self.shards.tokens.multiple == 1 else sharded_copy(self.shards)

    def model_sources(self) -> list[TensorSource]:
        return [self._source(name, self.shards.parts[name]) for name in saved_names(self.model)]

    def restore(self, state: TrainingState) -> None:
        self.shards.load(state.tensors["model"].items())
        held = dict(self.shards.named_parameters())
        own = {
            path: tensor if path.endswith("/step") else self.shards.take(path.rpartition("/")[0], tensor)
            for path, tensor in state.tensors["optimizer"].items()
            if path.rpartition("/")[0] in held
        }
        restore_optimizer(self.optimizer, self.shards, own)
        if self.ema is not None:
            held_averages = ((name, state.tensors["ema"][name]) for name in self.ema.weights)
            averages = {name: self.shards.take(name, tensor) for name, tensor in held_averages}
            self.ema.restore(averages, state.values["ema_updates"])

    def non_finite_weights(self) -> list[str]:
        flags = torch.stack([(~torch.isfinite(part)).any() for part in self.shards.parts.values()]).float()
        wrong = self.processes.sum(flags).tolist()
        return [name for name, flag in zip(self.shards.parts, wrong, strict=True) if flag]

    def seed(self, step: int, part: int) -> None:
        """Seed the generators that dropout draws from; every process has its own seeds."""
        rank = self.processes.rank
        seed = derive_seed(self.recipe.train.seed, step, part, *([rank] if rank else []))
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

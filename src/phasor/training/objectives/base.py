"""The contract of an objective: which models a task trains, and what it minimizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.model import Shape
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.data.store import Progress
from phasor.nn.heads import BALANCE_WEIGHT
from phasor.nn.moe import balance_of, mixtures_of, routed_tokens
from phasor.nn.record import Record
from phasor.parallel.exchange import Axis
from phasor.parallel.loss import PLAIN_LOSS, LossCall
from phasor.transformer import Transformer

if TYPE_CHECKING:
    from phasor.training.datasets import Datasets
    from phasor.training.run import RunFolder
    from phasor.training.trainer import Trainer


Start = Callable[[], Transformer]  # builds a model as a run began with it


class Objective:
    """What a recipe's task minimizes, and what it asks of a model; made once for a run, from its recipe.

    A subclass states the `shapes` of models it trains, the first of which is that of a fresh one, and computes
    `mean_loss`. With `varied_batches` nearly every batch has another shape. The loss of tokens that are cut over a
    mesh's axes `context` and `tensor` needs `cuts_tokens`: `mean_loss` then takes its `share` of each row. With
    `reads_other_rows` a forward has more rows than the tokens of a batch. Where there are `metrics`, `mean_loss` leaves
    their values in `measured`, means as the loss is. Along `row_axes` of a mesh processes have other rows of a batch.
    """

    shapes: ClassVar[tuple[Shape, ...]] = ()
    varied_batches: ClassVar[bool] = False
    cuts_tokens: ClassVar[bool] = False
    reads_other_rows: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ()

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.measured: Tensor | None = None  # [metrics]
        self.row_axes: tuple[Axis, ...] = ()

    def head(self, given: ModelConfig | None, labels: tuple[str, ...] = ()) -> dict[str, Any]:
        """Fields of the head of a fresh model, below those of the recipe; `given` is its preset, if it names one."""
        return {}

    def with_head(self, config: ModelConfig, labels: tuple[str, ...] = (), family: str | None = None) -> ModelConfig:
        """The configuration of a model that is loaded, with the head that is trained; a new one is drawn.

        `labels` are those of the data, where they are known, and `family` that of its Hugging Face folder.
        """
        return config

    def head_why_not(self, config: ModelConfig) -> str | None:
        """Why the objective cannot train a model with this head; None where it can. By default it takes logits."""
        if config.has_logits:
            return None
        return f"training needs a head that gives logits, and this model's is {config.head.kind!r}"

    def fixed_fields(self) -> dict[str, Any]:
        """What besides the recipe's own fields may not change in a run that is resumed, as JSON."""
        return {}

    def prepare(
        self, trainer: Trainer, datasets: Datasets, run: RunFolder, progress: Progress, start: Start | None
    ) -> None:
        """What the loss needs besides the model, before the first step, also of a run that is resumed.

        The trainer's model then is not as it was at first: `start` builds that.
        """

    def mean_loss(self, model: Transformer, batch: Batch, call: LossCall = PLAIN_LOSS) -> Tensor:
        """The mean over what a batch predicts, by `batch.weights`."""
        raise NotImplementedError

    def loss(self, model: Transformer, batch: Batch) -> Tensor:
        """The loss that training minimizes: the mean, and the balancing loss of routed experts."""
        record = Record("router") if mixtures_of(model) else None
        loss = self.mean_loss(model, batch, LossCall(record))
        if record is None:
            return loss
        routed = [each for side in routed_tokens(model, record) for each in side]
        return loss + BALANCE_WEIGHT * balance_of(routed)

    def validation_loss(self, model: Transformer, batch: Batch) -> Tensor:
        """The loss that tells which checkpoint is the best, a mean as above."""
        return self.mean_loss(model, batch, LossCall(training=False))

    def sample(self, model: Transformer, datasets: Datasets) -> str | None:
        """A text that shows what the model has learned; None where there is nothing to show."""
        return None

"""Loggers: TensorBoard, Weights & Biases, Trackio, or any object of the protocol."""

from collections.abc import Callable, Iterable

from phasor.config.recipe import LoggerName, Recipe
from phasor.training.loggers.base import LoggedRun as LoggedRun
from phasor.training.loggers.base import Logger as Logger
from phasor.training.loggers.tensorboard import TensorBoardLogger
from phasor.training.loggers.trackio import TrackioLogger
from phasor.training.loggers.wandb import WandbLogger

LOGGERS: dict[LoggerName, Callable[[], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
}


def loggers_of(recipe: Recipe, more: Iterable[Logger], notify: Callable[[str], None]) -> list[Logger]:
    """The loggers of a recipe, and some more; a package that is not installed is an error.

    TensorBoard is left out with a message, where nobody has asked for it.
    """
    made: list[Logger] = []
    for name in recipe.loggers:
        try:
            made.append(LOGGERS[name]())
        except ValueError as error:
            if recipe.loggers != Recipe().loggers:
                raise
            notify(str(error))
    return [*made, *more]

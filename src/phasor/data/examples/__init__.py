"""The examples of every task: a file per kind, and the table that names them."""

from phasor.checkpoints.load import read_config
from phasor.config.model import Shape
from phasor.config.recipe import Recipe
from phasor.config.tasks import Task
from phasor.data.examples.base import Examples as Examples
from phasor.data.examples.chat import Conversations
from phasor.data.examples.documents import Documents, MaskedDocuments
from phasor.data.examples.labeled import Labeled
from phasor.data.examples.pairs import ParallelTexts
from phasor.data.examples.preferences import PreferencePairs
from phasor.data.examples.replies import Replies
from phasor.data.examples.similar import SimilarTexts
from phasor.models.presets import preset

EXAMPLES: dict[Task, type[Examples]] = {
    "lm": Documents,
    "translation": ParallelTexts,
    "mlm": MaskedDocuments,
    "classify": Labeled,
    "embed": SimilarTexts,
    "distill": Documents,
    "chat": Conversations,
    "preference": PreferencePairs,
}


OF_ENCODER_DECODERS: dict[Task, type[Examples]] = {"chat": Replies}  # where they are others


def examples_of(recipe: Recipe, shape: Shape | None = None) -> Examples:
    """The kind of examples that a recipe's task reads, for a model of a shape, or else that of its recipe.

    >>> examples_of(Recipe()).unit, examples_of(Recipe(task="chat"), "encoder-decoder").unit
    ('document', 'reply')
    """
    kind = EXAMPLES[recipe.task]
    if recipe.task in OF_ENCODER_DECODERS and (shape or shape_of(recipe)) == "encoder-decoder":
        kind = OF_ENCODER_DECODERS[recipe.task]
    return kind(recipe)


def shape_of(recipe: Recipe) -> Shape | None:
    """The shape of a recipe's model; None where its task decides.

    >>> shape_of(Recipe(model={"preset": "t5"})), shape_of(Recipe())
    ('encoder-decoder', None)
    """
    if "shape" in recipe.model:
        return recipe.model["shape"]
    if "preset" in recipe.model:
        return preset(recipe.model["preset"]).shape
    return None if recipe.init_from is None else read_config(recipe.init_from).shape

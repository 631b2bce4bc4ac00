"""The examples of every task: a file per kind, and the table that names them."""

from phasor.config.recipe import Recipe
from phasor.config.tasks import Task
from phasor.data.examples.base import Examples as Examples
from phasor.data.examples.chat import Conversations
from phasor.data.examples.documents import Documents, MaskedDocuments
from phasor.data.examples.labeled import Labeled
from phasor.data.examples.pairs import ParallelTexts
from phasor.data.examples.preferences import PreferencePairs
from phasor.data.examples.similar import SimilarTexts

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


def examples_of(recipe: Recipe) -> Examples:
    """The kind of examples that a recipe's task reads.

    >>> examples_of(Recipe()).unit
    'document'
    """
    return EXAMPLES[recipe.task](recipe)

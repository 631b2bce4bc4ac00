"""What a run minimizes: a file per task, and the table that names them."""

from phasor.config.recipe import Recipe
from phasor.config.tasks import Task
from phasor.training.objectives.base import Objective as Objective
from phasor.training.objectives.chat import Chat
from phasor.training.objectives.classification import Classification
from phasor.training.objectives.distillation import Distillation
from phasor.training.objectives.embedding import ContrastiveEmbedding
from phasor.training.objectives.language import LanguageModeling
from phasor.training.objectives.masked import MaskedModeling
from phasor.training.objectives.preference import Preference
from phasor.training.objectives.translation import Translation

OBJECTIVES: dict[Task, type[Objective]] = {
    "lm": LanguageModeling,
    "translation": Translation,
    "mlm": MaskedModeling,
    "classify": Classification,
    "embed": ContrastiveEmbedding,
    "distill": Distillation,
    "chat": Chat,
    "preference": Preference,
}


def objective_of(recipe: Recipe) -> Objective:
    """The objective of a recipe's task.

    >>> objective_of(Recipe()).shapes
    ('decoder',)
    """
    return OBJECTIVES[recipe.task](recipe)

"""The metrics of every task: the table that names them, and a file per kind."""

from collections.abc import Callable
from typing import Any

from phasor.config.tasks import Task
from phasor.evaluation.metrics.chat import chat_metrics
from phasor.evaluation.metrics.classification import classification_metrics
from phasor.evaluation.metrics.embedding import embedding_metrics
from phasor.evaluation.metrics.language import language_metrics, masked_metrics
from phasor.evaluation.metrics.preference import preference_metrics
from phasor.evaluation.metrics.texts import EncodedTexts
from phasor.evaluation.metrics.translation import translation_metrics
from phasor.evaluation.run import TrainedRun
from phasor.generation.translation import Progress

METRICS: dict[Task, Callable[[TrainedRun, EncodedTexts, int, Progress], dict[str, Any]]] = {
    "lm": language_metrics,
    "translation": translation_metrics,
    "mlm": masked_metrics,
    "classify": classification_metrics,
    "embed": embedding_metrics,
    "distill": language_metrics,
    "chat": chat_metrics,
    "preference": preference_metrics,
}

"""Evaluation: the metrics of a trained model, and its translations."""

from phasor.evaluation.evaluator import evaluate as evaluate
from phasor.evaluation.translation import translate as translate

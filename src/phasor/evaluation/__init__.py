"""Evaluation: what a trained model is worth, and its translations."""

from phasor.evaluation.measuring import evaluate as evaluate
from phasor.evaluation.translating import translate as translate

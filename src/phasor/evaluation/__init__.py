"""Evaluation: the metrics of a trained model, its loss by length, what it finds in long texts, and its translations."""

from phasor.evaluation.evaluator import evaluate as evaluate
from phasor.evaluation.lengths import evaluate_lengths as evaluate_lengths
from phasor.evaluation.retrieval import evaluate_retrieval as evaluate_retrieval
from phasor.evaluation.stream import evaluate_stream as evaluate_stream
from phasor.evaluation.translation import translate as translate

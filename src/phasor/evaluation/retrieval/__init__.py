"""Retrieval: what a model finds in a long prompt, by the length of the prompt and by how deep in it the answer is."""

from phasor.evaluation.retrieval.evaluate import evaluate_retrieval as evaluate_retrieval
from phasor.evaluation.retrieval.tasks import TASKS as TASKS

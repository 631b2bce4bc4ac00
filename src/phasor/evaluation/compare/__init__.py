"""Position schemes compared: the same decoder trained with each, then measured beyond the length it was trained at."""

from phasor.evaluation.compare.comparison import compare as compare

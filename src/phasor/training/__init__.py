"""Training: the loop, its checkpoints and the folder of a run."""

from phasor.training.extend import Extended as Extended
from phasor.training.extend import extend as extend
from phasor.training.loop import train as train
from phasor.training.progress import RunSummary as RunSummary
from phasor.training.progress import SplitSize as SplitSize
from phasor.training.progress import StepReport as StepReport
from phasor.training.progress import TrainingProgress as TrainingProgress
from phasor.training.result import TrainingResult as TrainingResult

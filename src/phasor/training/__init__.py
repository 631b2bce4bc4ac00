"""Training: the loop, what it saves and the folder it leaves."""

from phasor.training.loop import train as train
from phasor.training.progress import Report as Report
from phasor.training.progress import Watcher as Watcher
from phasor.training.result import Result as Result

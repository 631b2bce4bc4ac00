"""Training: the loop, what it saves and the folder it leaves."""

from phasor.train.loop import train as train
from phasor.train.progress import Report as Report
from phasor.train.progress import Watcher as Watcher
from phasor.train.result import Result as Result

"""Training on many devices: the plan of a step on paper, and the processes that train together."""

from phasor.parallel.flops import mfu as mfu
from phasor.parallel.mesh import Mesh as Mesh
from phasor.parallel.plan import ParallelPlan as ParallelPlan
from phasor.parallel.plan import plan as plan

"""Training on many devices. What is here is the plan of a step on paper; nothing is distributed yet."""

from phasor.parallel.flops import mfu as mfu
from phasor.parallel.mesh import Mesh as Mesh
from phasor.parallel.plan import ParallelPlan as ParallelPlan
from phasor.parallel.plan import plan as plan

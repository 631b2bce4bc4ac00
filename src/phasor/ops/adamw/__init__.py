"""AdamW: the optimizer, its dispatch table, and the plain reference of a step."""

from phasor.ops.adamw.adamw import ADAMW, AdamW, adamw_why_not
from phasor.ops.adamw.reference import adamw_step_ref, stochastic_round_ref

__all__ = ["ADAMW", "AdamW", "adamw_step_ref", "adamw_why_not", "stochastic_round_ref"]

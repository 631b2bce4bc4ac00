"""What other engines make of the rotary settings of a Hugging Face folder."""

from phasor.inspect.audit.audit import Audit, audit
from phasor.inspect.audit.finding import Finding

__all__ = ["Audit", "Finding", "audit"]

"""Model folders: load, save and convert, in phasor's own format and in Hugging Face's."""

from phasor.checkpoints.convert import convert
from phasor.checkpoints.exact_rotary import exact_rotary
from phasor.checkpoints.load import load
from phasor.checkpoints.merge import merge
from phasor.checkpoints.save import save

__all__ = ["convert", "exact_rotary", "load", "merge", "save"]

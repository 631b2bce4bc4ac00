"""The engine: many requests at once, which join and leave between steps of one model."""

from phasor.generation.engine.engine import Engine, EngineStats, QueueFullError
from phasor.generation.engine.handle import CancelledError, Handle

__all__ = ["CancelledError", "Engine", "EngineStats", "Handle", "QueueFullError"]

"""The model with the rotary extensions that requests ask for; all share its weights."""

from __future__ import annotations

import threading

from phasor.checkpoints.swap_positions import swap_config
from phasor.config import Extension
from phasor.config.positions import Extension as ExtensionConfig
from phasor.models.extensions import extend_config, trained_length
from phasor.transformer import Transformer

MOST_MODELS = 8  # that are kept for further requests


class ExtendedModels:
    """A model as requests of several lengths use it.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50, max_length=64))
    >>> models = ExtendedModels(model)
    >>> models.get("yarn", 60) is model, models.get("yarn", 100).config.position.extension.factor
    (True, 2.0)
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.models: dict[Extension, Transformer] = {}  # that requests asked for last
        self.lock = threading.Lock()

    def get(self, extension: Extension | str | None, length: int) -> Transformer:
        """The model for a request that is planned for a length.

        An extension by its name is chosen for that length, rounded up to a multiple of the one that the model was
        trained at, and is none where the length is no longer than that.
        """
        if extension is None:
            return self.model
        if not isinstance(extension, ExtensionConfig):
            config, trained = self.model.config, trained_length(self.model.config)
            if length <= trained:
                return self.model
            longer = extend_config(config, extension, -(-length // trained) * trained)
            extension = getattr(longer.extendable_position(), "extension", None)
            if extension is None:
                return self.model
        with self.lock:
            model = self.models.pop(extension, None)
            if model is None:
                model = swap_config(self.model, self.model.config.with_extension(extension)).eval()
            self.models[extension] = model
            if len(self.models) > MOST_MODELS:
                del self.models[next(iter(self.models))]
        return model

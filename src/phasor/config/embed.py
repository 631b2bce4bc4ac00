"""The contrastive loss of a recipe, and where its texts stand. Nothing here imports torch."""

from __future__ import annotations

from phasor.config.schema import Config, positive


class EmbedConfig(Config):
    """Anchors and the texts that belong to them, among those of the other anchors of a batch.

    `scale` multiplies cosine similarities, the inverse of a temperature. A JSON line has the texts under `anchor_field`
    and `positive_field`, and under `negative_field`, where it has that, one that does not belong to the anchor.

    >>> EmbedConfig().scale
    20.0
    """

    scale: float = 20.0
    anchor_field: str = "anchor"
    positive_field: str = "positive"
    negative_field: str = "negative"

    def check(self) -> None:
        positive(self, "scale")
        for name in ("anchor_field", "positive_field", "negative_field"):
            if getattr(self, name) == "":
                raise ValueError(f"EmbedConfig.{name} must name a field, not ''")

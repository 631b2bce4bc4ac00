"""What the lab and reports say about a kind, in English and Chinese: the `texts.toml` of its folder."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

from phasor.config.schema import Choice, summary


def read_texts(cls: type[Choice]) -> dict[str, dict[str, str]]:
    """The `texts.toml` beside a configuration; without one, the kind and the first line of the docstring.

    What is missing in Chinese is as in English.

    >>> from phasor.nn.positions import ALiBiConfig
    >>> read_texts(ALiBiConfig)["zh"]["name"]
    'ALiBi'
    """
    file = Path(inspect.getfile(cls)).with_name("texts.toml")
    given = tomllib.loads(file.read_text("utf-8")) if file.exists() else {}
    line = summary(cls)
    english = {"name": cls.kind, "headline": cls.kind, "about": line, "summary": line} | given.get("en", {})
    return {"en": english, "zh": english | given.get("zh", {})}

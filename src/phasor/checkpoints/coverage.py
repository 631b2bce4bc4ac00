"""Which checkpoints phasor reads, by `model_type`, and how much of what people download that is."""

from __future__ import annotations

from importlib import resources
from typing import Literal, NamedTuple

from phasor.checkpoints.text_part import MULTIMODAL
from phasor.models import families

Part = Literal["model", "text part", ""]


class CheckpointType(NamedTuple):
    """A `model_type`: what people call it, its share of all downloads, and what of its models phasor reads."""

    model_type: str
    title: str
    share: float
    part: Part


def checkpoint_types() -> list[CheckpointType]:
    """All families, and all other types of text models that people download, the most downloaded first.

    Shares are of the monthly downloads of text models and of multimodal models, whose text part is what counts.

    >>> [found.part for found in checkpoint_types() if found.model_type in ("qwen3", "qwen3_vl", "mamba")]
    ['text part', 'model', '']
    """
    downloads = monthly_downloads()
    total, known = sum(downloads.values()), families.names()
    found = []
    for name in {*downloads, *known, *families.SAME_AS, *MULTIMODAL}:
        family = families.SAME_AS.get(name, name)
        part: Part = "model" if family in known else "text part" if name in MULTIMODAL else ""
        title = families.family(family).title if family in known else ""
        found.append(CheckpointType(name, title, downloads.get(name, 0) / total, part))
    return sorted(found, key=lambda one: (-one.share, one.model_type))


def covered_share(types: list[CheckpointType]) -> float:
    """The share of all downloads whose models, or whose text parts, phasor reads.

    >>> covered_share([CheckpointType("a", "A", 0.5, "model"), CheckpointType("b", "", 0.5, "")])
    0.5
    """
    return sum(one.share for one in types if one.part)


def monthly_downloads() -> dict[str, int]:
    """Downloads by `model_type`, of text and multimodal models."""
    text = resources.files("phasor.models").joinpath("downloads.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return {name: int(count) for name, count, modality in rows[1:] if modality != "other"}

"""Architectures that phasor does not load, though it has most of their parts: what each would need."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Missing(NamedTuple):
    """The part of an architecture that phasor does not have, and the family that is nearest."""

    part: str
    nearest: str


CONVOLUTIONS = "layers of gated short convolutions in place of attention"
MAMBA = "Mamba layers (selective state spaces)"
AUDIO = "an encoder that takes audio features through convolutions"
CAPACITY = "experts with a capacity, beyond which tokens are dropped"
RECURRENT = "a recurrent unit in place of attention"

MISSING = {
    "falcon_h1": Missing("layers of Mamba-2 and softmax attention side by side", "bamba"),
    "falcon_mamba": Missing(MAMBA, "llama"),
    "jamba": Missing(MAMBA, "mixtral"),
    "kimi_linear": Missing("linear attention layers with a decay per feature (Kimi delta attention)", "deepseek_v3"),
    "lfm2": Missing(CONVOLUTIONS, "qwen3"),
    "lfm2_moe": Missing(CONVOLUTIONS, "qwen3_moe"),
    "mamba": Missing(MAMBA, "llama"),
    "mamba2": Missing("layers without a feed-forward network", "bamba"),
    "moonshine": Missing(AUDIO, "llama"),
    "nemotron-nas": Missing("layers without attention or with a linear map in its place", "llama"),
    "nemotron_h": Missing("layers of attention or of a feed-forward network alone", "bamba"),
    "nllb-moe": Missing(CAPACITY, "m2m_100"),
    "recurrent_gemma": Missing(f"{RECURRENT} (RG-LRU)", "gemma"),
    "rwkv": Missing(f"{RECURRENT} (WKV)", "gpt2"),
    "switch_transformers": Missing(CAPACITY, "t5"),
    "whisper": Missing(AUDIO, "bart"),
    "xlstm": Missing(f"{RECURRENT} (mLSTM)", "llama"),
    "zamba2": Missing("one block of attention that several layers share, each with an adapter", "bamba"),
}


def refuse_missing(kind: object, file: Path) -> None:
    """Raise ValueError for a `model_type` whose missing part is known.

    >>> refuse_missing("mamba", Path("config.json"))
    Traceback (most recent call last):
    ValueError: config.json: phasor does not load mamba: it has Mamba layers (selective state spaces); the nearest ...
    """
    if isinstance(kind, str) and kind in MISSING:
        part, nearest = MISSING[kind]
        raise ValueError(f"{file}: phasor does not load {kind}: it has {part}; the nearest family is {nearest}")

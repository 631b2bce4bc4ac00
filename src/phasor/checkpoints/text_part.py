"""The text part of a multimodal Hugging Face folder: its fields and tensors, as the folder of a text model has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phasor.config.schema import quote
from phasor.models import families

TEXT = "text_config"
PARTS = ("text",)
# Families of text parts that do not name them, by the model they are part of.
USUAL = {"gemma3": "gemma3_text", "llava": "llama", "llava_next": "llama", "mistral3": "mistral"}
# Sizes that text parts leave out where they are the family's own in transformers.
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES: dict[str, tuple[int, ...]] = {
    "gemma3_text": (262208, 2304, 9216, 26, 8),
    "llama": (32000, 4096, 11008, 32, 32),
    "mistral": (32000, 4096, 14336, 32, 32),
    "qwen2": (151936, 4096, 22016, 32, 32),
}
# Beginnings of names in the whole, and in the part.
BEGINNINGS = {
    "language_model.model.": "model.",
    "language_model.": "",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
SHARED = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype")
TIED = "tie_word_embeddings"


def text_fields(data: dict[str, Any], file: Path) -> dict[str, Any]:
    """The fields of a config.json's text part; special tokens, tie and dtype may stand beside it.

    >>> data = {"model_type": "llava", "text_config": {"vocab_size": 9}, "eos_token_id": 2}
    >>> fields = text_fields(data, Path("config.json"))
    >>> [fields[name] for name in ("model_type", "eos_token_id", "vocab_size", "hidden_size")]
    ['llama', 2, 9, 4096]
    """
    given = data.get(TEXT)
    if not isinstance(given, dict):
        raise ValueError(f"{file} has no separate part for text: leave out part='text' (--part text)")
    kind = given.get("model_type") or USUAL.get(str(data.get("model_type")))
    tied = {} if data.get(TIED) is None else {TIED: data[TIED]}  # which holds for the whole
    beside = {name: data[name] for name in SHARED if data.get(name) is not None}
    usual = dict(zip(NAMES, SIZES.get(str(kind), ()), strict=False))
    return usual | beside | given | {"model_type": kind} | tied


def text_names(found: list[str]) -> dict[str, str]:
    """The names of a multimodal model's text tensors, by the names a text model has for them.

    >>> text_names(["language_model.model.norm.weight", "vision_tower.norm.weight", "language_model.lm_head.weight"])
    {'model.norm.weight': 'language_model.model.norm.weight', 'lm_head.weight': 'language_model.lm_head.weight'}
    """
    names = {}
    for name in found:
        beginning = next((old for old in BEGINNINGS if name.startswith(old)), None)
        if beginning is not None:
            names[BEGINNINGS[beginning] + name.removeprefix(beginning)] = name
    return names


def refuse_whole(data: dict[str, Any], file: Path) -> None:
    """Say that the text part of a multimodal model can be loaded, where it is of a known family."""
    if isinstance(data.get(TEXT), dict):
        kind = text_fields(data, file)["model_type"]
        if kind in families.names():
            raise ValueError(
                f"{file}: phasor does not load the multimodal {quote(data.get('model_type'))} as a whole; "
                f"its text part, a {kind}, is loaded by part='text' (--part text)"
            )

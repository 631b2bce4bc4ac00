"""The text part of a multimodal Hugging Face folder: its fields and tensors, as the folder of a text model has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from phasor.config.schema import quote, unknown
from phasor.models import families

PARTS = ("text",)


class Multimodal(NamedTuple):
    """A multimodal `model_type`: the family of a text part that does not name it, and what it has besides.

    `rest` are the beginnings of the names of its other tensors, behind `model.` where they have that, and what those
    are. `tied` says whether the head is tied where no field does.
    """

    text: str
    rest: dict[str, str]
    tied: bool = False


LLAVA = {"vision_tower.": "the vision tower", "multi_modal_projector.": "the projector"}
NEXT = LLAVA | {"image_newline": "the vector for ends of image rows"}
IDEFICS = {"vision_model.": "the vision tower", "connector.": "the projector"}
CHAT = {"vision_model.": "the vision tower", "mlp1.": "the projector"}
LLAMA4 = {"vision_model.": "the vision tower", "multi_modal_projector.": "the projector"}
GEMMA4 = {"vision_tower.": "the vision tower", "embed_vision.": "the projector of images"}
GEMMA4 |= {"audio_tower.": "the audio tower", "embed_audio.": "the projector of sounds"}
KIMI = {"vision_tower.": "the vision tower", "mm_projector.": "the projector"}
DEEPSEEK = {"sam_model.": "the vision tower", "vision_model.": "the vision tower", "vision.": "the vision tower"}
DEEPSEEK |= {"qwen2_model.": "the vision tower", "projector.": "the projector"}
DEEPSEEK |= dict.fromkeys(("image_newline", "tile_indicators", "view_seperator"), "the vectors between parts of images")
QIANFAN = CHAT | LLAVA
VISUAL = {"visual.": "the vision tower with its projector"}
QWEN35 = VISUAL | {"mtp.": "the layers that predict further tokens"}

MULTIMODAL = {
    "deepseek_ocr2": Multimodal("deepseek_ocr2_text", DEEPSEEK),
    "deepseek_vl_v2": Multimodal("deepseek_v2", DEEPSEEK),
    "exaone4_5": Multimodal("exaone4", QWEN35),
    "gemma3": Multimodal("gemma3_text", LLAVA, tied=True),
    "gemma4": Multimodal("gemma4_text", GEMMA4, tied=True),
    "glm4v": Multimodal("glm4v_text", VISUAL),
    "h2ovl_chat": Multimodal("mistral", CHAT),
    "idefics3": Multimodal("llama", IDEFICS),
    "internvl": Multimodal("qwen2", LLAVA, tied=True),
    "internvl_chat": Multimodal("llama", CHAT),
    "kimi_k25": Multimodal("deepseek_v3", KIMI, tied=True),
    "lfm2_vl": Multimodal("lfm2", LLAVA, tied=True),
    "llama4": Multimodal("llama4_text", LLAMA4),
    "llava": Multimodal("llama", LLAVA),
    "llava_next": Multimodal("llama", NEXT),
    "llava_onevision": Multimodal("qwen2", NEXT),
    "mistral3": Multimodal("mistral", LLAVA, tied=True),
    "qianfan_ocr": Multimodal("qwen3", QIANFAN),
    "qwen2_vl": Multimodal("qwen2_vl_text", VISUAL),
    "qwen2_5_vl": Multimodal("qwen2_5_vl_text", VISUAL),
    "qwen3_5": Multimodal("qwen3_5_text", QWEN35),
    "qwen3_5_moe": Multimodal("qwen3_5_moe_text", QWEN35),
    "qwen3_vl": Multimodal("qwen3_vl_text", VISUAL),
    "qwen3_vl_moe": Multimodal("qwen3_vl_moe_text", VISUAL),
    "smolvlm": Multimodal("llama", IDEFICS),
}
# Where the text part stands in a config.json.
NESTED = ("text_config", "llm_config", "language_config")
# Fields of the whole, beside those of text where older files have both in one.
WHOLE = frozenset(
    """
    architectures auto_map image_token_id model_type video_token_id vision_config vision_end_token_id
    vision_start_token_id vision_token_id
    """.split()  # noqa: SIM905
)
# Sizes that text parts leave out where they are the family's own in transformers.
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES: dict[str, tuple[int | None, ...]] = {
    "deepseek_ocr2_text": (102400, 4096, 11008, 32, 32),
    "deepseek_v2": (102400, 4096, 11008, 32, 32),
    "deepseek_v3": (129280, 7168, 18432, 61, 128),
    "exaone4": (102400, 4096, 16384, 32, 32),
    "gemma3_text": (262208, 2304, 9216, 26, 8),
    "gemma4_text": (262144, 2304, 9216, 30, 8),
    "glm4v_text": (151552, 4096, 13696, 40, 32),
    "llama": (32000, 4096, 11008, 32, 32),
    "llama4_text": (202048, 5120, 8192, 48, 40),
    "ministral3": (131072, 4096, 14336, 34, 32),
    "mistral": (32000, 4096, 14336, 32, 32),
    "mistral4": (131072, 4096, 12288, 36, 32),
    "qwen2": (151936, 4096, 22016, 32, 32),
    "qwen2_vl_text": (152064, 8192, 29568, 80, 64),
    "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64),
    "qwen3": (151936, 4096, 22016, 32, 32),
    "qwen3_5_text": (248320, 4096, 12288, 32, 16),
    "qwen3_5_moe_text": (248320, 2048, None, 40, 16),
    "qwen3_vl_moe_text": (151936, 2048, 5632, 24, 16),
    "qwen3_vl_text": (151936, 4096, 22016, 32, 32),
}
# Beginnings of names in the whole, and in the part.
BEGINNINGS = {
    "language_model.model.": "model.",
    "language_model.": "",
    "language.model.": "model.",
    "language.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "": "",
}
SHARED = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config", "torch_dtype")
TIED = "tie_word_embeddings"


def has_text_part(data: dict[str, Any]) -> bool:
    """Whether the fields of a config.json are those of a multimodal model, with those of its text part.

    >>> has_text_part({"model_type": "llava"}), has_text_part({"model_type": "llama"})
    (True, False)
    """
    return text_object(data) is not None or multimodal(data) is not None


def text_object(data: dict[str, Any]) -> dict[str, Any] | None:
    return next((data[name] for name in NESTED if isinstance(data.get(name), dict)), None)


def multimodal(data: dict[str, Any]) -> Multimodal | None:
    return MULTIMODAL.get(str(data.get("model_type")))


def text_fields(data: dict[str, Any], file: Path) -> dict[str, Any]:
    """The fields of a config.json's text part; special tokens, tie, dtype and quantization may stand beside it.

    >>> data = {"model_type": "llava", "text_config": {"vocab_size": 9}, "eos_token_id": 2}
    >>> fields = text_fields(data, Path("config.json"))
    >>> [fields[name] for name in ("model_type", "eos_token_id", "vocab_size", "hidden_size")]
    ['llama', 2, 9, 4096]
    """
    if not has_text_part(data):
        raise ValueError(f"{file} has no separate part for text: leave out part='text' (--part text)")
    whole, inside = multimodal(data), text_object(data)
    given = {name: value for name, value in data.items() if name not in WHOLE} if inside is None else inside
    kind = given.get("model_type") or (whole and whole.text)
    kind = families.SAME_AS.get(str(kind), kind)
    if kind == "deepseek_v2" and given.get("use_mla") is False:  # which that family of transformers always has
        kind = "deepseek_ocr2_text"
    said = [fields[TIED] for fields in (data, given) if fields.get(TIED) is not None]
    tied = next((value for value in said if value is not False), False) if said else bool(whole and whole.tied)
    beside = {name: data[name] for name in SHARED if data.get(name) is not None}
    usual = dict(zip(NAMES, SIZES.get(str(kind), ()), strict=False))
    return usual | beside | given | {"model_type": kind, TIED: tied}


def text_names(found: list[str], data: dict[str, Any], file: Path) -> tuple[dict[str, str], list[str]]:
    """The names of a multimodal model's text tensors, by those a text model has for them; and what is left out.

    >>> found = ["language_model.model.norm.weight", "vision_tower.norm.weight"]
    >>> text_names(found, {"model_type": "llava"}, Path("config.json"))
    ({'model.norm.weight': 'language_model.model.norm.weight'}, ['the vision tower'])
    """
    whole = multimodal(data)
    if whole is None:
        raise ValueError(f"{file}: {unknown('multimodal model_type', data.get('model_type'), MULTIMODAL)}")
    names, left = {}, set()
    for name in found:
        other = next((start for start in whole.rest if name.removeprefix("model.").startswith(start)), None)
        if other is None:
            beginning = next(old for old in BEGINNINGS if name.startswith(old))
            names[BEGINNINGS[beginning] + name.removeprefix(beginning)] = name
        else:
            left.add(other)
    return names, list(dict.fromkeys(what for start, what in whole.rest.items() if start in left))


def refuse_whole(data: dict[str, Any], file: Path) -> None:
    """Refuse a multimodal model as a whole, where it is one, and say whether its text part can be loaded."""
    whole = multimodal(data)
    if whole is None:
        return
    kind = text_fields(data, file)["model_type"]
    refused = f"{file}: phasor does not load the multimodal {quote(data['model_type'])} as a whole"
    if kind not in families.names():
        raise ValueError(f"{refused}, nor its text part: {unknown('model_type', kind, families.names())}")
    rest = " and ".join(dict.fromkeys(whole.rest.values()))
    raise ValueError(f"{refused}; its text part, a {kind}, is loaded without {rest} by part='text' (--part text)")

"""Files of a model folder: JSON, tokenizers, special tokens, and folders that are replaced as a whole."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from phasor.artifacts import ArtifactFolder
from phasor.checkpoints.tokenizer_errors import TOKENIZER_BYTES, check_growth, tokenizer_errors
from phasor.config.generation import SpecialTokens
from phasor.config.schema import name_some
from phasor.config.text_files import from_json, path_of, read_text
from phasor.manifest import MANIFEST, DamagedError, Manifest

CONFIG, WEIGHTS, SPECIAL, TOKENIZER = "config.json", "model.safetensors", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG, TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"  # what transformers reads besides
CHAT_TEMPLATE = "chat_template.jinja"
SOURCE_TOKENIZER = "source_tokenizer.json"  # ours alone: where an encoder-decoder reads with another than it writes
ADAPTER, ADAPTER_WEIGHTS = "adapter.json", "adapter.safetensors"  # of an adapter, in our format
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # in that of PEFT
ADAPTER_FILES = ((PEFT_CONFIG, PEFT_WEIGHTS), (ADAPTER, ADAPTER_WEIGHTS))
QUANTIZATION = "quantization.json"  # ours alone: where weights are in 8 or 4 bits
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")  # weights that phasor does not read
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
TOKENIZER_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, TOKENS_MAP, "added_tokens.json", CHAT_TEMPLATE),
    *(SOURCE_TOKENIZER, "chat_template.json", "tekken.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "target_vocab.json"),
)
TEMPLATES = "additional_chat_templates"  # a folder of them, beside chat_template.jinja
# Folders of sentence-transformers have these besides.
MODULES, SENTENCE = "modules.json", "sentence_bert_config.json"
MODULE_FOLDER = re.compile(r"\d+_(Pooling|Dense|Normalize)")
MODULE_FILE = re.compile(r"\d+_((Pooling|Dense|Normalize)/config\.json|Dense/model\.safetensors)")
SENTENCE_FILES = (MODULES, SENTENCE, "config_sentence_transformers.json")
SPECIAL_NAMES = {  # our names and those of the file, which are the field's own
    "stop": "eos_token_id",
    "start": "decoder_start_token_id",
    "forced_first": "forced_bos_token_id",
    "forced_last": "forced_eos_token_id",
    "bos": "bos_token_id",
    "pad": "pad_token_id",
}
USUAL_TOKENS = {  # special tokens that only a tokenizer knows, by their usual texts
    "unk_token": ("<unk>", "[UNK]"),
    "mask_token": ("<mask>", "[MASK]"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
}
BAD_WORDS = "bad_words_ids"  # sequences; those of one token each are tokens that are never generated


def model_folder(folder: str | Path, origin: Path | None = None) -> ArtifactFolder:
    """A folder to write a model to.

    What is there has to be a model that phasor wrote, or the folder that the model came from.
    """
    folder = path_of(folder).resolve()  # what a link points to is replaced, and not the link
    is_origin = origin is not None and origin.resolve() == folder
    reason = unreplaceable_reason(folder, is_origin) if folder.exists() else None
    if reason is not None:
        raise ValueError(f"{folder} {reason}")
    return ArtifactFolder(folder, "model")


def adapter_folder(folder: str | Path) -> ArtifactFolder:
    """A folder to write an adapter to: what is there has to be an adapter that phasor wrote, or a model."""
    folder = path_of(folder).resolve()
    reason = unreplaceable_reason(folder) if folder.exists() else None
    if reason is not None:
        raise ValueError(f"{folder} {reason}")
    return ArtifactFolder(folder, "model")


def unreplaceable_reason(folder: Path, foreign: bool = False) -> str | None:
    """Why a folder may not be replaced: it is not a model that phasor wrote, or holds more; None where it may.

    With `foreign`, a model that others wrote may be replaced.
    """
    if not folder.is_dir():
        return "exists and is not a folder: it is left alone"
    names = {name for entry in folder.iterdir() for name in files_in(entry)}
    weights = {name for name in names if name in (WEIGHTS, INDEX) or SHARD.fullmatch(name)}
    modules = {name for name in names if MODULE_FILE.fullmatch(name)}
    templates = {name for name in names if name.startswith(f"{TEMPLATES}/") and name.endswith(".jinja")}
    others = (
        names
        - weights
        - modules
        - templates
        - {CONFIG, SPECIAL, QUANTIZATION, MANIFEST, *TOKENIZER_FILES, *SENTENCE_FILES}
        - {ADAPTER, ADAPTER_WEIGHTS, PEFT_CONFIG, PEFT_WEIGHTS}
    )
    if not foreign:
        try:
            others |= names - listed_files(folder, names)
        except DamagedError:
            return f"has a damaged {MANIFEST}, so that nobody knows what phasor wrote there: write to another folder"
    is_adapter = {ADAPTER, ADAPTER_WEIGHTS} <= names or {PEFT_CONFIG, PEFT_WEIGHTS} <= names
    if names and not is_adapter and (CONFIG not in names or not weights):
        return "exists and is not a model folder: it is left alone"
    if others:
        return f"holds more than a model ({name_some(sorted(others))}): move that away, or write to another folder"
    if names and MANIFEST not in names and not foreign:
        return "is a model that phasor did not write: it is left alone, write to another folder"
    return None


def listed_files(folder: Path, names: set[str]) -> set[str]:
    """Those of some names that phasor wrote, by the folder's manifest; all of them where it has none."""
    manifest = Manifest.read(folder)
    return names if manifest is None else {MANIFEST, *manifest.files}


def files_in(entry: Path) -> list[str]:
    """The files of a folder's entry: itself, or the files of a subfolder that model folders may have."""
    if (entry.name == TEMPLATES or MODULE_FOLDER.fullmatch(entry.name)) and entry.is_dir():
        return [f"{entry.name}/{file.name}" for file in entry.iterdir()]
    return [entry.name]


def special_fields(special: SpecialTokens) -> dict[str, Any]:
    """Special tokens under the names of the file."""
    values = {theirs: getattr(special, ours) for ours, theirs in SPECIAL_NAMES.items()}
    values[BAD_WORDS] = [[token] for token in special.never]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def read_special(data: dict[str, Any], file: Path) -> SpecialTokens:
    """The special tokens a file names."""
    found = {ours: data[theirs] for ours, theirs in SPECIAL_NAMES.items() if data.get(theirs) is not None}
    if isinstance(found.get("stop"), int):
        found["stop"] = [found["stop"]]
    if lists_banned_tokens(BAD_WORDS, data.get(BAD_WORDS)):
        found["never"] = [token for (token,) in data.get(BAD_WORDS) or []]
    try:
        return SpecialTokens(**found)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def read_generation_settings(data: dict[str, Any]) -> dict[str, Any]:
    """What a file says about generation besides special tokens."""
    return {
        name: value
        for name, value in data.items()
        if name not in SPECIAL_NAMES.values() and not lists_banned_tokens(name, value)
    }


def lists_banned_tokens(name: str, value: Any) -> bool:
    """Whether a field lists single tokens that are never generated, which are special tokens here."""
    words = value or []
    return name == BAD_WORDS and isinstance(words, list) and all(isinstance(w, list) and len(w) == 1 for w in words)


def read_json(file: Path) -> dict[str, Any]:
    data = parse_json(file)
    if not isinstance(data, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return data


def read_json_list(file: Path) -> list[Any]:
    data = parse_json(file)
    if not isinstance(data, list):
        raise ValueError(f"{file} must hold a JSON list")
    return data


def parse_json(file: Path) -> Any:
    return from_json(read_text(file, "the JSON file"), file)


def index_of(file: Path) -> dict[str, str]:
    """Which file each tensor is in, by a folder's index."""
    listed = read_json(file).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) and Path(f).name == f for f in listed.values()):
        raise ValueError(f"{file} must hold a weight_map from names to files of the same folder")
    return listed


def write_json(file: Path, data: dict[str, Any] | list[Any]) -> None:
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizers(model: Any, origin: Path | None, folder: Path) -> None:
    """A model's tokenizers, and all files about them of the folder it came from, as they are if they still are them."""
    templates = () if origin is None else sorted((origin / TEMPLATES).glob("*.jinja"))
    for name in (*TOKENIZER_FILES, *(f"{TEMPLATES}/{template.name}" for template in templates)):
        if origin is not None:
            copy_own_file(origin, name, folder)
    for name, tokenizer in ((TOKENIZER, model.tokenizer), (SOURCE_TOKENIZER, model.source_tokenizer)):
        if tokenizer is not None and not is_tokenizer_of(folder, name, tokenizer.to_str()):
            (folder / name).write_text(tokenizer.to_str(), encoding="utf-8")
    if model.chat_template is not None:
        model.chat_template.write(folder)
        write_tokenizer_config(model.tokenizer, model.special, folder)
    if model.source_tokenizer is None:
        (folder / SOURCE_TOKENIZER).unlink(missing_ok=True)


def write_tokenizer_config(tokenizer: Tokenizer, special: SpecialTokens, folder: Path) -> None:
    """Tell transformers how to load a tokenizer and which of its tokens are special, where no file does yet."""
    if (folder / TOKENIZER_CONFIG).exists() or (folder / TOKENS_MAP).exists():
        return
    ids = {"bos_token": special.bos, "eos_token": next(iter(special.stop), None), "pad_token": special.pad}
    named = {role: None if i is None else tokenizer.id_to_token(i) for role, i in ids.items()}
    for role, texts in USUAL_TOKENS.items():
        named[role] = next((text for text in texts if tokenizer.token_to_id(text) is not None), None)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / TOKENIZER_CONFIG, settings | {role: text for role, text in named.items() if text is not None})


def copy_own_file(origin: Path, name: str, folder: Path) -> None:
    """Copy a file of a folder, where it has it; refuses a link out of the folder, but for those of a hub's cache."""
    if not (origin / name).is_file():
        return
    home, target = origin.resolve(), (origin / name).resolve()
    cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if not target.is_relative_to(home) and not cached:
        raise ValueError(
            f"{origin / name} is a link to {target}, outside of its folder, and is not copied: "
            "put the file itself into the folder, or remove the link"
        )
    (folder / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(target, folder / name)


def is_tokenizer_of(folder: Path, name: str, text: str) -> bool:
    """Whether a file of a folder gives the tokenizer with this JSON text, as it stands there or without limits."""
    read = read_tokenizer(folder, name)
    if read is None:
        return False
    return read.to_str() == text or remove_limits(read).to_str() == text


def remove_limits(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, which from now on neither truncates nor pads; its file may have been saved with both."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_tokenizers(model: Any, folder: Path) -> None:
    """Give a model its folder's tokenizers.

    A model that generates reads whole prompts, so its tokenizers do not truncate or pad. An encoder's keep what their
    file says: its texts are cut where `transformers` and `sentence-transformers` cut them.
    """
    for attribute, name in (("tokenizer", TOKENIZER), ("source_tokenizer", SOURCE_TOKENIZER)):
        tokenizer = read_tokenizer(folder, name)
        if tokenizer is not None and model.decoder is not None:
            remove_limits(tokenizer)
        setattr(model, attribute, tokenizer)


def read_tokenizer(folder: Path, name: str = TOKENIZER) -> Tokenizer | None:
    """A folder's tokenizer, where it has one."""
    file = folder / name
    if not file.exists():
        return None
    text = read_text(file, "the tokenizer", TOKENIZER_BYTES)
    with tokenizer_errors(f"{file} is not a tokenizer"):
        tokenizer = Tokenizer.from_str(text)
    check_growth(tokenizer, str(file))
    return tokenizer

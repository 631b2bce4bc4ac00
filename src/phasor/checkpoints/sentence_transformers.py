"""Folders of sentence-transformers: a Hugging Face folder, and beside it how hidden states are pooled into one vector.

`modules.json` lists the modules: the Transformer, a pooling with settings in another folder, and perhaps a
normalization. In phasor the last two are the model's head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phasor.checkpoints.folder import (
    CONFIG,
    MODULES,
    NORMALIZING,
    POOLING,
    SENTENCE,
    SENTENCE_FILES,
    copy_own_file,
    read_json,
    read_json_list,
    write_json,
)
from phasor.config import ModelConfig, PooledHeadConfig
from phasor.models.fields import Fields, json_repr

MODES = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}  # poolers by their names there
# Older files have a flag for every mode, and flags phasor knows no pooling for.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
NEWER_FLAGS = {"pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken"}
# What a model's own settings say about texts, before it computes anything.
HARMLESS = ("do_lower_case", "max_seq_length", "processing_kwargs", "unpad_inputs")
TOKENS = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


def add_pooling(config: ModelConfig, folder: Path) -> ModelConfig:
    """A folder's configuration with the pooling that lies beside it, where it is one of sentence-transformers."""
    if not (folder / MODULES).is_file():
        return config
    modules = read_modules(folder / MODULES)
    pooling = read_settings(folder / modules["Pooling"] / CONFIG)
    head = PooledHeadConfig(pooler=read_pooling_mode(pooling), normalize="Normalize" in modules)
    for name in ("word_embedding_dimension", "embedding_dimension"):
        pooling.expect(name, config.dim)
    pooling.expect("include_prompt", True)
    pooling.finish()
    if (folder / SENTENCE).is_file():
        model = read_settings(folder / SENTENCE)
        model.expect("transformer_task", "feature-extraction")
        model.expect("modality_config", TOKENS)
        model.expect("module_output_name", "token_embeddings")
        model.finish(HARMLESS)
    if "Normalize" in modules and (folder / modules["Normalize"] / CONFIG).is_file():
        normalizing = read_settings(folder / modules["Normalize"] / CONFIG)
        normalizing.expect("module_input_name", "sentence_embedding")
        normalizing.expect("module_output_name", "sentence_embedding")
        normalizing.finish()
    return pooling.build(lambda: config.replace(head=head))


def read_settings(file: Path) -> Fields:
    """A module's settings."""
    return Fields(read_json(file), file, strict=True)


def read_modules(file: Path) -> dict[str, str]:
    """The folder of every module, by the name of its class."""
    modules: dict[str, str] = {}
    for module in read_json_list(file):
        kind, path = (module.get(key) for key in ("type", "path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str) or path != Path(path).name:
            raise ValueError(
                f"{file}: a module must have a type, and a path inside the folder, not {json_repr(module)}"
            )
        ours = kind.startswith("sentence_transformers.")
        modules[kind.rpartition(".")[2] if ours else kind] = path
    if list(modules) not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"{file}: phasor honors the modules Transformer, Pooling and perhaps Normalize, not {', '.join(modules)}"
        )
    if modules["Transformer"]:
        raise ValueError(f"{file}: the Transformer must lie in the folder itself, not in {modules['Transformer']}")
    return modules


def read_pooling_mode(pooling: Fields) -> Any:
    """The one pooling that is on; mean where none is, as sentence-transformers has it."""
    flags = FLAGS | NEWER_FLAGS
    on = [mode for flag, mode in flags.items() if pooling.get(flag, False)]
    modes = pooling.get("pooling_mode", on or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in MODES:
        raise ValueError(
            f"{pooling.file}: phasor honors one pooling, of {', '.join(MODES)}, not {' and '.join(map(str, modes))}"
        )
    return MODES[modes[0]]


def read_back(head: PooledHeadConfig) -> PooledHeadConfig:
    """The head that reading the written folder gives; raises where sentence-transformers has no such pooling."""
    if head.pooler not in MODES.values():
        raise ValueError(f"sentence-transformers has no pooling {head.pooler!r}; it has {', '.join(MODES.values())}")
    return PooledHeadConfig(pooler=head.pooler, normalize=head.normalize)


def write_pooling(head: PooledHeadConfig, config: ModelConfig, folder: Path, origin: Path | None) -> None:
    """The files of sentence-transformers for a model's head, in the format that all its versions read."""
    paths = {"Transformer": "", "Pooling": POOLING} | ({"Normalize": NORMALIZING} if head.normalize else {})
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(paths.items())
    ]
    for path in filter(None, paths.values()):
        (folder / path).mkdir()
    known = FLAGS | (NEWER_FLAGS if head.pooler == "last" else {})
    flags = {flag: MODES.get(mode) == head.pooler for flag, mode in known.items()}
    write_json(folder / POOLING / CONFIG, {"word_embedding_dimension": config.dim, **flags})
    write_json(folder / SENTENCE, {"max_seq_length": config.max_length, "do_lower_case": False})
    for name in SENTENCE_FILES:
        if origin is not None:
            copy_own_file(origin, name, folder)
    write_json(folder / MODULES, modules)

"""Folders of sentence-transformers: a Hugging Face folder, and beside it how hidden states are pooled into one vector.

`modules.json` lists the modules: the Transformer, a pooling with settings in another folder, and perhaps dense layers,
each with its weights in its own folder, and a normalization. In phasor all but the first are the model's head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from phasor.adapters.layers import is_extra
from phasor.checkpoints.folder import (
    CONFIG,
    MODULES,
    SENTENCE,
    SENTENCE_FILES,
    copy_own_file,
    read_json,
    read_json_list,
    write_json,
)
from phasor.checkpoints.tensors import Tensors, write_tensors
from phasor.config import DenseConfig, HeadConfig, ModelConfig, PooledHeadConfig
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Rule, linear
from phasor.transformer import Transformer

MODES = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}  # poolers by their names there
# Older files have a flag for every mode, and flags phasor knows no pooling for.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
NEWER_FLAGS = {"pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken"}
# Activations of dense layers by their classes; without one it is Tanh.
ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity"} | {
    f"torch.nn.modules.activation.{name}": name.lower() for name in ("Tanh", "ReLU", "GELU", "SiLU")
}
DENSE = "pooler.layers."  # what the names of their weights begin with in phasor
# What a model's own settings say about texts, before it computes anything.
HARMLESS = ("do_lower_case", "max_seq_length", "processing_kwargs", "unpad_inputs")
TOKENS = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


def add_pooling(config: ModelConfig, folder: Path) -> ModelConfig:
    """A folder's configuration with the pooling that lies beside it, where it is one of sentence-transformers."""
    if not (folder / MODULES).is_file():
        return config
    (_, path), *others = read_modules(folder / MODULES)[1:]
    pooling = read_settings(folder / path / CONFIG)
    mode = read_pooling_mode(pooling)
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
    dense: list[DenseConfig] = []
    for kind, path in others:
        file = folder / path / CONFIG
        if kind == "Normalize" and not file.is_file():
            continue
        settings = read_settings(file)
        settings.expect("module_input_name", "sentence_embedding")
        settings.expect("module_output_name", "sentence_embedding")
        if kind == "Dense":
            dense.append(read_dense(settings, dense[-1].out_features if dense else config.dim))
        settings.finish()
    head = PooledHeadConfig(pooler=mode, dense=tuple(dense), normalize="Normalize" in dict(others))
    return pooling.build(lambda: config.replace(head=head))


def read_dense(settings: Fields, in_features: int) -> DenseConfig:
    """A dense layer that takes vectors of this width."""
    settings.expect("in_features", in_features)
    given = {"out_features": settings.get("out_features"), "bias": settings.get("bias", True)}
    activation = settings.choose("activation_function", ACTIVATIONS, "torch.nn.modules.activation.Tanh")
    dense: DenseConfig = settings.build(lambda: DenseConfig(**given, activation=activation))
    return dense


def dense_module(index: int) -> str:
    """The folder of a dense layer: modules are counted from the Transformer, and a pooling is between."""
    return f"{index + 2}_Dense"


def include_dense(tensors: Tensors, folder: Path) -> dict[str, str]:
    """Add the weights of a folder's dense layers to its tensors; gives their names by those of `dense_rules`."""
    modules = read_modules(folder / MODULES) if (folder / MODULES).is_file() else []
    names: dict[str, str] = {}
    for i, path in enumerate(path for kind, path in modules if kind == "Dense"):
        added = tensors.include(folder / path, f"{path}/")
        names |= {f"{dense_module(i)}/{name.removeprefix(f'{path}/')}": name for name in added}
    return names


def dense_rules(head: HeadConfig) -> Iterator[Rule]:
    """Which tensors of dense modules are which of ours."""
    for i in range(len(head.dense) if isinstance(head, PooledHeadConfig) else 0):
        yield from linear(f"{DENSE}{i}", f"{dense_module(i)}/linear")


def weights_of_family(model: Transformer) -> dict[str, Tensor]:
    """A model's weights but for those of adapters and of dense layers, which are in separate folders."""
    return {name: weight for name, weight in model.state_dict().items() if not is_extra(name)}


def read_settings(file: Path) -> Fields:
    """A module's settings."""
    return Fields(read_json(file), file, strict=True)


def read_modules(file: Path) -> list[tuple[str, str]]:
    """The class and the folder of every module."""
    modules: list[tuple[str, str]] = []
    for module in read_json_list(file):
        kind, path = (module.get(key) for key in ("type", "path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str) or path != Path(path).name:
            raise ValueError(
                f"{file}: a module must have a type, and a path inside the folder, not {json_repr(module)}"
            )
        ours = kind.startswith("sentence_transformers.")
        modules.append((kind.rpartition(".")[2] if ours else kind, path))
    kinds = ", ".join(kind for kind, _ in modules)
    if not re.fullmatch("Transformer, Pooling(, Dense)*(, Normalize)?", kinds):
        raise ValueError(
            f"{file}: phasor honors the modules Transformer, Pooling, any number of Dense and perhaps Normalize, "
            f"in this order, not {kinds}"
        )
    if modules[0][1]:
        raise ValueError(f"{file}: the Transformer must lie in the folder itself, not in {modules[0][1]}")
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
    return PooledHeadConfig(pooler=head.pooler, dense=head.dense, normalize=head.normalize)


def write_pooling(model: Transformer, head: PooledHeadConfig, folder: Path, origin: Path | None) -> None:
    """The files of sentence-transformers for a model's head, in the format that all its versions read."""
    config = model.config
    kinds = ["Transformer", "Pooling", *["Dense"] * len(head.dense), *["Normalize"] * head.normalize]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds[1:], start=1))]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    for path in paths[1:]:
        (folder / path).mkdir()
    for i, layer in enumerate(head.dense):
        write_dense(model, i, layer, folder / paths[2 + i])
    known = FLAGS | (NEWER_FLAGS if head.pooler == "last" else {})
    flags = {flag: MODES.get(mode) == head.pooler for flag, mode in known.items()}
    write_json(folder / paths[1] / CONFIG, {"word_embedding_dimension": config.dim, **flags})
    write_json(folder / SENTENCE, {"max_seq_length": config.max_length, "do_lower_case": False})
    for name in SENTENCE_FILES:
        if origin is not None:
            copy_own_file(origin, name, folder)
    write_json(folder / MODULES, modules)


def write_dense(model: Transformer, index: int, config: DenseConfig, folder: Path) -> None:
    """The settings and weights of a dense layer."""
    weights = model.get_submodule(f"{DENSE}{index}").state_dict()
    out_features, in_features = weights["weight"].shape
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    settings = {"in_features": in_features, "out_features": out_features, "bias": config.bias}
    write_json(folder / CONFIG, settings | {"activation_function": activation})
    total = sum(weight.nbytes for weight in weights.values())
    write_tensors(folder, ((f"linear.{name}", weight) for name, weight in weights.items()), total)

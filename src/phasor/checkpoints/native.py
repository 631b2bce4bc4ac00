"""phasor's own model folders: config.json, model.safetensors, generation_config.json, tokenizer.json."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from phasor.checkpoints.folder import (
    CONFIG,
    QUANTIZATION,
    SPECIAL,
    read_generation_settings,
    read_json,
    read_special,
    read_tokenizers,
    special_fields,
    write_json,
    write_tokenizers,
)
from phasor.checkpoints.hf import Origin
from phasor.checkpoints.opened import OpenedModel
from phasor.checkpoints.tensors import TYPES, Tensors, TensorSource, write_model_sources, write_tensors
from phasor.config import ModelConfig
from phasor.config.schema import name_some, quote
from phasor.nn.quantized import NF4, Quantization, quantized_tensors
from phasor.ops.quantized import GROUP_SIZES
from phasor.progress import Progress
from phasor.quantization import BITS, quantization_of, quantize
from phasor.transformer import Transformer


def save_native(
    model: Transformer,
    folder: Path,
    progress: Progress | None = None,
    *,
    sources: Sequence[TensorSource] | None = None,
) -> None:
    """Write a model into an empty folder; `sources` make its weights, one at a time, where it does not hold them."""
    (folder / CONFIG).write_text(model.config.to_json(), encoding="utf-8")
    write_json(folder / SPECIAL, special_fields(model.special) | model.generation_settings)
    write_tokenizers(model, None if model.origin is None else model.origin.folder, folder)
    if model.origin is not None and model.origin.passthrough:
        left = name_some(model.origin.passthrough)
        warnings.warn(f"tensors phasor has no use for, which its own format leaves out: {left}", stacklevel=4)
    if sources is not None:
        write_model_sources(folder, sources)
        return
    quantization = quantization_of(model)
    if quantization is not None:
        write_json(folder / QUANTIZATION, quantization._asdict())
    tensors = model.state_dict()
    total = sum(x.numel() * x.element_size() for x in tensors.values())
    write_tensors(folder, tensors.items(), total, progress)


@contextmanager
def open_native(folder: Path, dtype: torch.dtype | None) -> Iterator[OpenedModel]:
    """The model of a folder of ours."""
    config = read_native_config(folder)
    with Tensors(folder) as tensors:
        check_sizes(config, tensors)
        with torch.device("meta"):
            model = Transformer(config)
            quantization = read_quantization(folder)
            if quantization is not None:
                model = quantize(model, quantization.bits, group_size=quantization.group_size)
        expected = model.state_dict()
        check_tensors({name: tuple(x.shape) for name, x in expected.items()}, tensors)
        quantized = quantized_tensors(model)
        check_quantized_dtypes({name: expected[name].dtype for name in quantized}, tensors)
        buffers = dict(model.named_buffers())
        check_dtypes(tensors, dtype, buffers)
        if (folder / SPECIAL).exists():
            special = read_json(folder / SPECIAL)
            model.special = read_special(special, folder / SPECIAL)
            model.generation_settings = read_generation_settings(special)
        read_tokenizers(model, folder)
        model.origin = Origin("phasor", folder, config)
        floating = dtype or tensors.main_dtype(buffers)
        yield OpenedModel(model, floating, lambda name, device: tensors.get(name), tensors.release, quantized)


def read_quantization(folder: Path) -> Quantization | None:
    """How the weights of a folder are quantized; None where they are not."""
    file = folder / QUANTIZATION
    if not file.exists():
        return None
    data = read_json(file)
    known = {"bits": (*BITS, NF4), "group_size": GROUP_SIZES}
    if set(data) != set(known) or any(
        type(data[key]) not in (int, str) or data[key] not in known[key] for key in known
    ):
        shown = " and ".join(f"{key} ({', '.join(map(str, values))})" for key, values in known.items())
        raise ValueError(f"{file} must say {shown}, not {quote(data)}")
    return Quantization(**data)


def check_quantized_dtypes(expected: dict[str, torch.dtype], tensors: Tensors) -> None:
    """One error that lists the integers and scales of quantized weights that are stored as something else."""
    stored = {torch.int8: "I8", torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}
    wrong = [
        f"{name} is stored as {tensors.dtype(name)}, not {stored[dtype]}"
        for name, dtype in expected.items()
        if tensors.dtype(name) != stored[dtype]
    ]
    if wrong:
        file = tensors.folder / QUANTIZATION
        raise ValueError(f"{tensors.folder} does not fit its {file.name}: {name_some(sorted(wrong), separator='; ')}")


def check_sizes(config: ModelConfig, tensors: Tensors) -> None:
    """Refuse a number of layers or a width that the tensors cannot have, before a model is built for it."""
    count, largest = len(tensors.names), tensors.largest_size()
    layers = config.num_blocks or max(config.depth("encoder"), config.depth("decoder"))
    if layers > count:
        raise ValueError(f"{tensors.folder / CONFIG}: {layers:,} layers, but the folder has {count:,} tensors")
    for name in ("vocab_size", "dim", "head_dim"):
        if getattr(config, name) > largest:
            raise ValueError(
                f"{tensors.folder / CONFIG}: {name} is {getattr(config, name):,}, which is more than {largest:,}, "
                "the largest size of a tensor in the folder"
            )


def read_native_config(folder: Path) -> ModelConfig:
    """The model configuration of a folder."""
    file = folder / CONFIG
    data = read_json(file)
    try:
        return ModelConfig.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def check_tensors(expected: dict[str, tuple[int, ...]], tensors: Tensors) -> None:
    """One error that lists every missing, extra and misshapen tensor."""
    wrong = find_misfits(expected, {name: tensors.shape(name) for name in tensors.names})
    if wrong:
        files = sorted({file.name for file in tensors.file_of.values()})
        shown = tensors.folder / files[0] if len(files) == 1 else tensors.folder
        raise ValueError(f"{shown} does not fit its configuration: {name_some(wrong, separator='; ')}")


def find_misfits(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> list[str]:
    """Every missing, extra and misshapen tensor, each with what is wrong with it.

    >>> find_misfits({"wq": (4, 2), "wk": (4, 2)}, {"wq": (4, 3)})
    ['wk is missing', 'wq has the shape [4, 3], not [4, 2]']
    """
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is not the model's" for name in found if name not in expected]
    wrong += [
        f"{name} has the shape {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    return wrong


def check_dtypes(tensors: Tensors, dtype: torch.dtype | None, buffers: Collection[str] = ()) -> None:
    """Weights are floating-point numbers, all of one dtype unless another is asked for; buffers have their own."""
    dtypes = {name: tensors.dtype(name) for name in tensors.names if name not in buffers}
    for name, kind in dtypes.items():
        if kind not in TYPES:
            raise ValueError(f"{tensors.file_of[name]}: {name} is stored as {kind}, and weights are {', '.join(TYPES)}")
    if dtype is None and len(set(dtypes.values())) > 1:
        first = {kind: name for name, kind in reversed(dtypes.items())}
        shown = " and ".join(f"{TYPES[kind]} ({name})" for kind, name in first.items())
        raise ValueError(
            f"{tensors.folder} stores weights of several dtypes, {shown}: say which to load them as (dtype)"
        )

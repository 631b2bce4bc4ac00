"""Hugging Face folders: config.json of a known family, safetensors, tokenizer and generation files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasor.checkpoints.folder import (
    CONFIG,
    SPECIAL,
    TOKENIZER,
    read_generation_settings,
    read_json,
    read_special,
    read_tokenizers,
    special_fields,
    write_json,
    write_tokenizer_config,
    write_tokenizers,
)
from phasor.checkpoints.opened import OpenedModel
from phasor.checkpoints.quantized_folders import QuantizedTensors, take_format
from phasor.checkpoints.sentence_transformers import (
    add_pooling,
    dense_rules,
    include_dense,
    read_back,
    weights_of_family,
    write_pooling,
)
from phasor.checkpoints.sentencepiece_folders import load_sentencepiece, remove_copies
from phasor.checkpoints.stored_weights import keep_stored_weights
from phasor.checkpoints.tensors import TYPES, Tensors, write_tensors
from phasor.checkpoints.text_part import refuse_whole, text_fields, text_names
from phasor.checkpoints.weight_reader import WeightReader
from phasor.config import ModelConfig, PooledHeadConfig
from phasor.config.generation_settings import SETTINGS
from phasor.config.schema import name_some, unknown
from phasor.models import families
from phasor.models.family import Family, differences, trained_length_fields
from phasor.models.fields import Fields
from phasor.models.layout import Assignment, expand_rules
from phasor.models.missing import refuse_missing
from phasor.progress import Progress
from phasor.transformer import Transformer

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# Special tokens a model does not have: left out, they would be the family's usual ones.
NO_SPECIAL: dict[str, Any] = dict.fromkeys(SPECIAL_IDS[:3])


@dataclass
class Origin:
    """The folder a model was loaded from, and the parts of it that the model does not use but writes back."""

    family: str
    folder: Path
    config: ModelConfig  # as the folder has it
    fields: dict[str, Any] = field(default_factory=dict)  # of config.json that do not change the computation
    passthrough: dict[str, Tensor] = field(default_factory=dict)  # tensors by their names in the file

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()  # the same one when the process works in another folder by then


def family_of(data: dict[str, Any], file: Path) -> Family:
    """The family a config.json names."""
    kind = families.SAME_AS.get(str(data.get("model_type")), data.get("model_type"))
    if kind not in families.names():
        refuse_whole(data, file)
        refuse_missing(kind, file)
        raise ValueError(f"{file}: {unknown('model_type', kind, families.names())}")
    return families.family(str(kind))


def read_hf_config(folder: Path, part: str | None = None) -> ModelConfig:
    """The model configuration of a Hugging Face folder, without opening its tensors."""
    data = read_json(folder / CONFIG)
    data, _ = take_format(data if part is None else text_fields(data, folder / CONFIG), folder / CONFIG)
    family, fields = family_of(data, folder / CONFIG), Fields(data, folder / CONFIG)
    return add_pooling(family.read_whole(fields), folder)


@contextmanager
def open_hf(
    folder: Path, dtype: torch.dtype | None, *, strict: bool = False, part: str | None = None, keep_stored: bool = False
) -> Iterator[OpenedModel]:
    """The model of a Hugging Face folder, or its text part; `strict` refuses fields that have no effect.

    `keep_stored` leaves quantized weights as they are, where a kernel takes them.
    """
    file = folder / CONFIG
    whole = read_json(file)
    data, form = take_format(whole if part is None else text_fields(whole, file), file)
    family, dtype = family_of(data, file), dtype or config_dtype(data)
    with Tensors(folder) if form is None else QuantizedTensors(folder, form, dtype) as tensors:
        everything: tuple[dict[str, str], list[str]] = {name: name for name in tensors.names}, []
        stored, left = everything if part is None else text_names(tensors.names, whole, file)
        names = {normal: stored[name] for normal, name in canonical_names(list(stored), family).items()}

        def equal(one: str, other: str) -> bool:
            return torch.equal(tensors.get(names[one]), tensors.get(names[other]))

        fields = Fields(data, file, names, equal=equal, strict=strict, largest=tensors.largest_size())
        if left:
            fields.note(f"the text part, a {family.model_type}, is loaded alone, and {' and '.join(left)} left out")
        if form is not None and not keep_stored:
            fields.note(f"weights in {form.method} are dequantized as they are read, and the model is saved without it")
        config = add_pooling(family.read_whole(fields), folder)
        resolve_copies(names, family, config)
        config = detect_tied_head(config, family, tensors, names)
        resolve_copies(names, family, config)
        names |= include_dense(tensors, folder)
        with torch.device("meta"):
            model = Transformer(config).to(dtype or tensors.main_dtype())
        shapes = dict(model.state_dict())
        wanted = [
            p if p.theirs not in names else p.for_shape(tensors.shape(names[p.theirs]), shapes[p.ours])
            for p in expand_rules(chain(family.all_rules(config), dense_rules(config.head)), config, shapes, names)
        ]
        passthrough = check_tensors(family, folder, tensors, names, wanted, shapes, config)
        model.origin = Origin(family.model_type, folder, config, fields.unread_fields())
        model.origin.passthrough = {name: tensors.get(names[name]).clone() for name in passthrough}
        read_special_files(model, folder, data)
        reader = WeightReader(tensors, names, wanted, shapes, config)
        if not keep_stored:
            fields.warn()
            yield OpenedModel(model, model.tokens.weight.dtype, reader.read, tensors.release)
            return
        kept = keep_stored_weights(model, reader)
        if kept.left:
            fields.note(kept.left_note())
        fields.warn()
        yield OpenedModel(model, model.tokens.weight.dtype, kept.read, tensors.release, kept.tensors.keys())


def read_special_files(model: Transformer, folder: Path, data: dict[str, Any]) -> None:
    """Give a model its folder's special tokens, settings for generation and tokenizers."""
    generation = folder / SPECIAL
    if generation.exists():  # then config.json says no more than where texts begin and end
        settings = read_json(generation)
        model.special = read_special({name: data.get(name) for name in SPECIAL_IDS} | settings, generation)
    else:
        settings = {name: value for name, value in data.items() if name in SETTINGS}
        model.special = read_special(data, folder / CONFIG)
    model.generation_settings = read_generation_settings(settings)
    read_tokenizers(model, folder)
    load_sentencepiece(model, folder)


def canonical_names(found: list[str], family: Family) -> dict[str, str]:
    """The file's names by the names the family's rules use."""
    bare = family.prefix and not any(name.startswith(family.prefix) for name in found)
    names = {}
    for name in found:
        normal = name
        for old, new in family.renames.items():
            normal = normal.replace(old, new)
        if bare and not normal.startswith(family.unprefixed):
            normal = family.prefix + normal
        names[normal] = name
    return names


def resolve_copies(names: dict[str, str], family: Family, config: ModelConfig) -> None:
    """Find a tensor under the name of its copy, where the file has it there alone."""
    wanted = {rule.theirs for rule in family.all_rules(config)}
    copies = dict(family.copies)
    if config.has_logits and config.embedding.tied:
        copies[family.head] = family.embedding_of(config)
    for copy, original in copies.items():
        if copy in names and original in wanted and original not in names:
            names[original] = names.pop(copy)


def detect_tied_head(config: ModelConfig, family: Family, tensors: Tensors, names: dict[str, str]) -> ModelConfig:
    """Whether the head is tied to the token embedding: not where the file has another matrix, by the flag or not."""
    if not config.has_logits:
        return config
    if family.head not in names and not config.embedding.tied:
        raise ValueError(
            f"{tensors.folder}: {family.head} is missing: by {CONFIG} (tie_word_embeddings) the head has its own matrix"
        )
    tied, table = family.head not in names, family.embedding_of(config)
    if not tied and config.embedding.tied and table in names:
        tied = torch.equal(tensors.get(names[family.head]), tensors.get(names[table]))
    return config.replace(embedding=config.embedding.replace(tied=tied))


def check_tensors(
    family: Family,
    folder: Path,
    tensors: Tensors,
    names: dict[str, str],
    wanted: list[Assignment],
    shapes: dict[str, Tensor],
    config: ModelConfig,
) -> list[str]:
    """One error that lists every missing, extra and misshapen tensor; else the names of passthrough tensors."""
    expected = {p.theirs: p.layout.shape(p.slice(shapes[p.ours]), config) for p in wanted}
    wrong = [f"{name} is missing" for name in expected if name not in names]
    spare, passthrough = family.passthrough_patterns(config), []
    for normal, name in names.items():
        if normal in expected:
            if tensors.shape(name) != expected[normal]:
                wrong.append(f"{name} has the shape {list(tensors.shape(name))}, not {list(expected[normal])}")
            if tensors.dtype(name) not in TYPES:
                wrong.append(f"{name} is stored as {tensors.dtype(name)}, and phasor reads {', '.join(TYPES)}")
        elif any(fnmatchcase(normal, pattern) for pattern in spare):
            passthrough.append(normal)
        elif normal in family.copies or (normal == family.head and config.embedding.tied):
            original = names.get(family.copies.get(normal, family.embedding_of(config)))
            if original is not None and not torch.equal(tensors.get(name), tensors.get(original)):
                wrong.append(f"{name} should repeat {original} and does not")
        elif tensors.is_empty_bias(name):
            continue
        elif not any(fnmatchcase(normal, pattern) for pattern in family.derived):
            wrong.append(f"{name} is not the model's")
        elif not family.matches_config(normal, tensors.get(name), config):
            wrong.append(f"{name} should follow from the configuration and does not")
    if wrong:
        where = sorted({tensors.file_of[names[n]].name for n in names})
        shown = where[0] if len(where) == 1 else f"{len(where)} files"
        listed = name_some(wrong, separator="; ")
        raise ValueError(f"{folder} ({shown}) does not fit its configuration as {family.model_type}: {listed}")
    return passthrough


def config_dtype(data: dict[str, Any]) -> torch.dtype | None:
    """The dtype that a config.json names."""
    found = getattr(torch, str(data.get("dtype") or data.get("torch_dtype")).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None


def save_hf(model: Transformer, folder: Path, progress: Progress | None = None) -> None:
    """Write a model into an empty folder, as a family of transformers that computes the same."""
    origin: Origin | None = model.origin
    family, written = choose_family(model)
    ours = weights_of_family(model)
    wanted = expand_rules(family.all_rules(model.config), model.config, ours)
    own = own_origin(model, family)
    kept = {} if own is None else own.passthrough
    duplicates = {c: p for c, name in family.duplicates(model.config).items() for p in wanted if p.theirs == name}
    ids = special_ids(model)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    write_json(folder / CONFIG, written | {"dtype": dtype})
    if model.generation_settings or ids:
        write_json(folder / SPECIAL, ids | model.generation_settings)
    write_tokenizers(model, None if origin is None else origin.folder, folder)
    if origin is None or not (origin.folder / TOKENIZER).exists():
        remove_copies(model, folder)
    as_there = origin is not None and origin.family != "phasor" and (origin.folder / TOKENIZER).exists()
    if model.tokenizer is not None and (folder / TOKENIZER).exists() and not as_there:
        write_tokenizer_config(model.tokenizer, model.special, folder)
    if isinstance(model.config.head, PooledHeadConfig):
        write_pooling(model, model.config.head, folder, None if origin is None else origin.folder)

    def name_there(name: str) -> str:
        return family.written_name(name, model.config)

    def read_out(assignment: Assignment) -> Tensor:
        return assignment.layout.save(assignment.slice(ours[assignment.ours]), model.config)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for assignment in wanted:
            yield name_there(assignment.theirs), read_out(assignment)
        for name, assignment in duplicates.items():
            yield name_there(name), read_out(assignment).clone()
        for name, tensor in kept.items():
            yield name_there(name), tensor

    again = [ours[assignment.ours] for assignment in duplicates.values()]
    total = sum(x.numel() * x.element_size() for x in [*ours.values(), *again, *kept.values()])
    write_tensors(folder, tensors(), total, progress)


def special_ids(model: Transformer) -> dict[str, Any]:
    """The special tokens of a model, under the names of config.json."""
    ids = {name: value for name, value in special_fields(model.special).items() if value not in (None, [])}
    if len(ids.get("eos_token_id", ())) == 1:
        ids["eos_token_id"] = ids["eos_token_id"][0]
    return ids


def choose_family(model: Transformer) -> tuple[Family, dict[str, Any]]:
    """The family to write a model as, and its config.json: the one it came from, else the first that fits."""
    origin: Origin | None = model.origin
    why: dict[str, str] = {}
    known = [families.family(name) for name in families.names()]
    own = None if origin is None else origin.family
    for family in sorted(known, key=lambda f: (f.model_type != own, not f.first_choice, f.model_type)):
        try:
            return family, write_config(model, family)
        except ValueError as error:
            why[family.model_type] = str(error)
    first, reason = (own, why[own]) if own in why else explain_misfit(model.config, known, why)
    raise ValueError(f"no family of transformers computes what this model does; the nearest is {first}: {reason}")


def explain_misfit(config: ModelConfig, known: list[Family], why: dict[str, str]) -> tuple[str, str]:
    """The family nearest to a model that none fits, and what differs; `why` has the first reason of each family.

    It is one that would fit without the model's extension, or with one other field, or with another kind of positions,
    norm or placement.
    """
    if getattr(config.extendable_position(), "extension", None) is not None:
        fitting = find_family(config.with_extension(None), known)
        if fitting is not None:
            return fitting, why[fitting]
    nearest = nearest_family(why)
    if why[nearest].startswith("it would differ") and "; " not in why[nearest]:
        return nearest, why[nearest]
    for name, usual in {"position": "rotary", "norm": None, "placement": None}.items():
        for kind in dict.fromkeys([usual, *(family.parts.get(name) for family in known)]):
            try:
                other = config if kind is None else config.replace(**{name: kind})
            except ValueError:  # the other parts do not go with this kind
                continue
            fitting = find_family(other, known)
            if fitting is not None:
                return fitting, f"it would differ in {name} ({getattr(config, name).kind!r} and {kind!r})"
    return nearest, why[nearest]


def find_family(config: ModelConfig, known: list[Family]) -> str | None:
    """The family that a model with this configuration would be written as."""
    able = [family for family in known if can_write(family, config)]
    if not able:
        return None
    with torch.device("meta"):
        model = Transformer(config)
    for family in sorted(able, key=lambda family: (not family.first_choice, family.model_type)):
        with suppress(ValueError):
            write_config(model, family)
            return family.model_type
    return None


def can_write(family: Family, config: ModelConfig) -> bool:
    try:
        family.write(config)
    except ValueError:
        return False
    return True


def nearest_family(why: dict[str, str]) -> str:
    """The family with the fewest differences from a model; those that lack but one thing come first.

    >>> why = {"t5": "its shape is encoder, and not decoder", "phi3": "config.json: a factor of 0.3 is refused"}
    >>> nearest_family(why)
    'phi3'
    >>> nearest_family({"t5": why["t5"], "gpt2": "it has no norm 'rmsnorm' and no activation 'swiglu'"})
    'gpt2'
    """
    beginnings = ("transformers", "it would differ", CONFIG, "it has no tensors", "")
    return min(
        why,
        key=lambda name: (
            why[name].startswith(("its shape", "it would differ in shape")),
            [why[name].startswith(one) for one in beginnings].index(True),
            why[name].count(" and "),
            len(why[name]),
        ),
    )


def own_origin(model: Transformer, family: Family) -> Origin | None:
    """Where a model came from, if that was a folder of the family it is written as."""
    origin: Origin | None = model.origin
    return origin if origin is not None and origin.family == family.model_type else None


def write_config(model: Transformer, family: Family) -> dict[str, Any]:
    """A family's config.json for a model; raises ValueError unless reading it gives the same computation."""
    config = model.config
    own = own_origin(model, family)
    written = family.write(config)
    passthrough = () if own is None else own.passthrough
    written |= {"architectures": [family.architecture(config, passthrough)], "model_type": family.model_type}
    written = {"tie_word_embeddings": config.embedding.tied} | trained_length_fields(config) | written
    names = [
        assignment.theirs for assignment in expand_rules(family.all_rules(config), config, weights_of_family(model))
    ]
    read = family.read_whole(Fields(written, Path(CONFIG), names, strict=True))
    read = read.replace(embedding=read.embedding.replace(tied=config.embedding.tied))
    if isinstance(config.head, PooledHeadConfig):
        read = read.replace(head=read_back(config.head))
    wrong = differences(config, read)
    ignored_before = [] if own is None else family.ignored_by_transformers(own.config)
    wrong += [line for line in family.ignored_by_transformers(config) if line not in ignored_before]
    if wrong:
        raise ValueError(f"it would differ in {name_some(wrong, separator='; ')}")
    kept = NO_SPECIAL if own is None else own.fields
    inside = {n: kept[n] | v for n, v in written.items() if isinstance(v, dict) and isinstance(kept.get(n), dict)}
    return kept | special_ids(model) | written | inside

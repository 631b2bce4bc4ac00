"""PEFT's adapter folders: adapter_config.json and adapter_model.safetensors, with the names of a family's modules."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from phasor.adapters import Adapter, BaseModel, PartConfig, adapter_tensors, is_adapter_weight
from phasor.checkpoints.adapter_folder import StoredAdapter
from phasor.checkpoints.folder import PEFT_CONFIG, PEFT_WEIGHTS, read_json, write_json
from phasor.checkpoints.hub import HubName
from phasor.checkpoints.peft_factors import our_factors, their_factors
from phasor.checkpoints.peft_names import INNER, PeftNames, Target
from phasor.checkpoints.tensors import Tensors
from phasor.config.lora import Kind
from phasor.config.schema import quote
from phasor.files import safetensors_errors
from phasor.nn.lora import LoRA
from phasor.nn.moe import Experts
from phasor.transformer import Transformer

ROOT = "base_model.model."
FACTORS = re.compile(r"(.*)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?")
# Fields of adapter_config.json that say what the tensors are; the others chose modules, or were for training.
READ = frozenset(
    """
    alpha_pattern base_model_name_or_path bias fan_in_fan_out init_lora_weights lora_alpha lora_dropout modules_to_save
    peft_type r rank_pattern revision target_modules target_parameters use_dora use_rslora
    """.split()  # noqa: SIM905
)
UNUSED = frozenset(
    """
    auto_mapping corda_config eva_config exclude_modules inference_mode layers_pattern layers_to_transform
    loftq_config lora_ga_config megatron_core peft_version qalora_group_size runtime_config task_type
    """.split()  # noqa: SIM905
)
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that take something from the base
TASKS = {
    "lm": "CAUSAL_LM",
    "sequence-classifier": "SEQ_CLS",
    "token-classifier": "TOKEN_CLS",
    "none": "FEATURE_EXTRACTION",
    "pooled": "FEATURE_EXTRACTION",
}


@dataclass
class PeftAdapter(StoredAdapter):
    """An adapter with the names of PEFT, which the family of a model translates."""

    def for_model(self, model: Transformer) -> StoredAdapter:
        names, config, where = PeftNames(model), self.adapter.peft or {}, str(self.place / PEFT_WEIGHTS)
        modules, whole = group_tensors(self.tensors, where)
        layers: dict[str, dict[str, PartConfig]] = {}
        tensors: dict[str, Tensor] = {}
        for module, factors in modules.items():
            target = self.target(names, module, modules, where)
            found, rank = our_factors(factors, target, model, f"{where}: {module}")
            is_experts = isinstance(model.get_submodule(target.layer), Experts)
            key = names.parameter(module, target.part) if is_experts else module
            layers.setdefault(target.layer, {})[target.part] = PartConfig(
                rank=rank,
                alpha=alpha_of(config, key, str(self.place / PEFT_CONFIG)),
                rows=None if target.rows is None else len(target.rows),
            )
            tensors |= {f"{target.layer}.lora.{target.part}.{name}": x for name, x in found.items()}
        tensors |= names.our_weights(whole, where)
        adapter = Adapter(self.adapter.kind, self.adapter.dropout, layers, self.base, peft=config)
        return StoredAdapter(self.place, self.base, adapter, tensors)

    def target(self, names: PeftNames, module: str, modules: Mapping[str, Any], where: str) -> Target:
        """The layer of a module; where one matrix of experts alone has an update, it is the one that was asked for."""
        target = names.target(module, where)
        asked = (self.adapter.peft or {}).get("target_parameters") or []
        if target.part == "down" and f"{module}{INNER}" not in modules:
            up = any(str(name).endswith(names.family.expert_parameters["up"]) for name in asked)
            return names.target(f"{module}{INNER}", where) if up else target
        return target


def read_peft(folder: Path) -> PeftAdapter:
    """The adapter in a folder that PEFT wrote; what it has that phasor does not compute is refused by name."""
    file = folder / PEFT_CONFIG
    config = read_json(file)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type is {quote(config.get('peft_type'))}, and phasor reads 'LORA'")
    for name, value in config.items():
        if name not in READ | UNUSED and value not in (None, False, [], {}):
            raise ValueError(f"{file}: phasor does not know adapters with {name} = {quote(value)}")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{file}: phasor does not know adapters with bias = {quote(config['bias'])}")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(CHANGE_BASE):
        raise ValueError(f"{file}: its base was changed at the beginning, by init_lora_weights = {quote(begun)}")
    if not (folder / PEFT_WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {PEFT_WEIGHTS}; of a pickle (.bin), PEFT's save_pretrained makes one")
    with Tensors(folder, PEFT_WEIGHTS) as opened:
        tensors = {name: opened.get(name) for name in opened.names}
    kind: Kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    if config.get("use_dora") and config.get("use_rslora"):
        raise ValueError(f"{file}: use_dora and use_rslora are both true, and phasor has one of them at a time")
    dropout = finite_number(config.get("lora_dropout") or 0.0, "lora_dropout", str(file))
    if not 0 <= dropout < 1:
        raise ValueError(f"{file}: lora_dropout must be in [0, 1), not {dropout}")
    base = base_of(config)
    adapter = Adapter(kind, dropout, {}, base, peft=config)
    return PeftAdapter(folder, base, adapter, tensors)


def base_of(config: Mapping[str, Any]) -> BaseModel | None:
    """The base that an adapter_config.json names; of a name on the hub with its revision."""
    given, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(given, str) or not given:
        return None
    name = hub_name(given)
    pinned = given if name is None or not isinstance(revision, str) or not revision else f"{name.name}@{revision}"
    return BaseModel(folder=pinned, sha256="")


def hub_name(base: str | None) -> HubName | None:
    """A base as a name on the hub; None where it is a folder."""
    return None if base is None or os.path.lexists(base) else HubName.parse(base)


def group_tensors(tensors: Mapping[str, Tensor], where: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The tensors of a file by the module that they update, and those of modules that it has whole."""
    modules: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(ROOT):
            raise ValueError(f"{where}: {name} does not begin with {ROOT}, as the tensors of PEFT do")
        match = FACTORS.fullmatch(name.removeprefix(ROOT))
        if match:
            modules.setdefault(match[1], {})[match[2]] = tensor
        else:
            whole[name.removeprefix(ROOT).replace(f"{INNER}.", ".")] = tensor
    return modules, whole


def alpha_of(config: Mapping[str, Any], module: str, where: str) -> float:
    """The alpha of a module's update."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{where}: alpha_pattern must be an object, not {quote(patterns)}")
    try:
        alpha = by_pattern(patterns, module, config.get("lora_alpha", 8))
    except re.error as error:
        raise ValueError(f"{where}: a name in alpha_pattern is not a regular expression: {error}") from None
    return finite_number(alpha, "lora_alpha or alpha_pattern", where)


def finite_number(value: object, name: str, where: str) -> float:
    """
    >>> finite_number(16, "lora_alpha", "adapter_config.json")
    16.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: {name} must be a finite number, not {quote(value)}")
    return float(value)


def by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value for a module: of the first pattern that matches the end of its name, else the default.

    >>> by_pattern({"layers.1.self_attn.q_proj": 3}, "model.layers.1.self_attn.q_proj", 8), by_pattern({}, "lm_head", 8)
    (3, 8)
    """
    found = (v for p, v in (patterns or {}).items() if re.match(rf"(.*\.)?({p})$", module))
    return next(found, default)


def write_peft(model: Transformer, folder: Path, name: str) -> None:
    """Write an adapter of a model into an empty folder, as PEFT does."""
    names, adapter = PeftNames(model), model.adapters[name]
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, tuple[int, float]] = {}
    parameters: dict[str, None] = {}
    for layer in adapter.layers:
        module = model.get_submodule(layer)
        lora: LoRA = module.lora[name]  # type: ignore[index, assignment]
        if isinstance(module, Experts) and not any(names.modules(layer)):
            raise ValueError(
                f"the adapter updates the experts {layer}, each of which is a module in {names.family.model_type} of "
                "transformers: such adapters are not written as PEFT's"
            )
        for path, target in names.modules(layer):
            alone = target.part == "up" and "down" not in lora
            place = path.removesuffix(INNER) if alone else path
            found = their_factors(lora, target, model, f"the layer {layer}")
            if found is None:
                continue
            factors, rank, scale = found
            ranks[place] = rank, round(scale * (rank**0.5 if adapter.kind == "rslora" else rank), 6)
            tensors |= {f"{ROOT}{place}.{key}": x for key, x in factors.items()}
            if target.part in names.family.expert_parameters and target.rows is None and target.part in lora:
                parameters[names.parameter(path, target.part)] = None
    whole = {key: x for key, x in adapter_tensors(model, name).items() if not is_adapter_weight(key)}
    kept = names.their_weights(whole)
    for key, x in kept.items():
        module_name, _, last = key.rpartition(".")
        tensors[f"{ROOT}{module_name}{INNER if module_name in ranks else ''}.{last}"] = x
    if not tensors:
        raise ValueError("the adapter updates nothing that a module of transformers has")
    config = adapter.peft or describe(names, adapter, model, ranks, list(parameters), kept)
    write_json(folder / PEFT_CONFIG, config)
    held = {key: x.detach().cpu().contiguous() for key, x in tensors.items()}
    with safetensors_errors():
        save_file(held, folder / PEFT_WEIGHTS, {"format": "pt"})


def task_type(model: Transformer, has_head: bool) -> str | None:
    """What PEFT calls the task of a model; of a classifier only with its head, which it then expects in the file."""
    shape, head = model.config.shape, model.config.head.kind
    if shape == "encoder-decoder" and head == "lm":
        return "SEQ_2_SEQ_LM"
    expected = {"lm": shape == "decoder", "sequence-classifier": has_head, "token-classifier": has_head}
    return TASKS.get(head) if expected.get(head, True) else None


def describe(
    names: PeftNames,
    adapter: Adapter,
    model: Transformer,
    ranks: Mapping[str, tuple[int, float]],
    parameters: list[str],
    kept: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The adapter_config.json of an adapter, by the rank and alpha of each module."""
    (rank, alpha), _ = Counter(ranks.values()).most_common(1)[0] if ranks else ((8, 8.0), 0)
    experts = {name.rpartition(".")[0] for name in parameters}
    modules = [name for name in ranks if name.removesuffix(INNER) not in experts]
    others = [key.rpartition(".")[0] for key in kept if key.rpartition(".")[0] not in ranks]
    base = None if adapter.base is None else adapter.base.folder
    on_hub = hub_name(base)

    def pattern(name: str) -> str:
        inner = len(parameters) == 1 or name.endswith(INNER)
        return names.parameter(name, "up" if inner else "down") if name.removesuffix(INNER) in experts else name

    return {
        "peft_type": "LORA",
        "task_type": task_type(model, bool(others)),
        "base_model_name_or_path": base if on_hub is None else on_hub.name,
        "revision": None if on_hub is None else on_hub.revision,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.kind == "rslora",
        "use_dora": adapter.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": names.has_transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": names.shorten(modules),
        "target_parameters": sorted({".".join(name.split(".")[-2:]) for name in parameters}) or None,
        "modules_to_save": sorted({*others}) or None,  # matched by ends that need not begin at a dot
        "rank_pattern": {pattern(name): own for name, (own, _) in ranks.items() if own != rank},
        "alpha_pattern": {pattern(name): own for name, (_, own) in ranks.items() if own != alpha},
    }

"""The layers of a model under the names that PEFT has for them: those of the modules of a family of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.adapters import WHOLE, adaptable_layers, is_extra
from phasor.checkpoints.hf import choose_family
from phasor.config.schema import name_some, unknown
from phasor.models import families
from phasor.models.layout import Assignment, expand_rules
from phasor.models.modules import WEIGHT, experts_modules, fused_modules
from phasor.nn.heads import LogitsHead
from phasor.quantization import unquantized_weights
from phasor.transformer import Transformer

INNER = ".base_layer"  # of a module whose other parameter has an update too


class Target(NamedTuple):
    """One of our layers under the name of a module: the rows of ours that it has, or which matrix of experts it is.

    `columns` is the order of what experts give in theirs.
    """

    layer: str
    part: str = WHOLE
    rows: Tensor | None = None
    columns: Tensor | None = None


class PeftNames:
    """The names of a model's layers and weights in PEFT, by the family that it is of, or would be written as."""

    def __init__(self, model: Transformer) -> None:
        origin = None if model.origin is None else model.origin.family
        self.family = families.family(origin) if origin in families.names() else choose_family(model)[0]
        self.prefix = self.family.class_prefix or self.family.prefix
        self.config = model.config
        self.weights = {name: weight for name, weight in unquantized_weights(model).items() if not is_extra(name)}
        self.assignments = expand_rules(self.family.all_rules(self.config), self.config, self.weights)
        self.is_bare = model.config.head.kind in ("none", "pooled")
        self.targets: dict[str, Target] = {}
        self.has_transposed = False
        adaptable = {layer.name for layer in adaptable_layers(model)}
        for layer, modules in fused_modules(self.family, self.config, self.weights).items():
            if layer in adaptable:
                for name, rows, is_transposed in modules:
                    part = name.rpartition(".")[2] if rows is not None else WHOLE
                    self.targets[self.name(name)] = Target(layer, part, rows)
                    self.has_transposed |= is_transposed
        if isinstance(model.head, LogitsHead) and model.head.weight is None:
            self.targets[self.name(self.family.head.removesuffix(WEIGHT))] = Target("head")
        for layer, (name, columns) in experts_modules(self.family, self.config, self.weights).items():
            self.targets[self.name(name)] = Target(layer, "down")
            self.targets[self.name(name) + INNER] = Target(layer, "up", columns=columns)

    def name(self, name: str) -> str:
        """A name as the model's class has it, without the prefix of a class with a head where it has none."""
        if not self.family.prefix:
            return self.family.written_name(name, self.config)
        bare = name.removeprefix(self.family.prefix)
        return bare if self.is_bare or bare == name else self.prefix + bare

    def target(self, module: str, where: str) -> Target:
        """The layer with the name of a module, which may be that of a class with another head."""
        for name in (module, module.removeprefix(self.prefix), f"{self.prefix}{module}"):
            if name in self.targets:
                return self.targets[name]
        raise ValueError(f"{where}: {unknown('module with an update', module, self.targets)}")

    def modules(self, layer: str) -> Iterator[tuple[str, Target]]:
        """The modules that one of our layers is in theirs."""
        return ((name, target) for name, target in self.targets.items() if target.layer == layer)

    def parameter(self, module: str, part: str) -> str:
        """The parameter of a module of experts that one of our matrices is in theirs."""
        return f"{module.removesuffix(INNER)}.{self.family.expert_parameters[part]}"

    def our_weights(self, theirs: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """Our weights out of whole tensors of theirs; several of one of ours have to be all there."""
        given = {self.name(name.removeprefix(self.prefix)): x for name, x in theirs.items()}
        given |= dict(theirs)
        found: dict[str, Tensor] = {}
        used: set[str] = set()
        for assignment in self.assignments:
            name = next((n for n in self.spellings(assignment.theirs) if n in given), None)
            if name is None:
                continue
            ours = found.setdefault(assignment.ours, torch.full(self.weights[assignment.ours].shape, torch.nan))
            part = assignment.slice(ours)
            expected = assignment.layout.shape(part, self.config)
            if tuple(given[name].shape) != expected:
                raise ValueError(f"{where}: {name} has the shape {list(given[name].shape)}, not {list(expected)}")
            assignment.layout.load(part, given[name].to(ours.dtype), self.config)
            used.add(name)
        left = [name for name in theirs if not used & {*self.spellings(name), name}]
        if left:
            raise ValueError(f"{where} has tensors that are no weights of this model: {name_some(left)}")
        partial = [name for name, x in found.items() if bool(x.isnan().any())]
        if partial:
            raise ValueError(f"{where} has a part of {name_some(partial)} alone, which are fused of several weights")
        return found

    def spellings(self, name: str) -> tuple[str, ...]:
        """A name with and without the prefix of a class with a head."""
        bare = name.removeprefix(self.family.prefix).removeprefix(self.prefix)
        return name, bare, f"{self.prefix}{bare}"

    def their_weights(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole weights of ours as tensors of theirs."""
        found: dict[str, Tensor] = {}
        for assignment in self.of(ours):
            part = assignment.slice(ours[assignment.ours])
            found[self.name(assignment.theirs)] = assignment.layout.save(part, self.config)
        return found

    def of(self, ours: Iterable[str]) -> list[Assignment]:
        return [assignment for assignment in self.assignments if assignment.ours in set(ours)]

    def shorten(self, chosen: Iterable[str]) -> list[str]:
        """Names of modules as PEFT matches them, by their ends: as short as leaves the others of a model out.

        An end that all modules with it are among is enough, such as "q_proj".
        """
        wanted = set(chosen)
        others = {self.name(a.theirs.rpartition(".")[0]) for a in self.assignments} | set(self.targets)
        others -= wanted
        found: dict[str, None] = {}
        for name in wanted:
            pieces = name.split(".")
            ends = (".".join(pieces[i:]) for i in range(len(pieces) - 1, -1, -1))
            short = (end for end in ends if not any(o == end or o.endswith(f".{end}") for o in others))
            found[next(short, name)] = None
        return sorted(found)

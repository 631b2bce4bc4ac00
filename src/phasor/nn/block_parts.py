"""The modules of a block with their weights, and whether they are what they were at the last call."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn

from phasor.nn.call_signature import NUMBERS, is_aligned, setting_key
from phasor.ops.custom_op import PLAIN_TENSORS
from phasor.ops.replay import UnrecordableError

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
FIRST_HOOKS = operator.itemgetter(slice(len(HOOKS)))


class BlockParts:
    """The modules of a block with their weights and buffers, as they were found, and a number for what they are.

    It does not refer to the block, which is freed with the last reference to it.

    >>> a, b = nn.Linear(2, 3), nn.Linear(2, 3)
    >>> BlockParts(a).refresh(a) == BlockParts(b).refresh(b)
    True
    """

    def __init__(self, block: nn.Module) -> None:
        modules = list(block.modules())
        self.inner = modules[1:]
        self.modules_of = [module._modules for module in modules]
        self.children = self.find_children()
        self.inner_attributes = [vars(module) for module in self.inner]
        self.num_attributes = self.count_attributes(block)
        self.is_patched = any(map(has_own_methods, modules))
        self.read_settings = [operator.itemgetter(*HOOKS, *public_names(module)) for module in modules]
        self.tensors: list[dict[str, Any]] = [
            own for module in modules for own in (module._parameters, module._buffers)
        ]
        self.found: tuple[Any, ...] = ()
        self.settings: list[tuple[Any, ...]] = []
        self.number: int | None = None
        self.weights: list[Tensor] = []

    def has_changed(self, block: nn.Module) -> bool:
        """Whether this is another block, or modules were replaced, or attributes added or taken away."""
        if block._modules is not self.modules_of[0] or self.find_children() != self.children:
            return True
        return self.count_attributes(block) != self.num_attributes

    def find_children(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self.modules_of)))

    def count_attributes(self, block: nn.Module) -> int:
        return len(vars(block)) + sum(map(len, self.inner_attributes))

    def refresh(self, block: nn.Module) -> int | None:
        """The number of what the modules and weights are now; None if calls of some module have to be seen."""
        try:
            settings = list(map(operator.call, self.read_settings, (vars(block), *self.inner_attributes)))
        except KeyError:  # an attribute was replaced by one of another name
            return None
        if self.is_patched or any(map(any, map(FIRST_HOOKS, settings))):
            return None
        self.weights = [w for w in chain.from_iterable(map(dict.values, self.tensors)) if w is not None]
        types = [type(block), *map(type, self.inner)]
        addresses, shapes = [w.data_ptr() for w in self.weights], [w.shape for w in self.weights]
        found = addresses, shapes, [w.requires_grad for w in self.weights], types
        if found != self.found or not are_equal(settings, self.settings):
            self.found, self.settings, self.number = found, settings, None
            if all(type(w) in PLAIN_TENSORS and is_aligned(w) for w in self.weights):
                self.number = self.new_number(types)
        return self.number

    def new_number(self, types: list[type]) -> int | None:
        layouts = [(w.shape, w.stride(), w.dtype, w.device, w.requires_grad) for w in self.weights]
        try:
            keys = [setting_key(x) for own in self.settings for x in own[len(HOOKS) :]]
            return NUMBERS[*layouts, *types, *keys]
        except UnrecordableError:
            return None

    @contextmanager
    def holding(self, weights: tuple[Tensor, ...]) -> Iterator[None]:
        """A context in which the modules have these weights and buffers."""
        places = [(own, name) for own in self.tensors for name, w in own.items() if w is not None]
        before = [own[name] for own, name in places]
        try:
            set_items(places, weights)
            yield
        finally:
            set_items(places, before)


def are_equal(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]]) -> bool:
    """Whether settings are equal; what cannot be compared, such as tensors that are not the same, is not."""
    try:
        return a == b
    except (RuntimeError, ValueError):
        return False


def set_items(places: list[tuple[dict[str, Any], str]], values: Any) -> None:
    for (own, name), value in zip(places, values, strict=True):
        own[name] = value


def public_names(module: nn.Module) -> Iterator[str]:
    """The attributes of a module that may decide what it computes: numbers, configurations and the like."""
    return (name for name in vars(module) if not name.startswith("_") and name != "replays")


def has_own_methods(module: nn.Module) -> bool:
    """Whether an object has methods that are not those of its class.

    >>> linear = nn.Linear(2, 3)
    >>> has_own_methods(linear)
    False
    >>> linear.forward = lambda x: x
    >>> has_own_methods(linear)
    True
    """
    return any(callable(getattr(type(module), name, None)) for name in vars(module))

"""YAML with the plain scalars of YAML 1.2: `3e-4` is a number, and `on`, `no` and `2031-03-05` are text."""

from __future__ import annotations

import functools
import re
from typing import Any

from phasor.distribution import missing_package

MOST_DEPTH = 100
MOST_VALUES = 100_000  # of one text
# Tag, pattern and the characters such a scalar may begin with.
SCALARS = (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+", [*"-+0123456789"]),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
)


def from_yaml(text: str, where: str) -> Any:
    """The value of a YAML (or JSON) text, or a ValueError with the line of the mistake.

    >>> from_yaml("{lr: 3e-4, device: cpu, compile: no}", "here")
    {'lr': 0.0003, 'device': 'cpu', 'compile': 'no'}
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise missing_package(f"{where}: YAML needs the package pyyaml", "train") from None
    try:
        load = loader()(text)
        node = load.get_single_node()
        problem = None if node is None else expansion_problem(node)
        value = None if node is None or problem else load.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{where}{line}: this is not YAML: {error.problem}") from None
    except Exception as error:  # YAML's own tags raise errors of any type
        raise ValueError(f"{where}: this is not YAML: {' '.join(str(error).split())}") from None
    if problem is not None:
        raise ValueError(f"{where}{problem}")
    return value


def expansion_problem(node: Any) -> str | None:
    """What is wrong with the aliases of a text: one may stand for itself, or for too many values."""
    sizes: dict[int, int] = {}  # of every value, aliases written out; 0 while it is being counted
    pending = [(node, False)]
    while pending:
        node, counted = pending.pop()
        inner = node.value if isinstance(node.value, list) else []
        parts = [part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,))]
        if counted:
            sizes[id(node)] = 1 + sum(sizes[id(part)] for part in parts)
            if sizes[id(node)] > MOST_VALUES:
                return f": with its aliases written out it has more than {MOST_VALUES} values"
        elif sizes.get(id(node)) == 0:
            return f", line {node.start_mark.line + 1}: an alias stands for something that it is part of"
        elif id(node) not in sizes:
            sizes[id(node)] = 0
            pending += [(node, True), *((part, False) for part in parts)]
    return None


@functools.cache
def loader() -> Any:
    """PyYAML's safe loader with our scalars, refusing a key that stands twice."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

        def fetch_flow_collection_start(self, token: Any) -> None:
            super().fetch_flow_collection_start(token)
            self.check_depth()

        def add_indent(self, column: int) -> bool:
            self.check_depth()
            return bool(super().add_indent(column))

        def check_depth(self) -> None:
            if self.flow_level + len(self.indents) > MOST_DEPTH:
                raise yaml.scanner.ScannerError(None, None, "it is nested too deep", self.get_mark())

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # refused below
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice", key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    def integer(load: Any, node: Any) -> int:
        return int(node.value)

    def number(load: Any, node: Any) -> float:
        return float(node.value)

    for tag, pattern, first in SCALARS:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), first)
    Loader.add_constructor("tag:yaml.org,2002:int", integer)
    Loader.add_constructor("tag:yaml.org,2002:float", number)
    return Loader

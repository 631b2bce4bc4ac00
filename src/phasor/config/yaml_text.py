"""YAML with the plain scalars of YAML 1.2: `3e-4` is a number, and `on`, `no` and `2031-03-05` are text."""

from __future__ import annotations

import functools
import re
from typing import Any

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
        raise ValueError(f"{where}: YAML needs the package pyyaml: pip install 'phasor[train]'") from None
    try:
        return yaml.load(text, Loader=loader())
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{where}{line}: this is not YAML: {error.problem}") from None
    except Exception as error:  # YAML's own tags raise whatever they run into
        raise ValueError(f"{where}: this is not YAML: {' '.join(str(error).split())}") from None


@functools.cache
def loader() -> Any:
    """PyYAML's safe loader with our scalars, refusing a key that stands twice."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

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

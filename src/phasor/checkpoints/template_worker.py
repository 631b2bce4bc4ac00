"""The process that renders chat templates: a line of JSON in, a line of JSON out.

A template is a program that others wrote. Here it runs in Jinja's sandbox and with bounds on what it may take, which
hold in C code too: one that goes beyond them ends this process, and no other. It imports jinja2 alone, so that it
starts fast.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 1.0  # of the processor, per rendering
MEMORY = 1 << 29  # bytes of addresses, of the whole process
OUTPUT = 1 << 24  # characters
CACHED = 64  # compiled templates


class RefusedError(TemplateError):
    """What a template raises by `raise_exception`."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks what the model writes, and records where that is in the output."""

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.written = 0  # characters of the output so far
        self.spans: list[tuple[int, int]] = []
        environment.extend(generation=self)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Macro) -> str:
        text = caller()
        self.spans.append((self.written, self.written + len(text)))
        return text


class PlainDict:
    """The global `dict`, without the attributes of a class."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PublicNamespace(Namespace):
    """The global `namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **fields: Any) -> None:  # `self` may be the name of a field
        self, *rest = args
        named = dict(*rest, **fields)
        for name in named:
            PublicNamespace.check(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        PublicNamespace.check(name)
        super().__setitem__(name, value)

    @staticmethod
    def check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no name that begins with an underscore, as {name!r} does")


def raise_exception(message: str) -> None:
    raise RefusedError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: without the escapes of HTML that Jinja's own writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(CACHED)
def compile_template(text: str) -> jinja2.Template:
    """A template, compiled in a new environment with what transformers gives its templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, dict=PlainDict(), namespace=PublicNamespace
    )
    return environment.from_string(text)


def render(text: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The text of a template with these variables, and where in it the model writes; or why there is none."""
    try:
        template = compile_template(text)
        tag: GenerationTag = template.environment.generation  # type: ignore[attr-defined]
        tag.written, tag.spans = 0, []
        pieces = []
        for piece in template.generate(**variables):
            pieces.append(piece)
            tag.written += len(piece)
            if tag.written > OUTPUT:
                return {"error": f"writes more than {OUTPUT:,} characters"}
        return {"text": "".join(pieces), "spans": tag.spans}
    except RefusedError as error:
        return {"error": f"refuses this conversation: {error.message}"}
    except TemplateSyntaxError as error:
        return {"error": f"is not Jinja: line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"error": f"takes more than {MEMORY >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "calls itself without end"}
    except Exception as error:  # an expression of a template may raise any
        return {"error": f"fails: {type(error).__name__}: {error}"}


@contextmanager
def limited_time() -> Iterator[None]:
    """End the process when it computes for too long, where the system has such a timer."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory() -> None:
    """Bound the memory of this process, where the system can."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Answer requests until the input ends."""
    limit_memory()
    for line in sys.stdin.buffer:
        with limited_time():
            answer = json.dumps(render(*json.loads(line)))
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

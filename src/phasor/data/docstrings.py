"""Conversations about the standard library, made of its docstrings: what a name is, and how it is called.

The question comes from the name and the answer from the docstring's first paragraph. A function is also asked for its
parameters, in a second turn.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from phasor.data.conversations import Conversation
from phasor.data.sources import standard_library

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@functools.cache  # a process reads them more than once
def docstring_conversations() -> tuple[Conversation, ...]:
    """The conversations, in the order of files and definitions.

    >>> texts = {c.messages[0]["content"]: c.messages[1]["content"] for c in docstring_conversations()}
    >>> texts["What does textwrap.dedent do?"]
    'Remove any common leading whitespace from every line in `text`.'
    """
    return tuple(conversation for file in standard_library() for conversation in conversations_of(file))


def conversations_of(file: Path) -> Iterator[Conversation]:
    """Those of one file of the standard library, unless it is private or there to be wrong."""
    module = ".".join(file.relative_to(sysconfig.get_path("stdlib")).with_suffix("").parts).removesuffix(".__init__")
    if any(part.startswith("_") for part in module.split(".")):
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes in old sources
            tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return
    yield from definitions(tree, module, file)


def definitions(body: ast.Module | Definition, name: str, file: Path) -> Iterator[Conversation]:
    """Those of a module or a class and of what it defines, but for private names."""
    kind = "function" if isinstance(body, ast.FunctionDef | ast.AsyncFunctionDef) else "thing"
    if answer := first_paragraph(body):
        turns = [("What does {} do?" if kind == "function" else "What is {}?").format(name), answer]
        if kind == "function":
            turns += ["How is it called?", f"{name.rpartition('.')[2]}({ast.unparse(body.args)})"]  # type: ignore[union-attr]
        roles = ("user", "assistant") * 2
        messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
        yield Conversation(messages, [], f"{file}, {name}")
    if kind == "function":
        return
    for inner in body.body:
        if isinstance(inner, Definition) and not inner.name.startswith("_"):
            yield from definitions(inner, f"{name}.{inner.name}", file)


def first_paragraph(body: ast.Module | Definition) -> str:
    """The first paragraph of a docstring, on one line; empty where there is none.

    >>> first_paragraph(ast.parse('"One\\n  line.\\n\\n  More."'.replace('"', '"' * 3)))
    'One line.'
    """
    text = inspect.cleandoc(ast.get_docstring(body, clean=False) or "")
    return " ".join(textwrap.dedent(text).split("\n\n")[0].split())

"""What the documents show is true: their Python runs, their commands work, and the output they show comes out."""

from __future__ import annotations

import ast
import builtins
import math
import pkgutil
import re
import shlex
import shutil
import typing
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pytest
import transformers
from decoding import byte_tokenizer
from matplotlib import pyplot

import phasor
from phasor.cli import VERBS, main
from phasor.data.tokenizers import byte_tokenizer as with_bos

matplotlib.use("agg")

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "phasor"
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "index.md"})
CHAPTERS = [*sorted((ROOT / "docs").glob("guide/*.md")), *sorted((ROOT / "docs").glob("zh/guide/*.md"))]
DOCUMENTS = [*READMES, *PAGES, *CHAPTERS]
FENCE = re.compile(r"^```([\w{}]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block of a document; `line` is where its first line stands, from 1."""

    language: str
    text: str
    line: int


def blocks(document: Path, language: str) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    found = [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in FENCE.finditer(text)]
    return [block for block in found if block.language == language]


def commands(document: Path) -> list[tuple[str, list[str]]]:
    """The commands after a prompt in a document's console blocks, each with the lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks(document, "console"):
        assert block.text.startswith("$ "), f"{document.name}:{block.line} does not begin with a prompt"
        for line in block.text.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


SHOWN = {f"{name_of(d)}: {c}": (c, lines) for d in DOCUMENTS for c, lines in commands(d) if c.startswith("phasor ")}


@pytest.fixture(scope="module")
def llama_folders(tmp_path_factory) -> list[Path]:
    """Folders that documents call path/to/llama: tiny Llamas as Hugging Face keeps them, with unlike tokenizers."""
    folders = []
    for tokenizer, length in ((byte_tokenizer(), 4096), (with_bos(), 8192)):
        sizes = {"dim": 32, "num_heads": 2, "num_layers": 2, "max_length": length}
        model = phasor.Transformer(phasor.preset("llama-2", vocab_size=tokenizer.get_vocab_size(), **sizes))
        model.tokenizer = tokenizer
        folders.append(tmp_path_factory.mktemp("documents") / "llama")
        phasor.save(model, folders[-1], format="hf")
    return folders


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_python_blocks_run(document, monkeypatch, tmp_path, llama_folders):
    found = blocks(document, "python")
    assert found
    loads = any("path/to/llama" in block.text for block in found)
    for i, llama in enumerate(llama_folders if loads else llama_folders[:1]):
        (tmp_path / str(i)).mkdir()
        monkeypatch.chdir(tmp_path / str(i))
        shutil.copytree(llama, "path/to/llama")
        namespace: dict[str, object] = {"__name__": document.stem}
        for block in found:
            # Empty lines in front make a traceback name the line of the document.
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(document), "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("document", CHAPTERS, ids=name_of)
def test_plots_are_drawn(document):
    """Each by itself, as the site draws it."""
    for block in blocks(document, "{plot}"):
        code = re.sub(r"^:.*$", "", block.text, flags=re.MULTILINE)
        pyplot.close("all")
        exec(compile("\n" * (block.line - 1) + code, str(document), "exec"), {"__name__": document.stem})
        assert pyplot.get_fignums(), f"{name_of(document)}:{block.line} draws nothing"
    pyplot.close("all")


@pytest.mark.parametrize("document", PAGES, ids=name_of)
def test_python_blocks_import_phasor(document):
    """A reader copies one block of a page."""
    for block in blocks(document, "python"):
        names = {node.id for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Name)}
        imports = re.search(r"^import phasor$", block.text, re.MULTILINE)
        assert imports or "phasor" not in names, f"{document.name}:{block.line} does not import phasor"


@pytest.mark.parametrize("shown", SHOWN)
def test_commands_run_and_print_what_is_shown(shown, capsys, monkeypatch, tmp_path):
    command, lines = SHOWN[shown]
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in lines:  # in this order, with anything between them
        if line not in ("", "..."):
            assert line.rstrip() in printed, f"not printed, or not in this order: {line}"
            printed = printed[printed.index(line.rstrip()) + 1 :]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_commands_are_shown(readme):
    verbs = {command.split()[1] for command, _ in commands(readme) if command.startswith("phasor ")}
    assert verbs == {"kinds", "explain"}


def test_all_commands_are_listed():
    """docs/commands.md lists every command of the command line, and shows those that print tables."""
    page = ROOT / "docs" / "commands.md"
    listed = re.findall(r"^\| `phasor (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert list(dict.fromkeys(listed)) == list(VERBS), "in the order of phasor --help"
    shown = {command.split()[1] for command, _ in commands(page) if command.startswith("phasor ")}
    assert shown == {"kinds", "explain", "recipes"}


@pytest.mark.parametrize("document", [*READMES, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_make_targets_exist(document):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^\$ )make ([\w-]+)", text, re.MULTILINE))
    assert {"demo", "test"} & named
    assert named <= targets, f"{document.name} names targets the Makefile has not: {sorted(named - targets)}"


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", document.read_text(encoding="utf-8"))):
        if not link.startswith(("http:", "https:", "#")):
            assert (document.parent / link.partition("#")[0]).exists(), f"{document.name} links to {link}"


def test_the_readmes_say_the_same():
    """Both languages show the same code and commands, comments and prose apart."""

    def bare(readme: Path) -> list[str]:
        return [re.sub(r"\s*#.*", "", block.text) for block in blocks(readme, "python")]

    english, chinese = READMES
    assert bare(english) == bare(chinese)
    assert commands(english) == commands(chinese)


DESCRIPTIONS = [ROOT / "docs" / "design.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("document", DESCRIPTIONS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document):
    named = set(re.findall(r"`((?:[a-z_][\w.-]*/)+[\w.-]*)`", document.read_text(encoding="utf-8")))
    assert named
    missing = [name for name in sorted(named) if not any((root / name).exists() for root in (ROOT, PACKAGE))]
    assert not missing, f"{document.name} names files that are not there: {missing}"


def test_calls_are_in_the_files_that_the_design_names():
    """The training path and the generation path: every call or table, written as `name` (`file`), is in that file."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    calls = re.findall(r"`([\w.]+)`\s+\(`([\w/]+\.py)`\)", text)
    assert len(calls) > 20
    for call, file in calls:
        *owners, name = call.split(".")
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        for owner in owners:
            tree = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner), None)
            assert tree is not None, f"{file} defines no class {owner}, of which design.md names {call}"
        names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        names |= {ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)}
        assert name in names, f"{file} does not define {call}"


FORMULAS = {"R", "b", "code", "GELU"}  # of positions.md, beside the functions of `math`


class Definitions:
    """The names that phasor's source defines: classes, functions, attributes, and strings that are one word."""

    def __init__(self) -> None:
        source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
        self.classes = set(re.findall(r"^ *class (\w+)", source, re.MULTILINE))
        self.functions = set(re.findall(r"^ *def (\w+)", source, re.MULTILINE))
        self.attributes = set(re.findall(r"^ +(?:self\.)?(\w+)(?:: | = )", source, re.MULTILINE))
        self.words = set(re.findall(r"[\"']([\w-]+)[\"']", source))
        self.words |= set(re.findall(r'^ *"(--[\w-]+) [^"]+": ', source, re.MULTILINE))  # options with their values

    def undefined(self, span: str) -> str | None:
        """What a code span names that is not defined; None also where nothing in it looks like a name of ours."""
        if match := re.match(r"phasor(?:\.\w+)+", span):
            try:
                pkgutil.resolve_name(match[0])
            except (ImportError, AttributeError):
                return match[0]
        if re.fullmatch(r"[\w./-]+\.py", span):
            places = ROOT, ROOT / "src", ROOT / "benchmarks", ROOT / "benchmarks" / "tuning"
            return None if any((place / span).exists() for place in places) or any(PACKAGE.rglob(span)) else span
        if match := re.fullmatch(r"((?=\w*[a-z])[A-Z]\w*[A-Z]\w*)(?:\.(\w+))?", span):
            elsewhere = any(hasattr(module, match[1]) for module in (builtins, typing, transformers))
            known = match[1] in self.words or elsewhere
            if match[1] not in self.classes and not known:
                return match[1]
            if match[2] and match[1] in self.classes and match[2] not in self.functions | self.attributes:
                return match[0]
        if match := re.fullmatch(r"(?:\w+\.)*(\w+)\(.*\)", span):
            known = match[1] in FORMULAS or hasattr(builtins, match[1]) or hasattr(math, match[1])
            return None if known or match[1] in self.functions | self.classes else match[1]
        if match := re.match(r"--([\w-]+)", span):
            known = match[0] in self.words or match[1].replace("-", "_") in self.attributes | self.words
            return None if known else match[0]
        return None


def code_spans(document: Path) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", FENCE.sub("", document.read_text(encoding="utf-8"))))


@pytest.fixture(scope="module")
def definitions() -> Definitions:
    return Definitions()


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_names_in_the_text_are_defined(document, definitions):
    """Modules, files, classes, calls and options between backticks."""
    assert not sorted(filter(None, map(definitions.undefined, code_spans(document))))


@pytest.mark.parametrize(
    "span",
    [
        "phasor.gone",
        "phasor.nn.gone",
        "ops/gone.py",
        "KVCacheGone",
        "KVCache.gone",
        "gone(x)",
        "model.gone()",
        "--gone",
    ],
)
def test_undefined_names_are_recognized(span, definitions):
    assert definitions.undefined(span) is not None


def test_the_tree_of_the_design_is_the_tree():
    """Every package of phasor stands in the tree of docs/design.md, and everything in that tree exists.

    A top-level package with modules in the tree has all of them there; of `cli` those that are no commands.
    """
    block = next(b for b in blocks(ROOT / "docs" / "design.md", "text") if b.text.startswith("src/phasor/"))
    shown, parents = set(), [PACKAGE]
    for line in block.text.splitlines()[1:]:
        names, depth = re.split(r"\s{2,}", line.strip())[0], (len(line) - len(line.lstrip())) // 2
        for name in names.split(", "):
            path = parents[depth - 1] / name
            assert path.exists(), f"design.md shows {path.relative_to(PACKAGE)}, which does not exist"
            shown.add(path)
        parents[depth:] = [path]
    packages = {path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE}
    kinds = {path for path in packages if path.parent in (PACKAGE / "nn" / "positions", PACKAGE / "nn" / "attention")}
    modules = {path for path in PACKAGE.glob("*/*.py") if path.name != "__init__.py"}
    described = {path.parent for path in modules & shown}
    of_commands = {path for path in modules if path.parent.name == "cli" and path.stem.partition("_")[0] in VERBS}
    needed = packages - kinds | {path for path in modules - of_commands if path.parent in described}
    missing = sorted(str(path.relative_to(PACKAGE)) for path in needed - shown)
    assert not missing, f"add to the tree in docs/design.md: {', '.join(missing)}"

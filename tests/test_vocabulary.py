"""The field's words: retired ones do not come back, functions are not past participles, class names are unique."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "phasor").rglob("*.py"))
PYTHON = [*SOURCES, *sorted((ROOT / "benchmarks").rglob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
TESTS = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
RECIPES = sorted((ROOT / "src" / "phasor" / "recipes").glob("*.yaml"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")]
TEXTS = [*sorted(PAGES), *RECIPES]

EACH = "row|token|layer|text|line|head|document|prompt|query|key|position|slot|step|scheme|family|verb|operation|page"
RETIRED = {
    r"\bwhole[ _-]numbers?\b": "integer",
    rf"\b(one|id|file|list|kernels?|number|scale|vector) an? ({EACH})\b": "per",
    r"(optimi|quanti|normali|initiali|penali|parametri|organi|recogni|serializi)s(e|es|ed|ing|er|ers|ation)\b": "-ize",
    r"\b(neighbour|colour|honour|behaviour|favour)": "American spelling",
    r"\bcentred\b": "centered",
    r"\bnamed systems?\b": "preset, architecture",
    r"\bwhat is made small\b": "minimize the loss",
    r"\bobstacles?\b": "why_not",
    r"\b(Places|Scoring|Capped|Desk)\b": "SequenceInfo, ScoreMod, SinkQueries, SplitKWorkspace",
    r"\bCROOKED\b": "NON_CONTIGUOUS",
    r"\bjudge(_\w+|d)?\b": "cross_entropy",
    r"\b(by_the_host|foreseen|one_by_one|taken_in|lone_bias)\b": "the glossary's names",
    r"\b(key_value_heads|head_width|feedforward_width)\b": "num_kv_heads, head_dim, hidden_dim",
    r"\b(valid_share|checkpoint_activations|target_padding|target_documents)\b": "the glossary's names",
    r"\bturn(ed)?_(heads|projection)\b": "rope, rope_qkv",
    r"\b(attend|matvec|product|vote|following)_triton\b": "decode_attention, gemv, small_gemm, lm_head_argmax, pdl",
    r"\b(by_x|truths?)\b(?!_values| value)": "dx, expected",
    r"\bfractions? of a turn\b|\bturns? by\b": "rotation",
    r"\b(WORKS|Made|def eights)\b": "WORKLOADS, Callable, float8",
    r"\bnats a token\b|\bmicroseconds a layer\b|\bsome of the works\b": "per",
    r"\b(OUT_STRIDE_\w+|HALVES)\b": "the legend in ops/__init__.py",
    r"\bfloat8_linear_why_not\b": "float8_unsupported_reason",
    r"\bphasor\.(kernels|parts|speed|choices|explanation|routes|fast_paths|slots|presets)\b": "see docs/design.md",
}
PHRASES = {  # of pages and sources
    r"\w of (its|their|your) own\b(?! \w)": "say what is meant: by itself, separate, your own X",
    r"\bwhatever\b": "any, every, or the condition",
    r"\bso many\b": "that many, or the number",
    r"\b(is|are) no function of\b": "not a function of",
    r", which is said\b|\bis said\.": "a line says so",
}
VERBS = {"seed", "feed", "need", "embed", "exceed", "speed"}
PREFIXES = {"is", "has", "num", "read", "write", "refuse"}  # "is_finished" and "read_shared" are what they do


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    ("paths", "words"),
    [([*PYTHON, *TESTS], RETIRED), (SOURCES, PHRASES), (TEXTS, RETIRED | PHRASES)],
    ids=["code", "sources", "pages"],
)
def test_retired_words_are_gone(paths, words):
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    found = [
        f"{name_of(path)}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r} -> {better}"
        for path, text in texts.items()
        for retired, better in words.items()
        for match in re.finditer(retired, text)
    ]
    assert not found, "\n".join(found)


def definitions(tree):
    """Every function and class statement of a module, with whether it is a property."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            marks = {
                mark.id if isinstance(mark, ast.Name) else getattr(mark, "attr", "") for mark in node.decorator_list
            }
            yield node.name, bool(marks & {"property", "cached_property"})


def test_functions_are_not_named_by_participles():
    refused = []
    for path in PYTHON:
        for name, is_property in definitions(ast.parse(path.read_text(encoding="utf-8"))):
            words = name.strip("_").split("_")
            says_what_it_does = words[-1] in VERBS or (len(words) > 1 and words[0] in PREFIXES)
            if words[-1].endswith("ed") and not (is_property or says_what_it_does):
                refused.append(f"{name_of(path)}: {name}")
    assert not refused, "\n".join(refused)


def test_no_two_classes_share_a_name():
    homes = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name_of(path))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_kernels_keep_to_the_legend():
    """The names of compile-time constants in kernels, by the list in `ops/__init__.py`."""
    legend = set(re.findall(r"\b[A-Z][A-Z0-9_]*(?:\.{3})?", (ROOT / "src/phasor/ops/__init__.py").read_text()))
    prefixes = tuple(name.removesuffix("...") for name in legend if name.endswith("_..."))
    names = {name for path in SOURCES for name in re.findall(r"\b([A-Z]\w*): [tg]l\.constexpr", path.read_text())}
    assert len(names) > 40
    assert not {name for name in names if name not in legend and not name.startswith(prefixes)}


@pytest.mark.parametrize(
    "text",
    ["a whole number", "one a row", "optimisers", "normalised", "the named systems", "flash.obstacle", "turned_heads"],
)
def test_the_retired_words_are_recognized(text):
    assert any(re.search(retired, text) for retired in RETIRED)

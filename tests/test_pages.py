"""What the pages list is what there is: the registries, the command line, the configuration of the package."""

import importlib
import json
import re
import tomllib
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import pytest

import phasor
from phasor.bench import STUDIES, WORKLOADS
from phasor.cli import VERBS
from phasor.cli.parser import Verb
from phasor.config import AttentionConfig, Extension, PositionConfig
from phasor.config.parameters import parameters_of
from phasor.config.recipe import DataConfig
from phasor.config.schema import Choice
from phasor.data.tasks import TASKS
from phasor.evaluation.protocols import PROTOCOLS
from phasor.evaluation.retrieval import TASKS as RETRIEVAL_TASKS
from phasor.inspect.kinds import CHOICES
from phasor.lab.server import VIEWS
from phasor.models import families
from phasor.nn.attention.base import Attention
from phasor.nn.positions.base import Position
from phasor.recipes import names as recipe_names
from phasor.training.extend import METHODS

ROOT = Path(__file__).parents[1]
DOCS = sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "index.md"})
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """A page with its lines joined, in which sentences are looked up."""
    return re.sub(r"\s+", " ", read(page))


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next one of its level or above, without fenced blocks."""
    text = FENCE.sub("", read(page))
    match = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert match, f"{page} has no heading {heading!r}"
    rest = text[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the tables in a text, without their heads."""
    lines = re.findall(r"^\|(.*)\|$", re.sub(r"^\|.*\|\n\|[-:| ]+\|$", "", text, flags=re.MULTILINE), re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def first_column(text: str) -> set[str]:
    return {span for row in rows(text) for span in code_spans(row[0])}


def row(label: str) -> Callable[[str], set[str]]:
    """Reads the code spans of the row with this label, behind the label."""

    def spans(text: str) -> set[str]:
        found = [cells for cells in rows(text) if cells[0] == label]
        assert found, f"there is no row {label!r}"
        return set(code_spans(" ".join(found[0][1:])))

    return spans


def item(start: str) -> Callable[[str], set[str]]:
    """Reads the code spans of the item of a list that begins with these words."""

    def spans(text: str) -> set[str]:
        match = re.search(rf"^- {re.escape(start)}(.*?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL)
        assert match, f"there is no item that begins with {start!r}"
        return set(code_spans(match[1]))

    return spans


def class_names(text: str) -> set[str]:
    return {span for span in code_spans(text) if re.fullmatch(r"[A-Z]\w+", span)}


def commands(text: str) -> set[str]:
    return {span.removeprefix("phasor ") for span in code_spans(text)}


@dataclass(frozen=True)
class Listing:
    """A list on a page and what it has to name; `others` allows names that are none of these."""

    page: str
    heading: str
    reader: Callable[[str], set[str]]
    names: frozenset[str]
    what: str
    others: bool = False

    def __str__(self) -> str:
        return f"{self.page}-{self.what}"


def listing(page: str, heading: str, reader: Callable[[str], set[str]], names, what: str, **more) -> Listing:
    return Listing(page, heading, reader, frozenset(names), what, **more)


READMES = {
    "README.md": {
        "positions": "Positions",
        "parts": "Parts",
        "commands": "Commands",
        "attention": "attention",
        "sparse": "sparse attention",
        "activations": "feed-forward",
        "norms": "norm",
        "placements": "placement",
        "heads": "head",
        "initializations": "initialization",
    },
    "README.zh-CN.md": {
        "positions": "位置编码",
        "parts": "部件",
        "commands": "命令行",
        "attention": "注意力",
        "sparse": "稀疏注意力",
        "activations": "前馈网络",
        "norms": "归一化",
        "placements": "归一化的位置",
        "heads": "输出头",
        "initializations": "初始化",
    },
}
LISTED_ELSEWHERE = {"positions", "extensions", "schedules"}  # and not as rows of the tables of parts
EXTENSION_CLASSES = {cls.__name__ for cls in Extension.kinds.values()}
EXTRAS = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]

LISTINGS = [
    *(
        found
        for page, words in READMES.items()
        for found in (
            listing(page, words["positions"], first_column, PositionConfig.kinds, "position schemes"),
            listing(page, words["positions"], class_names, EXTENSION_CLASSES, "extensions"),
            listing(page, words["commands"], commands, VERBS, "commands"),
            *(
                listing(page, words["parts"], row(words.get(group, group)), CHOICES[group].kinds, group)
                for group in CHOICES
                if group not in LISTED_ELSEWHERE
            ),
        )
    ),
    *(
        listing(
            "docs/model.md",
            "Parts and their choices",
            row(READMES["README.md"].get(group, group)),
            CHOICES[group].kinds,
            group,
            others=True,
        )
        for group in CHOICES
        if group not in LISTED_ELSEWHERE
    ),
    listing("docs/model.md", "Parts and their choices", row("shape"), phasor.kinds("shapes"), "shapes", others=True),
    listing("docs/model.md", "Parts and their choices", row("scores"), phasor.kinds("qk-norms"), "norms", others=True),
    listing("docs/model.md", "Sparse attention", first_column, phasor.kinds("sparse"), "sparse patterns"),
    listing("docs/positions.md", "Context extension", first_column, Extension.kinds, "extensions"),
    listing("docs/positions.md", "Context extension", class_names, EXTENSION_CLASSES, "classes", others=True),
    listing(
        "docs/positions.md",
        "Positions given by the data",
        first_column,
        typing.get_args(typing.get_type_hints(DataConfig)["positions"]),
        "positions of data",
    ),
    listing("docs/training.md", "Recipes", first_column, recipe_names(), "recipes"),
    listing(
        "docs/training.md",
        "Recipes",
        lambda text: set(code_spans(text)),
        phasor.kinds("schedules"),
        "schedules",
        others=True,
    ),
    listing("docs/long-context.md", "Extend", first_column, METHODS, "methods"),
    listing("docs/long-context.md", "Loss by length", first_column, PROTOCOLS, "protocols"),
    listing("docs/long-context.md", "Retrieval", first_column, RETRIEVAL_TASKS, "tasks"),
    listing("docs/compare.md", "On tasks", first_column, TASKS, "tasks", others=True),
    listing("docs/commands.md", "Installing", first_column, EXTRAS, "extras"),
    listing("docs/speed.md", "Benchmarking", first_column, {*WORKLOADS, *STUDIES}, "workloads"),
    listing(
        "docs/generation.md",
        "Decoding strategies",
        lambda text: set(code_spans(text)),
        (field.name for field in fields(phasor.GenerationConfig)),
        "options",
        others=True,
    ),
    *(
        listing("CHANGELOG.md", "Added", item(f"{words}:"), CHOICES[group].kinds, group)
        for group, words in {
            "attention": "Attention",
            "activations": "Activations, plain and gated",
            "norms": "Norms",
            "placements": "Placements of norms",
            "heads": "Heads",
            "initializations": "Initializations",
            "schedules": "Learning rate schedules",
        }.items()
    ),
    listing("CHANGELOG.md", "Added", item("Position schemes:"), PositionConfig.kinds, "position schemes"),
    listing("CHANGELOG.md", "Added", item("Context extensions"), EXTENSION_CLASSES, "extensions"),
    listing("CHANGELOG.md", "Added", item("Sparse attention:"), phasor.kinds("sparse"), "sparse patterns", others=True),
    listing("CHANGELOG.md", "Added", item("Presets:"), phasor.kinds("presets"), "presets"),
    listing("CHANGELOG.md", "Added", item("Recipes"), recipe_names(), "recipes", others=True),
    listing(
        "CHANGELOG.md",
        "Added",
        lambda text: set(re.findall(r"\w+", text)),
        (name for name in phasor.__all__ if not name.endswith(("Config", "Schedule"))),
        "public names",
        others=True,
    ),
    listing(
        "CHANGELOG.md",
        "Added",
        lambda text: set(re.findall(r"`phasor (\w+)", text)),
        VERBS,
        "commands",
    ),
]


@pytest.mark.parametrize("listing", LISTINGS, ids=str)
def test_lists_are_complete(listing):
    shown = listing.reader(section(listing.page, listing.heading))
    missing, unknown = listing.names - shown, shown - listing.names
    where = f"{listing.page}, section {listing.heading!r}, {listing.what}:"
    assert not missing, f"{where} add {', '.join(sorted(missing))}"
    assert listing.others or not unknown, f"{where} remove {', '.join(sorted(unknown))}, which nothing defines"


def test_every_group_of_kinds_has_a_row():
    for page, words in READMES.items():
        groups = set(CHOICES) - LISTED_ELSEWHERE - words.keys()
        assert not groups, f"name in READMES of this file the row of {page} that lists {', '.join(sorted(groups))}"


COUNTS = {
    "presets": len(phasor.kinds("presets")),
    "个预设": len(phasor.kinds("presets")),
    "families": len(families.names()),
    "个模型家族": len(families.names()),
}


@pytest.mark.parametrize("page", [*READMES, "CHANGELOG.md"])
def test_counts_are_the_numbers_of_presets_and_families(page):
    counts = re.findall(rf"(\d+) ({'|'.join(COUNTS)})", read(page))
    assert counts, f"{page} counts neither presets nor families in digits"
    for count, what in counts:
        assert int(count) == COUNTS[what], f"{page} says {count} {what}: there are {COUNTS[what]}"


@pytest.mark.parametrize(("page", "to"), [("README.md", "to"), ("README.zh-CN.md", "至")])
def test_supported_versions_of_torch(page, to):
    (dependency,) = [d for d in tomllib.loads(read("pyproject.toml"))["project"]["dependencies"] if "torch" in d]
    first, after = re.findall(r"2\.(\d+)", dependency)
    sentence = f"torch 2.{first} {to} 2.{int(after) - 1}"
    assert sentence in read(page), f"{page} should say {sentence!r}, as pyproject.toml does"


def test_presets_have_the_sizes_that_the_page_shows():
    shown = {}
    for cells in rows(section("docs/model.md", "Presets")):
        for name, parameters in zip(cells[::2], cells[1::2], strict=True):
            shown[name.strip("`")] = int(parameters.replace(",", ""))
    assert shown == {name: parameters_of(phasor.preset(name)).total for name in phasor.kinds("presets")}


YES = {True: "yes", False: "no"}
UNDECIDED = {"axial", "combined", "mrope", "rotary", "selfextend", "xpos"}  # whose fields decide what the page says


def test_properties_of_position_schemes():
    """The table of docs/positions.md states what the configurations state."""
    table = {
        code_spans(cells[0])[0]: cells for cells in rows(section("docs/positions.md", "Properties")) if len(cells) == 6
    }
    missing = PositionConfig.kinds.keys() - table.keys()
    assert not missing, f"docs/positions.md, the table of properties: add a row for {', '.join(sorted(missing))}"
    assert table.keys() == PositionConfig.kinds.keys()
    for kind, cls in PositionConfig.kinds.items():
        config, (_, acts_on, shift_invariant, depends_on_length, *_) = next(iter(cls.examples().values())), table[kind]
        if kind != "combined":
            assert acts_on == (", ".join(config.acts_on) or "nothing"), f"docs/positions.md: where {kind} acts"
        if kind not in UNDECIDED:
            stated = YES[config.shift_invariant], YES[config.depends_on_length]
            assert (shift_invariant, depends_on_length) == stated, f"docs/positions.md: properties of {kind}"


@pytest.mark.parametrize(
    ("heading", "contract"),
    [
        ("The position contract", Position),
        ("The position contract", PositionConfig),
        ("Attention", Attention),
        ("Attention", AttentionConfig),
    ],
)
def test_contracts_are_described(heading, contract):
    """Every hook and property of a base class stands in its section of docs/design.md."""
    named = set(re.findall(r"\w+", " ".join(code_spans(section("docs/design.md", heading)))))
    hooks = {name for name in vars(contract) if not name.startswith("_")} - set(typing.get_type_hints(Choice))
    missing = hooks - named
    assert not missing, f"docs/design.md, section {heading!r}: add {', '.join(sorted(missing))}"


def test_views_of_the_lab():
    shown = [cells[0] for cells in rows(section("docs/lab.md", "The views"))]
    names = re.search(r"\ten: \{(.*?)\n\t\}", read("src/phasor/lab/page/js/core/i18n.js"), re.DOTALL)[1]
    titles = [re.search(rf'\b{view}: "([^"]+)"', names)[1] for view in VIEWS]
    assert shown == titles, "docs/lab.md, section 'The views': a row per view, in the order of the page"


@pytest.mark.parametrize("page", READMES)
def test_readmes_link_to_every_page(page):
    links = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", read(page)))
    missing = {f"docs/{document.name}" for document in DOCS} - links
    assert not missing, f"{page}, the list of the documentation: add {', '.join(sorted(missing))}"


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def headings(page: Path, level: str = "#+") -> list[str]:
    return re.findall(rf"^{level} (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_contents_are_the_sections(page):
    """The list of links at the top of a page has all of its sections, in their order."""
    top = page.read_text(encoding="utf-8").partition("\n## ")[0]
    links = re.findall(r"^- \[([^\]]+)\]\(#([^)]+)\)", top, re.MULTILINE)
    sections = headings(page, "##")
    assert [title for title, _ in links] == sections, f"{page.name}: the list at the top and the sections differ"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_sections_lead_somewhere(page):
    for target, fragment in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        there = (page.parent / target).resolve() if target else page
        anchors = [anchor(heading) for heading in headings(there)]
        assert fragment in anchors, f"{name_of(page)} links to {target}#{fragment}, which is no heading there"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_shown_exist(page):
    """In fenced blocks, but for Python and the tree of packages, and where a code span begins with the command."""
    text = page.read_text(encoding="utf-8")
    blocks = [block for block in FENCE.findall(text) if not block.startswith(("```python", "```text\nsrc/phasor/"))]
    shown = set(re.findall(r"\bphasor ([a-z][\w-]*)", "\n".join(blocks))) | set(
        re.findall(r"`phasor ([a-z][\w-]*)", text)
    )
    unknown = shown - VERBS.keys()
    assert not unknown, f"{name_of(page)} shows commands that there are not: {', '.join(sorted(unknown))}"


def options_of(verb: str) -> tuple[set[str], tuple[str, ...]]:
    """The options of a command, and the prefixes of those that it takes besides."""
    parser = Verb(prog=f"phasor {verb}")
    importlib.import_module(f"phasor.cli.{verb}").add_options(parser)
    return set(parser._option_string_actions), () if parser.prefix is None else (parser.prefix,)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_that_are_shown_exist(page):
    """In the commands of fenced blocks, each on a line or on several that end in a backslash."""
    blocks = "\n".join(FENCE.findall(page.read_text(encoding="utf-8"))).replace("\\\n", " ")
    commands = re.findall(r"^(?:\$ |.*-m )?phasor (\w+)([^#\n]*)", blocks, re.MULTILINE)
    for verb, arguments in commands:
        known, prefixes = options_of(verb)
        shown = re.findall(r"(?<![\w-])--[a-z][\w.-]*", arguments)
        unknown = [option for option in shown if option not in known and not option.startswith(prefixes)]
        assert not unknown, f"{name_of(page)} shows phasor {verb} with {', '.join(unknown)}, which it does not take"


@pytest.mark.parametrize("page", READMES)
def test_losses_by_length_of_a_model_folder_name_their_data(page):
    """A run has validation data, and MODEL may be any folder."""
    shown = re.findall(r"^\$ phasor evaluate MODEL (.*--lengths.*)$", read(page), re.MULTILINE)
    assert shown
    for arguments in shown:
        assert "--data" in arguments or "--retrieval" in arguments


def test_the_usage_of_convert_is_complete():
    parser = Verb(prog="phasor convert")
    importlib.import_module("phasor.cli.convert").add_options(parser)
    (usage,) = re.findall(r"^phasor convert SOURCE DESTINATION \[.*?^```$", read("docs/checkpoints.md"), re.M | re.S)
    options = {option for action in parser._optionals._group_actions for option in action.option_strings[-1:]}
    assert set(re.findall(r"--[a-z-]+", usage)) == options - {"--help"}


def figures(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])", text)


@pytest.mark.parametrize("page", READMES)
def test_measurements_are_those_of_the_page_on_speed(page):
    """Every figure of the table of workloads stands in docs/speed.md, perhaps with more digits."""
    measured = [float(figure.replace(",", "")) for figure in figures(read("docs/speed.md"))]
    table = rows(read(page)[: read(page).index("\n## ")])
    shown = [figure for cells in table for figure in figures(" ".join(cells[1:]))]
    assert len(shown) > 15
    for figure in shown:
        digits = len(figure.partition(".")[2])
        rounded = {round(value, digits) for value in measured}
        assert float(figure.replace(",", "")) in rounded, f"{page} shows {figure}, which docs/speed.md does not"


@pytest.mark.parametrize("page", READMES)
def test_findings_are_those_of_the_results(page):
    """The stream of a billion tokens and the translations, as benchmarks/results has them."""
    stream = json.loads(read("benchmarks/results/stream.json"))
    longest = max(stream["one stream, by phasor evaluate --stream"], key=lambda run: run["tokens"])
    millions = parameters_of(phasor.preset("llama-2", **stream["sizes"])).in_blocks / 1e6
    systems = json.loads(read("benchmarks/results/translation-en-es.json"))["systems"]
    measured = [longest["seconds"], round(millions) * (1 if page == "README.md" else 100)]
    for name in ("translation-modern", "Marian of transformers"):
        measured += [systems[name]["bleu"], systems[name]["train_s"]]
    for figure in measured:
        assert {f"{figure:.0f}", f"{figure:.1f}"} & set(figures(read(page))), f"{page} does not show {figure}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_spans_are_on_one_line(page):
    """A span that is broken over lines would hide its name from these tests."""
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    broken = [line for line in lines if line.count("`") % 2]
    assert not broken, f"{page.name} breaks a code span: {broken[0]}"


@pytest.mark.parametrize("page", READMES)
def test_commands_stand_in_the_order_of_the_help(page):
    spans = code_spans(section(page, READMES[page]["commands"]))
    shown = [name for span in spans if (name := span.removeprefix("phasor ")) in VERBS]
    assert shown == list(VERBS), f"{page}: commands in the order of phasor --help"


def test_readmes_have_the_same_figures():
    """Numbers in digits, where the Chinese page may count in units of 10^4 and 10^8."""
    english, chinese = (FENCE.sub("", read(page)) for page in READMES)
    for unit, power in (("万", 4), ("亿", 8)):
        for figure in re.findall(rf"([\d.]+) ?{unit}", chinese):
            value = float(figure) * 10**power
            scale, word = (1e9, "B") if value >= 1e9 else (1e6, "million")
            assert f"{value / scale:g} {word}" in english.replace("\n", " "), f"{figure} {unit}"
            chinese = re.sub(rf"{re.escape(figure)} ?{unit}", f"{value / scale:g}", chinese, count=1)
    numbers = [sorted(re.findall(r"(?<![\w.])\d+(?:[.,]\d+)*", text)) for text in (english, chinese)]
    assert numbers[0] == numbers[1]

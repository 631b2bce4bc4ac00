"""The notebooks in examples/notebooks: valid, without outputs, with text before all code; and their code runs."""

import itertools
import re
from pathlib import Path

import nbformat
import pytest
import transformers
from test_pages import VERBS, options_of

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ROOT = FOLDER.parents[1]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=nbformat.NO_CONVERT)


def test_they_are_valid_and_say_what_they_do(notebook):
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert notebook.cells[0].source.startswith("# ")
    assert all(before == "markdown" for before, kind in itertools.pairwise(kinds) if kind == "code")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs, "outputs are of one machine: clear them"
            assert cell.execution_count is None


def test_what_their_texts_name_exists(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for file in re.findall(r"`((?:docs|examples)/[\w./-]+|[\w-]+\.ipynb)`", text):
        assert (ROOT / file).exists() or (FOLDER / file).exists(), file
    code = "\n".join(
        [*re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL), *re.findall(r"`([^`\n]+)`", text)]
    )
    for verb, arguments in re.findall(r"^phasor (\w+)(.*)$", code, re.MULTILINE):
        assert verb in VERBS
        known, prefixes = options_of(verb)
        for option in re.findall(r"--[a-z][\w.-]*", arguments):
            assert option in known or option.startswith(prefixes), f"phasor {verb} has no {option}"


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_their_code_runs(request, notebook, tmp_path, monkeypatch):
    """Cell by cell in one namespace, as a kernel does; what they claim they assert."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    transformers.logging.disable_progress_bar()
    name = request.node.callspec.params["notebook"].name
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{name}:{number}", "exec"), namespace)


def test_they_are_listed():
    for page in ("README.md", "README.zh-CN.md"):
        listed = re.findall(r"\]\(examples/notebooks/([\w-]+\.ipynb)\)", (ROOT / page).read_text(encoding="utf-8"))
        assert sorted(listed) == [path.name for path in NOTEBOOKS], page

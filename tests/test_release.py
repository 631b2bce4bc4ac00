"""What a release consists of besides the package: citation, changelog, issue forms, workflow and images."""

import datetime
import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
import trove_classifiers
import yaml

import phasor

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
(TORCH,) = (requirement for requirement in PROJECT["dependencies"] if requirement.startswith("torch"))
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))


def read_targets():
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_the_version_has_one_place():
    """A number like it elsewhere is compared with it below; in the sources there is no other."""
    quoted = re.compile(rf"[\"']{re.escape(phasor.__version__)}[\"']")
    places = [path for path in (ROOT / "src" / "phasor").rglob("*.py") if quoted.search(path.read_text())]
    assert [path.name for path in places] == ["distribution.py"]
    assert "version" in PROJECT["dynamic"]


def test_the_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, day = re.search(r"^## \[(\d[^\]]*)\] - (\d{4}-\d\d-\d\d)$", text, re.MULTILINE).groups()
    assert version == phasor.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["date-released"]) == (version, day)
    datetime.date.fromisoformat(day)


def test_the_citation_has_what_its_schema_requires():
    """Of https://github.com/citation-file-format, version 1.2.0."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation.keys() >= {"authors", "message", "title"}
    assert citation["type"] in ("software", "dataset")
    assert citation["license"] == PROJECT["license"]
    assert len(set(citation["keywords"])) == len(citation["keywords"])
    assert all(author.keys() & {"name", "family-names", "given-names", "alias"} for author in citation["authors"])


def test_classifiers_are_those_of_the_index():
    """It refuses others."""
    assert set(PROJECT["classifiers"]) <= trove_classifiers.classifiers


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_forms_and_ask_for_the_doctor(form):
    data = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert data.keys() >= {"name", "description", "body"}
    for part in data["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert part["attributes"]["value" if part["type"] == "markdown" else "label"]
    ids = [part["id"] for part in data["body"] if part["type"] != "markdown"]
    assert len(set(ids)) == len(ids)
    assert any("phasor doctor" in str(part["attributes"]) for part in data["body"])
    assert any(part["type"] != "markdown" for part in data["body"])


def test_the_workflow_tests_what_is_supported():
    """Every Python of the classifiers, and both bounds of torch with the Triton that belongs to each."""
    runs = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["include"]
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert {run["python"] for run in runs} == named
    first, after = map(int, re.findall(r"2\.(\d+)", TORCH))
    tested = sorted({int(run["torch"].partition(".")[2]) for run in runs})
    assert (tested[0], tested[-1]) == (first, after - 1)
    (triton,) = (r for r in PROJECT["optional-dependencies"]["dev"] if r.startswith("triton"))
    lowest, above = map(int, re.findall(r"3\.(\d+)", triton))
    tested = sorted({int(run["triton"].partition(".")[2]) for run in runs})
    assert (tested[0], tested[-1]) == (lowest, above - 1)


def test_the_workflow_makes_targets_that_there_are():
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    made = re.findall(r"\bmake ([a-z][\w-]*)", " ".join(step.get("run", "") for step in steps))
    assert {"test", "docs"} <= set(made) <= read_targets()
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    assert WORKFLOW["permissions"] == {"contents": "read"}


def instructions(image):
    """The instructions of a Dockerfile, each with its arguments, lines that go on joined."""
    lines = [line for line in image.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]


def is_sent(path):
    """Whether .dockerignore, in which the last pattern that fits decides, lets a path at the root into the build."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    fitting = [line for line in lines if fnmatch.fnmatch(path, line.lstrip("!")) and not line.startswith("#")]
    return not fitting or fitting[-1].startswith("!")


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_images_are_built_from_what_there_is(image):
    found = instructions(image)
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in found} <= known
    assert found[0][0] == "FROM"
    python = re.fullmatch(r"python:(3\.\d+)-slim", found[0][1])[1]
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    sources = {word for name, words in found if name == "COPY" for word in words.split()[:-1]}
    readme, (license,) = PROJECT["readme"], PROJECT["license-files"]
    assert sources == {"pyproject.toml", "src", readme, license}  # what a wheel is built from
    assert all((ROOT / source).exists() and is_sent(source) for source in sources)
    assert not is_sent(".venv")
    assert not is_sent(".git")


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_images_have_the_library_with_its_extras_for_an_ordinary_user(image):
    found = instructions(image)
    runs = " ".join(words for name, words in found if name == "RUN")
    assert f'"{TORCH}"' in runs
    (extras,) = re.findall(r'"\.\[([\w,-]+)\]"', runs)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "--no-install-recommends" in runs
    assert "rm -rf /var/lib/apt/lists/*" in runs
    assert runs.count("pip install") == runs.count("--no-cache-dir")
    names = [name for name, _ in found]
    assert ("USER", "phasor") in found
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert ("ENTRYPOINT", '["phasor"]') in found

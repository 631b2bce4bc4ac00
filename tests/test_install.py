"""What the pages tell users to install: under the distribution's own name, and enough for what they show."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from phasor import recipes
from phasor.cli import main
from phasor.config.recipe import Recipe
from phasor.distribution import DISTRIBUTION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = {"pyyaml": "yaml"}  # where a package is imported under another name
TEXTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/phasor/**/*.py"), ROOT / "Makefile"]


def packages(extra):
    """The modules that an extra installs, with those of the extras it includes."""
    for requirement in EXTRAS[extra]:
        name, inner = re.match(r"([\w-]+)(?:\[(.*)\])?", requirement).groups()
        if inner is None:
            yield MODULES.get(name, name).replace("-", "_")
        else:
            assert name == PROJECT["name"]
            for one in inner.split(","):
                yield from packages(one)


def test_the_distribution_has_one_name():
    assert PROJECT["name"] == DISTRIBUTION
    for file in TEXTS:
        for name, extras in re.findall(r"pip install[^\n'`]*'([\w.-]+)\[([\w,-]+)\]'", file.read_text()):
            assert name in (DISTRIBUTION, "."), f"{file}: pip install '{name}[{extras}]' is another project"
            assert set(extras.split(",")) <= EXTRAS.keys(), f"{file}: there is no extra {extras}"


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_first_line_installs_what_the_commands_of_the_page_need(page, monkeypatch, capsys):
    text = (ROOT / page).read_text(encoding="utf-8")
    extras = re.search(r"^\$ pip install -e '?\.(?:\[(.*)\])?'?$", text, re.MULTILINE)[1]
    installed = {module for extra in (extras or "").split(",") if extra for module in packages(extra)}
    for module in {module for extra in EXTRAS for module in packages(extra)} - installed:
        for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
            monkeypatch.setitem(sys.modules, name, None)
    commands = re.findall(r"^\$ phasor ((?:explain|kinds|recipes)\b.*)$", text, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        assert main(shlex.split(command, comments=True)) == 0, capsys.readouterr().err
    if "convert SOURCE DESTINATION --check" in text:  # which imports what no extra for users installs
        assert "`pip install transformers`" in text
    for name in re.findall(r"^\$ phasor train ([a-z]\S*)", text, re.MULTILINE):
        Recipe.from_file(recipes.find(name))

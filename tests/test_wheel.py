"""The sdist and the wheel built from it, installed in an environment of its own, where README's commands run."""

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from phasor import __version__, recipes

ROOT = Path(__file__).parent.parent
IGNORED = shutil.ignore_patterns(
    ".git", ".venv", "*.egg-info", "__pycache__", ".*_cache", "build", "dist", "runs", "out"
)
TINY = (
    "--data.tokenizer bytes --train.steps 1 --train.batch-tokens 64 "
    "--model.dim 16 --model.hidden-dim 32 --model.num-layers 1"
)
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"


def call(*command, cwd, **how):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind, source, out):
    """An sdist or a wheel, as `python -m build` makes it, without the network."""
    return out / call(sys.executable, "-c", BUILD, kind, out, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of a copy of the repository, and the wheel of the sdist."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "copy", ignore=IGNORED)
    sdist = build("sdist", folder / "copy", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return sdist, build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """An environment with nothing but the wheel; the other packages are this environment's, by a .pth."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    call(*pip, "install", "--no-deps", "--no-index", built[1], cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder, site


@pytest.fixture
def phasor(environment, tmp_path, monkeypatch):
    """Runs the installed command, with the repository on no path."""
    folder, site = environment
    monkeypatch.delenv("PYTHONPATH", raising=False)
    place = call(folder / "bin" / "python", "-c", "import phasor; print(phasor.__file__)", cwd=tmp_path)
    assert Path(place.strip()) == site / "phasor" / "__init__.py"
    return lambda *given: call(folder / "bin" / "phasor", *given, cwd=tmp_path)


def test_both_hold_what_the_package_needs(built):
    """Every file of the package is in both, and the pages and tests in the sdist."""
    sources = {file.relative_to(ROOT / "src") for file in (ROOT / "src" / "phasor").rglob("*") if file.is_file()}
    expected = {str(file) for file in sources if "__pycache__" not in file.parts}
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        assert expected <= set(archive.namelist())
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in expected} <= held
    assert {"LICENSE", "CHANGELOG.md", "CITATION.cff", "README.zh-CN.md", "constraints.txt", "Makefile"} <= held
    assert {"docs/positions.md", "tests/test_wheel.py", "examples/notebooks/exact-angles.ipynb"} <= held


def test_what_the_index_will_show(environment):
    (metadata,) = environment[1].glob("phasor_transformer-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    fields = dict(re.findall(r"^([\w-]+): (.*)$", text.partition("\n\n")[0], re.MULTILINE))
    assert fields["Version"] == __version__
    assert fields["License-Expression"] == "Apache-2.0"
    assert "rope" in fields["Keywords"]
    assert fields["Description-Content-Type"] == "text/markdown"
    assert (ROOT / "README.md").read_text(encoding="utf-8") in text


def test_it_says_its_version_and_its_choices(phasor):
    assert phasor("--version") == f"phasor {__version__}\n"
    assert phasor("explain", "preset:llama-2")


def test_commands_of_the_readme(phasor):
    """Those that need no model folder, from its console and text blocks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ phasor ((?:explain preset|kinds|recipes)\b.*)$", text, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        assert phasor(*shlex.split(command, comments=True))


def test_python_of_the_readme(environment, phasor, tmp_path):
    """The blocks that need no model folder, one after the other."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "path/to" not in block]
    assert len(blocks) == 2
    call(environment[0] / "bin" / "python", "-c", "import phasor\n" + "\n".join(blocks), cwd=tmp_path)


def test_it_has_the_recipes(phasor):
    assert [line.split()[0] for line in phasor("recipes").splitlines()] == recipes.names()
    assert phasor("recipes", "show", "dates") == recipes.read("dates")


def test_a_recipe_trains_by_its_name(phasor, tmp_path):
    said = phasor("train", "dates", *TINY.split(), "--train.device", "cpu", "--out", "run")
    assert "finished after 1 of 1 steps" in said
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_it_finds_itself_in_order(phasor):
    assert f"phasor: {__version__}" in phasor("doctor")

"""The built wheel, installed into an empty folder: commands run from it, and a recipe trains by its name."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phasor import __version__, recipes

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
TINY = (
    "--data.tokenizer bytes --train.steps 1 --train.batch-tokens 64 "
    "--model.dim 16 --model.hidden-dim 32 --model.num-layers 1"
)


def call(*command, cwd, **how):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with nothing but the wheel's files, built without the network from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copy, site = folder / "copy", folder / "site"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copyfile(ROOT / name, copy / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    call(*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", folder, copy, cwd=folder)
    (wheel,) = folder.glob("phasor_transformer-*.whl")
    call(*pip, "install", *offline, "--target", site, wheel, cwd=folder)
    return site


@pytest.fixture
def phasor(installed, tmp_path):
    """Runs the installed command, without the repository on any path; the other packages are this environment's."""
    start = (
        f"import sys; sys.path = [{str(installed)!r}, *(p for p in sys.path if p and {str(ROOT / 'src')!r} != p)]; "
        f"import phasor; assert phasor.__file__.startswith({str(installed)!r}), phasor.__file__; "
        "from phasor.cli import main; sys.exit(main())"
    )
    return lambda *given: call(sys.executable, "-I", "-c", start, *given, cwd=tmp_path)


def test_the_wheel_holds_what_it_needs(installed):
    assert (installed / "phasor" / "py.typed").is_file()
    assert (installed / "bin" / "phasor").is_file()
    sources = {file.relative_to(ROOT / "src") for file in (ROOT / "src" / "phasor").rglob("*") if file.is_file()}
    missing = {file for file in sources if "__pycache__" not in file.parts and not (installed / file).is_file()}
    assert not missing


def test_it_says_its_version_and_its_choices(phasor):
    assert phasor("--version") == f"phasor {__version__}\n"
    assert "rotary" in phasor("kinds", "positions")
    assert "rotary" in phasor("explain", "preset:llama-2")


def test_it_has_the_recipes(phasor):
    assert [line.split()[0] for line in phasor("recipes").splitlines()] == recipes.names()
    assert phasor("recipes", "show", "dates") == recipes.read("dates")


def test_a_recipe_trains_by_its_name(phasor, tmp_path):
    said = phasor("train", "dates", *TINY.split(), "--train.device", "cpu", "--out", "run")
    assert "finished after 1 of 1 steps" in said
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()

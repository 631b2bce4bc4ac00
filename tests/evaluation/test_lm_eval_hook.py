"""The files that register phasor's model with lm_eval: in an environment with a small package in lm_eval's place."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from phasor.evaluation.lm_eval import install_hook, main, remove_hook

# The interface of lm_eval's registry, and how its models get there.
REGISTRY = """
class Registry(dict):
    def register(self, name, *, target):
        if self.setdefault(name, target) != target:
            raise ValueError(f"{name} is registered already")

    def get(self, name):
        import importlib
        module, _, attribute = self[name].partition(":")
        self[name] = getattr(importlib.import_module(module), attribute)
        return self[name]

model_registry = Registry()
"""
MODELS = """
from lm_eval.api.registry import model_registry
model_registry.register("hf", target="lm_eval.models:HFLM")
class HFLM: pass
"""
LIST = "import sys, lm_eval.models as m; print(*m.model_registry, *sys.modules.keys() & {'torch', 'phasor'})"
GET = "import importlib, lm_eval.models as m; print(m.model_registry.get('phasor')); importlib.reload(m)"


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def site(tmp_path):
    """The site-packages of a new environment, with such a package and another named phasor, and no other package."""
    venv.create(tmp_path, with_pip=False, symlinks=os.name != "nt")
    places = {"base": str(tmp_path), "platbase": str(tmp_path)}
    folder = Path(sysconfig.get_path("purelib", "venv", places))
    write(folder, {f"lm_eval/{name}": "" for name in ("__init__.py", "api/__init__.py")})
    write(folder, {"lm_eval/api/registry.py": REGISTRY, "lm_eval/models/__init__.py": MODELS})
    write(folder, {f"phasor/{name}": "" for name in ("__init__.py", "evaluation/__init__.py")})
    write(folder, {"phasor/evaluation/lm_eval.py": "PhasorLM = 'the model'\n"})
    return folder


@pytest.fixture
def python(site, tmp_path):
    """Runs code in that environment; what it printed, which for errors and warnings is nothing."""
    scripts = Path(sysconfig.get_path("scripts", "venv", {"base": str(tmp_path)}))

    def run(code, errors=""):
        command = [scripts / Path(sys.executable).name, "-I", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert errors in done.stderr if errors else not done.stderr
        return done.stdout.strip()

    return run


def test_the_model_is_registered_and_imported_on_demand(site, python):
    assert python(LIST) == "hf"
    for _ in range(2):  # to register again is harmless
        install_hook(site)
        assert python(LIST) == "hf phasor"
        assert python(GET) == "the model"
    remove_hook(site)
    assert python(LIST) == "hf"
    assert not [path for path in site.rglob("*") if "phasor_lm_eval" in path.name]


def test_a_start_of_python_imports_nothing_more(site, python):
    modules = "import sys; print(*sorted(sys.modules))"
    before = python(modules)
    install_hook(site)
    assert python(modules) == before


def test_without_phasor_the_other_models_are_there(site, python):
    """`pip uninstall phasor` does not know of the two files."""
    install_hook(site)
    (site / "phasor").rename(site / "elsewhere")
    assert python("print(1)") == "1"
    assert python("import lm_eval.models as m; print(m.HFLM.__name__)") == "HFLM"
    says = "try:\n    m.model_registry.get('phasor')\nexcept ImportError as error:\n    print(error)"
    assert python(f"import lm_eval.models as m\n{says}") == "No module named 'phasor'"


def test_without_lm_eval_nothing_changes(site, python):
    install_hook(site)
    (site / "lm_eval").rename(site / "elsewhere")
    says = "try:\n    import lm_eval.models\nexcept ImportError as error:\n    print(error)"
    assert python(says) == "No module named 'lm_eval'"


def test_another_registry_costs_a_warning_and_no_more(site, python):
    install_hook(site)
    write(site, {"lm_eval/api/registry.py": "", "lm_eval/models/__init__.py": "class HFLM: pass"})
    said = "lm_eval runs without the model phasor: cannot import name 'model_registry'"
    assert python("import lm_eval.models as m; print(m.HFLM.__name__)", errors=said) == "HFLM"


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs an option of the command in an environment with a given site-packages; what it printed."""

    def run(option, folder=tmp_path):
        monkeypatch.setattr(sysconfig, "get_path", {"purelib": str(folder)}.__getitem__)
        monkeypatch.setattr(sys, "argv", ["lm_eval.py", option])
        main()
        return capsys.readouterr().out.strip()

    return run


def test_the_command_says_what_it_wrote_and_deleted(command, tmp_path):
    module, start = tmp_path / "phasor_lm_eval.py", tmp_path / "phasor_lm_eval.pth"
    for _ in range(2):
        assert command("--register") == f"wrote {module} and {start}: lm_eval has the model phasor in this environment"
        assert sorted(tmp_path.iterdir()) == [start, module]
    assert command("--unregister") == f"deleted {start} and {module}"
    assert command("--unregister") == f"phasor is not registered with lm_eval in {tmp_path}"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(command, capsys, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        command("--register", tmp_path / "file")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"phasor: {tmp_path / 'file'} cannot be written: Not a directory\n"

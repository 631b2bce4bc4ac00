"""A new scheme is a new folder: found by its kind, public, built, and run by the contract tests by its examples."""

import sys
import textwrap

import pytest
import torch
from schemes import build, tiny, tokens

import phasor
from phasor.config import PositionConfig
from phasor.config.discovery import import_configs
from phasor.nn import positions
from phasor.nn.positions.base import Position

CONFIG = """
from phasor.config.positions import PositionConfig


class ParityConfig(PositionConfig, kind="parity"):
    '''Tokens at odd positions are scaled.'''

    scale: float = 2.0
    acts_on = ("input",)
"""
MODULE = """
import torch

from phasor.nn.positions.base import Position
from phasor.nn.positions.parity.config import ParityConfig


class Parity(Position, config=ParityConfig):
    def on_input(self, x, seq):
        odd = (seq.positions % 2).to(x.dtype)[..., None]
        return x * (1 + (self.config.scale - 1) * odd)
"""


@pytest.fixture
def parity(tmp_path, monkeypatch):
    """A folder with a scheme, where those of phasor are looked for."""
    folder = tmp_path / "parity"
    folder.mkdir()
    for name, text in {"__init__": "", "config": CONFIG, "module": MODULE}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setattr(positions, "__path__", [*positions.__path__, str(tmp_path)])
    import_configs("phasor.nn.positions")
    yield
    config = PositionConfig.kinds.pop("parity")
    config.__module__ = __name__  # a subclass as long as something holds it, but not one of phasor's
    Position.modules_by_config.pop(config, None)
    vars(phasor).pop("ParityConfig", None)
    vars(positions).pop("parity", None)
    for name in [name for name in sys.modules if name.startswith("phasor.nn.positions.parity")]:
        del sys.modules[name]


@pytest.mark.usefixtures("parity")
def test_a_new_folder_is_a_new_scheme():
    assert "parity" in phasor.kinds("positions")
    assert "ParityConfig" in phasor.__all__
    assert "ParityConfig" in dir(phasor)
    assert phasor.ParityConfig.examples() == {"parity": phasor.ParityConfig()}
    config = tiny(phasor.ParityConfig.examples()["parity"])
    assert phasor.ModelConfig.from_json(config.to_json()) == config
    assert "phasor.nn.positions.parity.module" not in sys.modules, "a module is loaded when it is needed"
    model, ids = build(config), tokens(1, 6)
    even = model(ids, positions=torch.zeros(6, dtype=torch.int64))
    assert not torch.allclose(model(ids), even)
    assert torch.equal(build(tiny("none"))(ids), even)


def test_a_scheme_leaves_with_its_folder():
    assert "parity" not in phasor.kinds("positions")
    with pytest.raises(AttributeError, match="ParityConfig"):
        phasor.ParityConfig  # noqa: B018


@pytest.mark.parametrize("kind", phasor.kinds("positions"))
def test_every_scheme_has_a_module_of_its_own(kind):
    config = PositionConfig.kinds[kind]
    assert Position.class_for(config).__module__ == f"phasor.nn.positions.{kind}.module"
    assert kind in config.examples()
    assert all(type(example) is config for example in config.examples().values())

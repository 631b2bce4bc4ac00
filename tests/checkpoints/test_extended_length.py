"""A model with an extension says how far it reaches: in both formats, and as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import phasor
from phasor.cli import main

TRAINED = 32
SHORT, LONG = [1.0] * 8, [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
LONGROPE = {"kind": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0}
EXTENSIONS: dict[str, tuple[dict[str, Any], int]] = {
    "linear": ({"kind": "linear", "factor": 4.0}, 4 * TRAINED),
    "yarn": ({"kind": "yarn", "factor": 4.0, "original_length": TRAINED}, 4 * TRAINED),
    "llama3": ({"kind": "llama3", "factor": 2.0, "original_length": TRAINED}, 2 * TRAINED),
    "dynamic": ({"kind": "dynamic-ntk", "factor": 2.0, "original_length": TRAINED}, TRAINED),
    "longrope": ({**LONGROPE, "original_length": TRAINED}, 4 * TRAINED),
    "ntk": ({"kind": "ntk", "factor": 3.0}, 3 * TRAINED),
    "dynamic yarn": ({"kind": "dynamic-yarn", "original_length": TRAINED}, TRAINED),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = phasor.preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=60, max_length=TRAINED)
    phasor.save(phasor.Transformer(config), tmp_path / "plain")
    return tmp_path / "plain"


@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_extends_the_length(name: str, folder: Path) -> None:
    extension, length = EXTENSIONS[name]
    extended, plain = phasor.load(folder, extension=extension), phasor.load(folder)
    assert extended.config.max_length == length
    phasor.save(extended, folder.parent / "ours")
    again = phasor.load(folder.parent / "ours")
    assert again.config == extended.config
    assert phasor.load(folder.parent / "ours", extension="none").config == plain.config
    twice = phasor.load(folder.parent / "ours", extension={"kind": "linear", "factor": 2.0})
    assert twice.config.max_length == 2 * TRAINED
    in_a_scheme = phasor.load(folder, position={"kind": "rotary", "extension": extension})
    assert in_a_scheme.config == extended.config


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3", "dynamic", "longrope"])
def test_transformers_reads_the_same_length(name: str, folder: Path) -> None:
    extension, length = EXTENSIONS[name]
    extended = phasor.load(folder, extension=extension).eval()
    phasor.save(extended, folder.parent / "theirs", format="hf")
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder.parent / "theirs").eval()
    assert theirs.config.max_position_embeddings == length
    assert phasor.load(folder.parent / "theirs").config == extended.config
    tokens = torch.randint(0, 60, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, extended(tokens), atol=2e-5)


@pytest.mark.parametrize("format", ["phasor", "hf"])
def test_convert_writes_the_extended_length(format: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--extension", "yarn", "--factor", "4", "--format", format]
    assert main(["convert", str(folder), str(folder.parent / "out"), *arguments]) == 0
    capsys.readouterr()
    written = json.loads((folder.parent / "out/config.json").read_text())
    assert written["max_length" if format == "phasor" else "max_position_embeddings"] == 4 * TRAINED


def test_an_extension_that_transformers_has_no_name_for_is_the_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--extension", "ntk", "--factor", "4", "--format", "hf"]
    assert main(["convert", str(folder), str(folder.parent / "out"), *arguments]) == 2
    assert "transformers has no name for the extension 'ntk'" in capsys.readouterr().err


REASONS = [
    # rotates a part of each head, as Bamba does
    ({"position": {"kind": "rotary", "rotary_dim": 8}}, "dynamic-yarn", "bamba: transformers has no name for the"),
    (
        {"position": {"kind": "rotary", "pairing": "adjacent"}},
        "ntk",
        "ernie4_5: transformers has no name for the extension",
    ),
    ({"placement": "parallel"}, "dynamic-ntk", "llama: it would differ in placement ('parallel' and 'pre')"),
    ({"placement": "parallel"}, "dynamic-yarn", "llama: transformers has no name for the extension 'dynamic-yarn'"),
    ({"max_length": 2**40}, "dynamic-ntk", "max_position_embeddings is out of range"),
]


@pytest.mark.parametrize(("fields", "extension", "reason"), REASONS)
def test_the_reason_is_that_of_the_family_that_would_fit(
    fields: dict[str, Any], extension: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {"dim": 32, "num_heads": 2, "num_layers": 1, "vocab_size": 60, "max_length": TRAINED}
    phasor.save(phasor.Transformer(phasor.preset("llama-2", **{**sizes, **fields})), tmp_path / "plain")
    arguments = ["--extension", extension, *([] if extension == "dynamic-yarn" else ["--factor", "4"])]
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--format", "hf", *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert "encoder" not in error
    assert not (tmp_path / "out").exists()

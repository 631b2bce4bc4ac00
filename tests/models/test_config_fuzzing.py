"""Odd values in config.json, of all families: read, or refused in one sentence, and never slowly."""

import copy
import json
import random
import struct
import time

import pytest
import torch
from test_family_fields import BUILDERS, drawn, read

import phasor
from phasor.cli import main

ODD = ["x", "", -1, 0, 1, 1.5, True, False, None, [], [None], [1, 2], ["x"], [[[]]], {}, {"x": 1}, {"a": {"b": [1]}}]
ODD += [float("nan"), float("inf"), 10**400, 2**63, -(2**63), 10**9, 1e308, "1" * 300, {"rope_type": "yarn"}]
ROPE = """
    rope_type type factor original_max_position_embeddings beta_fast beta_slow short_factor long_factor attention_factor
    mscale mscale_all_dim truncate low_freq_factor high_freq_factor rope_theta partial_rotary_factor
""".split()  # noqa: SIM905
KINDS = ["yarn", "llama3", "longrope", "linear", "dynamic", "proportional", "default", 3, None]


def spoil(whole, rng):
    """Put odd values into some of the fields, nested ones too, and perhaps odd rotary parameters beside them."""
    whole = copy.deepcopy(whole)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        inside, name = whole, rng.choice(sorted(whole))
        while isinstance(inside[name], dict) and inside[name] and rng.random() < 0.8:
            inside = inside[name]
            name = rng.choice(sorted(inside))
        inside[name] = copy.deepcopy(rng.choice(ODD))
    if rng.random() < 0.3:
        odd = {name: rng.choice([*ODD, 2.0, [1.0] * 8]) for name in rng.sample(ROPE, rng.randrange(6))}
        whole[rng.choice(["rope_scaling", "rope_parameters"])] = {"rope_type": rng.choice(KINDS)} | odd
    return whole


def complaints(name, seed, count):
    rng = random.Random(f"{name} {seed}")
    for _ in range(count):
        config = spoil(drawn(name, rng.randrange(3))[1], rng)
        began = time.monotonic()
        try:
            read(name, config)
        except ValueError as error:
            if not str(error).startswith("config.json: ") or len(str(error)) > 1500 or "\n" in str(error):
                yield f"{config}: {error}"
        if time.monotonic() - began > 5:
            yield f"{config}: slow"


every = pytest.mark.parametrize("name", [name for name in BUILDERS if "/" not in name])


@pytest.mark.sample(40)
@every
def test_odd_values_are_read_or_refused_in_a_sentence(name):
    assert list(complaints(name, 0, 25)) == []


@pytest.mark.slow
@every
def test_many_odd_values_are_read_or_refused_in_a_sentence(name):
    assert list(complaints(name, 1, 1600)) == []


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "architectures", [["LlamaForCausalLM"]]),
        ("gemma2", "query_pre_attn_scalar", 10**400),
        ("gpt_neox", "rotary_pct", float("inf")),
        ("phi", "partial_rotary_factor", float("inf")),
        ("qwen3", "rope_scaling", {"rope_type": "yarn", "original_max_position_embeddings": "1024"}),
    ],
)
def test_values_that_once_crashed(name, field, value):
    _, whole = drawn(name, 0)
    whole = {n: v for n, v in whole.items() if n != "rope_parameters"} | {field: value}
    with pytest.raises(ValueError, match=r"config\.json: "):
        read(name, whole)


def tiny_folder(folder):
    model = phasor.Transformer(
        phasor.preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=20, hidden_dim=24)
    )
    phasor.save(model, folder, format="hf")
    return folder / "config.json"


@pytest.mark.parametrize("field", ["num_hidden_layers", "head_dim", "hidden_size", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [20_000, 10**9])
def test_claims_are_compared_with_the_tensors_first(field, value, tmp_path, capsys):
    file = tiny_folder(tmp_path / "small")
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    began = time.monotonic()
    with pytest.raises(ValueError, match=rf"{field} is {value:,}, which is more than \d+"):
        phasor.load(file.parent, verify=False)
    assert main(["convert", str(file.parent), str(tmp_path / "out")]) == 2
    assert time.monotonic() - began < 5
    assert len(capsys.readouterr().err) < 1000


@pytest.mark.parametrize("field", ["num_layers", "head_dim", "dim", "vocab_size"])
def test_claims_of_a_native_folder_are_compared_with_the_tensors_first(field, tmp_path):
    model = phasor.Transformer(
        phasor.preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=20, hidden_dim=24)
    )
    phasor.save(model, tmp_path / "mine")
    file = tmp_path / "mine" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: 20_000}))
    began = time.monotonic()
    with pytest.raises(ValueError, match="20,000"):
        phasor.load(tmp_path / "mine", verify=False)
    assert time.monotonic() - began < 5


def test_errors_about_many_tensors_are_short(tmp_path):
    config = phasor.preset("llama-2", dim=16, num_heads=2, num_layers=60, vocab_size=20, hidden_dim=24)
    phasor.save(phasor.Transformer(config), tmp_path / "deep", format="hf")
    file = tmp_path / "deep" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"is not the model's .*and \d+ more") as error:
        phasor.load(tmp_path / "deep", verify=False)
    assert len(str(error.value)) < 1500


def test_odd_headers_of_safetensors_are_refused_in_a_sentence(tmp_path):
    """Headers whose bytes are changed, with fixed seeds: another model is never read in silence."""
    file = tiny_folder(tmp_path / "small").parent / "model.safetensors"
    whole = file.read_bytes()
    size = 8 + struct.unpack("<Q", whole[:8])[0]
    expected = phasor.load(file.parent, verify=False).state_dict()
    rng, said = random.Random(0), []
    for _ in range(150):
        changed = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            changed[rng.randrange(size)] = rng.randrange(256)
        file.write_bytes(changed)
        try:
            found = phasor.load(file.parent, verify=False).state_dict()
        except ValueError as error:
            said.append(str(error))
        else:
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [text for text in said if "\n" in text or len(text) > 2000] == []

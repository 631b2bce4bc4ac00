"""Phases are exact: cosines and sines against mpmath, at positions up to 2^36, after any conversion of the model."""

import random

import pytest
import torch
from device import DEVICE
from rope_formulas import CASES, exact_frequencies, mp
from schemes import SCHEMES, build, tiny, tokens

import phasor
from phasor.nn.positions.sinusoidal.module import Sinusoidal
from phasor.nn.sequence import SequenceInfo

FARTHEST = 2**36
# Half a unit in the last place of a float32 cosine is 2^-25 = 3.0e-8. The stored fraction of a rotation is off by at
# most 2^-65, which 2^36 positions make 2 pi 2^-29 = 1.2e-8.
EXACT = 4.5e-8


def far_positions(rows=1):
    """1,000 positions a row, uniform up to 2^36, after every power of two and its neighbors."""
    powers = torch.tensor([max(0, 2**p + d) for p in range(36) for d in (-1, 0, 1)] + [FARTHEST - 1, FARTHEST])
    drawn = torch.randint(0, FARTHEST + 1, (rows, 1000))
    return torch.cat((powers.expand(rows, -1), drawn), dim=-1)


def worst_error(cos, sin, positions, frequencies):
    """The largest error of `[N, pairs]` tables over every position, at one random pair each; `positions [N, pairs]`."""
    draw = random.Random(0)
    worst = mp.mpf(0)
    for n in range(len(positions)):
        i = draw.randrange(len(frequencies))
        true_cos, true_sin = mp.cos_sin(int(positions[n, i]) * frequencies[i])
        worst = max(worst, abs(float(cos[n, i]) - true_cos), abs(float(sin[n, i]) - true_sin))
    return float(worst)


def test_every_extension_is_among_the_cases():
    assert {extension["kind"] for extension, _ in CASES.values() if extension} == set(phasor.kinds("extensions"))


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES)
def test_rotary_is_exact(case):
    extension, length = CASES[case]
    rope = phasor.Rotary(head_dim=64, extension=extension)
    positions = far_positions()[0]
    cos, sin = rope.cos_sin(positions, length=length)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (len(positions), 32)
    frequencies, _ = exact_frequencies(extension, 10000, 64, length)
    assert worst_error(cos, sin, positions[:, None].expand(-1, 32), frequencies) <= EXACT


@pytest.mark.parametrize("base", [2.0, 500000.0, 1e7 + 0.3])
@pytest.mark.parametrize(("head_dim", "width"), [(64, 16), (10, 6), (14, 14), (8, 2)])
def test_partial_rotary_is_exact_for_any_base(head_dim, width, base):
    positions = far_positions()[0]
    cos, sin = phasor.Rotary(head_dim=head_dim, rotary_dim=width, base=base).cos_sin(positions)
    frequencies, _ = exact_frequencies(None, base, width)
    assert worst_error(cos, sin, positions[:, None].expand(-1, width // 2), frequencies) <= EXACT


@pytest.mark.parametrize("case", ["plain", "yarn", "dynamic-ntk-beyond"])
def test_axial_rotary_is_exact(case):
    """Half of the pairs rotate by the row, half by the column, each half with all frequencies of its width."""
    extension, length = CASES[case]
    rope = phasor.Rotary(phasor.AxialConfig(extension=extension), head_dim=64)
    positions = far_positions(rows=2)
    cos, sin = rope.cos_sin(positions[:, None], length=length)
    frequencies, _ = exact_frequencies(extension, 10000, 32, length)
    by_pair = torch.stack([positions[0]] * 16 + [positions[1]] * 16, dim=-1)
    assert worst_error(cos[0], sin[0], by_pair, frequencies * 2) <= EXACT


@pytest.mark.parametrize("case", ["plain", "yarn", "dynamic-ntk-beyond"])
@pytest.mark.parametrize("sections", [(8, 12, 12), (16, 8, 8), None])
def test_multi_section_rotary_is_exact(sections, case):
    extension, length = CASES[case]
    rope = phasor.Rotary(phasor.MultiSectionConfig(sections=sections, extension=extension), head_dim=64)
    positions = far_positions(rows=3)
    cos, sin = rope.cos_sin(positions[:, None], length=length)
    frequencies, _ = exact_frequencies(extension, 10000, 64, length)
    time, height, width = sections or (8, 12, 12)  # the published shares: a quarter, three eighths, three eighths
    by_pair = torch.stack([positions[0]] * time + [positions[1]] * height + [positions[2]] * width, dim=-1)
    assert worst_error(cos[0], sin[0], by_pair, frequencies) <= EXACT


@pytest.mark.parametrize("case", ["plain", "yarn", "dynamic-ntk-beyond"])
def test_interleaved_multi_section_rotary_is_exact(case):
    """Height has the pairs 1, 4, 7, ..., width 2, 5, 8, ..., as many as their sections; time has all others."""
    extension, length = CASES[case]
    config = phasor.MultiSectionConfig(sections=(14, 11, 7), interleaved=True, extension=extension)
    positions = far_positions(rows=3)
    cos, sin = phasor.Rotary(config, head_dim=64).cos_sin(positions[:, None], length=length)
    frequencies, _ = exact_frequencies(extension, 10000, 64, length)
    rows = [1 if pair in range(1, 33, 3) else 2 if pair in range(2, 21, 3) else 0 for pair in range(32)]
    by_pair = torch.stack([positions[row] for row in rows], dim=-1)
    assert worst_error(cos[0], sin[0], by_pair, frequencies) <= EXACT


def sinusoid(t, column, width, layout, spacing, base=10000):
    """One feature of the code of position `t`, from the formulas: sines and cosines side by side or in halves."""
    if spacing == "width":
        pairs, exponents = (width + 1) // 2, [mp.mpf(2 * i) / width for i in range((width + 1) // 2)]
    else:
        pairs, exponents = width // 2, [mp.mpf(i) / (width // 2 - 1) for i in range(width // 2)]
    if column >= 2 * pairs:
        return mp.mpf(0)
    i, cosine = (column // 2, column % 2) if layout == "interleaved" else (column % pairs, column // pairs)
    angle = t * mp.mpf(base) ** -exponents[i]
    return mp.cos(angle) if cosine else mp.sin(angle)


@pytest.mark.sample(14)
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("width", [16, 7, 33])
@pytest.mark.parametrize("spacing", ["width", "ends"])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoidal_table_is_exact(layout, spacing, width, offset):
    config = phasor.SinusoidalConfig(layout=layout, spacing=spacing, offset=offset)
    positions = far_positions()[0].clamp(max=FARTHEST - offset)
    table = Sinusoidal(config, dim=width).table(positions)
    assert table.dtype == torch.float32
    assert table.shape == (len(positions), width)
    draw, worst = random.Random(0), 0.0
    for t, row in zip(positions.tolist(), table.tolist(), strict=True):
        column = draw.randrange(width)
        worst = max(worst, abs(row[column] - sinusoid(t + offset, column, width, layout, spacing)))
    assert worst <= EXACT


def test_every_scheme_is_among_the_models():
    assert {scheme.kind for scheme in SCHEMES.values()} == set(phasor.kinds("positions"))


def logits_far_away(model, name):
    """Logits at positions from 2^30 on, where an angle that lost its precision would show; tables end earlier."""
    start = 0 if "learned" in name else 2**30
    count = 9
    source = tokens(2, count)
    given = {"positions": torch.arange(start, start + count), "length": 11}
    if model.config.shape != "encoder-decoder":
        return model(source, **given)
    return model(source, tokens(2, count, seed=2), **given, **{f"target_{key}": value for key, value in given.items()})


@pytest.mark.sample(60)
@pytest.mark.parametrize("shape", ["decoder", "encoder", "encoder-decoder"])
@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_about_positions_is_stored_but_weights(name, shape):
    model = build(tiny(name, shape=shape))
    assert list(model.buffers()) == []
    assert set(model.state_dict()) == {key for key, _ in model.named_parameters()}


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_round_trip_through_bfloat16_changes_nothing_but_weights(name):
    model = build(tiny(name))
    exact = logits_far_away(model, name)
    model = model.to(torch.bfloat16).to(torch.float32)
    fresh = build(tiny(name), seed=5)
    fresh.load_state_dict(model.state_dict())
    after = logits_far_away(model, name)
    assert torch.equal(after, logits_far_away(fresh, name))
    assert not torch.equal(after, exact)  # the weights did round


@pytest.mark.parametrize("case", ["plain", "yarn", "dynamic-ntk-beyond", "longrope-beyond"])
def test_a_bfloat16_model_has_exact_angles(case):
    extension, length = CASES[case]
    config = tiny(phasor.RotaryConfig(extension=extension), head_dim=64)
    rope = build(config).to(torch.bfloat16).decoder.positions[0]
    positions = far_positions()[0]
    cos, sin = rope.cos_sin(positions, length=length)
    frequencies, _ = exact_frequencies(extension, 10000, 64, length)
    assert worst_error(cos, sin, positions[:, None].expand(-1, 32), frequencies) <= EXACT


def test_a_bfloat16_model_adds_exact_sinusoids():
    """The codes added to a bfloat16 input are the true ones, rounded once."""
    sinusoidal = build(tiny("sinusoidal")).to(torch.bfloat16).decoder.positions[0]
    positions = torch.tensor([0, 5, 257, 2**17 + 1, 2**30 + 3])
    added = sinusoidal.on_input(torch.zeros(1, 5, 32, dtype=torch.bfloat16), SequenceInfo(positions, None))[0]
    true = [[float(sinusoid(t, c, 32, "interleaved", "width")) for c in range(32)] for t in positions.tolist()]
    torch.testing.assert_close(added.double(), torch.tensor(true).double(), rtol=2**-8, atol=1e-7)  # rtol: bfloat16


@pytest.mark.sample(30)
@pytest.mark.parametrize("shape", ["decoder", "encoder", "encoder-decoder"])
@pytest.mark.parametrize("name", SCHEMES)
def test_built_on_meta_then_loaded_gives_identical_logits(name, shape):
    config = tiny(name, shape=shape)
    loaded = build(config)
    with torch.device("meta"):
        model = phasor.Transformer(config).eval()
    assert all(weight.is_meta for weight in model.parameters())
    model.to_empty(device=DEVICE)
    assert all(weight.isnan().all() for weight in model.parameters())
    model.load_state_dict(loaded.state_dict())
    assert torch.equal(logits_far_away(model, name), logits_far_away(loaded, name))


def test_angles_are_exact_after_meta():
    with torch.device("meta"):
        model = phasor.Transformer(tiny(phasor.RotaryConfig(extension=CASES["yarn"][0]), head_dim=64))
    rope = model.to_empty(device=DEVICE).decoder.positions[0]
    positions = far_positions()[0]
    cos, sin = rope.cos_sin(positions)
    frequencies, _ = exact_frequencies(CASES["yarn"][0], 10000, 64)
    assert worst_error(cos, sin, positions[:, None].expand(-1, 32), frequencies) <= EXACT

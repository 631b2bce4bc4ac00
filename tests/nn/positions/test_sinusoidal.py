"""Sinusoidal codes: layouts as published, the rotation between positions, bounded and distinct codes, concatenation."""

import pytest
import torch
from rope_formulas import mp, plain
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

import phasor
from phasor.nn.positions.sinusoidal.module import Sinusoidal
from phasor.nn.sequence import SequenceInfo

LAYOUTS = ["interleaved", "halves"]
SPACINGS = ["width", "ends"]


def sinusoidal(dim, **fields):
    return Sinusoidal(phasor.SinusoidalConfig(**fields), dim=dim)


def frequencies(dim, spacing):
    """From the formulas: exponents 2i/dim, or i/(dim/2 - 1)."""
    if spacing == "width":
        return plain(10000, dim)[0]
    return [mp.mpf(10000) ** (-mp.mpf(i) / (dim // 2 - 1)) for i in range(dim // 2)]


def table(dim, positions, **fields):
    return sinusoidal(dim, **fields).table(positions, dtype=torch.float64)


@pytest.mark.parametrize("dim", [16, 7])
def test_halves_are_those_of_marian(dim):
    theirs = MarianSinusoidalPositionalEmbedding(300, dim).create_weight()
    ours = sinusoidal(dim, layout="halves").table(torch.arange(300))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)  # both within float32 rounding of the exact value


@pytest.mark.parametrize("dim", [16, 7])
def test_end_to_end_spacing_with_its_offset_is_that_of_m2m100(dim):
    theirs = M2M100SinusoidalPositionalEmbedding.get_embedding(300, dim)
    ours = sinusoidal(dim, layout="halves", spacing="ends", offset=2).table(torch.arange(298))
    torch.testing.assert_close(ours, theirs[2:], rtol=0, atol=1e-4)  # 300 positions times their float32 frequencies


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 17, 2**20])
def test_the_code_of_a_later_position_is_a_fixed_rotation_of_the_code(layout, spacing, k):
    dim = 16
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    for i, f in enumerate(frequencies(dim, spacing)):
        s, c = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + dim // 2)
        cos, sin = (float(x) for x in mp.cos_sin(k * f))
        # sin(a + b) = sin a cos b + cos a sin b; cos(a + b) = cos a cos b - sin a sin b
        matrix[s, s], matrix[c, s] = cos, sin
        matrix[c, c], matrix[s, c] = cos, -sin
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-15)
    t = torch.tensor([0, 1, 2, 1000, 2**17 + 3, 2**30])
    before, after = (table(dim, position, layout=layout, spacing=spacing) for position in (t, t + k))
    torch.testing.assert_close(before @ matrix, after, rtol=0, atol=1e-12)  # k positions at 2^-65 rotations each


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [4, 64])
def test_products_depend_on_the_distance_alone_and_are_symmetric(layout, spacing, dim):
    distance = torch.tensor([0, 1, 2, 3, 50, 1000, 2**20])
    expected = [float(sum(mp.cos(int(d) * f) for f in frequencies(dim, spacing))) for d in distance]
    for m in (0, 5, 12345, 2**30):
        here = table(dim, torch.tensor([m + 2**21]), layout=layout, spacing=spacing)
        for sign in (1, -1):
            there = table(dim, m + 2**21 + sign * distance, layout=layout, spacing=spacing)
            torch.testing.assert_close(
                (there @ here.T)[:, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-11
            )


@pytest.mark.parametrize("dim", [8, 7])
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_are_bounded_and_distinct(layout, spacing, dim):
    positions = torch.cat((torch.arange(2000), torch.arange(2000) + 2**30))
    codes = sinusoidal(dim, layout=layout, spacing=spacing).table(positions)
    assert codes.abs().max() <= 1
    if dim % 2 == 0:
        torch.testing.assert_close(codes.norm(dim=-1), torch.full((4000,), (dim / 2) ** 0.5), rtol=1e-6, atol=0)
    assert len(codes.unique(dim=0)) == len(positions)
    apart = torch.cdist(codes.double(), codes.double()).fill_diagonal_(torch.inf)
    assert apart.min() > 1e-3  # far above float32 rounding


def test_codes_are_added_to_the_input():
    module = sinusoidal(8)
    x = torch.randn(3, 5, 8)
    positions = torch.randint(0, 2**30, (3, 5))
    out = module.on_input(x, SequenceInfo(positions, 5))
    for row in range(3):
        for t in range(5):
            angles = [int(positions[row, t]) * f for f in frequencies(8, "width")]
            code = torch.tensor([float(g(a)) for a in angles for g in (mp.sin, mp.cos)])
            torch.testing.assert_close(out[row, t], x[row, t] + code, rtol=0, atol=5e-7)  # float32 addition


@pytest.mark.parametrize("width", [7, None])
@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_codes_concatenated_and_projected(width, shape):
    module = sinusoidal(8, combine="concat", width=width)
    codes = width or 8
    torch.nn.init.normal_(module.project.weight)
    assert module.project.weight.shape == (8, 8 + codes)
    x, positions = torch.randn(3, 5, 8, dtype=torch.float64), torch.randint(0, 2**30, shape)
    out = module.double().on_input(x, SequenceInfo(positions, 5))
    code = torch.empty(*shape, codes, dtype=torch.float64)
    # Odd widths end with a sine: its exponent is that of a pair whose cosine is left out.
    exact = [mp.mpf(10000) ** (-mp.mpf(2 * (c // 2)) / codes) for c in range(codes)]
    for where in torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape)).tolist():
        for c in range(codes):
            angle = int(positions[tuple(where)]) * exact[c]
            code[(*where, c)] = float(mp.cos(angle) if c % 2 else mp.sin(angle))
    joined = torch.cat((x, code.expand(3, 5, codes)), dim=-1)
    torch.testing.assert_close(out, joined @ module.project.weight.T, rtol=0, atol=1e-8)  # 2^30 at 2^-65 rotations each


def test_zero_padding_gives_padding_no_code():
    attention_mask = torch.tensor([[False, False, True, True], [True, True, True, True]])
    positions = torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])
    x = torch.zeros(2, 4, 8)
    with_codes = sinusoidal(8).on_input(x, SequenceInfo(positions, 4, attention_mask))
    silent = sinusoidal(8, zero_padding=True).on_input(x, SequenceInfo(positions, 4, attention_mask))
    assert torch.equal(silent[attention_mask], with_codes[attention_mask])
    assert not silent[~attention_mask].any()
    assert with_codes[~attention_mask].any()
    unpadded = sinusoidal(8, zero_padding=True).on_input(x, SequenceInfo(positions, 4))
    assert torch.equal(unpadded, with_codes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": 1.0}, "greater than 1"),
        ({"layout": "half"}, "halves"),
        ({"spacing": "even"}, "width"),
        ({"offset": -1}, "negative"),
        ({"width": 8}, "concat"),
        ({"width": 0, "combine": "concat"}, "greater than 0"),
    ],
)
def test_bad_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        phasor.SinusoidalConfig(**fields)

"""Rotary positions on queries and keys: the rotation itself, its properties, xPos, lengths by row, and bad input."""

import copy
import math

import pytest
import torch
from rope_formulas import CASES, DYNAMIC_NTK, DYNAMIC_YARN, LONGROPE, exact_frequencies, mp
from torch.autograd import gradcheck
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

import phasor
from phasor.nn.positions.base import Position
from phasor.ops import dispatch

PAIRINGS = ["half", "adjacent"]
OFFSETS = [1, 1000, 2**17, 2**24, 2**30]


def pair_columns(width, pairing):
    """The two features of each pair."""
    if pairing == "half":
        return [(i, i + width // 2) for i in range(width // 2)]
    return [(2 * i, 2 * i + 1) for i in range(width // 2)]


def rotation(position, frequencies, head_dim, pairing, scale=1):
    """The matrix that rotates a row vector, `(u, v) -> (u cos a - v sin a, u sin a + v cos a)`, from mpmath angles."""
    matrix = torch.eye(head_dim, dtype=torch.float64)
    for f, (u, v) in zip(frequencies, pair_columns(2 * len(frequencies), pairing), strict=True):
        cos, sin = (float(scale * x) for x in mp.cos_sin(position * f))
        matrix[u, u], matrix[v, u] = cos, -sin
        matrix[u, v], matrix[v, v] = sin, cos
    return matrix


def matrix_of(rope, position, length=None):
    """The rotation at a position, read off the rotated unit vectors."""
    unit = torch.eye(rope.head_dim, dtype=torch.float64)[None, None]
    rotated, _ = rope.rotate(unit, unit, torch.full((rope.head_dim,), position), length=length)
    return rotated[0, 0]


def random_qk(batch=2, heads=4, groups=2, count=7, head_dim=64, dtype=torch.float64):
    q = torch.randn(batch, heads, count, head_dim, dtype=torch.float64)
    k = torch.randn(batch, groups, count, head_dim, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


def scores(q, k):
    """Every query with every key of its group, `[B, H, T, T]`."""
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("case", CASES)
def test_rotate_is_the_written_rotation_times_the_attention_factor(case, pairing):
    extension, length = CASES[case]
    rope = phasor.Rotary(head_dim=64, pairing=pairing, extension=extension)
    frequencies, factor = exact_frequencies(extension, 10000, 64, length)
    for position in (0, 1, 12345, 2**30 + 7):
        expected = rotation(position, frequencies, 64, pairing, scale=factor)
        # 2^30 positions make the half unit of a 2^-64 rotation 2 pi 2^-35 = 1.8e-10.
        torch.testing.assert_close(matrix_of(rope, position, length), expected, rtol=0, atol=3e-10)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("head_dim", "width"), [(10, 6), (14, 2), (64, 16)])
def test_partial_rotary_leaves_the_rest_of_the_head_alone(head_dim, width, pairing):
    rope = phasor.Rotary(head_dim=head_dim, rotary_dim=width, pairing=pairing)
    frequencies, _ = exact_frequencies(None, 10000, width)
    expected = rotation(77, frequencies, head_dim, pairing)
    torch.testing.assert_close(matrix_of(rope, 77), expected, rtol=0, atol=1e-14)
    q, k = random_qk(head_dim=head_dim, dtype=torch.float32)
    rotated = rope.rotate(q, k, torch.arange(7) + 5)
    assert all(
        torch.equal(after[..., width:], before[..., width:]) for after, before in zip(rotated, (q, k), strict=True)
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("case", CASES)
def test_rotations_add_up_and_keep_norms(case, pairing):
    """R(a) R(b) = A R(a + b) with A = R(0) = the attention factor; R(a)^T R(a) = A^2. Angles add up to the last bit."""
    extension, length = CASES[case]
    rope = phasor.Rotary(head_dim=64, pairing=pairing, extension=extension)
    a, b = 2**35 + 12345, 2**34 + 678
    factor = matrix_of(rope, 0, length)[0, 0]
    both = matrix_of(rope, a, length) @ matrix_of(rope, b, length)
    torch.testing.assert_close(both, factor * matrix_of(rope, a + b, length), rtol=0, atol=1e-14)
    again = matrix_of(rope, a, length) @ matrix_of(rope, a, length).T
    torch.testing.assert_close(again, factor**2 * torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-14)
    q, k = random_qk()
    for before, after in zip((q, k), rope.rotate(q, k, torch.arange(7) + a, length=length), strict=True):
        torch.testing.assert_close(after.norm(dim=-1), factor * before.norm(dim=-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_transpose_is_the_rotation_back(pairing):
    rope = phasor.Rotary(head_dim=14, pairing=pairing)
    back = rotation(-321, exact_frequencies(None, 10000, 14)[0], 14, pairing)
    torch.testing.assert_close(matrix_of(rope, 321).T, back, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "config",
    [
        phasor.RotaryConfig(),
        phasor.RotaryConfig(rotary_dim=32),
        phasor.AxialConfig(),
        phasor.MultiSectionConfig(sections=(8, 12, 12)),
        phasor.XPosConfig(decay=512.0),
    ],
    ids=str,
)
def test_half_and_adjacent_agree_under_the_permutation_between_them(config):
    half = phasor.Rotary(config, head_dim=64, pairing="half")
    adjacent = phasor.Rotary(config, head_dim=64, pairing="adjacent")
    width = config.rotary_dim or 64
    to_half = [*range(0, width, 2), *range(1, width, 2), *range(width, 64)]
    q, k = random_qk()
    positions = torch.stack([torch.arange(7) + 2**20 * axis for axis in range(half.axes)])[:, None].expand(-1, 2, -1)
    positions = positions if half.axes > 1 else positions[0]
    for x, y in zip(
        adjacent.rotate(q, k, positions), half.rotate(q[..., to_half], k[..., to_half], positions), strict=True
    ):
        torch.testing.assert_close(x[..., to_half], y, rtol=0, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_scores_depend_on_the_distance_alone(case):
    extension, length = CASES[case]
    rope = phasor.Rotary(head_dim=64, extension=extension)
    q, k = random_qk()
    positions = torch.tensor([[0, 1, 2, 3, 5, 8, 13], [4, 4, 9, 700, 701, 3000, 3999]])
    near = scores(*rope.rotate(q, k, positions, length=length))
    for offset in OFFSETS:
        far = scores(*rope.rotate(q, k, positions + offset, length=length))
        torch.testing.assert_close(far, near, rtol=0, atol=1e-12)  # float64 sums of 64 products of unit variance
    # Along a diagonal the distance is the same: equal queries and equal keys give equal scores.
    q, k = q[:, :, :1].expand(-1, -1, 7, -1), k[:, :, :1].expand(-1, -1, 7, -1)
    along = scores(*rope.rotate(q, k, torch.arange(7) + 2**30, length=length))
    for distance in range(7):
        diagonal = along.diagonal(-distance, -2, -1)
        torch.testing.assert_close(diagonal, diagonal[..., :1].expand_as(diagonal), rtol=0, atol=1e-12)


@pytest.mark.parametrize("offset", OFFSETS)
def test_float32_scores_depend_on_the_distance_alone(offset):
    rope = phasor.Rotary(head_dim=64)
    q, k = random_qk(dtype=torch.float32)
    positions = torch.arange(7)
    near, far = (scores(*rope.rotate(q, k, positions + start)) for start in (0, offset))
    # A product of 64 float32 pairs: each rotated feature rounds by 2^-24 and the cosines by 2^-25.
    limit = 4 * 2**-24 * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    assert (near - far).abs().max() <= limit


@pytest.mark.parametrize("case", CASES)
def test_the_attention_factor_is_applied_by_rotate_and_not_by_cos_sin(case):
    extension, length = CASES[case]
    rope = phasor.Rotary(head_dim=64, extension=extension)
    _, factor = exact_frequencies(extension, 10000, 64, length)
    cos, sin = rope.cos_sin(torch.tensor([0, 5, 2**36]), length=length)
    assert torch.equal(cos[0], torch.ones(32))
    torch.testing.assert_close(cos**2 + sin**2, torch.ones(3, 32), rtol=0, atol=4e-7)  # three float32 roundings
    q, k = random_qk(count=1)
    for before, after in zip((q, k), rope.rotate(q, k, torch.tensor([0]), length=length), strict=True):
        torch.testing.assert_close(after, before * float(factor), rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("dtype", "half_ulp"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-24)]
)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("case", ["plain", "yarn", "dynamic-yarn-beyond"])
def test_low_precision_rotate_rounds_the_exact_rotation_once(case, pairing, dtype, half_ulp):
    extension, length = CASES[case]
    rope = phasor.Rotary(head_dim=64, pairing=pairing, extension=extension)
    q, k = random_qk(batch=3, dtype=dtype)
    positions = torch.randint(0, 2**30, (3, 7))
    frequencies, factor = exact_frequencies(extension, 10000, 64, length)
    matrices = torch.stack(
        [torch.stack([rotation(p, frequencies, 64, pairing, factor) for p in row]) for row in positions.tolist()]
    )
    for before, after in zip((q, k), rope.rotate(q, k, positions, length=length), strict=True):
        assert after.dtype == dtype
        exact = torch.einsum("bhtd,btde->bhte", before.double(), matrices)
        # The result rounds by half a unit in the last place; before that, float32 products of a pair round thrice.
        allowed = half_ulp * exact.abs() + 4 * 2**-24 * float(factor) * before.double().abs().max()
        assert ((after.double() - exact).abs() <= allowed).all()


@pytest.mark.sample(8)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(
    ("head_dim", "fields"),
    [
        (6, {}),
        (10, {"rotary_dim": 4}),
        (14, {"extension": {"kind": "yarn", "factor": 4.0, "original_length": 64}}),
        (6, {"config": phasor.XPosConfig(decay=512.0)}),
        (8, {"config": phasor.AxialConfig()}),
        (10, {"config": phasor.MultiSectionConfig(sections=(1, 3, 1))}),
        (10, {"config": phasor.MultiSectionConfig(sections=(2, 2, 1), interleaved=True)}),
    ],
)
@pytest.mark.cpu_only("gradcheck draws from the CPU's generator")
def test_gradients_of_rotate(head_dim, fields, pairing):
    rope = phasor.Rotary(head_dim=head_dim, pairing=pairing, **fields)
    q, k = random_qk(batch=3, heads=2, groups=1, head_dim=head_dim)
    positions = torch.randint(0, 2**14, (rope.axes, 3, 7)) + 2**30
    positions = positions if rope.axes > 1 else positions[0].sort(-1).values
    inputs = (q.requires_grad_(), k.requires_grad_())
    assert gradcheck(lambda q, k: rope.rotate(q, k, positions), inputs, fast_mode=head_dim > 6)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_low_precision_are_the_rotation_back(dtype, pairing):
    rope = phasor.Rotary(head_dim=10, rotary_dim=6, pairing=pairing)
    frequencies, _ = exact_frequencies(None, 10000, 6)
    q, k = random_qk(batch=3, heads=2, groups=1, head_dim=10, dtype=dtype)
    positions = torch.arange(7) + 2**30
    matrices = torch.stack([rotation(p, frequencies, 10, pairing) for p in positions.tolist()])
    out = rope.rotate(q.requires_grad_(), k.requires_grad_(), positions)
    grads = [torch.randn_like(x) for x in out]
    torch.autograd.backward(out, grads)
    for x, grad in zip((q, k), grads, strict=True):
        expected = torch.einsum("bhte,tde->bhtd", grad.double(), matrices)
        assert x.grad.dtype == dtype
        torch.testing.assert_close(x.grad.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_rotate_leaves_its_inputs_alone():
    q, k = random_qk(dtype=torch.float32)
    before = q.clone(), k.clone()
    phasor.Rotary(head_dim=64).rotate(q, k, torch.arange(7))
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def xpos_scores(q, k, positions, width, decay):
    """The sum over pairs of `zeta^((m - n)/decay) q R(m - n)^T k`, half pairing, of one row `[T, D]`, in mpmath."""
    frequencies, _ = exact_frequencies(None, 10000, width)
    zeta = [(mp.mpf(2 * i) / width + mp.mpf("0.4")) / mp.mpf("1.4") for i in range(width // 2)]
    result = torch.zeros(len(positions), len(positions), dtype=torch.float64)
    for a, m in enumerate(positions):
        for b, n in enumerate(positions):
            total = mp.mpf(float(q[a, width:] @ k[b, width:]))
            for i in range(width // 2):
                cos, sin = mp.cos_sin((m - n) * frequencies[i])
                (qu, qv), (ku, kv) = (map(float, x[[i, i + width // 2]]) for x in (q[a], k[b]))
                # R(m) q . R(n) k = q . R(n - m) k
                rotated = qu * (ku * cos + kv * sin) + qv * (kv * cos - ku * sin)
                total += zeta[i] ** (mp.mpf(m - n) / decay) * rotated
            result[a, b] = float(total)
    return result


@pytest.mark.parametrize("start", [0, 1000, 2**30])
@pytest.mark.parametrize("decay", [512.0, 300.0])
@pytest.mark.parametrize("width", [10, 6])
def test_xpos_scores_are_the_formula(width, decay, start):
    rope = phasor.Rotary(phasor.XPosConfig(rotary_dim=width, decay=decay), head_dim=10)
    q, k = random_qk(batch=2, heads=1, groups=1, count=5, head_dim=10)
    positions = torch.tensor([[0, 1, 30, 700, 2900], [5, 6, 7, 8, 9]]) + start
    ours = scores(*rope.rotate(q, k, positions))
    for row in range(2):
        expected = xpos_scores(q[row, 0], k[row, 0], positions[row].tolist(), width, decay)
        # Relative to the largest of the decayed terms, which a sum may cancel.
        scale = expected.abs().clamp(min=1.0)
        assert ((ours[row, 0] - expected).abs() / scale).max() <= 1e-10


def test_xpos_counts_from_the_first_position_of_each_row():
    """Queries shrink and keys grow by the formula, around the middle of the 4,096 positions that float16 spans."""
    rope = phasor.Rotary(phasor.XPosConfig(), head_dim=8)
    frequencies, _ = exact_frequencies(None, 10000, 8)
    zeta = torch.tensor([(2 * i / 8 + 0.4) / 1.4 for i in range(4)] * 2, dtype=torch.float64)
    q, k = random_qk(batch=2, heads=1, groups=1, count=3, head_dim=8)
    positions = torch.tensor([[0, 1, 700], [90, 91, 1000]])
    rotated_q, rotated_k = rope.rotate(q, k, positions)
    for row in range(2):
        for t in range(3):
            position, since = int(positions[row, t]), int(positions[row, t] - positions[row, 0]) - 2048
            matrix = rotation(position, frequencies, 8, "half")
            torch.testing.assert_close(
                rotated_q[row, 0, t], q[row, 0, t] @ matrix * zeta ** (since / 512), rtol=1e-9, atol=0
            )
            torch.testing.assert_close(
                rotated_k[row, 0, t], k[row, 0, t] @ matrix * zeta ** (-since / 512), rtol=1e-9, atol=0
            )


@pytest.mark.cpu_only("values are not checked on a GPU")
@pytest.mark.parametrize("start", [0, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xpos_spans_32768_positions_and_no_more(dtype, start):
    rope = phasor.Rotary(phasor.XPosConfig(), head_dim=64)
    q, k = random_qk(batch=1, count=2, dtype=dtype)
    for rotated in rope.rotate(q, k, torch.tensor([0, 32767]) + start):
        assert rotated.isfinite().all()
        assert (rotated.norm(dim=-1) > 0).all()
    for span in (32768, 10**6):
        with pytest.raises(ValueError, match="32768 positions"):
            rope.rotate(q, k, torch.tensor([0, span]) + start)


@pytest.mark.cpu_only("values are not checked on a GPU")
def test_a_shorter_decay_spans_fewer_positions():
    rope = phasor.Rotary(phasor.XPosConfig(decay=64.0), head_dim=64)
    q, k = random_qk(batch=1, count=2, dtype=torch.float32)
    assert all(rotated.isfinite().all() for rotated in rope.rotate(q, k, torch.tensor([0, 4095])))
    with pytest.raises(ValueError, match="4096 positions"):
        rope.rotate(q, k, torch.tensor([0, 4096]))


@pytest.mark.parametrize("offset", OFFSETS)
def test_xpos_scores_depend_on_the_distance_alone(offset):
    rope = phasor.Rotary(phasor.XPosConfig(), head_dim=64)
    q, k = random_qk()
    positions = torch.tensor([0, 1, 2, 40, 41, 500, 600])
    near, far = (scores(*rope.rotate(q, k, positions + start)) for start in (0, offset))
    torch.testing.assert_close(far, near, rtol=0, atol=1e-11)  # keys grow up to 4 times over 600 positions


@pytest.mark.parametrize("extension", [DYNAMIC_NTK, DYNAMIC_YARN, LONGROPE], ids=lambda e: e["kind"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lengths_by_row_equal_each_row_alone(extension, dtype):
    rope = phasor.Rotary(head_dim=64, extension=extension)
    q, k = random_qk(batch=4, dtype=dtype)
    positions = torch.randint(0, 2**30, (4, 7))
    lengths = [100, 4097, 50001, 100]
    together = rope.rotate(q, k, positions, length=lengths)
    angles = torch.stack(rope.cos_sin(positions, length=lengths))
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        with dispatch.force_path("reference"):  # bit by bit only where the same operations run
            alone = rope.rotate(q[one], k[one], positions[one], length=length)
        assert torch.equal(together[0][one], alone[0])
        assert torch.equal(together[1][one], alone[1])
        assert torch.equal(angles[:, row], torch.stack(rope.cos_sin(positions[row], length=length)))
    assert not torch.equal(together[0][:1], rope.rotate(q[:1], k[:1], positions[:1], length=50001)[0])


def test_lengths_by_row_on_several_axes():
    rope = phasor.Rotary(phasor.AxialConfig(extension=DYNAMIC_NTK), head_dim=64)
    q, k = random_qk()
    positions = torch.randint(0, 1000, (2, 2, 7))
    together = rope.rotate(q, k, positions, length=[100, 50001])
    angles = torch.stack(rope.cos_sin(positions, length=[100, 50001]))
    for row, length in enumerate([100, 50001]):
        one = slice(row, row + 1)
        assert torch.equal(together[0][one], rope.rotate(q[one], k[one], positions[:, one], length=length)[0])
        assert torch.equal(angles[:, one], torch.stack(rope.cos_sin(positions[:, one], length=length)))


@pytest.mark.parametrize("sections", [(16, 24, 24), (8, 12, 44)])
def test_multi_section_rotation_is_that_of_qwen2_vl(sections):
    config = qwen2_vl.Qwen2VLTextConfig(
        hidden_size=128,
        num_attention_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)},
    )
    q, k = random_qk(head_dim=128, dtype=torch.float32)
    positions = torch.randint(0, 50, (3, 2, 7))  # near, where their float32 angles are still good
    cos, sin = qwen2_vl.Qwen2VLRotaryEmbedding(config)(q, positions)
    theirs = qwen2_vl.apply_rotary_pos_emb(q, k, cos, sin)
    ours = phasor.Rotary(phasor.MultiSectionConfig(sections=sections), head_dim=128).rotate(q, k, positions)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5)  # 50 positions times their float32 frequencies


@pytest.mark.parametrize("sections", [(24, 20, 20), (30, 13, 21), None])
def test_interleaved_rotation_is_that_of_qwen3_vl(sections):
    """Also with their default sections, where none are given."""
    own = {} if sections is None else {"mrope_section": list(sections)}
    config = qwen3_vl.Qwen3VLTextConfig(
        head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **own}
    )
    q, k = random_qk(head_dim=128, dtype=torch.float32)
    positions = torch.randint(0, 50, (3, 2, 7))
    theirs = qwen3_vl.apply_rotary_pos_emb(q, k, *qwen3_vl.Qwen3VLTextRotaryEmbedding(config)(q, positions))
    scheme = phasor.MultiSectionConfig(sections=sections, interleaved=True)
    for a, b in zip(phasor.Rotary(scheme, head_dim=128).rotate(q, k, positions), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5)


def test_axial_rotation_is_that_of_qwen2_vl_vision():
    q, k = random_qk(batch=1, heads=4, groups=4, head_dim=64, dtype=torch.float32)
    positions = torch.randint(0, 50, (2, 1, 7))
    frequencies = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    angles = (positions[:, 0, :, None] * frequencies).movedim(0, 1).flatten(1)  # [T, rows then columns]
    emb = torch.cat((angles, angles), dim=-1)
    theirs = qwen2_vl.apply_rotary_pos_emb_vision(q[0].transpose(0, 1), k[0].transpose(0, 1), emb.cos(), emb.sin())
    ours = phasor.Rotary(phasor.AxialConfig(), head_dim=64).rotate(q, k, positions)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a[0].transpose(0, 1), b, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "config",
    [
        phasor.AxialConfig(),
        phasor.MultiSectionConfig(sections=(8, 12, 12)),
        phasor.MultiSectionConfig(interleaved=True),
    ],
    ids=str,
)
def test_the_same_position_on_every_axis(config):
    """Text among images: one row of positions stands for all axes."""
    rope = phasor.Rotary(config, head_dim=64)
    q, k = random_qk()
    positions = torch.randint(0, 2**30, (2, 7))
    for a, b in zip(rope.rotate(q, k, positions), rope.rotate(q, k, positions.expand(rope.axes, 2, 7)), strict=True):
        assert torch.equal(a, b)


def test_positions_of_one_row_serve_the_whole_batch():
    rope = phasor.Rotary(head_dim=64)
    q, k = random_qk()
    positions = torch.arange(7) * 1000
    for batched in (positions[None], positions.expand(2, 7)):
        for a, b in zip(rope.rotate(q, k, positions), rope.rotate(q, k, batched), strict=True):
            assert torch.equal(a, b)


def test_a_single_pair_repeats_after_its_wavelength():
    """One pair rotates by one radian per position: 710 positions are 113 full rotations, almost exactly."""
    rope = phasor.Rotary(head_dim=2)
    cos, sin = rope.cos_sin(torch.tensor([0, 1, 710]), dtype=torch.float64)
    assert cos[1].item() == pytest.approx(math.cos(1), abs=1e-15)
    assert sin[2].item() == pytest.approx(710 - 226 * math.pi, rel=1e-8)


Q, K, AT = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 5, 16), torch.arange(5)
DYNAMIC = phasor.DynamicNTKScaling(factor=2.0, original_length=4)


@pytest.mark.parametrize(
    ("fields", "call", "message"),
    [
        ({}, {"q": Q[0]}, "q must be"),
        ({}, {"k": K[..., :8]}, "k must be"),
        ({}, {"q": Q.long()}, "floating-point"),
        ({}, {"positions": AT[:4]}, "4 positions for 5 queries"),
        ({}, {"positions": AT.float()}, "int64"),
        ({}, {"positions": AT.tolist()}, "int64"),
        ({}, {"positions": AT - 1}, "smallest given is -1"),
        ({}, {"positions": AT.expand(3, 5)}, "3 rows"),
        ({}, {"positions": AT.expand(1, 2, 5)}, r"\[T\] or \[B, T\]"),
        ({}, {"positions": AT[0]}, "positions must be"),
        ({}, {"k": K[:1]}, "q has 2 rows and k 1"),
        ({"config": phasor.AxialConfig()}, {"positions": AT.expand(3, 2, 5)}, "2 position rows"),
        ({"extension": DYNAMIC}, {}, "length"),
        ({"extension": DYNAMIC}, {"length": 5.0}, "length must be"),
        ({"extension": DYNAMIC}, {"length": torch.tensor(5)}, "length must be"),
        ({"extension": DYNAMIC}, {"length": -3}, "length"),
        ({"extension": DYNAMIC}, {"positions": AT.expand(2, 5), "length": [5.5, 8]}, "length must be"),
        ({"extension": DYNAMIC}, {"positions": AT.expand(2, 5), "length": [8]}, "length lists 1 rows"),
        ({"extension": DYNAMIC}, {"positions": AT.expand(2, 5), "length": 3}, "shorter than the 5 tokens"),
    ],
)
@pytest.mark.cpu_only("values are not checked on a GPU")
def test_bad_input_to_rotate_is_refused_in_one_sentence(fields, call, message):
    rope = phasor.Rotary(head_dim=16, **fields)
    with pytest.raises(ValueError, match=message):
        rope.rotate(**{"q": Q, "k": K, "positions": AT} | call)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 15}, "even"),
        ({"head_dim": 16, "rotary_dim": 5}, "even"),
        ({"head_dim": 16, "rotary_dim": 18}, "wider"),
        ({"head_dim": 16, "pairing": "halves"}, "half"),
        ({"head_dim": 16, "base": 1.0}, "greater than 1"),
        ({"head_dim": 14, "config": phasor.AxialConfig()}, "divisible by 4"),
        ({"head_dim": 16, "config": phasor.MultiSectionConfig(sections=(2, 2))}, "add up"),
        (
            {"head_dim": 16, "config": phasor.MultiSectionConfig(sections=(2, 2, 4), interleaved=True)},
            "cannot be interleaved in 8 pairs",
        ),
        (
            {"head_dim": 16, "sections": (4, 4), "config": phasor.AxialConfig()},
            "field of AxialConfig 'sections'",
        ),
        ({"head_dim": 16, "decay": 512.0, "config": phasor.AxialConfig()}, "field of AxialConfig 'decay'"),
        ({"head_dim": 16, "extension": "yarm"}, "yarn"),
        ({"head_dim": 16, "extension": {"kind": "yarn", "factor": 8.0}}, "original_length"),
        ({"head_dim": 2, "extension": phasor.NTKScaling(factor=2.0)}, "at least 4"),
        ({"head_dim": 2, "extension": DYNAMIC}, "at least 4"),
        ({"head_dim": 64, "extension": LONGROPE, "rotary_dim": 32}, "16 pairs"),
        ({"head_dim": 16, "bases": 1.0}, "did you mean 'base'"),
    ],
)
def test_bad_rotary_configurations_are_refused_where_they_are_made(fields, message):
    with pytest.raises(ValueError, match=message):
        phasor.Rotary(**fields)


@pytest.mark.parametrize("config", [phasor.XPosConfig(), phasor.AxialConfig(), phasor.MultiSectionConfig()], ids=str)
def test_rotary_of_a_related_configuration_is_the_module_of_that_scheme(config):
    rope = phasor.Rotary(config, head_dim=16)
    assert type(rope) is Position.class_for(type(config))
    assert type(rope) is not phasor.Rotary
    again = copy.deepcopy(rope)
    assert type(again) is type(rope)
    assert again.config == config

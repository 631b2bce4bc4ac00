"""The naive schemes (counting, normalized) and the learned table: what they add, where they end, what they show."""

import pytest
import torch

import phasor
from phasor.nn.positions.base import build_position
from phasor.nn.sequence import SequenceInfo

DIM = 6


def build(scheme):
    model = phasor.ModelConfig(vocab_size=9, dim=DIM, num_layers=1, num_heads=1, max_length=20, position=scheme)
    module = build_position(model.position, model, "decoder")
    for weight in module.parameters():
        torch.nn.init.normal_(weight)
    return module


def position_vectors(module, seq, rows=1):
    """What a scheme adds to a zero input."""
    return module.on_input(torch.zeros(rows, seq.positions.shape[-1], DIM), seq)


def test_counting_adds_the_position_times_a_direction():
    module = build(phasor.CountingConfig())
    positions = torch.tensor([[0, 1, 2, 10], [5, 7, 100000, 2**24 + 1]])
    out = position_vectors(module, SequenceInfo(positions, 4), rows=2)
    expected = positions[..., None].double() * module.direction.double()
    torch.testing.assert_close(out.double(), expected, rtol=2**-23, atol=0)  # one float32 rounding


def test_counting_grows_without_bound():
    module = build(phasor.CountingConfig())
    norms = position_vectors(module, SequenceInfo(torch.tensor([1, 10, 1000, 10**6]), 4))[0].norm(dim=-1)
    torch.testing.assert_close(norms / norms[0], torch.tensor([1.0, 10.0, 1000.0, 1e6]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [1, 2, 5, 300])
def test_normalized_adds_a_fraction_of_the_length(length):
    module = build(phasor.NormalizedConfig())
    count = min(length, 5)
    out = position_vectors(module, SequenceInfo(torch.arange(count), length))[0]
    fractions = torch.tensor([0.0 if length == 1 else t / (length - 1) for t in range(count)], dtype=torch.float64)
    torch.testing.assert_close(out.double(), fractions[:, None] * module.direction.double(), rtol=2**-23, atol=0)


def test_normalized_takes_a_length_for_each_token():
    module = build(phasor.NormalizedConfig())
    positions = torch.tensor([[0, 1, 2], [0, 0, 1]])
    lengths = torch.tensor([[3, 3, 3], [1, 2, 2]])  # the second row packs a lone token and a pair
    out = position_vectors(module, SequenceInfo(positions, lengths), rows=2)
    expected = torch.tensor([[0.0, 0.5, 1.0], [0.0, 0.0, 1.0]])[..., None] * module.direction
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


def test_the_same_step_means_another_distance_at_another_length():
    module = build(phasor.NormalizedConfig())
    steps = [position_vectors(module, SequenceInfo(torch.arange(5), n))[0].diff(dim=0).norm(dim=-1) for n in (5, 9)]
    torch.testing.assert_close(steps[0], 2 * steps[1], rtol=1e-5, atol=0)


def test_normalized_needs_a_length():
    with pytest.raises(ValueError, match="length"):
        position_vectors(build(phasor.NormalizedConfig()), SequenceInfo(torch.arange(3), None))


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_adds_the_row_of_the_position(offset):
    module = build(phasor.LearnedConfig(max_length=12, offset=offset))
    assert module.weight.shape == (12 + offset, DIM)
    positions = torch.tensor([[0, 1, 2], [11, 3, 3]])
    out = position_vectors(module, SequenceInfo(positions, 3), rows=2)
    for b in range(2):
        for t in range(3):
            assert torch.equal(out[b, t], module.weight[positions[b, t] + offset])


def test_learned_is_as_long_as_the_model_unless_it_says():
    assert build(phasor.LearnedConfig()).weight.shape == (20, DIM)


@pytest.mark.cpu_only("values are not checked on a GPU")
@pytest.mark.parametrize("positions", [torch.arange(13), torch.tensor([12]), torch.tensor([[0, 1], [3, 2**40]])])
def test_positions_beyond_a_learned_table_are_refused(positions):
    module = build(phasor.LearnedConfig(max_length=12, offset=2))
    with pytest.raises(ValueError, match="learned table of 12 positions"):
        position_vectors(module, SequenceInfo(positions, 13), rows=2)


@pytest.mark.parametrize("fields", [{"max_length": 0}, {"offset": -1}])
def test_bad_learned_tables_are_refused(fields):
    with pytest.raises(ValueError, match=r"LearnedConfig\."):
        phasor.LearnedConfig(**fields)


@pytest.mark.cpu_only("gradcheck draws from the CPU's generator")
@pytest.mark.parametrize("scheme", [phasor.CountingConfig(), phasor.NormalizedConfig(), phasor.LearnedConfig()])
def test_gradients_reach_the_input_and_the_weights(scheme):
    module = build(scheme).double()
    x = torch.randn(3, 7, DIM, dtype=torch.float64, requires_grad=True)
    seq = SequenceInfo(torch.randint(0, 7, (3, 7)), 7)
    (name, weight), *_ = module.named_parameters()

    def run(x, weight):
        return torch.func.functional_call(module, {name: weight}, (x, seq))

    module.forward = module.on_input
    assert torch.autograd.gradcheck(run, (x, weight), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scheme", [phasor.CountingConfig(), phasor.NormalizedConfig(), phasor.LearnedConfig()])
def test_the_input_keeps_its_type(scheme, dtype):
    module = build(scheme).to(dtype)
    out = module.on_input(torch.zeros(1, 5, DIM, dtype=dtype), SequenceInfo(torch.arange(5), 5))
    assert out.dtype == dtype
    assert out.isfinite().all()

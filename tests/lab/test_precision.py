"""The view "precision": its reference is exact to float64, and errors are those that others measure."""

import math
import statistics
import time

import mpmath
import numpy
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import phasor
from phasor.lab.angle_errors import angle_errors, exact_cos_sin, logits_at, sample_positions
from phasor.lab.endpoints import ENDPOINTS, FieldError
from phasor.lab.views.precision import POWERS, AnglesRequest, LogitsRequest, errors, logits

BASE, HEAD_DIM = 10000.0, 64


def precise_cos_sin(positions, base, head_dim):
    with mpmath.workdps(60):
        return [
            [
                [float(part) for part in (mpmath.cos(angle), mpmath.sin(angle))]
                for angle in (p * mpmath.mpf(base) ** (mpmath.mpf(-2 * i) / head_dim) for i in range(head_dim // 2))
            ]
            for p in positions
        ]


@pytest.mark.parametrize(("base", "head_dim"), [(10000.0, 64), (500000.0, 16), (37.5, 2)])
def test_the_reference_is_exact(base, head_dim):
    positions = sample_positions(range(0, 37, 4), 3, seed=1).flatten()
    found = exact_cos_sin(phasor.RotaryConfig(base=base), head_dim, positions)
    expected = torch.tensor(precise_cos_sin(positions.tolist(), base, head_dim), dtype=torch.float64)
    assert float((found - expected).abs().max()) < 1e-15


def test_errors_of_phasor_are_roundings_and_those_of_floats_grow():
    answer = errors(AnglesRequest())
    matrix = numpy.frombuffer(answer.data, "<f4").reshape(answer.shape)
    assert answer.shape == (3, len(POWERS), 32)
    exact, in_float32, in_bfloat16 = matrix.max(-1)
    for power, error in enumerate(exact.tolist()):  # rounding to float32, and the increment's error
        assert error <= 2**-25 + 2 * math.pi * 2.0 ** (power - 65) + 1e-14
    assert in_float32[0] < 1e-7
    assert 1e-3 < in_float32[20] < 0.1
    assert min(in_float32[28:]) > 1
    assert in_bfloat16[12] > 1


def test_float32_errors_are_those_of_transformers():
    """transformers multiplies in float32 as well; its frequencies are rounded a little worse."""
    rope = LlamaRotaryEmbedding(LlamaConfig(hidden_size=HEAD_DIM, num_attention_heads=1, rope_theta=BASE))
    powers = range(10, 27, 4)
    ours = angle_errors(phasor.RotaryConfig(), HEAD_DIM, powers, 24, seed=0)["float32"].amax(-1)
    positions = sample_positions(powers, 24, seed=0).flatten()
    cos, sin = (x[0, :, : HEAD_DIM // 2] for x in rope(torch.zeros(1, 1, 1), positions[None]))
    exact = torch.tensor(precise_cos_sin(positions.tolist(), BASE, HEAD_DIM), dtype=torch.float64)
    theirs = (torch.stack((cos, sin), dim=-1).double() - exact).abs().amax((-1, -2)).view(len(powers), -1).amax(1)
    assert torch.all((ours / theirs > 0.2) & (ours / theirs < 5))


def test_logits_stay_with_exact_angles_alone():
    answer = logits(LogitsRequest(offset=2**30))
    methods = answer["methods"]
    assert max(methods["phasor"]["changes"]) < 2e-6
    assert methods["phasor"]["predictions_changed"] == 0
    assert methods["float32"]["change"] > 0.05
    assert methods["bfloat16"]["changes"][3] > 0.05


def test_logits_at_the_beginning_are_those_of_the_model():
    """The exchanged positions compute what the model's own do; other methods agree with it near position 0."""
    first = logits_at(phasor.RotaryConfig(), 16, [0], seed=3)
    again = logits_at(phasor.RotaryConfig(), 16, [0], seed=3)
    assert torch.equal(first["phasor"], again["phasor"])
    assert float((first["float32"] - first["phasor"]).abs().max()) < 1e-5


def test_mistakes_name_their_field():
    with pytest.raises(FieldError, match="offset must be at most 68,719,476,736") as caught:
        ENDPOINTS["/api/precision/logits"].answer({"offset": 2**37})
    assert caught.value.field == "offset"


@pytest.mark.slow
def test_requests_are_fast():
    """The limit is 30 ms of CPU for each; the first one also builds the model."""
    for ask in (lambda i: errors(AnglesRequest(base=1e4 + i)), lambda i: logits(LogitsRequest(base=1e4 + i))):
        times = []
        for i in range(8):
            start = time.process_time()
            ask(i)
            times.append(time.process_time() - start)
        assert statistics.median(times) < 0.030

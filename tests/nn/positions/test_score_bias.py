"""The schemes that act on scores: T5's buckets and bias, ALiBi's slopes and bias."""

import pytest
import torch
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import phasor
from phasor.nn.positions.alibi.module import ALiBi, alibi_slopes
from phasor.nn.positions.t5.module import T5Bias
from phasor.nn.sequence import SequenceInfo

SIZES = [(32, 128), (32, 100), (16, 64), (8, 16), (32, 256), (64, 1000), (12, 50), (4, 7)]
DISTANCES = torch.arange(-1500, 1501)


def t5(buckets, max_distance, bidirectional, heads=3):
    config = phasor.T5PositionConfig(num_buckets=buckets, max_distance=max_distance)
    module = T5Bias(config, num_heads=heads, bidirectional=bidirectional)
    torch.nn.init.normal_(module.weight)
    return module


def exact_bucket(distance, buckets, max_distance, bidirectional):
    """The rule as written, in integers: past `exact`, the bucket is
    `exact + floor(log(n/exact) / log(max/exact) * exact)`, at most the last."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance < 0 else 0
        n = abs(distance)
    else:
        n = max(distance, 0)
    exact = buckets // 2
    if n < exact:
        return first + n
    steps = 0
    # (n/exact)^exact >= (max/exact)^steps, both sides times exact^exact
    while steps + 1 < exact and n**exact * exact ** (steps + 1) >= max_distance ** (steps + 1) * exact**exact:
        steps += 1
    return first + exact + steps


def on_a_bound(distance, buckets, max_distance, bidirectional):
    """Whether a distance lies exactly where a log-spaced bucket begins, so that float32 may round it below."""
    exact = (buckets // 2 if bidirectional else buckets) // 2
    n = abs(distance)
    return n > exact and any(n**exact * exact**j == max_distance**j * exact**exact for j in range(1, exact + 1))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), SIZES)
def test_buckets_are_the_rule_in_exact_arithmetic(buckets, max_distance, bidirectional):
    ours = t5(buckets, max_distance, bidirectional).bucket(DISTANCES).tolist()
    assert ours == [exact_bucket(d, buckets, max_distance, bidirectional) for d in DISTANCES.tolist()]
    assert set(ours) == set(range(buckets)) - ({buckets // 2} if bidirectional else set())  # ahead by 0 is not ahead


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), SIZES)
def test_buckets_are_those_of_transformers(buckets, max_distance, bidirectional):
    theirs = T5Attention._relative_position_bucket(-DISTANCES, bidirectional, buckets, max_distance)
    ours = t5(buckets, max_distance, bidirectional).bucket(DISTANCES)
    differ = DISTANCES[ours != theirs].tolist()
    assert all(on_a_bound(d, buckets, max_distance, bidirectional) for d in differ)
    if (buckets, max_distance) == (32, 128):  # every published T5
        assert differ == []


def test_far_distances_share_the_last_bucket():
    far = torch.tensor([128, 129, 10**6, 2**40])
    assert t5(32, 128, True).bucket(far).tolist() == [15] * 4
    assert t5(32, 128, True).bucket(-far).tolist() == [31] * 4
    assert t5(32, 128, False).bucket(far).tolist() == [31] * 4
    assert t5(32, 128, False).bucket(-far).tolist() == [0] * 4


@pytest.mark.parametrize("start", [0, 2**40])
@pytest.mark.parametrize("is_decoder", [True, False])
def test_t5_bias_is_that_of_transformers(is_decoder, start):
    config = T5Config(num_heads=3, d_kv=4, d_model=12, is_decoder=is_decoder)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    module = t5(32, 128, bidirectional=not is_decoder)
    theirs.relative_attention_bias.weight.data.copy_(module.weight.data)
    positions = torch.arange(200)[None] + start
    ours = module.on_scores(module.prepare(SequenceInfo(positions, 200), torch.zeros(1)))(positions, positions)
    assert ours.shape == (1, 3, 200, 200)
    assert torch.equal(ours, theirs.compute_bias(200, 200))


def test_t5_bias_of_some_queries_and_keys_by_row():
    module = t5(8, 16, bidirectional=False)
    queries, keys = torch.tensor([[7, 3], [100, 5]]), torch.tensor([[0, 6, 7], [99, 4, 1]])
    bias = module.on_scores(None)(queries, keys)
    assert bias.shape == (2, 3, 2, 3)
    for b in range(2):
        for i in range(2):
            for j in range(3):
                bucket = exact_bucket(int(queries[b, i] - keys[b, j]), 8, 16, False)
                assert torch.equal(bias[b, :, i, j], module.weight[bucket])


def paper_slopes(heads):
    """For n heads, n a power of two: start at 2^(-8/n), and that is the ratio. Otherwise those of the closest power
    below, then every second one of twice that power, from the first."""
    power = max(2**p for p in range(10) if 2**p <= heads)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    more = [2.0 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return slopes + more[: heads - power]


def bias_of(heads, count, start=0, dtype=torch.float32):
    module = ALiBi(phasor.ALiBiConfig(), num_heads=heads)
    positions = torch.arange(count)[None] + start
    return module.on_scores(module.prepare(SequenceInfo(positions, count), torch.zeros(1, dtype=dtype)))(
        positions, positions
    )


@pytest.mark.parametrize("heads", range(1, 21))
def test_slopes_are_those_of_the_paper(heads):
    assert alibi_slopes(heads) == pytest.approx(paper_slopes(heads), rel=1e-15)


@pytest.mark.parametrize("heads", range(1, 21))
def test_alibi_is_that_of_bloom_and_mpt(heads):
    """Theirs is relative to position 0 and to the last one; a row of scores may be shifted freely under softmax."""
    ours = bias_of(heads, 9)[0]
    bloom = build_alibi_tensor(torch.ones(1, 9), heads, torch.float32).expand(heads, 9, 9)
    mpt = build_mpt_alibi_tensor(heads, 9).expand(heads, 9, 9)
    behind = torch.ones(9, 9).tril().bool()
    for theirs in (bloom, mpt):
        relative = theirs - theirs.diagonal(dim1=-2, dim2=-1)[..., None]
        torch.testing.assert_close(ours[:, behind], relative[:, behind], rtol=1e-5, atol=0)  # their float32 powers


def test_published_slopes():
    """The figures in the paper: 8 heads halve from 1/2, 16 heads start at 1/sqrt(2)."""
    assert alibi_slopes(8) == tuple(2.0**-h for h in range(1, 9))
    assert alibi_slopes(16)[:2] == pytest.approx((2**-0.5, 0.5), rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 2**30, 2**40])
def test_alibi_is_slope_times_distance_both_ways(start, dtype):
    bias = bias_of(6, 11, start, dtype)
    assert bias.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for h, slope in enumerate(paper_slopes(6)):
        for i in range(11):
            for j in range(11):
                assert bias[0, h, i, j].item() == pytest.approx(-slope * abs(i - j), rel=1e-7)


def test_max_bias_stretches_the_slopes():
    assert alibi_slopes(8, max_bias=16.0) == tuple(4.0**-h for h in range(1, 9))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: phasor.T5PositionConfig(num_buckets=6), "multiple of 4"),
        (lambda: phasor.T5PositionConfig(num_buckets=0), "greater than 0"),
        (lambda: phasor.T5PositionConfig(num_buckets=32, max_distance=16), "half of"),
        (lambda: phasor.ALiBiConfig(max_bias=0.0), "greater than 0"),
    ],
)
def test_bad_configurations_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

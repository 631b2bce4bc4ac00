"""Several schemes in one layer: the sum of what each does, and which combinations there are."""

import pytest
import torch
from device import DEVICE
from references import normal
from schemes import build, relative_change, tiny, tokens

import phasor
from phasor import CombinedConfig
from phasor.nn.positions.alibi.module import alibi_slopes
from phasor.nn.positions.base import build_position
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import DistanceBias


def combined(*schemes):
    return CombinedConfig(schemes=schemes)


def test_rotary_with_alibi_is_rotated_scores_and_a_penalty():
    """Scores in float64, written out: rotate by complex numbers, then subtract slope times distance."""
    heads, count, width = 2, 9, 8
    config = tiny(combined("alibi", phasor.RotaryConfig(base=100.0)), num_heads=heads, num_kv_heads=heads)
    module = build_position(config.position, config, "decoder")
    q, k, v = (normal(1, count, heads, width, seed=s) for s in (1, 2, 3))
    positions = torch.arange(count)
    prepared = module.prepare(SequenceInfo(positions, count), q)
    ours_q, ours_k, ours_v = module.on_heads(q, k, v, prepared)
    bias = module.on_scores(prepared)
    assert isinstance(bias, DistanceBias)  # one bias alone takes the kernel
    ours = torch.einsum("bqhd,bkhd->bhqk", ours_q, ours_k) + bias(positions[None], positions[None])
    turn = torch.exp(1j * positions[:, None].double() * 100.0 ** (-torch.arange(4).double() / 4))[:, None]
    a, b = (torch.complex(x[0, ..., :4], x[0, ..., 4:]) * turn for x in (q, k))
    scores = torch.einsum("qhd,khd->hqk", a, b.conj()).real
    distance = (positions[:, None] - positions).abs()
    expected = scores - torch.tensor(alibi_slopes(heads))[:, None, None] * distance
    torch.testing.assert_close(ours[0], expected, rtol=0, atol=1e-10)
    assert torch.equal(ours_v, v)


def test_the_kernel_of_rotary_runs_where_it_does_alone():
    config = tiny(combined("temperature", "rotary", "alibi"))
    module = build_position(config.position, config, "decoder").to(DEVICE)
    prepared = module.prepare(SequenceInfo(torch.arange(5, device=DEVICE), 5), torch.zeros(1, 5, 32, device=DEVICE))
    assert module.kernel_why_not(prepared) == module.parts[1].kernel_why_not(prepared[1])
    projected = normal(1, 5, 2, 4, 8).to(DEVICE, torch.float32)
    by_projection = module.on_projection(projected, prepared)
    by_heads = module.on_heads(
        projected[..., :2, :].flatten(2, 3), projected[..., 2, :], projected[..., 3, :], prepared
    )
    for x, y in zip(by_projection, by_heads, strict=True):
        torch.testing.assert_close(x, y)


def test_biases_add_up_and_their_weights_learn():
    config = tiny(combined("kerple", "t5"))
    module = build_position(config.position, config, "decoder")
    module.reset_parameters(config)
    positions = torch.arange(7)[None]
    bias = module.on_scores(module.prepare(SequenceInfo(positions, 7), torch.zeros(1)))(positions, positions)
    parts = [p.on_scores(p.prepare(SequenceInfo(positions, 7), torch.zeros(1))) for p in module.parts]
    torch.testing.assert_close(bias, sum(part(positions, positions) for part in parts))
    model = build(config)
    model(tokens(1, 12)).square().mean().backward()
    learned = [w for n, w in model.named_parameters() if "positions" in n]
    assert len(learned) == 3
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in learned)


def test_an_extension_is_that_of_the_part_that_rotates():
    config = tiny(combined("rotary", "alibi"))
    extended = config.with_extension(phasor.LinearScaling(factor=2.0))
    assert extended.position.extension.factor == 2.0
    assert extended.max_length == 2 * config.max_length
    ids, places = tokens(1, 9), torch.arange(9)
    # Interpolated by 2 at even positions is plain rotary at half of them, beside twice the slopes.
    slopes = phasor.ALiBiConfig(multiplier=2.0)
    halved = build(config.replace(position=combined("rotary", slopes))).double()(ids, positions=places)
    ours = build(extended).double()(ids, positions=2 * places)
    assert relative_change(ours, halved) < 1e-12
    report = phasor.explain(extended)
    assert report.schemes[0].pairs
    assert report.schemes[0].acts_on == ("queries", "keys", "scores")


@pytest.mark.parametrize(
    ("schemes", "message"),
    [
        (["rotary"], "at least 2"),
        (["rotary", "xpos"], "both rotate"),
        (["rotary", "none"], "cannot contain 'none'"),
        (["rotary", "combined"], "cannot contain 'combined'"),
        (["learned", "rotary"], "acts on the model's input"),
        (["mrope", "alibi"], "3 positions"),
        (["rotary", "alibbi"], "did you mean 'alibi'"),
    ],
)
def test_combinations_that_cannot_be_are_refused(schemes, message):
    with pytest.raises(ValueError, match=message):
        CombinedConfig(schemes=schemes)


def test_queries_keys_and_values_alone_are_as_together():
    """Latent attention takes queries and keys one by one."""
    config = tiny(combined("temperature", phasor.RotaryConfig(rotate_values=True)))
    module = build_position(config.position, config, "decoder")
    q, k, v = (normal(1, 9, 4, 8, seed=s) for s in (1, 2, 3))
    prepared = module.prepare(SequenceInfo(torch.arange(9), 9), q)
    alone = module.on_query(q, prepared), module.on_key(k, prepared), module.on_value(v, prepared)
    for one, together in zip(alone, module.on_heads(q, k, v, prepared), strict=True):
        assert torch.equal(one, together)

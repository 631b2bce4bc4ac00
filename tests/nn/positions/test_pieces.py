"""Rotary positions whose distances have several pieces, against distances written out pair by pair in float64."""

import pytest
import torch
from references import normal
from schemes import HEAD_DIM, build, relative_change, tiny, tokens

import phasor
from phasor.nn.positions.base import build_position
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import ATTENTION, Mask, ScoreMod, attention, attention_ref

WINDOW, GROUP, CHUNK, TRAINED = 5, 3, 6, 10


def self_extend(m, n):
    """Grouped distances beyond the window, which begin where the true ones end."""
    return m - n if m - n < WINDOW else m // GROUP - n // GROUP + WINDOW - WINDOW // GROUP


def rerope(m, n):
    return min(m - n, WINDOW)


def dual_chunk(m, n):
    """The query's position by how many chunks the key is behind, minus the key's within its chunk."""
    apart = m // CHUNK - n // CHUNK
    query = [m % CHUNK, min(m % CHUNK + CHUNK, TRAINED - 1), TRAINED - 1][min(apart, 2)]
    return query - n % CHUNK


SCHEMES = {
    "selfextend": (phasor.SelfExtendConfig(window=WINDOW, group=GROUP), self_extend),
    "rerope": (phasor.SelfExtendConfig(window=WINDOW, group=None), rerope),
    "dualchunk": (phasor.DualChunkConfig(chunk_length=CHUNK, trained_length=TRAINED), dual_chunk),
}


def weights_by_distance(q, k, distances):
    """Attention weights of the scores `q R(distance) k` over the keys behind, in float64."""
    theta = 10000.0 ** (-torch.arange(HEAD_DIM // 2).double() / (HEAD_DIM // 2))
    a, b = (torch.complex(x[0, ..., : HEAD_DIM // 2], x[0, ..., HEAD_DIM // 2 :]) for x in (q, k))
    turned = torch.exp(1j * distances[..., None] * theta)
    scores = torch.einsum("qhd,qkd,khd->hqk", a, turned, b.conj()).real * 0.5
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf")).softmax(-1)


@pytest.mark.parametrize("name", SCHEMES)
def test_keys_at_later_positions_have_the_mirrored_distance_in_a_decoder(name):
    """Coupled positions: earlier tokens with later positions, as many before as after the query."""
    config, distance = SCHEMES[name]
    module = build_position(config, tiny(config, num_heads=2, num_kv_heads=2), "decoder")
    positions = torch.cat((torch.arange(15), torch.arange(29, 14, -1)))  # of chunks of 6 there are 5
    q, k, v = (normal(1, len(positions), 2, HEAD_DIM, seed=s) for s in (1, 2, 3))
    prepared = module.prepare(SequenceInfo(positions, 30), q)
    rotated_q, rotated_k, _ = module.on_heads(q, k, v, prepared)
    score_mod = ScoreMod(scale=0.5, query_positions=positions[None], key_positions=positions[None])
    mask = Mask(causal=True)
    *heads, score_mod = module.on_attention(rotated_q, rotated_k, mask, score_mod, prepared)
    _, ours = attention_ref(*heads, v, mask, score_mod)

    def both_ways(m, n):
        if m >= n:
            return distance(m, n)
        return -distance(29 - m, 29 - n) if name == "dualchunk" else -distance(n, m)  # whose chunks begin at the end

    expected = torch.tensor([[both_ways(m, n) for n in positions.tolist()] for m in positions.tolist()])
    torch.testing.assert_close(ours[0], weights_by_distance(q, k, expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("start", [0, 2**36 - 30])
@pytest.mark.parametrize("name", SCHEMES)
def test_scores_are_those_of_the_distances(name, start):
    config, distance = SCHEMES[name]
    count, heads = 29, 2
    model = tiny(config, num_heads=heads, num_kv_heads=heads)
    module = build_position(config, model, "decoder")
    q, k, v = (normal(1, count, heads, HEAD_DIM, seed=s) for s in (1, 2, 3))
    positions = start + torch.arange(count)
    rotated_q, rotated_k, _ = module.on_heads(q, k, v, module.prepare(SequenceInfo(positions, count), q))
    pieces = module.pieces(rotated_q, rotated_k, positions[None], positions[None], True)
    places = {"query_positions": positions[None], "key_positions": positions[None]}
    score_mod = ScoreMod(scale=0.5, pieces=pieces, **places)
    y, ours = attention_ref(rotated_q, rotated_k, v, Mask(causal=True), score_mod)
    known = positions.tolist()
    distances = torch.tensor([[distance(m, n) if n <= m else 0 for n in known] for m in known]).double()
    expected = weights_by_distance(q, k, distances)
    torch.testing.assert_close(ours[0], expected, rtol=0, atol=1e-6)  # phases are exact to 2^-29 rotations there
    if start == 0:
        torch.testing.assert_close(ours[0], expected, rtol=0, atol=1e-12)
        args = rotated_q, rotated_k, v, Mask(causal=True), score_mod
        torch.testing.assert_close(attention(*args), y, rtol=0, atol=1e-12)
        path, reasons = ATTENTION.explain(*args)
        assert path == "reference in blocks of queries"
        assert all("pieces" in reasons[name] for name in ("SDPA in one call", "SDPA in blocks of queries"))


@pytest.mark.parametrize("name", SCHEMES)
def test_near_texts_are_those_of_rotary_and_gradients_flow(name):
    config, _ = SCHEMES[name]
    plain, ours = (build(tiny(p)).double() for p in ("rotary", config))
    near = tokens(1, 5)  # within a window and a chunk
    assert relative_change(ours(near), plain(near)) < 1e-12
    assert relative_change(ours(tokens(1, 30)), plain(tokens(1, 30))) > 1e-3
    grads = []
    for dtype in (torch.float32, torch.float64):
        model = build(tiny(config)).to(dtype)
        model(tokens(1, 30)).square().mean().backward()
        grads.append([w.grad.double() for w in model.parameters() if w.grad is not None])
    for single, double in zip(*grads, strict=True):
        assert relative_change(single, double) < 1e-3


def test_groups_of_one_token_are_rotary_and_combine_with_a_bias():
    ids = tokens(1, 30)
    config = phasor.SelfExtendConfig(window=4, group=1)
    assert relative_change(build(tiny(config)).double()(ids), build(tiny("rotary")).double()(ids)) < 1e-12
    both = [build(tiny(phasor.CombinedConfig(schemes=(p, "alibi")))).double()(ids) for p in (config, "rotary")]
    assert relative_change(*both) < 1e-12


SINKS = {"window": 4, "sink_tokens": 1, "cap_sinks": True}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: phasor.SelfExtendConfig(window=0), "at least 1"),
        (lambda: phasor.SelfExtendConfig(group=0), "at least 1"),
        (lambda: phasor.SelfExtendConfig(extension={"kind": "linear", "factor": 2}), "neither an extension"),
        (lambda: phasor.DualChunkConfig(rotate_values=True), "neither an extension"),
        (lambda: phasor.DualChunkConfig(chunk_length=9, trained_length=9), "greater than chunk_length"),
        (lambda: tiny(phasor.DualChunkConfig(), attention=SINKS), "cap_sinks"),
        (lambda: tiny("selfextend").with_extension(phasor.LinearScaling(factor=2.0)), "no extension|needs rotary"),
    ],
)
def test_bad_configurations_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""The view Encodings: its numbers against formulas in high precision and against transformers."""

from __future__ import annotations

import math
import time

import mpmath
import numpy as np
import pytest
import torch

from phasor.config import PositionConfig
from phasor.lab.codes import build_scheme
from phasor.lab.criteria import score_card
from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.views import import_views

import_views()
KINDS = sorted(PositionConfig.kinds)


def ask(name, **body):
    return ENDPOINTS[f"/api/encodings/{name}"].answer(body)


def matrix(**body):
    found = ask("matrix", **body)
    return np.frombuffer(found.data, dtype="<f4").reshape(found.shape)


@pytest.mark.parametrize("start", [0, 2**36 - 7])
def test_sinusoidal_rows_are_those_of_the_formula(start):
    rows = matrix(position={"kind": "sinusoidal", "layout": "halves"}, dim=32, length=8, start=start)
    with mpmath.workdps(40):
        for row, t in zip(rows, range(start, start + 8), strict=True):
            angles = [t * mpmath.mpf(10000) ** (-mpmath.mpf(2 * i) / 32) for i in range(16)]
            expected = [float(f(a)) for f in (mpmath.sin, mpmath.cos) for a in angles]
            assert np.abs(row - expected).max() < 1e-7


@pytest.mark.parametrize("kind", ["rotary", "accumulated"])  # the second over tokens that are all zeros
def test_rotary_rows_are_cosines_and_sines(kind):
    rows = matrix(position=kind, dim=16, length=5)
    angles = np.arange(5)[:, None] * 10000.0 ** (-np.arange(8) / 8)
    assert np.abs(rows - np.concatenate((np.cos(angles), np.sin(angles)), axis=1)).max() < 1e-7


def test_polar_rows_are_cosines_and_sines_of_every_feature():
    rows = matrix(position="pope", dim=16, length=5)
    angles = np.arange(5)[:, None] * 10000.0 ** (-np.arange(16) / 16)
    expected = np.log1p(np.e) * np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    assert np.abs(rows - expected).max() < 1e-6


def test_contextual_positions_count_tokens_that_are_alike():
    """A query and keys of ones have the gate sigmoid(sqrt(dim)), and the count is a multiple of it."""
    scheme = build_scheme(PositionConfig.from_dict({"kind": "cope", "max_position": 6}), 16)
    table = scheme.module.vectors[0].detach().double().numpy()
    counts = np.minimum(np.arange(1, 11) / (1 + np.exp(-4)), 6)
    low, high = np.floor(counts).astype(int), np.ceil(counts).astype(int)
    e = table[low] + (table[high] - table[low]) * (counts - low)[:, None]
    assert np.abs(scheme.codes(torch.arange(10), 10).numpy()[:, 0] - e.sum(-1) / 4).max() < 1e-12


def test_contextual_positions_count_the_tokens_of_a_text():
    """Gates are sigmoid(q k / sqrt(dim)), with a query of ones and, after the first, the tokens of the text as keys."""
    scheme = build_scheme(PositionConfig.from_dict({"kind": "cope", "max_position": 20}), 16)
    text = torch.randn(9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gates = 1 / (1 + np.exp(-np.concatenate(([16.0], text[1:].sum(-1).numpy())) / 4))
    counts = gates.cumsum()  # of key 0 for the query of each row
    table = scheme.module.vectors[0].detach().double().numpy()
    low, high = np.floor(counts).astype(int), np.ceil(counts).astype(int)
    e = table[low] + (table[high] - table[low]) * (counts - low)[:, None]
    assert np.abs(scheme.codes(torch.arange(9), 9, text=text).numpy()[:, 0] - e.sum(-1) / 4).max() < 1e-12


def test_alibi_map_is_that_of_transformers():
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = build_alibi_tensor(torch.ones(1, 2), 8, torch.float32)[:, 0, 1].numpy()
    for head in (0, 7):
        distance = np.abs(np.arange(6)[:, None] - np.arange(6))
        assert np.allclose(matrix(position="alibi", length=6, head=head), -slopes[head] * distance, rtol=1e-6)


def test_t5_buckets_are_those_of_transformers():
    from transformers.models.t5.modeling_t5 import T5Attention

    found = ask("facts", position="t5", length=200)
    expected = T5Attention._relative_position_bucket(-torch.arange(200), bidirectional=False)
    assert found["buckets"] == expected.tolist()
    bias = np.array(found["bias"])
    for distance in range(1, 200):
        same_bucket = expected[distance] == expected[distance - 1]
        assert bool(np.array_equal(bias[:, distance], bias[:, distance - 1])) == bool(same_bucket)


def test_t5_map_has_one_value_for_each_distance():
    bias = ask("facts", position="t5", length=24)["bias"][3]
    rows = matrix(position="t5", length=24, head=3)
    for query in range(24):
        for key in range(query + 1):
            assert math.isclose(rows[query, key], bias[query - key], rel_tol=1e-6)


def test_similarity_of_sinusoids_is_the_mean_cosine():
    found = ask("facts", position="sinusoidal", dim=64, length=32)["similarity"]
    for distance in range(32):
        expected = sum(math.cos(distance * 10000.0 ** (-i / 32)) for i in range(32)) / 32
        for curve in ("least", "mean", "most"):
            assert abs(found[curve][distance] - expected) < 1e-12


@pytest.mark.parametrize("kind", ["rotary", "xpos"])
def test_similarity_of_rotary_is_the_score_that_the_library_gives(kind):
    import phasor

    config = PositionConfig.from_dict({"kind": kind})
    rope = phasor.Rotary(config, head_dim=16)
    vector = torch.cat((torch.ones(8), torch.zeros(8))).double().expand(1, 1, 12, 16)
    q, k = rope.rotate(vector, vector, torch.arange(12))
    scores = (q @ k.mT)[0, 0] / 8
    found = ask("facts", position=kind, dim=16, length=12)["similarity"]
    for distance in range(12):
        assert abs(found["mean"][distance] - float(scores.diagonal(-distance).mean())) < 1e-12
        assert found["most"][distance] - found["least"][distance] < 1e-12


def test_counting_depends_on_where_it_starts():
    found = ask("facts", position="counting", length=16)["similarity"]
    assert found["most"][1] - found["least"][1] > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_pair_is_the_nearest(kind):
    length = 20
    found = ask("facts", position=kind, dim=32, length=length)["nearest"]
    if "scores" in PositionConfig.kinds[kind]().acts_on:
        rows = np.array(ask("facts", position=kind, dim=32, length=length)["bias"]).T
    else:
        rows = matrix(position=kind, dim=32, length=length).astype(float)
    least = min(np.linalg.norm(rows[a] - rows[b]) for a in range(length) for b in range(a))
    assert found["distance"] == pytest.approx(least, rel=1e-5, abs=1e-6)
    assert found["distance"] == pytest.approx(np.linalg.norm(rows[found["a"]] - rows[found["b"]]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "position",
    [
        {"kind": "sinusoidal"},
        {"kind": "sinusoidal", "layout": "halves"},
        {"kind": "sinusoidal", "layout": "halves", "spacing": "ends"},
        {"kind": "rotary"},
        {"kind": "rotary", "pairing": "adjacent", "rotary_dim": 16},
        {"kind": "rotary", "extension": {"kind": "yarn", "factor": 4, "original_length": 64}},
    ],
)
@pytest.mark.parametrize("dim", [32, 33])
def test_a_later_row_is_an_earlier_one_rotated(position, dim):
    if dim % 2 and position["kind"] == "rotary":
        position = {**position, "rotary_dim": 16}
    for start in (0, 1000, 2**36):
        found = ask("rotation", position=position, dim=dim, start=start, shift=1 + start % 7)
        assert found["error"] < 1e-14
        assert len(found["increments"]) in (8, 16)


def test_a_decay_stretches_rows_as_well():
    assert ask("rotation", position="xpos", dim=32)["error"] > 1e-3


@pytest.mark.parametrize("kind", ["alibi", "t5", "learned", "counting", "normalized", "none", "axial", "mrope"])
def test_schemes_without_one_axis_of_pairs_have_no_rotation(kind):
    assert ask("rotation", position=kind) == {"increments": [], "error": None}


def test_the_score_card_says_what_holds():
    cards = {card["kind"]: card for card in ask("criteria", dim=32, length=48)}
    criteria = ("unique", "consistent", "bounded", "deterministic")
    expected = {
        "alibi": ["bounded"],
        "axial": [],
        "combined": ["bounded"],
        "cope": ["consistent", "deterministic"],
        "counting": ["bounded"],
        "disentangled": [],
        "dualchunk": [],
        "fire": [],
        "forget": ["consistent", "bounded", "deterministic"],
        "grape": [],
        "kerple": ["bounded"],
        "learned": ["bounded"],
        "mrope": [],
        "none": ["unique"],
        "normalized": ["consistent"],
        "pope": [],
        "profiles": ["consistent", "deterministic"],
        "rotary": [],
        "sandwich": [],
        "accumulated": ["consistent", "deterministic"],
        "selfextend": [],
        "shaw": ["unique"],
        "sinusoidal": [],
        "t5": ["unique"],
        "temperature": ["bounded"],
        "transformerxl": [],
        "xpos": ["bounded"],
    }
    assert {kind: [name for name in criteria if not cards[kind][name]["holds"]] for kind in expected} == expected
    assert cards["learned"]["bounded"]["refused"]
    assert cards["xpos"]["bounded"]["refused"]
    assert {kind for kind in expected if cards[kind]["deterministic"]["learned"]} == {
        "cope",
        "counting",
        "disentangled",
        "fire",
        "forget",
        "grape",
        "kerple",
        "learned",
        "normalized",
        "accumulated",
        "pope",
        "profiles",
        "shaw",
        "t5",
        "transformerxl",
    }
    # one step of t/(n - 1) is half as long in a sentence of twice the length
    assert cards["normalized"]["consistent"]["change"] == pytest.approx(1 - 47 / 95)


def follows_text(config: PositionConfig) -> bool:
    """Whether codes depend on the tokens; vectors of the distance that multiply queries are the same in every text."""
    return config.kind in ("accumulated", "cope", "forget", "profiles")


def test_the_score_card_agrees_with_what_schemes_state():
    for card in ask("criteria", dim=32, length=16):
        config = PositionConfig.kinds[card["kind"]]()
        varies = config.depends_on_length or follows_text(config)
        assert varies != card["consistent"]["holds"]


def test_concatenation_is_a_sum_of_two_projections():
    found = ask("combination", dim=64, width=16, length=32, token_std=0.05)
    assert found["concat"]["sum_error"] < 1e-12
    assert (found["sum"]["width"], found["concat"]["width"], found["concat"]["parameters"]) == (64, 80, 80 * 64)
    assert found["sum"]["positions_read"] == 1.0
    assert len(found["feature_std"]) == 64
    assert 0 < found["moving"] < 64
    loud = ask("combination", dim=64, width=16, length=32, token_std=20.0)
    assert loud["sum"]["positions_read"] < 0.5
    assert loud["sum"]["tokens_read"] == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_every_scheme_has_a_matrix_of_its_size(kind):
    rows = matrix(position=kind, dim=64, length=10, start=3)
    width = {"pope": 128}.get(kind, 64)  # a cosine and a sine of every feature
    assert rows.shape == ((10, 10) if "scores" in PositionConfig.from_dict({"kind": kind}).acts_on else (10, width))
    assert np.isfinite(rows).all()


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"position": "rotari"}, "position", "did you mean 'rotary'"),
        ({"position": {"kind": "sinusoidal", "base": 1}}, "position.base", "greater than 1"),
        ({"position": {"kind": "learned", "max_length": 2**40}}, "position.max_length", "at most 268,435,456"),
        ({"position": {"kind": "learned", "offset": 2**24}}, "position", "at most 4,194,304 weights"),
        ({"position": {"kind": "shaw", "max_distance": 2**20}}, "position", "at most 4,194,304 weights"),
        (
            {"position": {"kind": "combined", "schemes": ["rotary", {"kind": "fire", "hidden_dim": 2**30}]}},
            "position.schemes",
            "FIREConfig.hidden_dim must be at most",
        ),
        (
            {"position": {"kind": "combined", "schemes": ["rotary", {"kind": "t5", "max_distance": 2**37}]}},
            "position.max_distance",
            "at most 68,719,476,736 here",
        ),
        ({"position": {"kind": "mrope", "sections": [1] * 64}}, "position", "at most 8 axes"),
        ({"position": "learned", "start": 2000}, "start", "ends after 1,024 positions"),
        ({"dim": 513}, "dim", "at most 512"),
        ({"length": 2000}, "length", "at most 1,024"),
        ({"length": 1}, "length", "at least 2"),  # one position has no nearest
        ({"start": 2**36}, "start", "2^36"),
        ({"head": 8}, "head", "below the number of heads"),
        ({"position": "rotary", "dim": 33}, None, "must be even"),
        ({"position": {"kind": "alibi", "multiplier": 1e308}}, None, "overflow"),
    ],
)
def test_a_mistake_is_one_sentence_about_its_field(body, field, words):
    with pytest.raises(ValueError, match=words.replace("^", r"\^")) as caught:
        ask("matrix", **body)
    assert getattr(caught.value, "field", None) == field
    assert "\n" not in str(caught.value)


def test_criteria_of_a_new_size_build_each_scheme_once():
    """And once more for a table that ends."""
    score_card.cache_clear()
    for kind, expected in (("sinusoidal", 1), ("rotary", 1), ("alibi", 1), ("t5", 1), ("learned", 2)):
        build_scheme.cache_clear()
        score_card(PositionConfig.kinds[kind](), 24, 20)
        assert build_scheme.cache_info().misses == expected, kind


@pytest.mark.slow
def test_a_request_takes_little_time():
    changes = {"combination": ("base", 10000.0), "criteria": ("length", 100)}
    for name in ("matrix", "facts", "rotation", "combination", "criteria"):
        ask(name)
        field, value = changes.get(name, ("start", 0))
        times = []
        few = {"count": 5} if name == "criteria" else {}  # as many as the page asks for at once
        for start in range(5):
            began = time.process_time()
            ask(name, **{field: value + start}, **few)
            times.append(time.process_time() - began)
        assert min(times) < 0.030, name  # the least: others may be using the same cores


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_same_in_every_sentence_unless_a_scheme_follows_the_input(kind):
    """By the layer itself, on two texts of random tokens."""
    config = PositionConfig.kinds[kind]()
    (card,) = [one for one in ask("criteria", dim=64, length=24) if one["kind"] == kind]
    assert card["deterministic"]["holds"] is not follows_text(config)
    if follows_text(config):
        assert not card["consistent"]["holds"]
        assert card["deterministic"]["learned"]


def test_sums_over_a_text_are_those_of_its_gates():
    """The bias of forget gates by their formula, -sum of log sigmoid(w x + b) over the tokens after the first."""
    scheme = build_scheme(PositionConfig.kinds["forget"](), 16, heads=3)
    text = torch.randn(9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    codes = scheme.codes(torch.arange(9), 9, text=text)
    weight, bias = (one.detach().double() for one in scheme.module.layer_weights(0))
    logs = torch.nn.functional.logsigmoid(text @ weight.T + bias)
    expected = logs.cumsum(0) - logs[:1]
    # Sums are in units of 2^-32 nats: nine roundings of half a unit.
    assert (codes - expected).abs().max() < 9 * 2.0**-33 + 1e-12

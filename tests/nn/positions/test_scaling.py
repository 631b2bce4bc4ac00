"""Frequencies and attention factors of the extensions, against `transformers` and against mpmath."""

from decimal import Decimal

import pytest
import torch
from device import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from rope_formulas import CASES, FORMULAS, LLAMA3, exact_frequencies, mp
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import phasor

bases = st.floats(100.0, 1e6)
factors = st.floats(1.0, 64.0)
lengths = st.integers(2, 2**18)
widths = st.integers(2, 64).map(lambda pairs: 2 * pairs)  # 4 to 128


@st.composite
def ramps(draw):
    """The fields YaRN and its dynamic form share; any of the three ways to say the attention factor."""
    fields = {"original_length": draw(lengths), "truncate": draw(st.booleans())}
    if draw(st.booleans()):
        fields |= {"beta_fast": draw(st.floats(16.0, 64.0)), "beta_slow": draw(st.floats(0.5, 2.0))}
    said = draw(st.sampled_from(["nothing", "attention", "mscale"]))
    if said == "attention":
        fields["attention"] = draw(st.floats(0.5, 2.0))
    if said == "mscale":
        fields |= {"mscale": draw(st.floats(0.1, 2.0)), "mscale_all_dim": draw(st.floats(0.1, 2.0))}
    return fields


@st.composite
def extensions(draw, kind, width):
    """A random extension of a kind, as a dict."""
    fields = {"kind": kind}
    if kind != "dynamic-yarn":
        fields["factor"] = draw(factors)
    if kind in ("dynamic-ntk", "llama3", "longrope"):
        fields["original_length"] = draw(lengths)
    if kind in ("yarn", "dynamic-yarn"):
        fields |= draw(ramps())
    if kind == "llama3":
        low = draw(st.floats(0.25, 4.0))
        fields |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(1.0, 30.0))}
    if kind == "longrope":
        divisors = st.tuples(*[st.floats(1.0, 70.0)] * (width // 2))
        fields |= {"short_factor": draw(divisors), "long_factor": draw(divisors)}
        if draw(st.booleans()):
            fields["attention"] = draw(st.floats(0.5, 2.0))
    if kind == "proportional":
        fields["fraction"] = draw(st.floats(0.01, 1.0))
    return fields


def near(length, data):
    """A length on either side of an extension's original one."""
    return data.draw(st.integers(max(1, length // 4), 40 * length), label="length")


@pytest.mark.parametrize("kind", phasor.kinds("extensions"))
@given(data=st.data())
def test_frequencies_and_attention_factor_are_the_formulas(kind, data):
    assert kind in FORMULAS, "write the new extension's formula in rope_formulas.py"
    base, width = data.draw(bases, label="base"), data.draw(widths, label="width")
    extension = data.draw(extensions(kind, width), label="extension")
    length = near(extension.get("original_length", 4096), data)
    rope = phasor.Rotary(head_dim=width, base=base, extension=extension)
    frequencies, factor = exact_frequencies(extension, base, width, length)
    ours = rope.frequencies(length)
    assert len(ours) == len(frequencies) == width // 2
    for mine, true in zip(ours, frequencies, strict=True):
        assert isinstance(mine, Decimal)
        assert abs(mp.mpf(str(mine)) - true) <= abs(true) * mp.mpf("1e-40")  # 50 digits, less what sums lose
    assert rope.attention_factor(length) == pytest.approx(float(factor), rel=1e-15, abs=0)  # a float64


# Their name for each of ours, and their name for each of our fields.
THEIR_TYPES = {
    "linear": "linear",
    "dynamic-ntk": "dynamic",
    "yarn": "yarn",
    "longrope": "longrope",
    "llama3": "llama3",
    "proportional": "proportional",
}
THEIR_FIELDS = {
    "original_length": "original_max_position_embeddings",
    "attention": "attention_factor",
    "fraction": "partial_rotary_factor",
}


def theirs(extension, base, head_dim, width, length):
    """Frequencies and attention factor as `transformers` computes them, in float32."""
    fields = dict(extension)
    rope_type = THEIR_TYPES[fields.pop("kind")]
    trained = fields.get("original_length", 2048)
    if rope_type == "dynamic":
        fields.pop("original_length")  # it goes by max_position_embeddings
    parameters = {THEIR_FIELDS.get(key, key): value for key, value in fields.items()}
    if rope_type != "proportional":
        parameters["partial_rotary_factor"] = width / head_dim
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=trained,
        rope_parameters={"rope_type": rope_type, "rope_theta": base, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[rope_type](config, DEVICE, seq_len=length)


def gentle(extension):
    """Llama-3 bounds at least a factor 4 and a difference 1 apart, as published.

    Between the bounds their float32 rounding grows by high / (high - low).
    """
    low, high = extension["low_freq_factor"], extension["high_freq_factor"]
    return extension | {"high_freq_factor": max(high, 4 * low)}


@pytest.mark.cpu_only("their float32 powers are exact enough on the CPU alone")
@pytest.mark.parametrize("kind", THEIR_TYPES)
@given(data=st.data())
def test_frequencies_and_attention_factor_are_those_of_transformers(kind, data):
    # Their float32 exponents round by up to 3e-8 ln(base), and llama3's passage more than doubles that.
    base = data.draw(st.floats(100.0, 2e4) if kind == "llama3" else bases, label="base")
    head_dim = data.draw(widths, label="head_dim")
    width = head_dim
    if kind != "proportional" and head_dim % 8 == 0:
        width = data.draw(st.sampled_from([head_dim, head_dim // 2, 3 * head_dim // 4]), label="width")
    extension = data.draw(extensions(kind, width), label="extension")
    if kind == "llama3":
        extension = gentle(extension)
    length = near(extension.get("original_length", 4096), data)
    rope = phasor.Rotary(head_dim=head_dim, rotary_dim=width, base=base, extension=extension)
    their_frequencies, their_factor = theirs(extension, base, head_dim, width, length)
    assert their_frequencies.shape == (width // 2,)
    for i, (mine, other) in enumerate(zip(rope.frequencies(length), their_frequencies.tolist(), strict=True)):
        assert abs(float(mine) - other) <= 1e-6 * base ** (-2 * i / width)
    assert rope.attention_factor(length) == pytest.approx(their_factor, rel=1e-12)  # both are float64


@pytest.mark.parametrize(
    "case", [name for name, (extension, _) in CASES.items() if (extension or {}).get("kind") in THEIR_TYPES]
)
def test_the_formulas_of_the_phase_tests_agree_with_transformers(case):
    extension, length = CASES[case]
    frequencies, factor = exact_frequencies(extension, 10000.0, 64, length)
    their_frequencies, their_factor = theirs(extension, 10000.0, 64, 64, length)
    for i, (true, other) in enumerate(zip(frequencies, their_frequencies.tolist(), strict=True)):
        assert abs(float(true) - other) <= 1e-6 * 10000 ** (-2 * i / 64)
    assert float(factor) == pytest.approx(their_factor, rel=1e-12)


@pytest.mark.parametrize(("head_dim", "factor"), [(128, 8.0), (64, 32.0), (128, 16.0)])
def test_published_llama_3_frequencies(head_dim, factor):
    rope = phasor.Rotary(head_dim=head_dim, base=500000.0, extension=LLAMA3 | {"factor": factor})
    their_frequencies, _ = theirs(LLAMA3 | {"factor": factor}, 500000.0, head_dim, head_dim, None)
    for i, (mine, other) in enumerate(zip(rope.frequencies(), their_frequencies.tolist(), strict=True)):
        assert abs(float(mine) - other) <= 1e-6 * 500000.0 ** (-2 * i / head_dim)


@pytest.mark.parametrize("kind", ["dynamic-ntk", "dynamic-yarn"])
def test_a_dynamic_extension_is_plain_up_to_its_original_length(kind):
    extension = next(e for e, _ in CASES.values() if e and e["kind"] == kind)
    rope = phasor.Rotary(head_dim=64, extension=extension)
    plain, edge = phasor.Rotary(head_dim=64), extension["original_length"]
    for length in (1, edge - 1, edge):
        assert [float(f) for f in rope.frequencies(length)] == [float(f) for f in plain.frequencies()]
        assert rope.attention_factor(length) == 1.0
    assert float(rope.frequencies(edge + 1)[-1]) < float(plain.frequencies()[-1])


@pytest.mark.parametrize("case", [name for name, (_, length) in CASES.items() if length is not None])
def test_an_extension_that_depends_on_length_asks_for_it(case):
    extension, _ = CASES[case]
    rope = phasor.Rotary(head_dim=64, extension=extension)
    with pytest.raises(ValueError, match="length"):
        rope.cos_sin(torch.arange(4))


@pytest.mark.parametrize("case", [name for name, (_, length) in CASES.items() if length is None])
def test_length_has_no_effect_on_fixed_schemes(case):
    extension, _ = CASES[case]
    rope = phasor.Rotary(head_dim=64, extension=extension)
    positions = torch.arange(5).expand(2, 5)
    expected = torch.stack(rope.cos_sin(positions))
    for length in (5, 10**6, [7, 10**6]):
        assert torch.equal(torch.stack(rope.cos_sin(positions, length=length)), expected)
        assert rope.attention_factor(10**6) == rope.attention_factor()

"""Rotary frequencies in mpmath, written from the published formulas: what tests compare phasor with.

Each function takes the base, the rotary dimension `d`, the length and the extension's parameters, and returns the
frequencies in radians per position and the attention factor. Nothing here comes from phasor.
"""

from mpmath import MPContext

mp = MPContext()
mp.dps = 60


def plain(base, d, length=None):
    return [mp.mpf(base) ** (-mp.mpf(2 * i) / d) for i in range(d // 2)], mp.mpf(1)


def linear(base, d, length, *, factor):
    return [f / mp.mpf(factor) for f in plain(base, d)[0]], mp.mpf(1)


def ntk(base, d, length, *, factor):
    return plain(mp.mpf(base) * mp.mpf(factor) ** (mp.mpf(d) / (d - 2)), d)


def dynamic_ntk(base, d, length, *, factor, original_length):
    s, n = mp.mpf(factor), max(length, original_length)
    return plain(mp.mpf(base) * (s * n / original_length - (s - 1)) ** (mp.mpf(d) / (d - 2)), d)


def yarn(
    base,
    d,
    length,
    *,
    factor,
    original_length,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=True,
    attention=None,
    mscale=None,
    mscale_all_dim=None,
):
    s = mp.mpf(factor)

    def correction(rotations):
        return d * mp.log(original_length / (2 * mp.pi * mp.mpf(rotations))) / (2 * mp.log(base))

    def m(k):
        return mp.mpf(1) if s <= 1 else k * mp.log(s) / 10 + 1

    low, high = correction(beta_fast), correction(beta_slow)
    if truncate:
        low, high = mp.floor(low), mp.ceil(high)
    low, high = max(low, mp.mpf(0)), min(high, mp.mpf(d - 1))
    if low == high:
        high += mp.mpf("0.001")
    result = []
    for i, f in enumerate(plain(base, d)[0]):
        ramp = min(max((i - low) / (high - low), mp.mpf(0)), mp.mpf(1))
        result.append((f / s) * ramp + f * (1 - ramp))
    if attention is not None:
        return result, mp.mpf(attention)
    if mscale is not None and mscale_all_dim is not None:
        return result, m(mp.mpf(mscale)) / m(mp.mpf(mscale_all_dim))
    return result, m(1)


def dynamic_yarn(base, d, length, *, original_length, **fields):
    s = max(mp.mpf(1), mp.mpf(length) / original_length)
    return yarn(base, d, length, factor=s, original_length=original_length, **fields)


def llama3(base, d, length, *, factor, original_length, low_freq_factor=1.0, high_freq_factor=4.0):
    s, low, high = mp.mpf(factor), mp.mpf(low_freq_factor), mp.mpf(high_freq_factor)
    result = []
    for f in plain(base, d)[0]:
        wavelength = 2 * mp.pi / f
        if wavelength < original_length / high:
            result.append(f)
        elif wavelength > original_length / low:
            result.append(f / s)
        else:
            t = (original_length / wavelength - low) / (high - low)
            result.append((1 - t) * f / s + t * f)
    return result, mp.mpf(1)


def longrope(base, d, length, *, short_factor, long_factor, original_length, factor=1.0, attention=None):
    divisors = long_factor if length > original_length else short_factor
    result = [f / mp.mpf(e) for f, e in zip(plain(base, d)[0], divisors, strict=True)]
    if attention is not None:
        return result, mp.mpf(attention)
    return result, mp.mpf(1) if factor <= 1 else mp.sqrt(1 + mp.log(factor) / mp.log(original_length))


def proportional(base, d, length, *, fraction, factor=1.0):
    rotating = int(fraction * d // 2)
    return [f / mp.mpf(factor) if i < rotating else mp.mpf(0) for i, f in enumerate(plain(base, d)[0])], mp.mpf(1)


FORMULAS = {
    "linear": linear,
    "ntk": ntk,
    "dynamic-ntk": dynamic_ntk,
    "yarn": yarn,
    "dynamic-yarn": dynamic_yarn,
    "llama3": llama3,
    "longrope": longrope,
    "proportional": proportional,
}


def exact_frequencies(extension, base, d, length=None):
    """Frequencies and attention factor of an extension written as a dict with its "kind", or of none at all."""
    if extension is None:
        return plain(base, d)
    fields = dict(extension)
    return FORMULAS[fields.pop("kind")](base, d, length, **fields)


YARN = {"kind": "yarn", "factor": 8.0, "original_length": 4096}
DYNAMIC_YARN = {"kind": "dynamic-yarn", "original_length": 4096}
DYNAMIC_NTK = {"kind": "dynamic-ntk", "factor": 4.0, "original_length": 4096}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_length": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "kind": "longrope",
    "short_factor": tuple(1.0 + 0.01 * i for i in range(32)),
    "long_factor": tuple(1.05 * 1.1**i for i in range(32)),
    "original_length": 4096,
    "factor": 32.0,
}

# Every extension for a rotary dimension of 64, with its sequence length: (extension, length).
CASES = {
    "plain": (None, None),
    "linear": ({"kind": "linear", "factor": 3.7}, None),
    "ntk": ({"kind": "ntk", "factor": 5.3}, None),
    "dynamic-ntk-within": (DYNAMIC_NTK, 4000),
    "dynamic-ntk-beyond": (DYNAMIC_NTK, 10001),
    "yarn": (YARN, None),
    "yarn-untruncated": (YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 1.5}, None),
    "yarn-mscale": (YARN | {"factor": 40.0, "mscale": 0.9, "mscale_all_dim": 0.7}, None),
    "yarn-attention": (YARN | {"attention": 1.3}, None),
    "dynamic-yarn-within": (DYNAMIC_YARN, 4000),
    "dynamic-yarn-beyond": (DYNAMIC_YARN, 50001),
    "dynamic-yarn-mscale": (DYNAMIC_YARN | {"truncate": False, "mscale": 0.9, "mscale_all_dim": 0.7}, 50001),
    "llama3": (LLAMA3, None),
    "llama3-one-bound": (LLAMA3 | {"high_freq_factor": 1.0}, None),
    "longrope-within": (LONGROPE, 4096),
    "longrope-beyond": (LONGROPE, 4097),
    "longrope-attention": (LONGROPE | {"attention": 1.19}, 4097),
    "proportional": ({"kind": "proportional", "fraction": 0.3, "factor": 2.5}, None),
}

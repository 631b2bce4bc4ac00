"""The four criteria of a position encoding, measured on what a scheme gives; and positions added or concatenated.

The criteria: every position has a different code; two positions are as far apart in another, longer sentence; codes go
on past the sentences seen, and stay bounded; a position has the same code in every sentence. The sentences of the
second and the last differ in their tokens as well, which are random vectors.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from phasor.config import PositionConfig
from phasor.lab.codes import EncodingScheme, build_scheme, nearest_pair
from phasor.lab.schemes import plain_model

SAME = 1e-9  # relative differences below this are rounding
FAR = 1024  # the sentence that a scheme has to go on to is this many times longer
SENTENCE = 64  # tokens whose codes are drawn twice
VOCABULARY = 256  # token vectors among which one is recognized
MOVES = 0.1  # a feature moves where its standard deviation over positions is above this


@functools.lru_cache(maxsize=256)
def score_card(position: PositionConfig, dim: int, length: int, heads: int = 8) -> dict[str, Any]:
    """Whether a scheme meets each criterion, with what was measured, for sentences of `length` tokens.

    >>> from phasor.nn.positions import NormalizedConfig
    >>> card = score_card(NormalizedConfig(), 16, 32)
    >>> [card[name]["holds"] for name in ("unique", "consistent", "bounded", "deterministic")]
    [True, False, True, True]
    """
    heads = heads if "scores" in position.acts_on else 1  # elsewhere all heads have the same code
    scheme = build_scheme(position, dim, heads=heads)
    positions = torch.arange(length)
    rows = scheme.codes(positions, length)
    nearest = nearest_pair(rows)
    short, long = random_text(length, dim, seed=0), random_text(2 * length, dim, seed=1)
    apart = distances(scheme.codes(positions, length, text=short))
    later = distances(scheme.codes(positions, 2 * length, text=long))
    change = float((later - apart).abs().max() / apart.max()) if bool(apart.any()) else 0.0
    is_table = position.resolve(plain_model(dim, heads)) != position  # which ends with the sentences seen
    ending = build_scheme(position, dim, heads=heads, table_length=length) if is_table else scheme
    return {
        "kind": position.kind,
        "on_scores": scheme.on_scores,
        "unique": {"holds": nearest is None or nearest["relative"] > SAME, "nearest": nearest},
        "consistent": {"holds": change < SAME, "change": change},
        "bounded": boundedness(ending, length, float(rows.abs().max())),
        "deterministic": determinism(position, dim, heads),
    }


def random_text(length: int, dim: int, seed: int) -> Tensor:
    """Tokens `[length, dim]` with features of mean 0 and variance 1."""
    return torch.randn(length, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@functools.lru_cache(maxsize=256)
def determinism(position: PositionConfig, dim: int, heads: int) -> dict[str, bool]:
    """Whether codes are the same in two sentences, and whether they are learned: others with other weights."""
    scheme, positions = build_scheme(position, dim, heads=heads), torch.arange(SENTENCE)
    first, second = (random_text(SENTENCE, dim, seed) for seed in (0, 1))
    rows = scheme.codes(positions, SENTENCE, text=first)
    other = change_weights(scheme) if scheme.has_weights else scheme
    learned = scheme.has_weights and not torch.equal(rows, other.codes(positions, SENTENCE, text=first))
    return {"holds": torch.equal(rows, scheme.codes(positions, SENTENCE, text=second)), "learned": learned}


def change_weights(scheme: EncodingScheme) -> EncodingScheme:
    """The scheme with other weights, as training leaves them; some begin at zero with every seed."""
    module, draws = copy.deepcopy(scheme.module), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape, generator=draws).to(weight))
    return dataclasses.replace(scheme, module=module)


def boundedness(scheme: EncodingScheme, length: int, near: float) -> dict[str, Any]:
    """The largest element of the codes of a sentence, `near`, and of one `FAR` times longer, or why that is refused."""
    far_length = FAR * length
    far_positions = torch.cat((torch.arange(1), torch.arange(far_length - length + 1, far_length)))
    try:
        far = float(scheme.codes(far_positions, far_length).abs().max())
    except ValueError as error:
        return {"holds": False, "near": near, "far": None, "far_length": far_length, "refused": str(error)}
    return {
        "holds": far <= near * (1 + SAME) or far <= 1 + SAME,
        "near": near,
        "far": far,
        "far_length": far_length,
        "refused": None,
    }


def distances(rows: Tensor) -> Tensor:
    """How far each row is from the first and from the one before it."""
    return torch.cat(((rows - rows[:1]).norm(dim=-1), rows.diff(dim=0).norm(dim=-1)))


@torch.no_grad()
def combination(add: PositionConfig, concat: PositionConfig, dim: int, length: int, token_std: float) -> dict[str, Any]:
    """Positions added to random token vectors beside positions concatenated to them and projected.

    What can be read back is the share of positions, and of tokens, that are nearest to what they were made from.

    >>> from phasor.nn.positions import SinusoidalConfig
    >>> found = combination(SinusoidalConfig(), SinusoidalConfig(combine="concat", width=16), 64, 32, 1.0)
    >>> found["concat"]["parameters"], found["sum"]["parameters"]
    (5120, 0)
    """
    codes = build_scheme(add, dim).codes(torch.arange(length), length)
    draws = torch.Generator().manual_seed(0)
    vectors = torch.randn(VOCABULARY, dim, dtype=torch.float64, generator=draws) * token_std
    tokens = torch.randint(0, VOCABULARY, (length,), generator=draws)
    x = vectors[tokens]
    both = x + codes
    joining = build_scheme(concat, dim)
    (weight,) = (weight.double() for weight in joining.module.parameters())
    small = joining.codes(torch.arange(length), length)
    joined = torch.cat((x, small), dim=-1) @ weight.T
    split = x @ weight[:, :dim].T, small @ weight[:, dim:].T
    feature_std = codes.std(dim=0, correction=0)
    cosine = torch.nn.functional.cosine_similarity(x, codes, dim=-1)
    return {
        "feature_std": feature_std.tolist(),
        "moving": int((feature_std > MOVES).sum()),
        "overlap": float(cosine.abs().mean()),
        "token_norm": float(x.norm(dim=-1).mean()),
        "code_norm": float(codes.norm(dim=-1).mean()),
        "sum": {
            "parameters": 0,
            "width": dim,
            "positions_read": share(nearest(both, codes), torch.arange(length)),
            "tokens_read": share(nearest(both, vectors), tokens),
        },
        "concat": {
            "parameters": weight.numel(),
            "width": weight.shape[1],
            "positions_read": share(nearest(joined, small @ weight[:, dim:].T), torch.arange(length)),
            "tokens_read": share(nearest(joined, vectors @ weight[:, :dim].T), tokens),
            "sum_error": float((joined - sum(split)).abs().max()),
        },
    }


def nearest(rows: Tensor, table: Tensor) -> Tensor:
    """The index of the row of a table that lies nearest to each row."""
    return torch.cdist(rows, table).argmin(dim=-1)


def share(found: Tensor, expected: Tensor) -> float:
    return float((found == expected).double().mean())

"""The view "phasors": two words whose pairs are dials, their score, and what moving them along does to it."""

from __future__ import annotations

import math
from typing import Any, Literal

from phasor.lab.endpoints import MAX_HEAD_DIM, MAX_POSITION, FieldError, LabRequest, bounded_field, register
from phasor.nn.positions.rotary.config import Pairing, RotaryConfig

SPAN = 256  # distances of the curve, and positions of the ruler


class HeadRequest(LabRequest):
    """The rotary settings of a head, and a seed for what is random about it."""

    head_dim: int = bounded_field(64, 2, MAX_HEAD_DIM)
    base: float = bounded_field(10000.0, 2, 1e12)
    seed: int = bounded_field(0, 0, 1 << 31)

    def check(self) -> None:
        super().check()
        if self.head_dim % 2:
            raise FieldError("head_dim", f"head_dim must be even, not {self.head_dim}: features rotate in pairs")

    @property
    def rotary(self) -> RotaryConfig:
        return RotaryConfig(base=self.base)


class WordsRequest(HeadRequest):
    """Two words in a head: its rotary settings, how alike the words are, and which two (`seed`)."""

    pairing: Pairing = "half"
    alike: float = bounded_field(1.0, 0, 1)

    @property
    def rotary(self) -> RotaryConfig:
        return RotaryConfig(base=self.base, pairing=self.pairing)


class ScoreRequest(WordsRequest):
    """Two words, their positions, and whether they are rotated after the projections or before."""

    query: int = bounded_field(40, 0, MAX_POSITION)
    key: int = bounded_field(28, 0, MAX_POSITION)
    rotate: Literal["after", "before"] = "after"


def dials(request: WordsRequest) -> dict[str, Any]:
    """The hands of every dial before any rotation, and how far a position turns them.

    Increments are signed 64-bit fractions of a full rotation, as text: the phase of a position is their product,
    wrapped to 64 bits.

    >>> answer = dials(WordsRequest(head_dim=4))
    >>> answer["increments"], [round(w, 2) for w in answer["wavelengths"]], answer["features"]
    (['2935890503282001226', '29358905032820012'], [6.28, 628.32], [[0, 2], [1, 3]])
    """
    from phasor.lab.two_words import make_words, pair_features
    from phasor.nn.positions.rotary.module import table_of

    words = make_words(request.head_dim, request.pairing, request.alike, request.seed)
    return {
        "increments": [str(increment) for increment in table_of(request.rotary, request.head_dim, None).increments],
        "wavelengths": [2 * math.pi / float(f) for f in request.rotary.frequencies(request.head_dim)],
        "features": pair_features(request.head_dim, request.pairing),
        "query_angles": words.query_angles.tolist(),
        "key_angles": words.key_angles.tolist(),
    }


def score(request: ScoreRequest) -> dict[str, Any]:
    """The score of the query and the key, what each pair adds to it, and how it changes with distance and shift.

    `by_distance` has the query that many positions after the key, or before it where it is now, at the same place.
    `by_shift` has both at the same distance, moved along from the beginning to `shifts`.

    >>> near, far = (score(ScoreRequest(query=at + 40, key=at + 28)) for at in (0, 2**36 - 40))
    >>> round(near["score"], 6) == round(far["score"], 6), abs(near["float32_score"] - far["float32_score"]) > 1
    (True, True)
    """
    import torch

    from phasor.lab.two_words import make_heads, make_words
    from phasor.ops.rope.reference import split_pairs

    words = make_words(request.head_dim, request.pairing, request.alike, request.seed)
    exact, in_float32, mispaired = make_heads(
        words, request.rotary, request.head_dim, request.rotate == "before", request.seed
    )
    start = min(request.query, request.key)
    query, key = request.query - start, request.key - start
    shifts = [0, *(1 << power for power in range(36)), MAX_POSITION - max(query, key)]
    shifts = sorted({shift for shift in shifts if shift + max(query, key) <= MAX_POSITION})
    steps, moved, still = torch.arange(SPAN), torch.tensor(shifts), torch.zeros(SPAN, dtype=torch.int64)
    by_distance = (start + steps, start + still) if request.query >= request.key else (start + still, start + steps)
    now = torch.tensor([request.query]), torch.tensor([request.key])
    queries, keys = (
        torch.cat((one, curve, moved + own)) for one, curve, own in zip(now, by_distance, (query, key), strict=True)
    )

    rotated_query, rotated_key = exact.query(queries), exact.key(keys)
    scores = (rotated_query * rotated_key).sum(-1).tolist()
    float32_scores = in_float32.scores(queries, keys).tolist()
    hands = [torch.stack(split_pairs(rotated[0], request.pairing), dim=-1) for rotated in (rotated_query, rotated_key)]
    return {
        "score": scores[0],
        "float32_score": float32_scores[0],
        "mispaired_score": mispaired.scores(*now).item(),
        "unmoved_score": scores[1 + SPAN],
        "pairs": (hands[0] * hands[1]).sum(-1).tolist(),
        "query_hands": hands[0].tolist(),
        "key_hands": hands[1].tolist(),
        "by_distance": {"scores": scores[1 : 1 + SPAN], "float32_scores": float32_scores[1 : 1 + SPAN]},
        "by_shift": {"shifts": shifts, "scores": scores[1 + SPAN :], "float32_scores": float32_scores[1 + SPAN :]},
    }


register("phasors", "dials", WordsRequest, dials)
register("phasors", "score", ScoreRequest, score)

"""The view "precision": the errors of cosines and sines by position, and what they do to a model's logits."""

from __future__ import annotations

from typing import Any

from phasor.lab.endpoints import MAX_POSITION, Matrix, bounded_field, register
from phasor.lab.views.phasors import HeadRequest

POWERS = range(37)
LOGIT_POWERS = range(0, 37, 4)
ROUNDING = 2.0**-25  # the error of a cosine that is rounded to float32
SAMPLES = 12  # positions below each power of two


class AnglesRequest(HeadRequest):
    """The rotary settings of a head, and which positions are sampled (`seed`)."""


class LogitsRequest(AnglesRequest):
    """The same, and the position at which a text begins."""

    offset: int = bounded_field(1 << 24, 0, MAX_POSITION)


def errors(request: AnglesRequest) -> Matrix:
    """The worst error of cosine and sine: by method, power of two and pair, `[3, 37, pairs]`.

    >>> answer = errors(AnglesRequest(head_dim=8))
    >>> answer.shape, answer.notes["methods"]
    ((3, 37, 4), ['phasor', 'float32', 'bfloat16'])
    """
    import torch

    from phasor.lab.angle_errors import METHODS, angle_errors

    by_method = angle_errors(request.rotary, request.head_dim, POWERS, SAMPLES, request.seed)
    return Matrix.of(
        torch.stack([by_method[method] for method in METHODS]),
        methods=list(METHODS),
        powers=list(POWERS),
        rounding=ROUNDING,
    )


def logits(request: LogitsRequest) -> dict[str, Any]:
    """How the logits of a text change when it begins at another position, relative to the largest of them.

    `changes` is by power of two, `change` at the offset; `predictions_changed` counts the tokens whose most likely
    successor there is another one. `last` are the logits after the last token, at the beginning and at the offset.

    >>> answer = logits(LogitsRequest(head_dim=16, offset=2**30))
    >>> answer["methods"]["phasor"]["change"] < 1e-5, answer["methods"]["float32"]["change"] > 1e-2
    (True, True)
    """
    from phasor.lab.angle_errors import TOKENS, logits_at

    offsets = [0, request.offset, *(1 << power for power in LOGIT_POWERS)]
    methods = {}
    for method, rows in logits_at(request.rotary, request.head_dim, offsets, request.seed).items():
        start = rows[0]
        changes = ((rows - start).abs().amax((1, 2)) / start.abs().max()).tolist()
        methods[method] = {
            "change": changes[1],
            "changes": changes[2:],
            "predictions_changed": int((rows[1].argmax(-1) != start.argmax(-1)).sum()),
            "last": rows[1, -1].tolist(),
            "last_unmoved": start[-1].tolist(),
        }
    return {"powers": list(LOGIT_POWERS), "tokens": TOKENS, "methods": methods}


register("precision", "errors", AnglesRequest, errors)
register("precision", "logits", LogitsRequest, logits)

"""The next tokens of rows whose requests have different options."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phasor.config.generation import GenerationConfig
from phasor.generation.constraints import MINUS_INFINITY
from phasor.generation.engine.graph_steps import LaunchedStep
from phasor.generation.engine.row import EngineRow
from phasor.generation.sampling import GREEDY, check_best, choose_tokens
from phasor.nn.checks import describe_tensor


def add_tokens(rows: Sequence[EngineRow], logits: Tensor) -> dict[EngineRow, Exception]:
    """Choose and append the next token of each row, from logits `[B, vocab]`.

    Rows whose options are alike are taken together. The result has the rows for which no token can be chosen.
    """
    failed: dict[EngineRow, Exception] = {}
    plain = [i for i, row in enumerate(rows) if row.handle.is_argmax_only]
    if plain:
        own = logits if len(plain) == len(rows) else logits[plain]
        add_chosen([rows[i] for i in plain], own, GREEDY, failed)
    groups: dict[GenerationConfig, list[tuple[EngineRow, Tensor]]] = {}
    for i in sorted(set(range(len(rows))).difference(plain)):
        try:
            scores = score(rows[i], logits[i])
        except Exception as error:  # of a caller's logits processor
            failed[rows[i]] = error
        else:
            groups.setdefault(rows[i].handle.filters, []).append((rows[i], scores))
    for options, members in groups.items():
        add_chosen([row for row, _ in members], torch.stack([scores for _, scores in members]), options, failed)
    return failed


def read_tokens(step: LaunchedStep) -> dict[EngineRow, Exception]:
    """Append the likeliest tokens of a step to its rows that have not ended, with the result of `add_tokens`."""
    failed: dict[EngineRow, Exception] = {}
    for row, (token, best) in zip(step.rows, step.read(), strict=True):
        if not row.ended:
            append(row, token, best, None, failed)
    return failed


def score(row: EngineRow, logits: Tensor) -> Tensor:
    """The scores `[vocab]` of the next token: logits that are penalized and constrained."""
    handle, prompt, new = row.handle, row.state.prompt, row.state.new
    scores = handle.request.score(logits, prompt, new)
    if handle.logits_processor is None:
        return scores
    found = handle.logits_processor(prompt, new, scores)
    if not isinstance(found, Tensor) or found.shape != scores.shape:
        raise ValueError(f"a logits_processor must return scores {list(scores.shape)}, not {describe_tensor(found)}")
    return found.to(scores)


def add_chosen(
    rows: Sequence[EngineRow], scores: Tensor, options: GenerationConfig, failed: dict[EngineRow, Exception]
) -> None:
    found = choose_tokens(scores, options, [row.state.random for row in rows])
    for row, own, (token, best) in zip(rows, scores, found, strict=True):
        append(row, token, best, own, failed)


def append(row: EngineRow, token: int, best: float, scores: Tensor | None, failed: dict[EngineRow, Exception]) -> None:
    """Append a token to a row, unless the best of the scores it was chosen by is not finite."""
    if not math.isfinite(best):
        try:
            check_best(best)
        except ValueError as error:
            failed[row] = error
            return
    handle = row.handle
    handle.request.add_token(row.state, token, scores)
    row.text.append(token)
    if handle.top_logprobs and scores is not None:
        row.tops.append(likeliest(scores, handle.top_logprobs))


def likeliest(scores: Tensor, count: int) -> dict[int, float]:
    """The log-probabilities of the likeliest tokens, as far as they may come next.

    >>> likeliest(torch.tensor([0.0, -torch.inf]), 2)
    {0: 0.0}
    """
    values, tokens = scores.log_softmax(-1).topk(min(count, len(scores)))
    found = zip(tokens.tolist(), values.tolist(), strict=True)
    return {token: value for token, value in found if value > MINUS_INFINITY}

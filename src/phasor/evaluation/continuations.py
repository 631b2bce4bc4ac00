"""Log-probabilities of continuations, and whether greedy decoding would write them, in one forward each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phasor.nn.mode import eval_mode
from phasor.nn.norm import at_least_float32
from phasor.transformer import Transformer

BATCH_TOKENS = 16_384
LOGITS = 1 << 26  # that are held at once
Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class ContinuationScore:
    """The log-probability of a continuation in nats, and whether every token of it is the most likely one."""

    log_probability: float
    greedy: bool


@torch.inference_mode()
def score_continuations(
    model: Transformer,
    pairs: Sequence[tuple[Tokens, Tokens]],
    *,
    batch_tokens: int = BATCH_TOKENS,
    batch_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[ContinuationScore]:
    """Score the continuation of every pair of context and continuation, both of at least one token.

    A continuation is read together with its context, and each token of it predicted from the true ones before it.
    Greedy decoding writes exactly this continuation if and only if each of its tokens is the most likely one in that
    forward: as long as they agree, both have read the same tokens. So `greedy` needs no decoding.

    Rows of about the same length are batched, `batch_tokens` at a time, or `batch_rows` rows. Every row has the
    length of its own context and continuation, for positions that depend on it.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> [score] = score_continuations(model, [([1, 2, 3], [4, 5])])
    >>> logits = model.eval()(torch.tensor([[1, 2, 3, 4]]))[0, -2:].log_softmax(-1)
    >>> abs((logits[0, 4] + logits[1, 5]).item() - score.log_probability) < 1e-5
    True
    """
    check_scorable(model)
    for context, continuation in pairs:
        if len(context) == 0 or len(continuation) == 0:
            raise ValueError("a continuation is scored after a context, and each has at least one token")
    sizes = [len(context) + len(continuation) for context, continuation in pairs]
    order = sorted(range(len(pairs)), key=lambda i: -sizes[i])
    results: list[ContinuationScore] = [ContinuationScore(0.0, False)] * len(pairs)
    parts: list[tuple[list[int], Tensor]] = []
    done = 0
    with eval_mode(model):
        while done < len(pairs):
            rows = batch_rows or max(1, batch_tokens // sizes[order[done]])
            chosen = order[done : done + rows]
            parts.append((chosen, score_batch(model, [pairs[i] for i in chosen])))
            done += len(chosen)
            if progress is not None:
                progress(done, len(pairs))
    for chosen, scores in parts:
        for i, (log_probability, missed) in zip(chosen, scores.tolist(), strict=True):
            if not math.isfinite(log_probability):
                raise ValueError(
                    f"the log-probability of a continuation is {log_probability}: the model's weights are not finite, "
                    "or an activation exceeds its dtype's range"
                )
            results[i] = ContinuationScore(log_probability, missed == 0)
    return results


def check_scorable(model: Transformer) -> None:
    """Refuse a model that does not predict the next token."""
    if model.config.shape != "decoder" or not model.config.has_logits:
        raise ValueError(
            f"continuations are scored by a decoder with a language-model head, not by this "
            f"{model.config.shape} with the head {model.config.head.kind!r}"
        )


def score_batch(model: Transformer, pairs: Sequence[tuple[Tokens, Tokens]]) -> Tensor:
    """`[rows, 2]`: log-probability, and how many tokens are not the most likely; on the model's device."""
    device = model.tokens.weight.device
    sizes = [len(context) + len(continuation) - 1 for context, continuation in pairs]
    tokens = np.zeros((len(pairs), max(sizes)), np.int64)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    for row, (context, continuation) in enumerate(pairs):
        tokens[row, : len(context)] = context
        tokens[row, len(context) : sizes[row]] = continuation[:-1]
        rows += [row] * len(continuation)
        columns += range(len(context) - 1, sizes[row])
        targets += [int(token) for token in continuation]
    arguments: dict[str, Tensor] = {}
    if min(sizes) < max(sizes):
        mask = np.arange(max(sizes)) < np.array(sizes)[:, None]
        arguments["attention_mask"] = torch.from_numpy(mask).to(device)
    # The token that is only predicted counts into the length, as it does where it is generated.
    length = [size + 1 for size in sizes] if "attention_mask" in arguments else max(sizes) + 1
    hidden = model(torch.from_numpy(tokens).to(device), length=length, head=False, **arguments)
    row_ids = torch.tensor(rows, device=device)
    hidden = hidden[row_ids, torch.tensor(columns, device=device)]
    wanted = torch.tensor(targets, device=device)
    scores = torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)
    assert model.head is not None
    step = max(1, LOGITS // model.config.vocab_size)
    for start in range(0, len(wanted), step):
        part = slice(start, start + step)
        logits = at_least_float32(model.head(hidden[None, part], model.tokens.table))[0]
        nats = logits.log_softmax(-1).gather(1, wanted[part, None])[:, 0]
        missed = logits.argmax(-1) != wanted[part]
        scores.index_add_(0, row_ids[part], torch.stack([nats, missed], dim=1).double())
    return scores

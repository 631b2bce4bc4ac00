"""Contrastive search: among the likeliest tokens the one whose hidden state repeats the text least."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from phasor.generation.constraints import MINUS_INFINITY
from phasor.generation.request import GenerationRequest, SequenceState
from phasor.generation.sampling import check_best
from phasor.nn.record import Record
from phasor.ops.topk import stable_topk


def contrastive_search(request: GenerationRequest) -> Iterator[list[SequenceState]]:
    """Decode the prompts one after the other; yields the rows after every token.

    Of the `top_k` likeliest tokens the one with the largest `(1 - a) p - a s` is taken, `a` the option
    `penalty_alpha`, `s` the largest cosine similarity of its hidden state to those before.
    """
    options, model = request.options, request.model
    assert options.top_k is not None
    rows = request.new_rows()
    width, alpha = min(options.top_k, model.config.vocab_size), options.penalty_alpha
    for row in rows:
        cache = request.new_cache([row.prompt], copies=width)
        record = Record("hidden")
        tokens = torch.tensor([row.prompt] * width, device=model.tokens.weight.device)
        logits = model(tokens, cache=cache, record=record)[0, -1]
        assert record.hidden is not None
        past = F.normalize(record.hidden[-1][0].float(), dim=-1)  # [T, dim]
        while not row.done:
            scores = request.score(logits, row.prompt, row.new)
            check_best(float(scores.max()))
            values, candidates = stable_topk(scores, width)
            probabilities = scores.softmax(-1)[candidates]
            record = Record("hidden")
            next_logits = model(candidates[:, None], cache=cache, record=record)[:, -1]
            assert record.hidden is not None
            hidden = F.normalize(record.hidden[-1][:, -1].float(), dim=-1)  # [width, dim]
            similarity = (hidden @ past.mT).amax(-1)
            merits = (1 - alpha) * probabilities - alpha * similarity
            best = int(merits.masked_fill(values == MINUS_INFINITY, MINUS_INFINITY).argmax())
            request.add_token(row, int(candidates[best]), scores)
            cache.reorder([best] * width)
            past, logits = torch.cat((past, hidden[best][None])), next_logits[best]
            yield rows

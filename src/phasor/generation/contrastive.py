"""Contrastive search: among the likeliest tokens the one whose hidden state repeats the text least."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from phasor.generation.loop import Job, Row, scored
from phasor.generation.sampling import chances
from phasor.transformer import Record


def contrastive_search(job: Job) -> Iterator[list[Row]]:
    """Decode the prompts one after the other; gives the rows after every token.

    Of the `top_k` likeliest tokens the one with the largest `(1 - a) p - a s` is taken, `a` the option
    `contrastive`, `s` the largest cosine similarity of its hidden state to those before.
    """
    options = job.options
    assert options.top_k is not None
    rows = [Row(list(p), c) for p, c in zip(job.prompts, chances(options, len(job.prompts)), strict=True)]
    width, alpha = min(options.top_k, job.model.config.vocab_size), options.penalty_alpha
    for row in rows:
        cache = job.new_cache([row.prompt], copies=width)
        record = Record("hidden")
        tokens = torch.tensor([row.prompt] * width, device=job.model.tokens.weight.device)
        logits = job.model(tokens, cache=cache, record=record)[0, -1]
        assert record.hidden is not None
        past = F.normalize(record.hidden[-1][0].float(), dim=-1)  # [T, dim]
        while not row.done:
            scores = scored(logits, row, options)
            likely, candidates = scores.softmax(-1).topk(width)
            record = Record("hidden")
            following = job.model(candidates[:, None], cache=cache, record=record)[:, -1]
            assert record.hidden is not None
            hidden = F.normalize(record.hidden[-1][:, -1].float(), dim=-1)  # [width, dim]
            repeats = (hidden @ past.mT).amax(-1)
            best = int(((1 - alpha) * likely - alpha * repeats).argmax())
            job.add(row, int(candidates[best]), scores)
            cache.reorder([best] * width)
            past, logits = torch.cat((past, hidden[best][None])), following[best]
            yield rows

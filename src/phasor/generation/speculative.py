"""Speculative decoding: a cheap draft of several tokens, verified by the model in one call.

A draft token `x` drawn from `q` is accepted with probability `min(1, p(x)/q(x))`; at the first rejection the token
is drawn from the positive part of `p - q`. The result is distributed as if drawn from `p` alone. Layers that keep a
state go back to the one before the draft, and read the accepted tokens again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from phasor.config.generation import GenerationConfig
from phasor.generation.request import GenerationRequest, SequenceState
from phasor.generation.sampling import check_best, draw, filter_logits
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.states import copy_states
from phasor.transformer import Transformer


class Drafter(Protocol):
    """Proposes tokens, each with the distribution `[vocab]` it was drawn from."""

    def propose(self, row: SequenceState, count: int) -> tuple[list[int], list[Tensor]]: ...


class ModelDrafter:
    """Drafts by a smaller model of the same vocabulary, with its own cache."""

    def __init__(self, request: GenerationRequest, draft: Transformer, row: SequenceState) -> None:
        self.request, self.options, self.draft = request, request.options, draft
        spare = self.options.draft_tokens + 1
        longest = len(row.prompt) + (self.options.max_new_tokens or 0) + spare
        self.cache: KVCache = draft.new_cache(1, longest, spare=spare)
        self.read: list[int] = []  # the tokens in the cache

    def propose(self, row: SequenceState, count: int) -> tuple[list[int], list[Tensor]]:
        text = row.prompt + row.new
        shared = next((i for i, (a, b) in enumerate(zip(self.read, text, strict=False)) if a != b), None)
        keep = min(len(self.read), len(text) - 1) if shared is None else min(shared, len(text) - 1)
        self.cache.crop(len(self.read) - keep)
        self.read = self.read[:keep]
        tokens: list[int] = []
        distributions: list[Tensor] = []
        for _ in range(count):
            unread = (text + tokens)[len(self.read) :]
            logits = self.draft(torch.tensor([unread], device=self.draft.tokens.weight.device), cache=self.cache)
            self.read += unread
            scores = self.request.score(logits[0, -1], row.prompt, row.new + tokens)
            distribution = next_distribution(scores, self.options)
            tokens.append(int(draw(distribution, row.random.next().to(distribution.device))))
            distributions.append(distribution)
        return tokens, distributions


class PromptLookup:
    """Drafts the tokens that followed the last occurrence of the latest ones in the text (prompt lookup)."""

    def __init__(self, longest: int, vocab_size: int) -> None:
        self.longest, self.vocab_size = longest, vocab_size

    def propose(self, row: SequenceState, count: int) -> tuple[list[int], list[Tensor]]:
        text = row.prompt + row.new
        for size in range(min(self.longest, len(text) - 1), 0, -1):
            tail = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == tail:
                    tokens = text[start + size : start + size + count]
                    return tokens, [one_hot(token, self.vocab_size) for token in tokens]
        return [], []


def one_hot(token: int, vocab_size: int) -> Tensor:
    distribution = torch.zeros(vocab_size)
    distribution[token] = 1.0
    return distribution


def next_distribution(scores: Tensor, options: GenerationConfig) -> Tensor:
    """The distribution the next token is drawn from: all on the likeliest for greedy decoding."""
    check_best(float(scores.max()))
    if options.samples:
        return filter_logits(scores, options).softmax(-1)
    return one_hot(int(scores.argmax()), len(scores)).to(scores.device)


def speculative_decoding(request: GenerationRequest) -> Iterator[list[SequenceState]]:
    """Decode the prompts one after the other; yields the rows after every call of the model."""
    options, model = request.options, request.model
    assert options.max_new_tokens is not None
    rows = request.new_rows()
    for row in rows:
        drafter: Drafter = PromptLookup(options.prompt_lookup_tokens, model.config.vocab_size)
        if request.draft is not None:
            drafter = ModelDrafter(request, request.draft, row)
        cache = request.new_cache([row.prompt], spare=options.draft_tokens + 1)
        unread = row.prompt
        while not row.done:
            count = min(options.draft_tokens, options.max_new_tokens - len(row.new) - 1)
            if any(cache.states) and not cache.used:
                count = 0  # a prompt is read once, and not again after a draft that is rejected
            draft, distributions = drafter.propose(row, count) if count > 0 else ([], [])
            tokens = torch.tensor([unread + draft], device=model.tokens.weight.device)
            states = copy_states(cache.states) if draft else []
            logits = model(tokens, cache=cache)[0, len(unread) - 1 :]
            num_accepted = accept(request, row, logits, draft, distributions)
            rejected = max(0, len(draft) - num_accepted)
            if rejected and any(cache.states):
                cache.crop(tokens.shape[1], states)
                model(tokens[:, :-rejected], cache=cache, head=False)
            else:
                cache.crop(rejected)
            unread = row.new[-1:]
            yield rows


def accept(
    request: GenerationRequest, row: SequenceState, logits: Tensor, draft: list[int], distributions: list[Tensor]
) -> int:
    """Append the accepted draft tokens and one more token to the row; the number of accepted ones."""
    options = request.options
    for i, token in enumerate(draft):
        scores = request.score(logits[i], row.prompt, row.new)
        p, q = next_distribution(scores, options), distributions[i].to(logits.device)
        if float(row.random.next()) * float(q[token]) < float(p[token]):
            request.add_token(row, token, scores)
            if row.done:
                return i + 1
            continue
        rest = (p - q).clamp(min=0)
        rest = rest if float(rest.sum()) > 0 else p  # the difference is nothing but rounding
        request.add_token(row, int(draw(rest, row.random.next().to(rest.device))), scores)
        return i
    scores = request.score(logits[len(draft)], row.prompt, row.new)
    token = int(draw(next_distribution(scores, options), row.random.next().to(scores.device)))
    request.add_token(row, token, scores)
    return len(draft)

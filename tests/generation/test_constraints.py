"""Constraints over streams without end, and requests after which no token can be chosen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from decoding import speaker
from schemes import VOCAB

from phasor import SpecialTokens, Transformer, generate, stream

PROMPT = [7, 3, 3]
COUNT = 40
RULES: dict[str, dict[str, Any]] = {
    "min_new_tokens": {"min_new_tokens": 4, "stop": tuple(range(0, VOCAB, 3))},
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": tuple((a, b, c) for a, b, c in itertools.product((0, 1, 2), repeat=3))},
    "begin_suppress_tokens": {"begin_suppress_tokens": tuple(range(VOCAB - 4))},
}


@pytest.mark.parametrize("rule", RULES)
def test_a_stream_without_end_keeps_to_the_constraints_of_a_text(rule: str) -> None:
    """Where `generate` keeps all tokens, the stream gives the same ones; sampled from few, so that they repeat."""
    few = {"suppress_tokens": tuple(range(3, VOCAB, 3))} if rule == "bad words" else {}
    options: dict[str, Any] = {"top_k": 3, "temperature": 2.0, "seed": 1, **RULES[rule], **few}
    model = speaker(attention={"window": 8}, num_layers=1)
    model.special = SpecialTokens(forced_first=5)
    for prompt in (PROMPT, [7]):
        expected = generate(model, prompt, max_new_tokens=COUNT, **options)
        assert list(itertools.islice(stream(model, prompt, **options | {"max_new_tokens": None}), COUNT)) == expected


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"temperature": 1.0, "top_p": 0.9},
    "details": {"details": True},
    "beams": {"num_beams": 3},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 3},
    "prompt lookup": {"prompt_lookup_tokens": 2},
}


def broken_model(value: float) -> Transformer:
    model = speaker()
    with torch.no_grad():
        model.get_parameter("decoder.blocks.0.attention.out.weight")[0, 0] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_not_finite_are_an_error(way: str, value: float) -> None:
    with pytest.raises(ValueError, match="the largest logit is nan: the model's weights are not finite"):
        generate(broken_model(value), PROMPT, max_new_tokens=4, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_where_every_token_is_banned_none_is_returned(way: str) -> None:
    with pytest.raises(ValueError, match="no token may come next: suppress_tokens"):
        generate(speaker(), PROMPT, max_new_tokens=4, suppress_tokens=tuple(range(VOCAB)), **WAYS[way])


@pytest.mark.parametrize("way", [way for way in WAYS if way != "beams"])
def test_no_token_is_returned_after_the_last_bigram(way: str) -> None:
    """Two tokens make four bigrams, in a text of five tokens."""
    options = {"suppress_tokens": tuple(range(2, VOCAB)), "no_repeat_ngram_size": 2, **WAYS[way]}
    tokens = generate(speaker(), [0], max_new_tokens=2, **options)
    tokens = tokens.tokens if way == "details" else tokens
    assert set(tokens) <= {0, 1}
    with pytest.raises(ValueError, match="no token may come next"):
        generate(speaker(), [0], max_new_tokens=5, **options)

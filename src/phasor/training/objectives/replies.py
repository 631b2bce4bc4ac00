"""Replies that show what a model has learned."""

from __future__ import annotations

from torch import Tensor

from phasor.data.batch import Batch
from phasor.generation import generate
from phasor.training.datasets import Datasets
from phasor.transformer import Transformer

PROMPTS, TOKENS = 4, 96


def sample_replies(
    model: Transformer, datasets: Datasets, batch: Batch, trained: Tensor, max_length: int
) -> str | None:
    """What the model replies to the prompts of the first documents of a batch, each greedily and in at most 96 tokens.

    `trained [B, T]` is above 0 where a token's target is of a reply: a prompt goes up to there.
    """
    tokenizer = datasets.tokenizer
    if tokenizer is None:
        return None
    assert batch.document_ids is not None
    shown: dict[str, str] = {}
    for row, ids, own in zip(batch.tokens.tolist(), batch.document_ids.tolist(), trained.tolist(), strict=True):
        for number in dict.fromkeys(ids):
            places = [place for place, document in enumerate(ids) if document == number]
            first = next((place for place in places if own[place] > 0), None)
            if first is None or len(shown) == PROMPTS:
                continue
            prompt = row[places[0] : first + 1]
            new = generate(model, prompt, max_new_tokens=max(1, min(TOKENS, max_length - len(prompt))))
            shown[tokenizer.decode(prompt, skip_special_tokens=False)] = tokenizer.decode(new)
    return "\n\n".join(f"{prompt}{reply}" for prompt, reply in shown.items())

"""A KV cache that is kept between requests, so that what they begin with in common is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from phasor.generation.runners.eager import EagerRunner
from phasor.generation.runners.protocol import ENDLESS
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.protocol import EncoderOutput
from phasor.transformer import Transformer

if TYPE_CHECKING:
    from phasor.generation.request import GenerationRequest

SPARE = 16  # tokens that a window can give back, such as those at the end of a reply that a template writes otherwise


class PrefixCache:
    """What a model has computed of the text so far, for requests of one prompt after another.

    >>> import dataclasses
    >>> from phasor import preset
    >>> from phasor.generation.api import stream_steps
    >>> from phasor.generation.request import build_request
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50)).eval()
    >>> prefix = PrefixCache(model)
    >>> request = build_request(model, [1, 2, 3], fields={"max_new_tokens": 2})
    >>> new = list(stream_steps(dataclasses.replace(request, prefix=prefix)))
    >>> prefix.take([1, 2, 3, new[0], 4], 8, 8)
    [4]
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.cache: KVCache | None = None
        self.tokens: list[int] = []  # that the cache holds

    def take(self, prompt: Sequence[int], longest: int, planned: int) -> list[int]:
        """Keep what the cache holds of a prompt and give back the rest; the tokens of it that are to be read.

        `longest` is what prompt and new tokens may reach, `planned` the length that frequencies are chosen for.
        """
        shared = next(
            (i for i, (a, b) in enumerate(zip(self.tokens, prompt, strict=False)) if a != b), len(self.tokens)
        )
        shared = min(shared, len(prompt) - 1)  # the last token is read for its logits
        if not self._keep(shared, longest, planned):
            size = ENDLESS if longest == ENDLESS else 1 << (longest - 1).bit_length()  # doubled when it is too small
            self.cache, self.tokens = self.model.new_cache(1, size, length=planned, spare=SPARE), []
        return list(prompt[len(self.tokens) :])

    def _keep(self, count: int, longest: int, planned: int) -> bool:
        """Crop the cache to its first tokens and have it plan for a length; whether it can."""
        cache = self.cache
        if cache is None or cache.broken or cache.counts[0] != len(self.tokens) or longest > cache.max_length:
            return False
        if cache.needs_length and cache.lengths != [planned]:
            return False
        try:
            cache.crop(len(self.tokens) - count)
        except ValueError:  # a window or a state, of which the tokens before are gone
            return False
        cache.lengths = [planned]
        self.tokens = self.tokens[:count]
        return True


class PrefixRunner(EagerRunner):
    """Steps of one row by plain calls of the model, with a cache that stays after them."""

    def __init__(self, prefix: PrefixCache, request: GenerationRequest) -> None:
        self.prefix, self.model = prefix, prefix.model
        self.request = request

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        memory: EncoderOutput | None = None,
        positions: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        (prompt,) = prompts
        longest = self.request.longest(prompts)
        planned = (self.request.planned_lengths(prompts) or [longest])[0]
        unread = self.prefix.take(prompt, longest, planned)
        assert self.prefix.cache is not None
        self.cache = self.prefix.cache
        logits = super().prefill([unread])
        self.prefix.tokens += unread
        return logits

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        logits = super().step(tokens)
        self.prefix.tokens += [int(token) for token in tokens]
        return logits

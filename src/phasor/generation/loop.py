"""The loop: prefill once, then one token a row and step, from a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from phasor.config.generation import GenerationConfig
from phasor.generation.compiled import ROUND, CompiledSteps, can_compile
from phasor.generation.sampling import NOT, Chance, chances, draw, filtered, penalized
from phasor.generation.steps import KEPT, Runs, ahead, steps_of, why_not
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.protocol import EncoderOutput
from phasor.transformer import Stack, Transformer

ENDLESS = 1 << 62


@dataclass
class Row:
    """One sequence as it grows: the tokens it began with, the new ones and their log-probabilities."""

    prompt: list[int]
    chance: Chance
    new: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    done: bool = False
    watched: int = 0  # how many of the new tokens have been looked at from outside


@dataclass(frozen=True)
class Job:
    """What is to be generated: prompts (sources, for an encoder-decoder), where decoding begins, where it ends."""

    model: Transformer
    options: GenerationConfig
    prompts: list[list[int]]
    stop: frozenset[int]
    start: int | None = None
    forced_first: int | None = None
    forced_last: int | None = None
    never: tuple[int, ...] = ()
    details: bool = False  # whether log-probabilities are wanted

    def add(self, row: Row, token: int, scores: Tensor | None) -> None:
        """Let a row go on with a token, chosen from these scores `[vocab]` (which only details need)."""
        if self.details:
            assert scores is not None
            row.log_probabilities.append(float(scores.log_softmax(-1)[token]))
        row.new.append(token)
        row.done = token in self.stop or len(row.new) == self.options.max_new_tokens

    def forced(self, count: int) -> int | None:
        """The token that has to come after so many new ones, where one does."""
        if self.forced_last is not None and count + 1 == self.options.max_new_tokens:
            return self.forced_last
        return self.forced_first if count == 0 else None

    @property
    def foreseen(self) -> bool:
        """Whether the next token is always the likeliest, so that a step needs nothing but the one before it."""
        free = self.forced_first is None and self.forced_last is None
        return free and not (self.options.samples or self.options.penalizes or self.details)

    @property
    def crosses(self) -> bool:
        return self.model.config.shape == "encoder-decoder"

    def beginnings(self) -> list[list[int]]:
        """The tokens each decoder row begins with."""
        if not self.crosses:
            return self.prompts
        if self.start is None:
            raise ValueError("an encoder-decoder needs the token its decoder starts with: pass start=")
        return [[self.start] for _ in self.prompts]

    def check(self, draft: Transformer | None = None) -> None:
        """Whatever cannot be generated, said before anything runs."""
        size = self.model.config.vocab_size
        forced = {"forced first": {self.forced_first}, "forced last": {self.forced_last}}
        given = {"stop": self.stop, "start": {self.start}, **forced, "never generated": set(self.never)}
        for what, tokens in given.items():
            for token in tokens - {None}:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                    raise ValueError(f"the {what} token {token!r} is outside the vocabulary of {size}")
        chances(self.options, len(self.prompts))
        if self.crosses and (self.options.penalty_alpha or self.options.prompt_lookup_tokens or draft is not None):
            raise ValueError("contrastive search and speculative decoding are for decoders, not for encoder-decoders")
        if self.model.encoder is not None:
            source = max(map(len, self.prompts))
            check_reach(self.model.encoder, source, f"a prompt of {source} tokens reaches")
        for model in (self.model,) if draft is None else (self.model, draft):
            self._check_decoder(cast(Stack, model.decoder), drafts=draft is not None)

    def _check_decoder(self, stack: Stack, drafts: bool) -> None:
        """Whether a decoder's positions reach as far as its tokens will."""
        options, longest = self.options, max(map(len, self.beginnings()))
        if options.max_new_tokens is not None:
            # Only contrastive search reads the last token too.
            read = longest + options.max_new_tokens - (0 if options.penalty_alpha else 1)
            check_reach(stack, read, f"{longest} tokens and {options.max_new_tokens} new ones reach")
            return
        if options.num_beams > 1 or options.penalty_alpha or options.prompt_lookup_tokens or drafts:
            raise ValueError("only greedy decoding and plain sampling go on without end: give max_new_tokens")
        windows = all(layer.attention.window is not None for layer in stack.layers)
        if not windows or any(x.depends_on_length or x.max_positions is not None for x in stack.schemes):
            raise ValueError(
                "generating without end needs a window in every layer and positions without end: give max_new_tokens"
            )

    def new_cache(self, beginnings: Sequence[Sequence[int]], copies: int = 1, spare: int = 0) -> KVCache:
        """A cache for the rows, each planned as long as its beginning and `max_new_tokens`."""
        most = self.options.max_new_tokens
        if most is None:
            return self.model.new_cache(len(beginnings) * copies, ENDLESS, spare=spare)
        lengths = [len(b) + most for b in beginnings for _ in range(copies)]
        room = self.room(beginnings) if self.options.compile else max(lengths) + spare
        return self.model.new_cache(len(lengths), room, length=lengths, spare=spare)

    def room(self, beginnings: Sequence[Sequence[int]]) -> int:
        """How long a cache for the rows is where texts of about one length share a graph."""
        most = self.options.max_new_tokens
        return ENDLESS if most is None else -(-(max(map(len, beginnings)) + most) // ROUND) * ROUND

    def prefill(self, cache: KVCache, beginnings: Sequence[Sequence[int]], copies: int = 1) -> Tensor:
        """Read the beginnings into the cache; the logits `[rows, vocab]` after each."""
        rows = [b for b in beginnings for _ in range(copies)]
        tokens, attention_mask = padded(rows, self.model.tokens.weight.device)
        memory = None
        if self.crosses:
            source, real = padded(self.prompts, tokens.device, left=False)
            memory = self.model.encode(source, attention_mask=real)
            if copies > 1:
                padding_of = None if real is None else real.repeat_interleave(copies, 0)
                memory = EncoderOutput(memory.hidden.repeat_interleave(copies, 0), padding_of)
        hidden = self.model.decode(tokens, memory, attention_mask=attention_mask, cache=cache)
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of the last token alone, `[rows, vocab]`."""
        assert self.model.head is not None
        return self._allowed(self.model.head(hidden[:, -1], self.model.tokens.table))

    def _allowed(self, logits: Tensor) -> Tensor:
        """Logits without the tokens that are never generated."""
        return logits.index_fill(-1, logits.new_tensor(self.never, dtype=torch.int64), NOT) if self.never else logits

    def step(self, cache: KVCache, tokens: Sequence[int] | Tensor) -> Tensor:
        """Feed one token a row; the logits `[rows, vocab]` after it."""
        column = torch.as_tensor(tokens, device=self.model.tokens.weight.device)[:, None]
        return self._logits(self.model.decode(column, cache.memory, cache=cache))

    def stepper(self, cache: KVCache) -> Callable[[Sequence[int]], Tensor]:
        """What feeds one token a row: by the compiled graph where that was asked for and one graph does."""
        if not (self.options.compile and can_compile(self.model)):
            return partial(self.step, cache)
        steps = CompiledSteps(self.model, cache)
        device = self.model.tokens.weight.device
        return lambda tokens: self._allowed(steps.step(torch.tensor(tokens, device=device)))


def check_reach(stack: Stack, tokens: int, what: str) -> None:
    for scheme in stack.schemes:
        if scheme.max_positions is not None and tokens > scheme.max_positions:
            raise ValueError(f"{what} past the {scheme.max_positions} positions of the model's {scheme.kind!r} scheme")


def padded(rows: Sequence[Sequence[int]], device: torch.device, left: bool = True) -> tuple[Tensor, Tensor | None]:
    """Rows side by side, padded on the left (or right), and which tokens are real (None if all are)."""
    width = max(map(len, rows))
    if all(len(row) == width for row in rows):
        return torch.tensor(rows, device=device), None
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[i, at], real[i, at] = torch.tensor(row), True
    return tokens.to(device), real.to(device)


def scored(logits: Tensor, row: Row, options: GenerationConfig) -> Tensor:
    """A row's logits `[vocab]` in at least float32, with its penalties."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return penalized(wide, options, row.prompt, row.new)


def only(token: int, like: Tensor) -> Tensor:
    """Scores that leave one token: its log-probability is 0."""
    scores = torch.full_like(like, NOT)
    scores[..., token] = 0.0
    return scores


def choose(logits: Tensor, row: Row, options: GenerationConfig) -> int:
    """The next token of a row from its penalized logits `[vocab]`."""
    if not options.samples:
        return int(logits.argmax())
    return int(draw(filtered(logits, options).softmax(-1), row.chance.next().to(logits.device)))


def one_by_one(job: Job) -> Iterator[list[Row]]:
    """Greedy decoding and sampling of all rows together; gives the rows after every step."""
    options, beginnings = job.options, job.beginnings()
    rows = [Row(list(b), c) for b, c in zip(beginnings, chances(options, len(beginnings)), strict=True)]
    if why_not(job.model) is not None:
        KEPT.pop(job.model, None)  # what was kept on a device it has left
        cache = job.new_cache(beginnings)
        logits = job.prefill(cache, beginnings)
        yield from by_the_host(job, rows, logits, job.stepper(cache))
        return
    with steps_of(job.model, len(rows), job.room(beginnings), options.compile) as steps:
        cache = steps.fresh()
        logits = job.prefill(cache, beginnings)
        if job.foreseen:
            steps.begin(cache, logits.argmax(-1))
            yield from foreseen(job, rows, steps)
        else:
            steps.begin(cache)
            yield from by_the_host(job, rows, logits, steps.logits_after)


def foreseen(job: Job, rows: list[Row], steps: Runs) -> Iterator[list[Row]]:
    """The rows after every step of those that are launched ahead; what comes after a row's end is not its own."""
    for tokens in ahead(steps, job.options.max_new_tokens):
        for row, token in zip(rows, tokens, strict=True):
            if not row.done:
                job.add(row, token, None)
        yield rows
        if all(row.done for row in rows):
            return


def by_the_host(
    job: Job, rows: list[Row], logits: Tensor, step: Callable[[Sequence[int]], Tensor]
) -> Iterator[list[Row]]:
    """The rows after every step, each token chosen from the logits before the next step begins."""
    options = job.options
    simple = not (options.samples or options.penalizes or job.details)
    while True:
        likeliest = logits.max(-1).indices.tolist() if simple else None
        for i, row in enumerate(rows):
            if row.done:
                continue
            forced = job.forced(len(row.new))
            if forced is not None:
                job.add(row, forced, only(forced, logits[i]))
                continue
            scores = logits[i] if simple else scored(logits[i], row, options)
            job.add(row, choose(scores, row, options) if likeliest is None else likeliest[i], scores)
        yield rows
        if all(row.done for row in rows):
            return
        logits = step([row.new[-1] for row in rows])

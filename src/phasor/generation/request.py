"""A generation request: prompts as token ids, where decoding starts and stops, and the options; all of it checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.generation import GenerationConfig, SpecialTokens
from phasor.config.generation_settings import merge_options
from phasor.config.positions import PositionConfig
from phasor.config.schema import name_some, quote
from phasor.generation.constraints import Constraints
from phasor.generation.encode import encode_prompts
from phasor.generation.prefix_cache import PrefixCache
from phasor.generation.runners import StepSpec
from phasor.generation.runners.eager import pad_rows
from phasor.generation.runners.protocol import ENDLESS, round_length
from phasor.generation.sampling import RandomStream, penalize, random_streams
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.protocol import EncoderOutput
from phasor.nn.checks import describe_tensor
from phasor.nn.norm import at_least_float32
from phasor.transformer import Stack, Transformer

# A source of features is `[frames, features]`.
Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Tensor | Sequence[Tensor]


@dataclass
class SequenceState:
    """One sequence as it grows: its prompt, its new tokens and their log-probabilities."""

    prompt: list[int]
    random: RandomStream
    new: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    done: bool = False
    num_read: int = 0  # how many of the new tokens the caller has read


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: prompts (sources, for an encoder-decoder), where decoding starts, where it stops.

    Sources of features are tensors `[frames, features]`. `start` are the tokens that an encoder-decoder's decoder
    begins with. `tokenizer` decodes the new tokens where the prompts were text, `is_batch` says whether there was a
    list of them.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> request = build_request(model, [1, 2, 3], GenerationConfig(max_new_tokens=5))
    >>> request.prompts, request.is_batch, request.is_argmax_only
    ([[1, 2, 3]], False, True)
    """

    model: Transformer
    options: GenerationConfig
    prompts: list[Any]
    stop: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    start: tuple[int, ...] | None = None
    constraints: Constraints = field(default_factory=Constraints)
    details: bool = False  # whether log-probabilities are needed
    draft: Transformer | None = None
    tokenizer: Any = None
    is_batch: bool = True
    positions: list[list[int]] | None = None  # of the tokens of each prompt, where they do not count from 0
    prefix: PrefixCache | None = None  # what is computed already of the one prompt

    @property
    def is_argmax_only(self) -> bool:
        """Whether the next token is always the likeliest, so that a step needs nothing but the one before it."""
        return not (self.constraints.any or self.options.samples or self.options.penalizes or self.details)

    @property
    def samples_per_prompt(self) -> int:
        """How many rows each of the caller's prompts has; beams are counted elsewhere."""
        return self.options.num_return_sequences if self.options.num_beams == 1 else 1

    @property
    def is_encoder_decoder(self) -> bool:
        return self.model.config.shape == "encoder-decoder"

    def decoder_prompts(self) -> list[list[int]]:
        """The tokens each decoder row begins with."""
        if not self.is_encoder_decoder:
            return self.prompts
        if self.start is None:
            raise ValueError("an encoder-decoder needs the token its decoder starts with: pass start=")
        return [list(self.start) for _ in self.prompts]

    def prompt_positions(self, copies: int = 1) -> list[list[int]] | None:
        """The positions of each prompt's tokens, for `copies` rows per prompt; None where they count from 0."""
        return None if self.positions is None else [own for own in self.positions for _ in range(copies)]

    def new_rows(self) -> list[SequenceState]:
        """A row for every prompt, with no new tokens yet."""
        prompts = self.decoder_prompts()
        streams = random_streams(self.options, len(prompts))
        return [SequenceState(list(prompt), stream) for prompt, stream in zip(prompts, streams, strict=True)]

    def add_token(self, row: SequenceState, token: int, scores: Tensor | None) -> None:
        """Append a token to a row, chosen from these scores `[vocab]` (which only details need)."""
        if self.details:
            assert scores is not None
            row.log_probabilities.append(float(scores.log_softmax(-1)[token]))
        row.new.append(token)
        row.done = token in self.stop or len(row.new) == self.options.max_new_tokens

    def score(self, logits: Tensor, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
        """One row of logits `[vocab]` (log-probabilities, for beams) in at least float32, penalized and constrained."""
        return self.constraints.apply(penalize(at_least_float32(logits), self.options, prompt, new), prompt, new)

    def planned_lengths(self, prompts: Sequence[Sequence[int]], copies: int = 1) -> list[int] | None:
        """The length that each row is planned for; None where decoding has no end."""
        most, planned = self.options.max_new_tokens, self.options.planned_length
        if most is None:
            return None
        return [planned or len(prompt) + most for prompt in prompts for _ in range(copies)]

    def new_cache(self, prompts: Sequence[Sequence[int]], copies: int = 1, spare: int = 0) -> KVCache:
        """A dynamic cache for `copies` rows per prompt, each planned as long as its prompt and `max_new_tokens`."""
        lengths = self.planned_lengths(prompts, copies)
        longest = self.longest(prompts)
        longest = longest if longest == ENDLESS else longest + spare
        return self.model.new_cache(len(prompts) * copies, longest, length=lengths, spare=spare)

    def longest(self, prompts: Sequence[Sequence[int]]) -> int:
        """The number of tokens of the longest row with all of its new tokens."""
        most = self.options.max_new_tokens
        return ENDLESS if most is None else max(map(len, prompts)) + most

    def step_spec(self, beams: int = 1) -> StepSpec:
        """What a step runner for all rows is built for, `beams` of them for each prompt."""
        prompts, compile = self.decoder_prompts(), self.options.compile
        lengths, longest = self.planned_lengths(prompts, beams), self.longest(prompts)
        source_length = self.source_length
        longest = round_length(longest) if compile else longest
        return StepSpec(self.model, len(prompts) * beams, longest, lengths, compile, beams, source_length)

    @property
    def source_length(self) -> int:
        """How many vectors the encoder reads of the longest prompt."""
        longest, front_end = max(map(len, self.prompts)), self.model.config.embedding.front_end
        return longest if front_end is None else front_end.length(longest)

    def encode(self, copies: int = 1) -> EncoderOutput | None:
        """The encoder's output of the prompts, each `copies` times; None for a decoder."""
        if not self.is_encoder_decoder:
            return None
        output = encode_sources(self.model, self.prompts)
        if copies == 1:
            return output
        real = None if output.attention_mask is None else output.attention_mask.repeat_interleave(copies, 0)
        return EncoderOutput(output.hidden.repeat_interleave(copies, 0), real)

    def check(self) -> None:
        """Refuse what cannot be generated before anything runs."""
        size = self.model.config.vocab_size
        rules = self.constraints
        forced = {"forced first": {rules.forced_first}, "forced last": {rules.forced_last}}
        words = {token for words in rules.banned_sequences for token in words}
        never = {"never generated": words | rules.banned | rules.banned_first}
        given = {"stop": self.stop, "start": set(self.start or ()), **forced, **never}
        for what, tokens in given.items():
            for token in tokens - {None}:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                    raise ValueError(f"the {what} token {token!r} is outside the vocabulary of {size}")
        random_streams(self.options, len(self.prompts))
        speculative = self.options.prompt_lookup_tokens or self.draft is not None
        if self.is_encoder_decoder and (self.options.penalty_alpha or speculative):
            raise ValueError("contrastive search and speculative decoding are for decoders, not for encoder-decoders")
        layers = 0 if self.draft is None else self.draft.config.num_layers
        if self.draft is not None and any(map(self.draft.config.cached_per_sequence, range(layers))):
            raise ValueError(
                "a draft's tokens are undone where they are rejected, which layers that keep a state cannot do: give a "
                "draft without such layers, or prompt_lookup_tokens"
            )
        if self.model.encoder is not None:
            source, what = self.source_length, "tokens" if self.model.front_end is None else "vectors"
            check_max_positions(self.model.encoder.schemes, source, f"a prompt of {source} {what} reaches")
        if self.positions is not None:
            self._check_positions(self.positions)
        for model in (self.model,) if self.draft is None else (self.model, self.draft):
            self._check_decoder(cast(Stack, model.decoder), like=model.tokens.weight)

    def _check_positions(self, positions: list[list[int]]) -> None:
        options = self.options
        if self.is_encoder_decoder or self.draft or options.penalty_alpha or options.prompt_lookup_tokens:
            raise ValueError("positions are for a decoder, with greedy decoding, sampling or beam search")
        sizes = [len(own) if isinstance(own, list) else None for own in positions]
        if sizes != list(map(len, self.prompts)):
            raise ValueError("positions are a list of integers for each prompt, one for each of its tokens")
        for position in {position for own in positions for position in own}:
            if type(position) is not int or not 0 <= position < 1 << 62:
                raise ValueError(f"a position is an integer from 0 to 2^62, not {quote(position)}")

    def _check_decoder(self, stack: Stack, like: Tensor) -> None:
        """Whether a decoder's positions suffice for its tokens."""
        options, longest = self.options, max(map(len, self.decoder_prompts()))
        limited, given = stack.schemes_with_max_positions(like), self.positions
        # Only contrastive search reads the last token too.
        new = (options.max_new_tokens or 1) - (0 if options.penalty_alpha else 1)
        if given is not None:
            reached = max(max(map(max, given)), max(own[-1] for own in given) + new) + 1
            check_max_positions(limited, reached, "the positions of prompts and new tokens reach")
        else:
            check_max_positions(stack.schemes, longest, f"a prompt of {longest} tokens reaches")
        if options.max_new_tokens is not None:
            if given is None:
                what = f"{longest} tokens and {options.max_new_tokens} new ones reach"
                check_max_positions(limited, longest + new, what)
            planned, needed = options.planned_length, longest + options.max_new_tokens
            if planned is not None and planned < needed:
                raise ValueError(f"planned_length must be at least prompt and max_new_tokens, {needed}, not {planned}")
            return
        if options.num_beams > 1 or options.penalty_alpha or options.prompt_lookup_tokens or self.draft is not None:
            raise ValueError("only greedy decoding and plain sampling go on without end: give max_new_tokens")
        grows = any(layer.attention.grows for layer in stack.layers)
        if grows or limited or any(scheme.depends_on_length for scheme in stack.schemes):
            raise ValueError(
                "generating without end needs a window or a state in every layer, and positions without end: give "
                "max_new_tokens"
            )


def build_request(
    model: Transformer,
    prompt: Prompt,
    options: GenerationConfig | None = None,
    fields: dict[str, Any] | None = None,
    *,
    draft: Transformer | None = None,
    start: int | Sequence[int] | None = None,
    positions: Any = None,
    details: bool = False,
    streams: bool = False,
    as_text: bool = False,
) -> GenerationRequest:
    """Tokenize the prompts, merge the options with the folder's settings, resolve the stop tokens, check everything.

    With `as_text` the new tokens of prompts of ids are decoded too.
    """
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise ValueError(f"generation needs a Transformer, not {quote(model)}")
    if model.decoder is None:
        raise ValueError("an encoder does not generate: generation needs a decoder or an encoder-decoder")
    if model.tokens.weight.is_meta:
        raise ValueError("a model on the meta device has no weights to generate with")
    if not model.config.has_logits:
        raise ValueError(f"this model's head is {model.config.head.kind!r}: generation needs logits, the head 'lm'")
    if start is not None and model.config.shape != "encoder-decoder":
        raise ValueError("start is for an encoder-decoder; a decoder starts with its prompt")
    prompts, is_batch, is_text = split_prompts(prompt)
    if is_text and model.tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer, and this model has none: pass token ids")
    reader = model.tokenizer if model.source_tokenizer is None else model.source_tokenizer
    ids = encode_prompts(reader, prompts) if is_text and model.front_end is None else prompts
    for p in ids:
        check_prompt(p, model)
    start = model.special.start if start is None else start
    begin = None if start is None else tuple(start) if isinstance(start, Sequence) else (start,)
    if begin == ():
        raise ValueError("start is empty: a decoder starts with at least one token")
    longest = len(begin or (0,)) if model.encoder is not None else max(map(len, ids))
    options = merge_options(
        model.generation_settings,
        options,
        fields or {},
        prompt_length=longest,
        streams=streams,
        drafts=draft is not None,
    )
    if draft is not None:
        check_draft(model, draft, options)
    stop = model.special.stop if options.stop is None else options.stop
    tokenizer = model.tokenizer if is_text or as_text else None
    stop_tokens, stop_texts = split_stops(stop, tokenizer, options)
    copies = options.num_return_sequences if options.num_beams == 1 else 1
    if positions is not None:
        listed = positions.tolist() if isinstance(positions, Tensor) else positions
        if not isinstance(listed, list):
            raise ValueError(f"positions are a list of integers for each prompt, not {quote(positions)}")
        positions = [own for own in (listed if is_batch else [listed]) for _ in range(copies)]
    request = GenerationRequest(
        model,
        options,
        [p if isinstance(p, Tensor) else list(p) for p in ids for _ in range(copies)],
        stop_tokens,
        stop_texts,
        start=begin,
        constraints=build_constraints(options, model.special, stop_tokens),
        details=details,
        draft=draft,
        tokenizer=tokenizer,
        is_batch=is_batch,
        positions=positions,
    )
    request.check()
    return request


def build_constraints(options: GenerationConfig, special: SpecialTokens, stop: frozenset[int]) -> Constraints:
    """What the options and the special tokens of a folder force and ban.

    A stop token alone is no bad word, as in `transformers`.
    """
    words = options.bad_words_ids
    words = tuple((token,) for token in special.never) if words is None else words
    single = {word[0] for word in words if len(word) == 1} - stop
    return Constraints(
        forced_first=special.forced_first,
        forced_last=special.forced_last,
        max_new_tokens=options.max_new_tokens,
        banned=frozenset(single | set(options.suppress_tokens)),
        banned_first=frozenset(options.begin_suppress_tokens),
        banned_sequences=tuple(word for word in words if len(word) > 1),
        no_repeat_ngram_size=options.no_repeat_ngram_size,
        min_new_tokens=options.min_new_tokens,
        stop=stop,
    )


def split_prompts(prompt: Prompt) -> tuple[list[Any], bool, bool]:
    """Prompts as a list, whether there was a list of them, and whether they are text."""
    if isinstance(prompt, str):
        return [prompt], False, True
    if isinstance(prompt, Tensor) and prompt.is_floating_point():
        return (list(prompt), True, False) if prompt.dim() == 3 else ([prompt], False, False)
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and not prompt:
        raise ValueError("the prompt is empty: give token ids, text, or a list of either")
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise ValueError(f"a prompt is a list of token ids, a text, or a list of either, not {quote(prompt)}")
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return list(prompt), True, True
    if all(issubclass(kind, int) and kind is not bool for kind in kinds):
        return [prompt], False, False
    if all(isinstance(p, Sequence | torch.Tensor) and not isinstance(p, str) for p in prompt):
        if all(isinstance(p, Tensor) and p.is_floating_point() for p in prompt):
            return list(prompt), True, False
        lists = [p.tolist() if isinstance(p, Tensor) else list(cast(Sequence[int], p)) for p in prompt]
        return lists, True, False
    raise ValueError("a prompt is a list of token ids, a list of such lists, a text, or a list of texts")


def split_stops(
    stop: Sequence[int | str], tokenizer: Any, options: GenerationConfig
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Stop tokens and stop texts; the name of a special token is a stop token, because decoded text leaves it out."""
    texts = [s for s in stop if isinstance(s, str)]
    if texts and tokenizer is None:
        raise ValueError(f"the stop text {texts[0]!r} needs a text prompt; with token ids give stop tokens")
    if texts and options.num_beams > 1:
        raise ValueError("beam search ends at stop tokens, not at stop texts: its beams are compared token by token")
    if "" in texts:
        raise ValueError("a stop text is empty: it would stop before it starts")
    added = tokenizer.get_added_tokens_decoder() if texts else {}
    special = {token.content: i for i, token in added.items() if token.special}
    tokens = frozenset(special[s] if isinstance(s, str) else s for s in stop if not isinstance(s, str) or s in special)
    return tokens, tuple(s for s in texts if s not in special)


def check_prompt(prompt: Any, model: Transformer) -> None:
    if model.front_end is not None:
        model.front_end.check(prompt[None] if isinstance(prompt, Tensor) else prompt)
        return
    if isinstance(prompt, Tensor):
        raise ValueError(f"a prompt is a list of token ids, a text, or a list of either, not {describe_tensor(prompt)}")
    size = model.config.vocab_size
    if model.config.shape == "encoder-decoder":
        size = model.config.embedding.source_vocab_size or size
    if not prompt:
        raise ValueError("a prompt is empty: it needs at least one token")
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < size:
        return
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise ValueError(f"the prompt's token {token!r} is outside the vocabulary of {size}")


def encode_sources(model: Transformer, prompts: Sequence[Any]) -> EncoderOutput:
    """The encoder's output of sources, tokens of any numbers or features of as many frames."""
    device = model.tokens.weight.device
    if model.front_end is not None:
        if len(frames := {len(prompt) for prompt in prompts}) > 1:
            raise ValueError(f"the features of a batch have one number of frames, and not {name_some(sorted(frames))}")
        return model.encode(torch.stack(list(prompts)).to(device))
    source, real = pad_rows(prompts, device, left=False)
    return model.encode(source, attention_mask=real)


def check_draft(model: Transformer, draft: Transformer, options: GenerationConfig) -> None:
    config = getattr(draft, "config", None)
    if not isinstance(config, ModelConfig) or config.shape != "decoder" or not config.has_logits:
        raise ValueError("a draft model must be a decoder with logits")
    if config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the draft model's vocabulary has {config.vocab_size} tokens and the model's "
            f"{model.config.vocab_size}: they must be the same"
        )
    if options.num_beams > 1 or options.penalty_alpha or options.prompt_lookup_tokens or options.compile:
        raise ValueError(
            "a draft model works with greedy decoding or sampling, not with num_beams, penalty_alpha, "
            "prompt_lookup_tokens or compile"
        )


def check_max_positions(schemes: Iterable[PositionConfig], tokens: int, what: str) -> None:
    for scheme in schemes:
        if scheme.max_positions is not None and tokens > scheme.max_positions:
            raise ValueError(f"{what} past the {scheme.max_positions} positions of the model's {scheme.kind!r} scheme")

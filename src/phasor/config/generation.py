"""How tokens are chosen when a model generates."""

from __future__ import annotations

from typing import Literal

from phasor.config.schema import Config

MAX_LENGTH_PENALTY = 16  # a length to this power is still finite in float64
AT_MOST = {"num_beams": 1 << 12, "num_return_sequences": 1 << 16}  # each of them is a row of the batch


OPTIONS = {
    "max_new_tokens": "maximum number of new tokens (none: no limit, for models with a window in every layer)",
    "min_new_tokens": "number of new tokens before which no stop token is generated",
    "planned_length": "length of prompt and output that LongRoPE and dynamic extensions choose their frequencies for; "
    "by default prompt and max_new_tokens, so that another max_new_tokens may change the first tokens",
    "temperature": "divides the logits; 0 is greedy decoding, above 0 samples",
    "top_k": "sample from the k most likely tokens",
    "top_p": "sample from the smallest set of most likely tokens with this total probability",
    "min_p": "sample from tokens with at least this fraction of the top token's probability",
    "typical_p": "locally typical sampling: the most typical tokens with this total probability",
    "repetition_penalty": "above 1, makes tokens of the prompt and the output less likely",
    "frequency_penalty": "subtracted from a logit for each time its token was generated",
    "presence_penalty": "subtracted from a logit if its token was generated",
    "no_repeat_ngram_size": "no n-gram of this size occurs twice in prompt and output",
    "suppress_tokens": "token ids that are never generated",
    "begin_suppress_tokens": "token ids that are not generated as the first new token",
    "bad_words_ids": "sequences of token ids that are never generated; by default those the folder names",
    "num_beams": "number of beams of beam search",
    "num_return_sequences": "number of samples, or of beams to return, per prompt",
    "length_penalty": "exponent of the length by which a beam's score is divided",
    "early_stopping": "stop when num_beams beams are finished; never: only when none can improve",
    "renormalize_logits": "normalize the probabilities of beams again after penalties and bans",
    "penalty_alpha": "weight of the degeneration penalty of contrastive search over the top_k",
    "prompt_lookup_tokens": "prompt lookup decoding: maximum number of tokens proposed from the text so far",
    "draft_tokens": "number of tokens a draft model proposes",
    "compile": "compile the decoding step: slow to start, then faster",
    "seed": "random seed of sampling; one integer, or one per prompt",
    "stop": "token ids and strings that end generation",
}


class GenerationConfig(Config):
    """The options of `generate`.

    Greedy unless a temperature or a filter asks for sampling. `num_beams` above 1 searches beams, `penalty_alpha` above
    0 searches contrastively among the `top_k` best, `prompt_lookup_tokens` proposes continuations found in the
    text so far. `compile` compiles the decoding step, which takes a while once and is then faster for all texts
    of about the same length; where frequencies depend on the length it has no effect. Stop strings need a tokenizer.
    `repetition_penalty` and `no_repeat_ngram_size` apply to prompt and new tokens, `frequency_penalty` and
    `presence_penalty` to new ones. `num_return_sequences` are the best beams, or samples: with the seed `s` those of
    the seeds `s`, `s + 1`, ...

    Where frequencies depend on the length of the text (LongRoPE, dynamic extensions), every token is computed with
    those of the `planned_length`, by default prompt and `max_new_tokens`, so that the output equals a forward over the
    whole text. Another `max_new_tokens` may then change all tokens; give `planned_length` to keep them.

    >>> GenerationConfig(top_p=0.9).samples, GenerationConfig(max_new_tokens=8).samples
    (True, False)
    """

    max_new_tokens: int | None = 64
    min_new_tokens: int = 0
    planned_length: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    renormalize_logits: bool = False
    penalty_alpha: float = 0.0
    prompt_lookup_tokens: int = 0
    draft_tokens: int = 4
    compile: bool = False
    seed: int | tuple[int, ...] | None = None
    stop: tuple[int | str, ...] | None = None

    def check(self) -> None:
        at_least = {
            "max_new_tokens": 1,
            "min_new_tokens": 0,
            "planned_length": 1,
            "no_repeat_ngram_size": 0,
            "top_k": 1,
            "num_beams": 1,
            "num_return_sequences": 1,
            "prompt_lookup_tokens": 0,
            "draft_tokens": 1,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for name, most in AT_MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, not {getattr(self, name)}")
        if self.temperature is not None and not self.temperature >= 0:
            raise ValueError(f"temperature must not be negative, not {self.temperature}")
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], not {value}")
        for name in ("min_p", "penalty_alpha"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], not {value}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be greater than 0, not {self.repetition_penalty}")
        if self.num_return_sequences > self.num_beams and not (self.samples and self.num_beams == 1):
            raise ValueError(
                f"num_return_sequences ({self.num_return_sequences}) cannot exceed num_beams ({self.num_beams}) "
                "without sampling: several samples need a temperature above 0"
            )
        if self.bad_words_ids is not None and () in self.bad_words_ids:
            raise ValueError("bad_words_ids has a sequence without tokens")
        searches = [self.num_beams > 1, self.penalty_alpha > 0, self.prompt_lookup_tokens > 0]
        if sum(searches) > 1:
            raise ValueError(
                "num_beams, penalty_alpha and prompt_lookup_tokens are different ways of decoding: choose one"
            )
        if self.num_beams > 1 and self.samples:
            raise ValueError("beam search does not sample: leave temperature, top_k, top_p, min_p and typical_p out")
        if self.compile and any(searches):
            raise ValueError(
                "compile is for greedy decoding and plain sampling, "
                "not for num_beams, penalty_alpha or prompt_lookup_tokens"
            )
        filters = (self.temperature or None, self.top_p, self.min_p, self.typical_p)
        if self.penalty_alpha > 0 and (self.top_k is None or any(f is not None for f in filters)):
            raise ValueError("contrastive search chooses among the top_k best and does not sample: give top_k alone")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise ValueError(
                f"length_penalty must be in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}], not {self.length_penalty}"
            )

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled rather than chosen greedily."""
        if self.temperature is not None:
            return self.temperature > 0
        filters = (None if self.penalty_alpha else self.top_k, self.top_p, self.min_p, self.typical_p)
        return any(f is not None for f in filters)

    @property
    def penalizes(self) -> bool:
        """Whether previous tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class SpecialTokens(Config):
    """The tokens a model's folder names: where texts end, and how a decoder begins.

    Three of them override what the model finds likely: `forced_first` is the second token of a text (in an
    encoder-decoder, the first after `start`), `forced_last` the one with which `max_new_tokens` are reached, and
    `never` are tokens that are not generated, unless `bad_words_ids` are given instead.
    """

    stop: tuple[int, ...] = ()
    start: int | None = None
    forced_first: int | None = None
    forced_last: int | None = None
    never: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

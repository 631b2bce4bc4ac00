"""A model of phasor for lm-evaluation-harness (the package `lm_eval`).

The harness finds a model by the name it was registered under, and has no option for a package that registers one. So
its command line is started from here, with all of its options:

    python -m phasor.evaluation.lm_eval --model phasor --model_args path=FOLDER --tasks ...
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from phasor.checkpoints.open_model import open_model
from phasor.checkpoints.swap_positions import swap_config
from phasor.config.schema import check_integer, quote
from phasor.data.tokenizers import special_of
from phasor.distribution import missing_package
from phasor.evaluation.continuations import check_scorable, score_continuations
from phasor.evaluation.run import known_limits
from phasor.evaluation.variants import check_variants, make_variant
from phasor.generation.api import decode_rows
from phasor.generation.encode import encode_prompts, without_limits
from phasor.generation.engine.prompt_list import engine_why_not, split_request
from phasor.generation.request import build_request

NAME, TARGET = "phasor", "phasor.evaluation.lm_eval:PhasorLM"  # in the registry of the harness
NEW_TOKENS = 256  # that are generated where a task does not say how many
DTYPES = ("float32", "bfloat16", "float16", "float64")
NEW_TOKEN_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given


class HarnessRequest(Protocol):
    """What the harness asks: `args` are a context and its continuation, a text, or a context and options."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class HarnessModel:
    """The three questions of the harness, answered by a model folder of any format that `phasor.load` reads.

    `path` is the folder, `dtype` a name such as "bfloat16", `device` as everywhere. `max_length` is the most tokens
    that the model reads, by default as many as its configuration states; `extension` extends its positions to that.
    `batch_size` is the number of rows of a forward, or "auto" for as many as about 16,000 tokens.

    A request that is longer is cut at its beginning, as by the harness's own models, so that scores are the same. Here
    it is counted: a warning says how many were cut, and `truncated` is among the results of the harness.

    >>> import tempfile
    >>> import phasor
    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> from types import SimpleNamespace
    >>> model = phasor.Transformer(phasor.preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=261))
    >>> model.tokenizer = byte_tokenizer()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     phasor.save(model, folder)
    ...     harness = HarnessModel(folder, device="cpu", max_length=32)
    >>> [(score, greedy)] = harness.loglikelihood([SimpleNamespace(args=("Two and two", " is four"))])
    >>> score < 0, harness.truncated
    (True, {'loglikelihood': 0, 'generate_until': 0})
    """

    def __init__(
        self,
        path: str,
        dtype: str | None = None,
        device: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        extension: str | None = None,
        checkpoint: str | int | None = None,
        part: str | None = None,
    ) -> None:
        super().__init__()
        if dtype not in (None, "auto", *DTYPES):
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {quote(dtype)}")
        self.path = path
        torch_dtype = None if dtype in (None, "auto") else getattr(torch, dtype)
        self.model, folder = open_model(path, device or "auto", torch_dtype, checkpoint=checkpoint, part=part)
        assert folder is not None
        self.folder = folder
        if self.model.tokenizer is None:
            raise ValueError(f"{path} has no tokenizer, and the harness asks in text")
        check_scorable(self.model)
        self.max_length = check_integer(
            "max_length", self.model.config.max_length if max_length is None else max_length
        )
        limit = min(known_limits(self.model), default=self.max_length)
        if self.max_length > limit:
            raise ValueError(f"max_length is {self.max_length:,}, and the model has a table of {limit:,} positions")
        self.extension = extension
        if extension is not None:
            check_variants([extension])
            config = make_variant(self.model.config, extension, self.max_length).config
            self.model = swap_config(self.model, config)
        rows = 1 if batch_size is None else batch_size
        self.batch_rows = None if str(rows).startswith("auto") else check_integer("batch_size", int(rows))
        self.special = special_of(self.model.tokenizer, self.folder)
        self.text_tokenizer = without_limits(self.model.tokenizer)
        self.truncated = {"loglikelihood": 0, "generate_until": 0}

    def loglikelihood(self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each context and continuation: its log-probability, and whether greedy decoding would write it."""
        pairs = [self._encode_pair(*request.args) for request in requests]
        room = self.max_length + 1  # the last token is not read
        cut = []
        for context, continuation in pairs:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation):,} tokens, and the model reads {self.max_length:,} at most"
                )
            cut.append((context[-(room - len(continuation)) :], continuation))
        self._report_cuts("loglikelihood", pairs, cut)
        scores = score_continuations(self.model, cut, batch_rows=self.batch_rows)
        results = [(score.log_probability, score.greedy) for score in scores]
        for request, result in zip(requests, results, strict=True):
            self._remember("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text. Longer ones are read in windows; every token counts once."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            for window in rolling_windows(self.encode(request.args[0]), self.prefix_token_id, self.max_length):
                pairs.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        scores = score_continuations(self.model, pairs, batch_rows=self.batch_rows)
        for owner, score in zip(owners, scores, strict=True):
            totals[owner] += score.log_probability
        for request, total in zip(requests, totals, strict=True):
            self._remember("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first of the texts to stop at."""
        results = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        before: list[Any] = []
        after: list[Any] = []
        for members in groups.values():
            settings = read_settings(requests[members[0]].args[1])
            room = self.max_length - settings.new_tokens
            if room < 1:
                raise ValueError(
                    f"a task generates {settings.new_tokens:,} tokens, and max_length is {self.max_length:,}: "
                    "nothing is left for the prompt"
                )
            prompts = {number: self.encode(requests[number].args[0]) for number in members}
            before += [(prompts[number], []) for number in members]
            after += [(prompts[number][-room:], []) for number in members]
            members.sort(key=lambda number: -len(prompts[number]))
            texts = self._generate([prompts[number][-room:] for number in members], settings)
            for number, text in zip(members, texts, strict=True):
                results[number] = text
                self._remember("generate_until", requests[number].args, text)
        self._report_cuts("generate_until", before, after)
        return results

    def _generate(self, prompts: list[list[int]], settings: GenerationSettings) -> Iterator[str]:
        """The texts of new tokens, decoded by themselves."""
        stop = sorted({self.special.eos, *self.model.special.stop})
        fields = {"max_new_tokens": settings.new_tokens, "stop": stop, **settings.options}
        request = build_request(self.model, prompts, None, fields)
        # Prompts are tokens, to be cut to a number of them, and stops are texts.
        request = dataclasses.replace(request, tokenizer=self.text_tokenizer, stop_texts=settings.until)
        rows = self.batch_rows or 16
        for part in (request,) if engine_why_not(request) is None else split_request(request, rows):
            for new in decode_rows(part, rows):
                yield cut_at(self.text_tokenizer.decode(new.tokens, skip_special_tokens=True), settings.until)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text, with what its tokenizer begins texts with, unless the text has it already."""
        name = self.text_tokenizer.id_to_token(self.prefix_token_id)
        if special and not (name and text.startswith(name)):
            return encode_prompts(self.text_tokenizer, [text])[0]
        return self.text_tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of both. They are those of the joined text; spaces in between belong to the continuation."""
        if context == "":
            ids = self.encode(continuation, special=False)
            return (ids[:1], ids[1:]) if ids[:1] == [self.prefix_token_id] else ([self.prefix_token_id], ids)
        kept = context.rstrip()
        both, alone = self.encode(context + continuation), self.encode(kept)
        return alone or [self.prefix_token_id], both[len(alone) :]

    def _report_cuts(self, what: str, before: Sequence[Any], after: Sequence[Any]) -> None:
        count = sum(len(a[0]) < len(b[0]) for b, a in zip(before, after, strict=True))
        self.truncated[what] += count
        if count:
            were = "is longer than {} and was" if count == 1 else "are longer than {} and were"
            limit = f"max_length ({self.max_length:,} tokens)"
            warnings.warn(
                f"{count:,} of {len(before):,} requests {were.format(limit)} cut at the beginning", stacklevel=3
            )

    def _remember(self, what: str, args: tuple[Any, ...], result: Any) -> None:
        """Pass a result on to the harness's cache of requests, where it has one."""
        hook = getattr(self, "cache_hook", None)
        if hook is not None:
            hook.add_partial(what, args, result)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.special.eos

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context is predicted from."""
        return self.special.eos if self.special.bos is None else self.special.bos

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache of requests."""
        return str(self.folder).replace("/", "__")

    @cached_property
    def chat_tokenizer(self) -> Any:
        """The folder's tokenizer as transformers loads it, for its chat template."""
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ValueError("a chat template needs the package transformers: pip install transformers") from None
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        if tokenizer.chat_template is None:
            raise ValueError(f"{self.path} has no chat template")
        return tokenizer

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The folder's chat template, where one is asked for."""
        return (
            self.chat_tokenizer.get_chat_template(chat_template if isinstance(chat_template, str) else None)
            if chat_template
            else None
        )

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one text, by the folder's chat template."""
        return str(
            self.chat_tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its scores."""
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "model_dtype": str(self.model.tokens.dtype),
            "max_length": self.max_length,
            "extension": self.extension,
            "truncated": self.truncated,
        }


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """How a task generates: up to how many tokens, until which texts, and options of `phasor.generate`."""

    new_tokens: int
    until: tuple[str, ...]
    options: dict[str, Any]


def read_settings(given: dict[str, Any]) -> GenerationSettings:
    """The settings of a task under the names that the harness has for them.

    >>> read_settings({"until": "\\n", "max_gen_toks": 9, "do_sample": False, "temperature": 0.0}).options
    {'temperature': 0.0}
    """
    rest = dict(given)
    until = rest.pop("until", None) or []
    numbers = [value for name in NEW_TOKEN_NAMES if (value := rest.pop(name, None)) is not None]
    temperature = rest.pop("temperature", None)
    sample = rest.pop("do_sample", None)
    samples = bool(sample) if sample is not None else bool(temperature)
    options: dict[str, Any] = {"temperature": (1.0 if temperature is None else float(temperature)) if samples else 0.0}
    texts = [until] if isinstance(until, str) else list(until)
    new_tokens = check_integer("max_gen_toks", int(numbers[0]) if numbers else NEW_TOKENS)
    return GenerationSettings(new_tokens, tuple(text for text in texts if text), options | rest)


def cut_at(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of some others.

    >>> cut_at("four. Then", [".", " T"])
    'four'
    """
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def rolling_windows(ids: list[int], first: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Contexts and continuations that predict every token once, each window of at most `length` tokens read.

    All but the last begin anew, behind one token; the last has as much context as fits.

    >>> list(rolling_windows([1, 2, 3, 4, 5], 0, 3))
    [([0], [1, 2, 3]), ([2, 3], [4, 5])]
    """
    done = 0
    while done < len(ids):
        end = min(done + length, len(ids))
        yield [first] if done == 0 else ids[end - length - 1 : done], ids[done:end]
        done = end


def __getattr__(name: str) -> Any:
    """`PhasorLM`, the class that the harness imports: it is made when asked for, since its base is the harness's."""
    if name != "PhasorLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lm_eval.api.model import LM

    globals()[name] = value = type(name, (HarnessModel, LM), {"__module__": __name__})
    return value


def register() -> type[Any]:
    """Register the model with the harness in this process; the class."""
    try:
        import lm_eval.models  # noqa: F401  # the harness registers its own where there are none yet
        from lm_eval.api.registry import get_model, model_registry

        if NAME not in model_registry:
            model_registry.register(NAME, target=TARGET)
    except ImportError:
        raise missing_package(
            "lm-evaluation-harness is the package lm_eval, of version 0.4.10 or later", "lm-eval"
        ) from None
    return get_model(NAME)


def main() -> None:
    """The command line of the harness, with this model."""
    try:
        register()
    except ValueError as error:
        print(f"phasor: {error}", file=sys.stderr)
        sys.exit(2)
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()

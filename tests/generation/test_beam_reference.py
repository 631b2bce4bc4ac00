"""The search of all prompts together is that of each prompt alone, written plainly, over tables of random logits."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from decoding import speaker
from torch import Tensor

from phasor import Transformer
from phasor.config.generation import GenerationConfig
from phasor.generation import beam
from phasor.generation.request import build_request

Text = tuple[int, ...]
Logits = Callable[[Text], Tensor]
Found = list[tuple[list[int], list[float], float]]
PROMPTS = [[0], [1], [2], [1, 1], [0, 2, 1]]
NEVER = -math.inf


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of a few elements: waiting for other threads would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TableRunner:
    """Rows are texts, and their logits are looked up; with fixed rows it refuses to drop any."""

    def __init__(self, logits: Logits, has_fixed_rows: bool, max_steps: int) -> None:
        self.logits, self.has_fixed_rows, self.steps_left = logits, has_fixed_rows, max_steps
        self.texts: list[Text] = []

    def prefill(self, prompts: Sequence[Sequence[int]], memory: object, positions: object) -> Tensor:
        self.texts = [tuple(prompt) for prompt in prompts]
        return torch.stack([self.logits(text) for text in self.texts])

    def reorder(self, rows: Tensor) -> None:
        assert len(rows) == len(self.texts) if self.has_fixed_rows else len(rows) <= len(self.texts)
        self.texts = [self.texts[row] for row in rows.tolist()]

    def step(self, tokens: Tensor) -> Tensor:
        self.steps_left -= 1
        assert self.steps_left >= 0, "past the capacity of the cache"
        self.texts = [(*text, token) for text, token in zip(self.texts, tokens.tolist(), strict=True)]
        return torch.stack([self.logits(text) for text in self.texts])


def table(vocab_size: int, seed: int, dtype: torch.dtype, values: Sequence[float] | None) -> Logits:
    """Logits for every text, drawn once: normal ones, or some of the given values, which makes ties."""
    known: dict[Text, Tensor] = {}

    def logits(text: Text) -> Tensor:
        if text not in known:
            drawn = random.Random(f"{seed} {text}")
            row = [drawn.gauss(0, 2) if values is None else drawn.choice(values) for _ in range(vocab_size)]
            row[-1] = max(row[-1], -9.0)  # something is possible
            known[text] = torch.tensor(row, dtype=dtype)
        return known[text]

    return logits


def search_ref(logits: Logits, prompt: Text, options: GenerationConfig, stop: set[int]) -> Found:
    """Beam search of one prompt; results are tokens, log-probabilities and score."""
    width, last, penalty = options.num_beams, options.max_new_tokens, options.length_penalty
    assert last is not None
    beams: list[tuple[Text, list[float], float]] = [((), [], 0.0)]
    finished: Found = []
    for length in range(1, last + 1):
        rows = torch.stack([logits(prompt + text) for text, _, _ in beams])
        rows = (rows if rows.dtype == torch.float64 else rows.float()).log_softmax(-1)
        totals = rows + torch.tensor([total for _, _, total in beams], dtype=rows.dtype)[:, None]
        impossible = totals.new_full((width - len(beams), rows.shape[1]), NEVER)
        flat = torch.cat((totals, impossible)).flatten()
        best = sorted(enumerate(flat.tolist()), key=lambda one: (-one[1], one[0]))  # of equal ones the first
        following = []
        for rank, (index, total) in enumerate(best[: (1 + len(stop)) * width]):
            if total == NEVER:
                continue
            parent, token = divmod(index, rows.shape[1])
            text, steps, _ = beams[parent]
            new = (*text, token), [*steps, float(rows[parent, token])]
            if token not in stop and length < last:
                following.append((*new, total))
            elif rank < width:
                finished.append((list(new[0]), new[1], total / length**penalty))
        finished = sorted(finished, key=lambda one: one[2], reverse=True)[:width]
        beams = following[:width]
        if not beams or (len(finished) == width and options.early_stopping is True):
            break
        final = last if options.early_stopping == "never" and penalty > 0 else length
        if len(finished) == width and beams[0][2] / final**penalty <= finished[-1][2]:
            break
    return finished


@functools.cache
def model_of(vocab_size: int) -> Transformer:
    """A model that is never run."""
    return speaker(vocab_size=vocab_size, num_layers=1)


def compare(
    monkeypatch: pytest.MonkeyPatch,
    options: GenerationConfig,
    *,
    vocab_size: int = 7,
    fixed: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    values: Sequence[float] | None = None,
) -> set[int]:
    """Whether both find the same; the lengths of the best texts."""
    logits = table(vocab_size, seed, dtype, values)

    @contextlib.contextmanager
    def runner(spec: object) -> Iterator[TableRunner]:
        yield TableRunner(logits, fixed, (options.max_new_tokens or 0) - 1)

    monkeypatch.setattr(beam, "step_runner", runner)
    monkeypatch.setattr(beam, "runs_cuda_graph", lambda spec: fixed)
    monkeypatch.setattr(beam, "round_up", lambda count: count + 2)  # prompts that nobody asked for
    request = build_request(model_of(vocab_size), PROMPTS, options)
    with torch.inference_mode():
        found = beam.beam_search(request)
    for prompt, ours in zip(PROMPTS, found, strict=True):
        texts = search_ref(logits, tuple(prompt), options, set(request.stop))[: options.num_return_sequences]
        expected = [texts[i % len(texts)] for i in range(options.num_return_sequences)]
        assert [(one.tokens, one.log_probabilities, one.score) for one in ours] == expected
    return {len(best[0].tokens) for best in found if best}


WIDTHS = [2, 3, 5]
PENALTIES = [-1.0, 0.0, 0.7, 1.0, 2.0]
ENDINGS: list[bool | str] = [True, False, "never"]


def options_of(width: int, penalty: float, early: bool | str, length: int = 8, stop: Text = (3,)) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=length,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=early,  # type: ignore[arg-type]
        stop=stop,
    )


@pytest.mark.parametrize("fixed", [False, True], ids=["rows that are dropped", "fixed rows"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_penalty_and_ending(width: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: set[int] = set()
    for seed, (penalty, early) in enumerate(itertools.product(PENALTIES, ENDINGS)):
        lengths |= compare(monkeypatch, options_of(width, penalty, early), fixed=fixed, seed=seed)
    assert len(lengths) > 3  # texts end at different steps


@pytest.mark.sample(12)
@pytest.mark.parametrize("fixed", [False, True], ids=["rows that are dropped", "fixed rows"])
@pytest.mark.parametrize("stop", [(), (0, 5), (1, 2, 4, 6)], ids=["no stop", "two stops", "four stops"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_stops_and_dtypes(dtype: torch.dtype, stop: Text, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for width, early in itertools.product(WIDTHS, ENDINGS):
        options = options_of(width, 0.7, early, length=6, stop=stop)
        compare(monkeypatch, options, fixed=fixed, seed=width, dtype=dtype)


@pytest.mark.parametrize("fixed", [False, True], ids=["rows that are dropped", "fixed rows"])
@pytest.mark.parametrize("values", [(0.0,), (0.0, 1.0), (0.0, NEVER), (NEVER, 0.0, 2.0)], ids=str)
def test_ties_and_tokens_that_are_impossible(
    values: tuple[float, ...], fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, (width, early) in enumerate(itertools.product(WIDTHS, ENDINGS)):
        for stop in ((3,), (1, 6)):
            options = options_of(width, 1.0, early, length=5, stop=stop)
            compare(monkeypatch, options, fixed=fixed, seed=seed, values=values)


@pytest.mark.parametrize("fixed", [False, True], ids=["rows that are dropped", "fixed rows"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_few_tokens_and_a_small_vocabulary(length: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for width, stop in itertools.product((2, 5, 9), ((), (1,), (0, 1))):
        options = options_of(width, 1.0, False, length=length, stop=stop)
        compare(monkeypatch, options, vocab_size=3, fixed=fixed, seed=width)

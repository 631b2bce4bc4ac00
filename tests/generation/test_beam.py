"""Beam search: exhaustive where that is possible, and transformers' own where both define the same thing."""

from __future__ import annotations

import functools
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from decoding import continuations, full_logits, speaker
from torch.utils._python_dispatch import TorchDispatchMode
from transformers_pairs import CASES, make

from phasor import SpecialTokens, Transformer, generate

SMALL = 5  # the vocabulary that is searched exhaustively
PROMPT = [1, 3, 0]


def exhaustive(
    model: Transformer, count: int, penalty: float, stop: tuple[int, ...], source: list[int] | None = None
) -> list[tuple[float, list[int]]]:
    """Every continuation with its score, best first."""
    begin = PROMPT if source is None else [2]
    found = []
    for text in continuations(SMALL, count, stop):
        logits = full_logits(model, begin + list(text), len(begin) + count, source)[len(begin) - 1 : -1]
        total = float(logits.double().log_softmax(-1).gather(-1, torch.tensor(text)[:, None]).sum())
        found.append((total / len(text) ** penalty, list(text)))
    return sorted(found, reverse=True)


@pytest.mark.sample(6)
@pytest.mark.parametrize("stop", [(), (2,), (0, 4)], ids=["no stop", "one stop", "two stops"])
@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0, -1.0])
def test_enough_beams_search_everything(penalty: float, stop: tuple[int, ...]) -> None:
    model = speaker(vocab_size=SMALL)
    expected = exhaustive(model, 3, penalty, stop)
    width = SMALL**3
    found = generate(
        model,
        PROMPT,
        max_new_tokens=3,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        stop=stop,
        details=True,
    )
    expected = list(islice(cycle(expected), width))  # fewer are possible: they are repeated
    assert [one.tokens for one in found] == [text for _, text in expected]
    # scores of order 1, sums of three float32 log-probabilities
    assert [one.score for one in found] == pytest.approx([score for score, _ in expected], abs=1e-5)


@pytest.mark.parametrize("scheme", ["alibi", "learned", "rotary-dynamic-ntk", "rotary-longrope"])
def test_enough_beams_for_other_schemes(scheme: str) -> None:
    model = speaker(scheme, vocab_size=SMALL)
    found = generate(model, PROMPT, max_new_tokens=3, num_beams=SMALL**3, num_return_sequences=20, stop=[1])
    assert found == [text for _, text in exhaustive(model, 3, 1.0, (1,))[:20]]


def test_enough_beams_for_an_encoder_decoder() -> None:
    model = speaker("t5", vocab_size=SMALL, shape="encoder-decoder")
    found = generate(
        model, [[4, 1, 1], [0]], max_new_tokens=3, num_beams=SMALL**3, num_return_sequences=20, stop=[1], start=2
    )
    for source, best in zip([[4, 1, 1], [0]], found, strict=True):
        assert best == [text for _, text in exhaustive(model, 3, 1.0, (1,), source)[:20]]


def test_one_result_is_the_best_and_more_come_best_first() -> None:
    model = speaker()
    prompts = [[9], [7, 3, 3, 58, 12], [1, 2]]
    five = generate(model, prompts, max_new_tokens=8, num_beams=5, num_return_sequences=5, stop=[19], details=True)
    for best in five:
        assert len(best) == 5
        assert [one.score for one in best] == sorted((one.score for one in best), reverse=True)
        assert len({tuple(one.tokens) for one in best}) == 5
        for one in best:
            assert one.score == pytest.approx(sum(one.log_probabilities) / len(one.tokens), abs=1e-5)
    assert generate(model, prompts, max_new_tokens=8, num_beams=5, stop=[19]) == [best[0].tokens for best in five]
    assert generate(model, prompts[1], max_new_tokens=8, num_beams=5, stop=[19]) == five[1][0].tokens


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.cpu_only("a GPU captures a graph for each number of prompts")
def test_all_prompts_are_searched_together() -> None:
    """A step asks as much of a device for many prompts as for one."""
    model = speaker("t5", shape="encoder-decoder")
    counts = []
    for prompts in (1, 7):
        with Operations() as operations:
            generate(model, [[5, 9, 3]] * prompts, max_new_tokens=6, num_beams=3, start=2)
        counts.append(operations.count)
    assert counts[0] == counts[1] > 100


def test_more_beams_than_continuations() -> None:
    model = speaker(vocab_size=3)
    found = generate(model, [0], max_new_tokens=2, num_beams=20, num_return_sequences=20)
    assert sorted(found[:9]) == [[a, b] for a in range(3) for b in range(3)]
    assert found[9:18] == found[:9]


def test_where_one_text_is_possible_it_is_returned_as_often_as_transformers_returns_it() -> None:
    theirs, ours = pair("llama_plain")
    banned = [token for token in range(ours.config.vocab_size) if token != 7]
    options = {"num_beams": 3, "num_return_sequences": 3, "suppress_tokens": banned}
    expected, _ = their_texts(theirs, PROMPTS[0], [], **options)
    assert generate(ours, PROMPTS[0], max_new_tokens=COUNT, stop=(), **options) == expected == [[7] * COUNT] * 3


@pytest.mark.parametrize("view", [{"window": 4}, {"window": 4, "sink_tokens": 2}])
def test_beams_past_a_window(view: dict[str, int]) -> None:
    """The score of the best, found with rings that are reordered at every step, is that of the full forward."""
    model, prompt = speaker(attention=view), [7, 3, 3, 58, 12]
    found = generate(model, prompt, max_new_tokens=16, num_beams=4, details=True)
    logits = full_logits(model, prompt + found.tokens, 21)[4:-1].log_softmax(-1)
    total = float(logits.gather(-1, torch.tensor(found.tokens)[:, None]).sum())
    assert found.score == pytest.approx(total / 16, abs=1e-5)
    greedy = generate(model, prompt, max_new_tokens=16, details=True)
    assert found.score >= sum(greedy.log_probabilities) / 16


PROMPTS = [[5, 17, 30, 8], [44], [3, 3, 9, 21, 60, 2, 11]]
COUNT, START = 10, 6


@functools.cache
def pair(name: str) -> tuple[Any, Transformer]:
    """Their model and ours with the same weights."""
    case, ours = make(CASES[name])
    case.theirs.generation_config.forced_eos_token_id = None  # Marian's ends every text by force
    return case.theirs, ours


def beginning(model: Transformer) -> dict[str, int]:
    return {"start": START} if model.config.shape == "encoder-decoder" else {}


@functools.cache
def stops(name: str) -> list[int]:
    """Tokens that come up in the middle of texts."""
    ours = pair(name)[1]
    texts = generate(ours, PROMPTS, max_new_tokens=COUNT, num_beams=3, **beginning(ours))
    return sorted({texts[0][4], texts[2][6]})


def their_texts(model: Any, prompt: list[int], stop: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    """New tokens up to and with the first stop token, and the scores where beams were searched."""
    crosses = model.config.is_encoder_decoder
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=stop or None,
            pad_token_id=0,
            decoder_start_token_id=START if crosses else None,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    texts = []
    for row in out.sequences.tolist():
        new = row[1 if crosses else len(prompt) :]
        end = next((i + 1 for i, token in enumerate(new) if token in stop), len(new))
        texts.append(new[:end])
    return texts, out.sequences_scores.tolist() if "num_beams" in options else []


# Every width with every length penalty, and with every way of stopping.
SEARCHES = [
    (2, 0.5, False),
    (2, 1.0, True),
    (2, 2.0, "never"),
    (3, 0.5, True),
    (3, 1.0, "never"),
    (3, 2.0, False),
    (4, 0.5, "never"),
    (4, 1.0, False),
    (4, 2.0, True),
]


def compare(name: str, width: int, penalty: float, early: bool | str, **forced: int) -> None:
    theirs, ours = pair(name)
    stop, shorter = stops(name), 0
    options = {"max_new_tokens": COUNT, "length_penalty": penalty, "early_stopping": early, **beginning(ours)}
    found = generate(ours, PROMPTS, num_beams=width, num_return_sequences=width, stop=stop, details=True, **options)
    for prompt, best in zip(PROMPTS, found, strict=True):
        texts, scores = their_texts(
            theirs,
            prompt,
            stop,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            early_stopping=early,
            **forced,
        )
        assert [one.tokens for one in best] == texts
        # sums of ten float32 log-probabilities of order 1
        assert [one.score for one in best] == pytest.approx(scores, abs=1e-4)
        shorter += sum(len(text) < COUNT for text in texts)
    assert shorter > 0 or penalty > 1  # which favors the longest


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", ["llama_plain", "gpt_2"])
@pytest.mark.parametrize(("width", "penalty", "early"), SEARCHES)
def test_beams_are_those_of_transformers(name: str, width: int, penalty: float, early: bool | str) -> None:
    compare(name, width, penalty, early)


@pytest.mark.parametrize("name", ["t5_11", "marian"])
@pytest.mark.parametrize(("width", "penalty", "early"), SEARCHES[::3])
def test_beams_of_encoder_decoders(name: str, width: int, penalty: float, early: bool | str) -> None:
    compare(name, width, penalty, early)


@pytest.mark.parametrize(("width", "penalty", "early"), SEARCHES[1::4])
def test_beams_with_a_forced_first_token(
    width: int, penalty: float, early: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair("t5_11")[1], "special", SpecialTokens(forced_first=33))
    compare("t5_11", width, penalty, early, forced_bos_token_id=33)


def test_beams_without_a_stop() -> None:
    theirs, ours = pair("llama_plain")
    for prompt in PROMPTS:
        found = generate(ours, prompt, max_new_tokens=COUNT, num_beams=3, num_return_sequences=3)
        assert found == their_texts(theirs, prompt, [], num_beams=3, num_return_sequences=3)[0]


@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("name", ["llama_plain", "gpt_2", "mixtral", "bloom_four_heads", "t5_11", "marian"])
def test_greedy_is_that_of_transformers(name: str, penalty: float) -> None:
    theirs, ours = pair(name)
    options = {"max_new_tokens": COUNT, "stop": stops(name), "repetition_penalty": penalty}
    found = generate(ours, PROMPTS, **options, **beginning(ours))
    expected = [their_texts(theirs, p, stops(name), repetition_penalty=penalty)[0][0] for p in PROMPTS]
    assert found == expected

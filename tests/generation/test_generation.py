"""Generation equals decoding written out plainly: every step a fresh forward over all of the text."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoding import full_logits, greedy_ref, penalized_ref, speaker
from device import ON_GPU
from schemes import BY_LENGTH, SCHEMES, SHORT, VIEWS, VOCAB

import phasor
from phasor import Generated, GenerationConfig, SpecialTokens, Transformer, generate, stream
from phasor.kv_cache.dynamic import KVCache
from phasor.transformer import Stack

PROMPT = [7, 3, 3, 58, 12]
PROMPTS = [[9], PROMPT, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [40, 41]]
TOLERANCE = 1e-4  # float32, logits of order 1: the order of summation differs with and without a cache


@pytest.mark.sample(10)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_is_the_likeliest_token_of_a_fresh_forward(scheme: str) -> None:
    model = speaker(scheme)
    assert generate(model, PROMPT, max_new_tokens=20) == greedy_ref(model, PROMPT, 20)


@pytest.mark.sample(12)
@pytest.mark.parametrize("view", ["window", "sinks"])
@pytest.mark.parametrize("scheme", ["none", "sinusoidal", "learned", "t5", "alibi", "rotary", "xpos", *BY_LENGTH])
def test_greedy_with_a_window(scheme: str, view: str) -> None:
    model = speaker(scheme, attention=VIEWS[view])
    assert generate(model, PROMPT, max_new_tokens=20) == greedy_ref(model, PROMPT, 20)


@pytest.mark.parametrize("count", [1, SHORT - len(PROMPT), SHORT - len(PROMPT) + 1, 5 * SHORT])
@pytest.mark.parametrize("scheme", BY_LENGTH)
def test_greedy_on_both_sides_of_the_trained_length(scheme: str, count: int) -> None:
    model = speaker(scheme, seed=2)
    assert generate(model, PROMPT, max_new_tokens=count) == greedy_ref(model, PROMPT, count)


@pytest.mark.sample(8)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "t5", "alibi", "rotary", "xpos", "mrope", *BY_LENGTH])
def test_a_ragged_batch_equals_each_prompt_alone(scheme: str, view: str) -> None:
    model = speaker(scheme, attention=VIEWS[view])
    together = generate(model, PROMPTS, max_new_tokens=12)
    assert together == [generate(model, p, max_new_tokens=12) for p in PROMPTS]
    assert together[2] == greedy_ref(model, PROMPTS[2], 12)


def test_prompts_of_every_form() -> None:
    model = speaker()
    expected = generate(model, PROMPT, max_new_tokens=3)
    for prompt in (tuple(PROMPT), torch.tensor(PROMPT)):
        assert generate(model, prompt, max_new_tokens=3) == expected
    for prompts in ([PROMPT], (PROMPT,), torch.tensor([PROMPT]), [torch.tensor(PROMPT)]):
        assert generate(model, prompts, max_new_tokens=3) == [expected]
    assert all(type(token) is int for token in expected)
    assert generate(model, PROMPT, GenerationConfig(max_new_tokens=9), max_new_tokens=3) == expected


def test_other_precisions() -> None:
    model = speaker().double()
    assert generate(model, PROMPT, max_new_tokens=12) == greedy_ref(model, PROMPT, 12)
    assert len(generate(speaker().half(), PROMPTS, max_new_tokens=12)[1]) == 12


def test_a_learned_table_is_used_to_its_last_row() -> None:
    model = speaker("learned", max_length=16)
    room = 16 - len(PROMPT) + 1  # the last new token is not read again
    assert generate(model, PROMPT, max_new_tokens=room)[:-1] == greedy_ref(model, PROMPT, room - 1)
    with pytest.raises(ValueError, match="past the 16 positions"):
        generate(model, PROMPT, max_new_tokens=room + 1)


CROSSING = ["sinusoidal", "learned", "t5", "rotary", "normalized", "rotary-dynamic-yarn"]


@pytest.mark.parametrize("scheme", CROSSING)
def test_encoder_decoders_begin_with_their_start_token(scheme: str) -> None:
    model = speaker(scheme, shape="encoder-decoder")
    expected = [greedy_ref(model, [2], 10, source) for source in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=10, start=2) == expected
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    model.special = SpecialTokens(start=2)
    assert generate(model, PROMPTS, max_new_tokens=10) == expected
    assert list(stream(model, PROMPTS[0], max_new_tokens=10)) == expected[0]
    assert generate(model, PROMPTS[0], max_new_tokens=10, start=3) == greedy_ref(model, [3], 10, PROMPTS[0])


def test_a_forced_first_token_is_the_first_and_certain() -> None:
    model = speaker(shape="encoder-decoder")
    model.special = SpecialTokens(start=2, forced_first=17)
    found = generate(model, PROMPT, max_new_tokens=8, details=True)
    assert found.tokens == [17, *greedy_ref(model, [2, 17], 7, PROMPT)]
    assert found.log_probabilities[0] == 0
    assert generate(model, PROMPT, max_new_tokens=8, temperature=1.0, seed=0)[0] == 17
    assert generate(model, PROMPT, max_new_tokens=8, num_beams=2)[0] == 17


def test_source_and_target_vocabularies_may_differ() -> None:
    embedding = phasor.EmbeddingConfig(tied=False, source_vocab_size=200)
    model = speaker("sinusoidal", shape="encoder-decoder", embedding=embedding)
    source = [150, 199, 3]
    assert generate(model, source, max_new_tokens=6, start=1) == greedy_ref(model, [1], 6, source)
    with pytest.raises(ValueError, match="outside the vocabulary of 200"):
        generate(model, [200], start=1)


def cut(tokens: list[int], stop: set[int]) -> list[int]:
    """Tokens up to and with the first stop token."""
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


def test_a_stop_token_ends_its_row_and_is_the_last_of_it() -> None:
    model = speaker()
    whole = generate(model, PROMPTS, max_new_tokens=24)
    stop = {whole[0][3], whole[1][5]}
    expected = [cut(row, stop) for row in whole]
    assert len(set(map(len, expected))) > 1
    assert generate(model, PROMPTS, max_new_tokens=24, stop=sorted(stop)) == expected
    assert [generate(model, p, max_new_tokens=24, stop=sorted(stop)) for p in PROMPTS] == expected
    assert list(stream(model, PROMPTS[0], max_new_tokens=24, stop=sorted(stop))) == expected[0]
    model.special = SpecialTokens(stop=sorted(stop))
    assert generate(model, PROMPTS, max_new_tokens=24) == expected
    assert generate(model, PROMPTS, max_new_tokens=24, stop=()) == whole
    assert generate(model, PROMPTS[0], max_new_tokens=24, stop=whole[0][3]) == cut(whole[0], {whole[0][3]})


def test_a_stop_token_in_the_prompt_stops_nothing() -> None:
    model = speaker()
    assert len(generate(model, [*PROMPT, 4], max_new_tokens=1, stop=4)) == 1


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"temperature": 1.2, "seed": 3},
    "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.95, "seed": 3},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    "contrastive": {"penalty_alpha": 0.4, "top_k": 4},
    "lookup": {"prompt_lookup_tokens": 2},
    "lookup and sampling": {"prompt_lookup_tokens": 2, "temperature": 0.7, "seed": 3},
    "draft": {"draft": speaker(seed=9)},
    "draft and sampling": {"draft": speaker(seed=9), "temperature": 0.7, "seed": 3},
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("way", WAYS)
def test_stream_yields_what_generate_returns(way: str) -> None:
    model = speaker()
    expected = generate(model, PROMPT, max_new_tokens=15, **WAYS[way])
    assert list(stream(model, PROMPT, max_new_tokens=15, **WAYS[way])) == expected
    assert len(expected) == 15
    steps = list(stream(model, PROMPT, max_new_tokens=15, details=True, **WAYS[way]))
    assert [token for step in steps for token in step.tokens] == expected


@pytest.mark.sample(6)
@pytest.mark.parametrize("way", [*WAYS, "beams"])
def test_log_probabilities_are_those_of_the_full_forward(way: str) -> None:
    """Of the model with its penalties, before temperature and filters."""
    model, options = speaker("rotary-dynamic-ntk"), WAYS.get(way, {"num_beams": 3})
    for prompt, found in zip(
        PROMPTS, generate(model, PROMPTS, max_new_tokens=12, details=True, **options), strict=True
    ):
        assert isinstance(found, Generated)
        logits = full_logits(model, prompt + found.tokens, len(prompt) + 12)[len(prompt) - 1 :]
        for i, token in enumerate(found.tokens):
            scores = penalized_ref(logits[i].tolist(), prompt, found.tokens[:i], options)
            expected = scores[token] - math.log(math.fsum(map(math.exp, scores)))
            assert abs(found.log_probabilities[i] - expected) < TOLERANCE
        if way == "beams":
            assert found.score == pytest.approx(sum(found.log_probabilities) / 12, abs=1e-5)


def test_without_details_there_are_only_tokens() -> None:
    assert isinstance(generate(speaker(), PROMPT, max_new_tokens=2), list)


def test_generation_uses_eval_mode_and_restores_the_mode_after() -> None:
    dropout = phasor.DropoutConfig(embedding=0.5, attention=0.5, residual=0.5, feedforward=0.5)
    model = speaker(dropout=dropout)
    expected = generate(model, PROMPT, max_new_tokens=10)
    model.train()
    model.decoder.blocks[0].eval()
    before = [part.training for part in model.modules()]
    assert generate(model, PROMPT, max_new_tokens=10) == expected
    assert [part.training for part in model.modules()] == before
    for _ in stream(model, PROMPT, max_new_tokens=3):
        assert [part.training for part in model.modules()] == before
    assert list(stream(model, PROMPT, max_new_tokens=10)) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "commit", broken)
        with pytest.raises(RuntimeError, match="broken"):
            generate(model, PROMPT)
    assert [part.training for part in model.modules()] == before


def broken(*_: object) -> None:
    raise RuntimeError("broken")


@pytest.mark.sample(20)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_can_be_trained_after_generation(scheme: str) -> None:
    """Nothing that generation made without gradients is kept and met again."""
    model = speaker(scheme)
    generate(model, PROMPT, max_new_tokens=3)
    model(torch.tensor([PROMPT]), length=len(PROMPT) + 3).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def contrastive_ref(model: Transformer, prompt: list[int], count: int, alpha: float, width: int) -> list[int]:
    """Contrastive search (Su et al., 2022) as its paper states it, every step by full forwards."""
    text, length = list(prompt), len(prompt) + count
    hidden: list[torch.Tensor] = []
    handle = model.decoder.register_forward_hook(lambda *args: hidden.append(args[-1][0]))
    for _ in range(count):
        likely = full_logits(model, text, length)[-1].softmax(-1)
        best, chosen = -float("inf"), -1
        for token in likely.topk(width).indices.tolist():
            hidden.clear()
            full_logits(model, [*text, token], length)
            similar = F.cosine_similarity(hidden[0][-1:], hidden[0][:-1], dim=-1).max()
            score = float((1 - alpha) * likely[token] - alpha * similar)
            if score > best:
                best, chosen = score, token
        text.append(chosen)
    handle.remove()
    return text[len(prompt) :]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("alpha", "width"), [(0.6, 4), (1.0, 3)])
@pytest.mark.parametrize("scheme", ["rotary", "alibi", "learned", "rotary-dynamic-ntk"])
def test_contrastive_search(scheme: str, alpha: float, width: int) -> None:
    model = speaker(scheme)
    found = generate(model, PROMPTS[:2], max_new_tokens=6, penalty_alpha=alpha, top_k=width)
    assert found == [contrastive_ref(model, p, 6, alpha, width) for p in PROMPTS[:2]]
    assert found[1] != greedy_ref(model, PROMPT, 6)


def test_contrastive_search_with_a_window() -> None:
    model = speaker(attention=VIEWS["sinks"])
    found = generate(model, PROMPT, max_new_tokens=12, penalty_alpha=0.6, top_k=4)
    assert found == contrastive_ref(model, PROMPT, 12, 0.6, 4)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[KVCache]:
    """The caches that generation makes."""
    made: list[KVCache] = []
    original = Transformer.new_cache

    def record_cache(*args: Any, **options: Any) -> KVCache:
        made.append(original(*args, **options))
        return made[-1]

    monkeypatch.setattr(Transformer, "new_cache", record_cache)
    return made


ENDLESS = {"max_new_tokens": None, "temperature": 1.0, "seed": 5}


@pytest.mark.sample(5)
@pytest.mark.parametrize("attention", [{"window": 8}, {"window": 8, "sink_tokens": 2}], ids=["window", "sinks"])
@pytest.mark.parametrize("scheme", ["rotary", "alibi", "t5", "none", "sinusoidal", "rotary-yarn"])
def test_streams_without_end_stay_exact(scheme: str, attention: dict[str, int], caches: list[KVCache]) -> None:
    """Every log-probability of a stream that has gone many windows far is that of a forward over all of it."""
    model, count = speaker(scheme, attention=attention, max_length=16), 90
    steps = list(itertools.islice(stream(model, PROMPT, details=True, **ENDLESS), count))
    text = PROMPT + [step.tokens[0] for step in steps]
    logits = full_logits(model, text, len(text))[len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = logits.gather(-1, torch.tensor(text[len(PROMPT) :])[:, None])[:, 0]
    found = torch.tensor([step.log_probabilities[0] for step in steps])
    assert float((found - expected).abs().max()) < TOLERANCE
    assert caches[0].endless
    assert ON_GPU or caches[0].used == len(PROMPT) + count - 1  # CUDA graphs go on in a static cache


def resident() -> int:
    """Bytes of memory the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def far(window: int, count: int, cache_of: list[KVCache]) -> None:
    """Stream `count` tokens past a window: nothing grows, and positions go on counting.

    One layer without sinks sees nothing but its window, so the forward over the last tokens at their true
    positions is what the stream must have computed.
    """
    model = speaker(num_layers=1, num_heads=4, num_kv_heads=4, head_dim=16, attention={"window": window})
    tokens = stream(model, PROMPT, details=True, **ENDLESS)
    text = PROMPT + [next(tokens).tokens[0] for _ in range(window)]
    bytes_before, memory_before = cache_of[0].nbytes, resident()
    for step in itertools.islice(tokens, count):
        text.append(step.tokens[0])
    grown = resident() - memory_before
    assert cache_of[0].nbytes == bytes_before == 2 * window * 4 * 16 * 4
    # A key and a value of each of these tokens would take a multiple of this.
    assert grown < max(1 << 20, count * 2 * 4 * 16 * 4 // 4)
    last = torch.arange(len(text) - window - 1, len(text) - 1)
    with torch.no_grad():
        logits = model(torch.tensor([text])[:, last], positions=last)[0, -1]
    assert abs(step.log_probabilities[0] - float(logits.log_softmax(-1)[text[-1]])) < TOLERANCE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory from /proc")
def test_memory_is_constant_far_past_a_window(caches: list[KVCache]) -> None:
    far(64, 600, caches)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory from /proc")
def test_ten_thousand_tokens_past_a_window_of_1024(caches: list[KVCache]) -> None:
    far(1024, 10_000, caches)


def test_an_endless_stream_does_not_keep_its_tokens() -> None:
    tokens = stream(speaker(num_layers=1, attention={"window": 8}), PROMPT, details=True, **ENDLESS)
    for _ in itertools.islice(tokens, 100):
        pass
    row = tokens.gi_frame.f_locals["row"]
    assert len(row.new) <= 3
    assert len(row.log_probabilities) <= 3


def test_generation_without_end_may_end_at_a_stop_token() -> None:
    model = speaker(attention=VIEWS["window"])
    whole = list(itertools.islice(stream(model, PROMPT, max_new_tokens=None), 30))
    assert generate(model, PROMPT, max_new_tokens=None, stop=whole[20]) == cut(whole, {whole[20]})


WINDOW = phasor.SoftmaxAttentionConfig(window=4)
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty prompt": ([], {}, "prompt is empty"),
    "empty prompt in a list": ([[1], []], {}, "prompt is empty"),
    "not a prompt": (5, {}, "a prompt is a list"),
    "bytes": (b"12", {}, "a prompt is a list"),
    "mixed prompts": ([[1], "a"], {}, "a prompt is a list"),
    "text without a tokenizer": ("hello", {}, "needs a tokenizer"),
    "token too large": ([1, VOCAB], {}, "61 is outside the vocabulary"),
    "token negative": ([-1], {}, "-1 is outside the vocabulary"),
    "token not whole": ([[1.5]], {}, "1.5 is outside the vocabulary"),
    "stop token out of range": ([1], {"stop": VOCAB}, "stop token 61 is outside"),
    "stop token negative": ([1], {"stop": [-1]}, "stop token -1 is outside"),
    "stop text without text": ([1], {"stop": "end"}, "stop text 'end' needs a text prompt"),
    "temperature": ([1], {"temperature": -0.1}, "temperature must not be negative"),
    "top_k": ([1], {"top_k": 0}, "top_k must be at least 1"),
    "top_p zero": ([1], {"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
    "top_p above one": ([1], {"top_p": 1.01}, r"top_p must be in \(0, 1\]"),
    "typical_p": ([1], {"typical_p": 0.0}, r"typical_p must be in \(0, 1\]"),
    "min_p": ([1], {"min_p": 1.5}, r"min_p must be in \[0, 1\]"),
    "repetition_penalty": ([1], {"repetition_penalty": 0.0}, "repetition_penalty must be greater than 0"),
    "length_penalty": ([1], {"num_beams": 2, "length_penalty": 1e5}, "length_penalty must be in"),
    "max_new_tokens": ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    "max_new_tokens not whole": ([1], {"max_new_tokens": 2.5}, "must be an integer"),
    "nan temperature": ([1], {"temperature": float("nan")}, "temperature must be a finite number"),
    "nan top_p": ([1], {"top_p": float("nan")}, "top_p must be a finite number"),
    "infinite penalty": ([1], {"frequency_penalty": float("inf")}, "must be a finite number"),
    "results without beams": (
        [1],
        {"num_return_sequences": 2},
        r"num_return_sequences \(2\) cannot exceed num_beams \(1\)",
    ),
    "beams and sampling": ([1], {"num_beams": 2, "temperature": 1.0}, "beam search does not sample"),
    "beams and lookup": ([1], {"num_beams": 2, "prompt_lookup_tokens": 2}, "choose one"),
    "contrastive without top_k": ([1], {"penalty_alpha": 0.5}, "give top_k alone"),
    "contrastive with top_p": ([1], {"penalty_alpha": 0.5, "top_k": 3, "top_p": 0.5}, "give top_k alone"),
    "unknown option": ([1], {"temprature": 1.0}, "did you mean 'temperature'"),
    "early stopping": ([1], {"num_beams": 2, "early_stopping": "nevr"}, "early_stopping must be"),
    "seeds": ([1], {"seed": [1, 2]}, "seed lists 2 seeds for 1 prompts"),
    "options by place": ([1], {"options": 64}, "options must be a GenerationConfig"),
    "start of a decoder": ([1], {"start": 1}, "start is for an encoder-decoder"),
    "never ending": ([1], {"max_new_tokens": None}, "needs a window or a state in every layer"),
}


@pytest.fixture
def unused_model(monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """A model that must not be run."""
    monkeypatch.setattr(Stack, "forward", broken)
    return speaker()


def assert_refuses(match: str, model: Any, prompt: Any, *functions: Any, **options: Any) -> None:
    """Each of the functions refuses at once, in one sentence."""
    for function in functions:
        with pytest.raises(ValueError, match=match) as error:
            function(model, prompt, **options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_the_model_runs(case: str, unused_model: Transformer) -> None:
    prompt, options, match = BAD[case]
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], list)
    assert_refuses(match, unused_model, prompt, generate, *([] if several else [stream]), **options)


def test_bad_draft_models(unused_model: Transformer) -> None:
    both = generate, stream
    assert_refuses(
        "vocabulary has 60 tokens and the model's 61", unused_model, [1], *both, draft=speaker(vocab_size=60)
    )
    assert_refuses("must be a decoder", unused_model, [1], *both, draft=speaker(shape="encoder-decoder"))
    assert_refuses("must be a decoder", unused_model, [1], *both, draft=speaker(head="none"))
    assert_refuses("must be a decoder", unused_model, [1], *both, draft="folder")
    assert_refuses("not with num_beams", unused_model, [1], *both, draft=unused_model, num_beams=2)
    assert_refuses("not with num_beams", unused_model, [1], *both, draft=unused_model, prompt_lookup_tokens=2)
    short = speaker("learned", max_length=10)
    assert_refuses("past the 10 positions", unused_model, [1, 2, 3], *both, draft=short, max_new_tokens=9)


def test_what_stream_refuses(unused_model: Transformer) -> None:
    assert_refuses("cannot stream", unused_model, [1], stream, num_beams=2)
    assert_refuses("one prompt", unused_model, [[1], [2]], stream)


def test_models_that_do_not_generate(unused_model: Transformer) -> None:
    both = generate, stream
    assert_refuses("an encoder does not generate", speaker(shape="encoder"), [1], *both)
    assert_refuses("meta device has no weights to generate with", speaker().to("meta"), [1], *both)
    assert_refuses("needs logits", speaker(head="none"), [1], *both)
    assert_refuses("needs a Transformer", "folder", [1], *both)
    crossing = speaker(shape="encoder-decoder")
    assert_refuses("pass start=", crossing, [1], *both)
    assert_refuses("start token 61 is outside", crossing, [1], *both, start=61)
    assert_refuses("are for decoders", crossing, [1], *both, start=1, prompt_lookup_tokens=2)
    assert_refuses("are for decoders", crossing, [1], *both, start=1, penalty_alpha=0.5, top_k=2)
    assert_refuses("are for decoders", crossing, [1], *both, start=1, draft=unused_model)


@pytest.mark.parametrize("attention", [phasor.SoftmaxAttentionConfig(), WINDOW], ids=["whole", "window"])
def test_more_tokens_than_a_scheme_has_positions(
    attention: phasor.SoftmaxAttentionConfig, unused_model: Transformer
) -> None:
    both = generate, stream
    learned = speaker("learned", max_length=12, attention=attention)
    assert_refuses("past the 12 positions", learned, list(range(13)), *both, max_new_tokens=1)
    assert_refuses("past the 12 positions", learned, [1] * 6, *both, max_new_tokens=8)
    assert_refuses("past the 12 positions", learned, [1] * 6, *both, max_new_tokens=7, penalty_alpha=0.5, top_k=2)
    assert_refuses("past the 12 positions", learned, [1] * 6, generate, max_new_tokens=8, num_beams=2)
    prompt = "a prompt of 32769 tokens reaches past the 32768 positions"
    assert_refuses(prompt, speaker("xpos", attention=attention), [1] * 32769, *both, max_new_tokens=1)
    crossing = speaker("learned", max_length=12, shape="encoder-decoder", attention=attention)
    assert_refuses("a prompt of 13 tokens", crossing, [1] * 13, *both, start=1, max_new_tokens=2)
    assert_refuses("past the 12 positions", crossing, [1], *both, start=1, max_new_tokens=13)


def test_xpos_goes_on_past_its_span_under_a_window_alone(unused_model: Transformer) -> None:
    """The decay below spans 64 positions, of which a window shows few."""
    model = speaker(phasor.XPosConfig(decay=1.0))
    assert_refuses("past the 64 positions", model, [1], generate, stream, max_new_tokens=65)
    assert_refuses("positions without end", model, [1], generate, stream, max_new_tokens=None)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"compile": True}, marks=pytest.mark.slow), {"prompt_lookup_tokens": 2}], ids=str
)
def test_xpos_past_its_span(options: dict[str, Any]) -> None:
    model, prompt = speaker(phasor.XPosConfig(decay=1.0), attention=WINDOW), [3, 1, 4]
    found = generate(model, prompt, max_new_tokens=150, **options)
    assert found == list(itertools.islice(stream(model, prompt, max_new_tokens=None), 150))
    with torch.no_grad():
        cache, text = model.new_cache(1, 8), torch.tensor([prompt + found])
        logits = torch.cat([model(part, cache=cache) for part in text.split(20, dim=1)], dim=1)
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == found


@pytest.mark.parametrize("scheme", ["learned", *BY_LENGTH])
def test_schemes_without_endless_generation(scheme: str, unused_model: Transformer) -> None:
    assert_refuses(
        "positions without end", speaker(scheme, attention=WINDOW), [1], generate, stream, max_new_tokens=None
    )


def test_strategies_without_endless_generation(unused_model: Transformer) -> None:
    model = speaker(attention=WINDOW)
    for options in ({"prompt_lookup_tokens": 2}, {"penalty_alpha": 0.5, "top_k": 3}, {"draft": model}):
        assert_refuses("give max_new_tokens", model, [1], generate, stream, max_new_tokens=None, **options)
    assert_refuses("give max_new_tokens", model, [1], generate, max_new_tokens=None, num_beams=2)
    assert_refuses("would never end", model, [1], generate, max_new_tokens=None)


@pytest.mark.parametrize("scheme", ["rotary-dynamic-ntk", "rotary-longrope", "rotary-dynamic-yarn"])
def test_a_planned_length_keeps_tokens_whatever_their_number(scheme: str) -> None:
    """By default the length is planned from prompt and max_new_tokens; it may be given instead."""
    model, prompt, planned = speaker(scheme), [5, 9, 2], 40
    few, many = (generate(model, prompt, max_new_tokens=n, planned_length=planned) for n in (6, 20))
    assert many[:6] == few
    text = list(prompt)
    for _ in range(6):
        text.append(int(full_logits(model, text, planned)[-1].argmax()))
    assert text[3:] == few
    assert [*stream(model, prompt, max_new_tokens=6, planned_length=planned)] == few
    assert generate(model, prompt, max_new_tokens=37, planned_length=planned) == generate(
        model, prompt, max_new_tokens=37
    )
    with pytest.raises(ValueError, match="planned_length must be at least prompt and max_new_tokens, 41, not 40"):
        generate(model, prompt, max_new_tokens=38, planned_length=planned)

"""A cache with a prefix, a window and padding, in every small combination: equal to the full forward, or refused."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from schemes import build, tiny, tokens
from torch import Tensor

import phasor
from phasor import Transformer
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.static import StaticKVCache

COUNT = 7
WINDOWS = [None, 1, 2, 3, 9]
CASES = list(itertools.product(WINDOWS, [0, 1], [0, 2], [7, 9], [0, 1, 2, 4], [1, 2, 4, 7], [0, 1, 2]))
SAMPLE = random.Random(0).sample(CASES, 100)
MODELS: dict[tuple[int | None, int], Transformer] = {}


def model_of(window: int | None, sinks: int) -> Transformer:
    if (window, sinks) not in MODELS:
        attention = phasor.SoftmaxAttentionConfig(window=window, sink_tokens=0 if window is None else sinks)
        MODELS[window, sinks] = build(tiny("rotary", attention=attention))
    return MODELS[window, sinks]


def run_case(case: tuple[int | None, int, int, int, int, int, int]) -> str:
    """Feed two rows, the second with left padding in the first call; the outcome is "equal" or "refused"."""
    window, sinks, spare, max_length, prefix, first, padding = case
    model, ids = model_of(window, sinks), tokens(2, COUNT)
    padding = min(padding, first)
    mask = torch.ones(2, first, dtype=torch.bool)
    mask[1, :padding] = False
    chunk = ids[:, :first].clone()
    chunk[1] = torch.cat([torch.zeros(padding, dtype=torch.int64), ids[1, : first - padding]])
    cache = model.new_cache(2, max_length, spare=spare)
    outputs: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        try:
            logits = model(chunk, cache=cache, attention_mask=mask, prefix_length=[min(prefix, first)] * 2)
        except ValueError as error:
            return "refused" if "prefix_length" in str(error) else str(error)
        outputs[0].append(logits[0])
        outputs[1].append(logits[1, padding:])
        at = [first, first - padding]
        while at[0] < COUNT:
            size = min(2, COUNT - at[0])
            logits = model(torch.stack([ids[row, at[row] : at[row] + size] for row in (0, 1)]), cache=cache)
            for row in (0, 1):
                outputs[row].append(logits[row])
                at[row] += size
        for row in (0, 1):
            if at[row]:
                expected = model(ids[row : row + 1, : at[row]], prefix_length=min(prefix, first), length=max_length)[0]
                torch.testing.assert_close(torch.cat(outputs[row]), expected, atol=1e-4, rtol=1e-4)
    return "equal"


def check_cases(cases: list[tuple[int | None, int, int, int, int, int, int]]) -> None:
    for case in cases:
        window, _, _, _, prefix, first, padding = case
        prefix, real = min(prefix, first), first - min(padding, first)
        assert run_case(case) == ("refused" if prefix and (window is not None or prefix > real) else "equal"), case


def test_a_sample_of_windows_prefixes_and_paddings() -> None:
    check_cases(SAMPLE)


@pytest.mark.slow
def test_all_small_windows_prefixes_and_paddings() -> None:
    check_cases(CASES)


def test_the_reported_case_is_refused() -> None:
    model = model_of(1, 0)
    cache = model.new_cache(1, 3, spare=2)
    with pytest.raises(ValueError, match="without a sliding window"):
        model(tokens(1, 2), cache=cache, prefix_length=1)
    assert cache.used == 0
    with torch.no_grad():  # the refusal left the cache as it was
        pieces = [model(tokens(1, 3)[:, i : i + 1], cache=cache) for i in range(3)]
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens(1, 3)), atol=1e-4, rtol=1e-4)


def test_a_prefix_in_packed_rows_with_a_cache_is_refused() -> None:
    model, ids = model_of(None, 0), tokens(1, 4)
    document_ids = torch.tensor([[0, 0, 0, 1]])
    with pytest.raises(ValueError, match="one document"):
        model(ids, cache=model.new_cache(1, 8), prefix_length=2, document_ids=document_ids)


def test_cropping_into_a_prefix_is_refused() -> None:
    model, ids = model_of(None, 0), tokens(1, 7)
    cache = model.new_cache(1, 8)
    with torch.no_grad():
        model(ids[:, :6], cache=cache, prefix_length=4)
        with pytest.raises(ValueError, match="2 tokens can be undone, or all"):
            cache.crop(3)
        cache.crop(2)
        expected = model(ids[:, [0, 1, 2, 3, 6]], prefix_length=4)[:, -1:]
        torch.testing.assert_close(model(ids[:, 6:], cache=cache), expected, atol=1e-4, rtol=1e-4)
        cache.crop(5)
        torch.testing.assert_close(model(ids, cache=cache), model(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", ["rotary", "xpos", "t5", "rotary-dynamic-ntk"])
@pytest.mark.parametrize("view", [None, 3])
@pytest.mark.parametrize("start", [0, 5])
def test_a_row_may_begin_in_a_later_call(scheme: str, view: int | None, start: int) -> None:
    """The first calls are all padding for one row; its tokens then are as if it had been alone."""
    model = build(tiny(scheme, attention=phasor.SoftmaxAttentionConfig(window=view)))
    ids, cache = tokens(2, 8), model.new_cache(2, 16)
    real = torch.tensor([[True] * 3, [False] * 3])
    place = {} if start == 0 else {"positions": torch.arange(start, start + 8)}
    with torch.no_grad():
        model(ids[:, :3], attention_mask=real, cache=cache, **{n: x[:3] for n, x in place.items()})
        assert cache.used == [3, 0]
        later = torch.stack([ids[0, 3:6], ids[1, :3]])
        both = {n: torch.stack([x[3:6], x[:3]]) for n, x in place.items()}
        outputs = [model(later, cache=cache, **both)]
        outputs += [model(torch.stack([ids[0, 6 + i], ids[1, 3 + i]])[:, None], cache=cache) for i in range(2)]
        got = torch.cat(outputs, dim=1)
        whole = model(ids, length=16, **place)
    torch.testing.assert_close(got[0], whole[0, 3:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[1], whole[1, :5], atol=1e-4, rtol=1e-4)


def test_a_static_cache_begins_a_row_that_was_all_padding() -> None:
    model, ids = build(tiny("xpos")), tokens(2, 4)
    cache = model.new_cache(2, 8)
    with torch.no_grad():
        model(ids[:, :2], attention_mask=torch.tensor([[True] * 2, [False] * 2]), cache=cache)
        step = model(torch.stack([ids[0, 2:3], ids[1, :1]]), cache=StaticKVCache(cache))
        torch.testing.assert_close(step[1], model(ids[1:, :1])[0], atol=1e-4, rtol=1e-4)


def test_documents_of_a_row_that_pauses() -> None:
    """Padding of a paused row names no document: the row goes on in its own."""
    model, ids = build(tiny("xpos")), tokens(2, 8)
    cache = model.new_cache(2, 16)
    real = torch.tensor([[True, True], [False, False]])
    positions = torch.arange(7, 15)
    with torch.no_grad():
        model(ids[:, :3], document_ids=torch.ones(2, 3, dtype=torch.int64), positions=positions[:3], cache=cache)
        paused = torch.tensor([[1, 1], [9, 9]])
        model(ids[:, 3:5], document_ids=paused, attention_mask=real, positions=positions[3:5], cache=cache)
        step = model(torch.stack([ids[0, 5:6], ids[1, 3:4]]), cache=cache)
        whole = model(ids, positions=positions)
    torch.testing.assert_close(step[0, 0], whole[0, 5], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(step[1, 0], whole[1, 3], atol=1e-4, rtol=1e-4)


def test_files_that_lie_about_a_cache(tmp_path: Path) -> None:
    model, file, changed = model_of(2, 1), tmp_path / "cache", tmp_path / "changed"
    cache = model.new_cache(2, 9)
    with torch.no_grad():
        model(tokens(2, 5), cache=cache)
    cache.save(file)
    with safe_open(file, "pt") as opened:
        metadata = json.loads(opened.metadata()["cache"])
        stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    lies: list[dict[str, object]] = [
        *({name: wrong} for name in metadata for wrong in (None, "x", -1, 1 << 40, [], [1, 2, 3], {}, True)),
        {"config": metadata["config"] | {"num_layers": 10**12}},
        {"max_length": 10**15, "batch_size": 10**9},
        {"counts": [6, 6]},
    ]
    for lie in lies:
        if all(metadata[name] == value and type(metadata[name]) is type(value) for name, value in lie.items()):
            continue
        save_file(stored, changed, {"cache": json.dumps(metadata | lie)})
        try:
            KVCache.load(changed)
            said = "accepted"
        except ValueError as error:
            said = str(error)
        harmless = set(lie) <= {"length", "next_positions", "spare", "max_length"}
        assert "not a cache that phasor saved" in said or (harmless and said == "accepted"), lie
        assert len(said) < 1000
    for name in stored:
        for wrong in (stored[name][:1], stored[name].to(torch.int8), torch.zeros(0)):
            save_file({**stored, name: wrong.contiguous()}, changed, {"cache": json.dumps(metadata)})
            with pytest.raises(ValueError, match="not a cache that phasor saved"):
                KVCache.load(changed)
    for text in ("", "[]", "null", "[" * 10**5, '{"config": {}}'):
        save_file(stored, changed, {"cache": text})
        with pytest.raises(ValueError, match="not a cache that phasor saved"):
            KVCache.load(changed)


@pytest.mark.parametrize("kind", ["forget", "accumulated"])
def test_a_cache_file_without_what_a_scheme_keeps_names_it(tmp_path: Path, kind: str) -> None:
    config = phasor.ModelConfig(vocab_size=9, dim=8, num_layers=2, num_heads=2, position=kind)
    cache = KVCache(config, 1, 16)
    Transformer(config)(torch.tensor([[1, 2, 3]]), cache=cache)
    cache.save(tmp_path / "cache")
    with safe_open(tmp_path / "cache", framework="pt") as file:
        metadata, stored = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    own = [name for name in config.cached_per_token(0) if name not in ("keys", "values")]
    kept = {name: x for name, x in stored.items() if name.rpartition(".")[0] not in own}
    save_file(kept, tmp_path / "cache", metadata)
    with pytest.raises(ValueError, match=rf"it lacks {own[0]}\.0, {own[0]}\.1\): read its tokens again with the model"):
        KVCache.load(tmp_path / "cache")

"""Cached decoding equals the full forward over the same tokens at the same planned length, for every scheme."""

from __future__ import annotations

import pytest
import torch
from device import DEVICE
from schemes import BY_LENGTH, SCHEMES, SHORT, VIEWS, build, tiny, tokens
from torch import Tensor

import phasor
from phasor import Transformer
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.slots import SlotLayout

TOLERANCE = 1e-4  # float32, logits of order 1: the order of summation differs between the two ways
COUNT = 29


def feed(model: Transformer, ids: Tensor, cache: KVCache, sizes: list[int], **first: object) -> Tensor:
    """Logits of tokens fed in chunks of these sizes, the last size repeated; `first` goes with the first chunk."""
    pieces, at = [], 0
    with torch.no_grad():
        while at < ids.shape[1]:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            pieces.append(model(ids[:, at : at + size], cache=cache, **(first if at == 0 else {})))
            at += size
    return torch.cat(pieces, dim=1)


def full(model: Transformer, ids: Tensor, **args: object) -> Tensor:
    with torch.no_grad():
        return model(ids, **args)


def close(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    difference = float((a - b).abs().max())
    assert difference < TOLERANCE, f"logits differ by {difference:.1e} (of {float(b.abs().max()):.1f})"


@pytest.mark.sample(14)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunks_equal_the_full_forward(scheme: str, view: str) -> None:
    model, ids = build(tiny(scheme, attention=VIEWS[view])), tokens(2, COUNT)
    expected = full(model, ids, length=40)
    for sizes in ([1], [3], [64], [5, 1], [1, 7, 1]):
        cache = model.new_cache(2, 40)
        close(feed(model, ids, cache, sizes), expected)
        assert cache.used == COUNT


@pytest.mark.parametrize("scheme", BY_LENGTH)
@pytest.mark.parametrize("length", [SHORT - 1, SHORT, SHORT + 9, 4 * SHORT])
def test_lengths_on_both_sides_of_the_trained_one(scheme: str, length: int) -> None:
    model, ids = build(tiny(scheme)), tokens(2, SHORT - 2)
    close(feed(model, ids, model.new_cache(2, length), [3, 1]), full(model, ids, length=length))


@pytest.mark.parametrize("scheme", BY_LENGTH)
def test_a_length_for_each_row(scheme: str) -> None:
    model, ids = build(tiny(scheme)), tokens(3, 7)
    lengths = [7, SHORT + 1, 40]
    together = feed(model, ids, model.new_cache(3, 40, length=lengths), [4, 1])
    close(together, full(model, ids, length=lengths))
    for row, length in enumerate(lengths):
        close(together[row : row + 1], full(model, ids[row : row + 1], length=length))


@pytest.mark.sample(30)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("view", VIEWS)
def test_left_padded_prompts_continue_as_each_row_alone(scheme: str, view: str) -> None:
    model, ids = build(tiny(scheme, attention=VIEWS[view])), tokens(3, COUNT)
    lengths, prompt = [5, 11, 8], 11
    padded, attention_mask = torch.zeros(3, prompt, dtype=torch.int64), torch.zeros(3, prompt, dtype=torch.bool)
    for row, length in enumerate(lengths):
        padded[row, prompt - length :], attention_mask[row, prompt - length :] = ids[row, :length], True
    cache = model.new_cache(3, 40)
    with torch.no_grad():
        prefill = model(padded, attention_mask=attention_mask, cache=cache)
        assert cache.used == lengths
        steps = [
            model(torch.stack([ids[r, n + i : n + i + 1] for r, n in enumerate(lengths)]), cache=cache)
            for i in range(12)
        ]
    for row, length in enumerate(lengths):
        alone = full(model, ids[row : row + 1, : length + 12], length=40)[0]
        close(prefill[row, prompt - length :], alone[:length])
        close(torch.cat([s[row] for s in steps]), alone[length:])


@pytest.mark.parametrize("scheme", ["rotary", "t5", "alibi", "learned", "xpos", "rotary-dynamic-yarn"])
@pytest.mark.parametrize("view", VIEWS)
def test_ragged_chunks_after_a_ragged_prompt(scheme: str, view: str) -> None:
    model, ids = build(tiny(scheme, attention=VIEWS[view])), tokens(2, COUNT)
    cache, taken = model.new_cache(2, 40), [0, 0]
    seen: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for sizes in ([3, 6], [4, 1], [5, 5], [1, 3]):
            width = max(sizes)
            chunk, attention_mask = torch.zeros(2, width, dtype=torch.int64), torch.zeros(2, width, dtype=torch.bool)
            for row, size in enumerate(sizes):
                chunk[row, :size], attention_mask[row, :size] = ids[row, taken[row] : taken[row] + size], True
            logits = model(chunk, attention_mask=attention_mask, cache=cache)
            for row, size in enumerate(sizes):
                seen[row].append(logits[row, :size])
                taken[row] += size
    for row in range(2):
        close(torch.cat(seen[row]), full(model, ids[row : row + 1, : taken[row]], length=40)[0])


@pytest.mark.parametrize("scheme", ["rotary", "learned", "t5", "alibi", "xpos", "rotary-dynamic-ntk"])
@pytest.mark.parametrize("view", ["whole", "window"])
def test_packed_prefill_continues_with_the_last_document(scheme: str, view: str) -> None:
    model, ids = build(tiny(scheme, attention=VIEWS[view])), tokens(1, COUNT)
    document_ids = torch.tensor([[0] * 6 + [3] * 5 + [1] * (COUNT - 11)])
    alone = full(model, ids[:, 11:], length=40)
    cache = model.new_cache(1, 40)
    with torch.no_grad():
        first = model(ids[:, :14], document_ids=document_ids[:, :14], cache=cache)
        rest = [model(ids[:, i : i + 1], cache=cache) for i in range(14, COUNT)]
    close(torch.cat([first[:, 11:], *rest], dim=1), alone)
    close(first[:, :6], full(model, ids[:, :6], length=40))


def test_per_layer_mixtures() -> None:
    local = phasor.LayerConfig(
        attention=phasor.SoftmaxAttentionConfig(window=4), position=phasor.RotaryConfig(base=100.0)
    )
    sinks = phasor.LayerConfig(attention=phasor.SoftmaxAttentionConfig(window=3, sink_tokens=1), position="alibi")
    layers = (local, phasor.LayerConfig(position="none"), sinks, phasor.LayerConfig())
    model, ids = build(tiny("rotary", num_layers=4, layers=layers)), tokens(2, COUNT)
    for sizes in ([1], [6, 1], [5]):
        close(feed(model, ids, model.new_cache(2, COUNT), sizes), full(model, ids))


@pytest.mark.parametrize("scheme", ["rotary", "alibi", "t5"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_ring_that_wrapped_many_times_past_the_length(scheme: str, sinks: int) -> None:
    attention = phasor.SoftmaxAttentionConfig(window=4, sink_tokens=sinks)
    model, ids = build(tiny(scheme, attention=attention)), tokens(1, 60)
    cache = model.new_cache(1, 10)
    assert cache.endless
    bytes_before = cache.nbytes
    close(feed(model, ids, cache, [7, 1]), full(model, ids))
    assert cache.used == 60
    assert cache.nbytes == bytes_before


@pytest.mark.parametrize("extras", [{"softcap": 5.0}, {"sink_logits": True}, {"qk_norm": "head"}, {"qk_norm": "whole"}])
def test_score_extras(extras: dict[str, object]) -> None:
    model, ids = build(tiny("rotary", attention=phasor.SoftmaxAttentionConfig(window=5, **extras))), tokens(2, COUNT)
    close(feed(model, ids, model.new_cache(2, COUNT), [4, 1]), full(model, ids))


def test_default_positions_continue_from_explicit_ones() -> None:
    model, ids = build(tiny("rotary")), tokens(1, 12)
    far = torch.arange(12) + 2**30
    cache = model.new_cache(1, 16)
    with torch.no_grad():
        first = model(ids[:, :5], positions=far[:5], cache=cache)
        rest = [model(ids[:, i : i + 1], cache=cache) for i in range(5, 12)]
    close(torch.cat([first, *rest], dim=1), full(model, ids, positions=far))


def test_multi_section_positions_continue_from_the_largest() -> None:
    model, ids = build(tiny("mrope")), tokens(1, 8)
    rows = torch.stack(
        [torch.tensor([[0, 1, 1, 1, 1]]), torch.tensor([[0, 1, 1, 2, 2]]), torch.tensor([[0, 1, 2, 1, 2]])]
    )
    after = torch.arange(3, 6).expand(3, 1, 3)
    cache = model.new_cache(1, 8)
    with torch.no_grad():
        first = model(ids[:, :5], positions=rows, cache=cache)
        rest = model(ids[:, 5:], cache=cache)
    close(torch.cat([first, rest], dim=1), full(model, ids, positions=torch.cat([rows, after], dim=-1)))


def test_prefix_in_the_first_call() -> None:
    model, ids = build(tiny("rotary")), tokens(2, 12)
    cache = model.new_cache(2, 12)
    with torch.no_grad():
        pieces = [model(ids[:, :8], prefix_length=[5, 3], cache=cache), model(ids[:, 8:], cache=cache)]
    close(torch.cat(pieces, dim=1), full(model, ids, prefix_length=[5, 3]))


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "t5", "rotary", "rotary-dynamic-yarn"])
def test_encoder_decoder_computes_the_source_once(scheme: str) -> None:
    model = build(tiny(scheme, shape="encoder-decoder"))
    source, target = tokens(2, 9), tokens(2, 13, seed=5)
    attention_mask = torch.arange(9)[None] < torch.tensor([[9], [6]])
    expected = full(model, source, target=target, attention_mask=attention_mask, target_length=20)
    cache = model.new_cache(2, 20)
    with torch.no_grad():
        pieces = [model(source, target[:, :4], attention_mask=attention_mask, cache=cache)]
        calls: list[int] = []
        handles = [b.cross.kv.register_forward_hook(lambda *_: calls.append(1)) for b in model.decoder.blocks]
        pieces += [model(None, target[:, i : i + 1], cache=cache) for i in range(4, 13)]
        for handle in handles:
            handle.remove()
    close(torch.cat(pieces, dim=1), expected)
    assert calls == []


@pytest.mark.parametrize("scheme", ["rotary", "t5", "alibi", "learned", "xpos"])
@pytest.mark.parametrize("view", VIEWS)
def test_causality_with_a_cache(scheme: str, view: str) -> None:
    model, ids = build(tiny(scheme, attention=VIEWS[view])), tokens(1, COUNT)
    changed = ids.clone()
    changed[:, 17:] = (changed[:, 17:] + 1) % 61
    a, b = (feed(model, x, model.new_cache(1, 40), [6, 1]) for x in (ids, changed))
    assert torch.equal(a[:, :17], b[:, :17])
    assert not torch.equal(a[:, 17:], b[:, 17:])


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["rotary", "t5", "learned", "xpos"])
def test_a_cropped_cache_equals_one_that_never_read_the_tokens(scheme: str, view: str) -> None:
    model, ids = build(tiny(scheme, attention=VIEWS[view])), tokens(1, COUNT)
    cache = model.new_cache(1, 40, spare=4)
    with torch.no_grad():
        model(ids[:, :9], cache=cache)
        for start in (9, 13, 18):
            model(tokens(1, 4, seed=start), cache=cache)
            cache.crop(4)
            assert cache.used == start
            stop = {9: 13, 13: 18, 18: COUNT}[start]
            logits = model(ids[:, start:stop], cache=cache)
            close(logits, full(model, ids[:, :stop], length=40)[:, start:])


def test_cropping_rows_differently() -> None:
    model, ids = build(tiny("rotary")), tokens(2, 12)
    cache = model.new_cache(2, 16)
    with torch.no_grad():
        model(ids[:, :10], cache=cache)
        cache.crop([3, 0])
        assert cache.used == [7, 10]
        step = model(torch.stack([ids[0, 7:8], ids[1, 10:11]]), cache=cache)
    close(step[0], full(model, ids[:1, :8])[0, -1:])
    close(step[1], full(model, ids[1:, :11])[0, -1:])


def test_copy_reorder_move_and_save(tmp_path: object) -> None:
    model, ids = build(tiny("t5", attention=VIEWS["sinks"])), tokens(3, COUNT)
    cache = model.new_cache(3, 40)
    with torch.no_grad():
        model(ids[:, :20], cache=cache)
        kept = cache.copy()
        cache.save(tmp_path / "cache.safetensors")
        expected = model(ids[:, 20:], cache=cache)
        assert kept.used == 20
        close(model(ids[:, 20:], cache=KVCache.load(tmp_path / "cache.safetensors").to(DEVICE)), expected)
        close(model(ids[:, 20:], cache=kept.to("cpu").to(DEVICE)), expected)
        kept.reorder([2, 0, 0])
        close(model(ids[[2, 0, 0], 20:], cache=kept), expected[[2, 0, 0]])
        fewer = KVCache.load(tmp_path / "cache.safetensors").to(DEVICE)
        fewer.reorder([2, 1])
        assert fewer.batch_size == 2
        close(model(ids[[2, 1], 20:], cache=fewer), expected[[2, 1]])
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]


def test_another_dtype_leaves_integers_alone() -> None:
    model, ids = build(tiny("alibi")), tokens(1, 8)
    cache = model.new_cache(1, 10)
    full(model, ids, cache=cache)
    other = cache.to(dtype=torch.bfloat16)
    assert other.layers[0]["keys"].dtype == torch.bfloat16
    assert cache.layers[0]["keys"].dtype == torch.float32
    assert all(
        torch.equal(a.data, b.data) for a, b in zip(other.positions.values(), cache.positions.values(), strict=True)
    )


def test_memory_follows_from_the_shape() -> None:
    layers = (
        phasor.LayerConfig(attention=phasor.SoftmaxAttentionConfig(window=8, sink_tokens=2)),
        phasor.LayerConfig(),
    )
    config = tiny("rotary", layers=layers)
    cache = build(config).new_cache(3, 100)
    slots = (8 + 2) + 100
    assert cache.nbytes == 2 * 3 * slots * config.num_kv_heads * config.head_dim * 4


def test_slots_of_a_ring_against_a_plain_loop() -> None:
    layout = SlotLayout(2, 5, 5)
    held: dict[int, int] = {}
    for token in range(40):
        held[layout.slot(token)] = token
        expected = [held.get(slot, -1) for slot in range(layout.slots)]
        index = layout.token_index(torch.tensor([token + 1]), layout.slots)[0]
        assert [int(x) if x < 1 << 60 else -1 for x in index] == expected


def assert_refuses(call: object, *words: str) -> None:
    with pytest.raises(ValueError, match=words[0]) as error:
        call()
    assert "\n" not in str(error.value)


def test_bad_input() -> None:
    model, ids = build(tiny("rotary")), tokens(2, 8)
    cache = model.new_cache(2, 10)
    full(model, ids, cache=cache)
    assert_refuses(lambda: model(ids, cache=cache), "holds at most 10 tokens")
    assert cache.used == 8
    assert_refuses(lambda: model(ids[:1], cache=cache), "2 rows")
    assert_refuses(lambda: model(ids[:, :1], cache=cache, length=30), "is given its length when it is created")
    assert_refuses(lambda: cache.crop(9), "undoes 0 to 8")
    assert_refuses(lambda: cache.reorder([0, 2]), "row number below 2")
    assert_refuses(lambda: cache.reorder([0, 1, 0]), "reorder takes")
    assert_refuses(lambda: cache.reorder([]), "reorder takes")
    assert_refuses(lambda: model.new_cache(0, 10), "batch_size")
    assert_refuses(lambda: model.new_cache(1, 10, length=[3, 4]), "length")
    assert_refuses(
        lambda: model(ids[:, :1], document_ids=torch.zeros(2, 1, dtype=torch.int64), cache=cache), "first call"
    )
    assert_refuses(lambda: model(ids[:, :1], prefix_length=1, cache=cache), "prefix_length")
    assert_refuses(lambda: build(tiny("rotary", shape="encoder")).new_cache(1, 4), "encoder")
    windowed = build(tiny("rotary", attention=VIEWS["window"]))
    ring = windowed.new_cache(1, 100)
    full(windowed, tokens(1, 30), cache=ring)
    assert_refuses(lambda: ring.crop(2), "spare")
    by_length = build(tiny("rotary-dynamic-ntk")).new_cache(1, 20, length=6)
    assert_refuses(lambda: build(tiny("rotary-dynamic-ntk"))(tokens(1, 7), cache=by_length), "past the length 6")
    learned = build(tiny("learned", max_length=9))
    assert_refuses(lambda: learned(tokens(1, 10), cache=learned.new_cache(1, 20)), "learned table")


def test_a_file_that_is_not_a_cache(tmp_path: object) -> None:
    (tmp_path / "x").write_bytes(b"nothing")
    assert_refuses(lambda: KVCache.load(tmp_path / "x"), "not a cache")
    assert_refuses(lambda: KVCache.load(tmp_path / "missing"), "not a cache")


def capped_model(scheme: str) -> Transformer:
    return build(tiny(scheme, attention=phasor.SoftmaxAttentionConfig(window=4, sink_tokens=2, cap_sinks=True)))


@pytest.mark.parametrize("scheme", ["rotary", "alibi", "t5", "none", "rotary-yarn", "rotary-partial", "xpos"])
def test_capped_sinks_with_a_cache_equal_the_full_forward(scheme: str) -> None:
    model, ids = capped_model(scheme), tokens(2, COUNT)
    for sizes in ([1], [5], [9, 1]):
        close(feed(model, ids, model.new_cache(2, 40), sizes), full(model, ids, length=40))


def test_capped_sinks_equal_moving_the_window_next_to_them() -> None:
    """What the last token sees is as if all between the sinks and the window had never been."""
    config = tiny(
        "rotary", num_layers=1, attention=phasor.SoftmaxAttentionConfig(window=4, sink_tokens=2, cap_sinks=True)
    )
    model, ids = build(config), tokens(1, COUNT)
    short = torch.cat([ids[:, :2], ids[:, -4:]], dim=1)
    close(full(model, ids)[:, -1], full(model, short)[:, -1])
    uncapped = build(config.replace(attention=phasor.SoftmaxAttentionConfig(window=4, sink_tokens=2)))
    assert not torch.allclose(full(uncapped, ids)[:, -1], full(model, ids)[:, -1], atol=1e-2)


def test_a_cache_is_for_the_model_that_made_it() -> None:
    model, ids = build(tiny("rotary")), tokens(1, 4)
    other = build(tiny("rotary", num_layers=3, attention=VIEWS["window"])).new_cache(1, 20)
    assert_refuses(lambda: model(ids, cache=other), "not made for this model")
    assert_refuses(lambda: model(ids, cache="x"), "not made for this model")


@pytest.mark.parametrize("view", VIEWS)
def test_a_failed_call_makes_the_cache_refuse_further_calls(view: str) -> None:
    model, ids = build(tiny("rotary", attention=VIEWS[view])), tokens(1, 20)
    cache = model.new_cache(1, 40)
    full(model, ids[:, :9], cache=cache)
    kept = cache.copy()
    handle = model.decoder.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        full(model, ids[:, 9:13], cache=cache)
    handle.remove()
    assert_refuses(lambda: model(ids[:, 9:], cache=cache), "failed half-way")
    close(full(model, ids[:, 9:], cache=kept), full(model, ids)[:, 9:])


def test_an_encoder_decoder_continues_after_a_refused_first_call() -> None:
    model = build(tiny("t5", shape="encoder-decoder"))
    source, target = tokens(2, 6), tokens(2, 6, seed=4)
    cache = model.new_cache(2, 4)
    assert_refuses(lambda: model(source, target, cache=cache), "holds at most 4 tokens")
    close(full(model, source, target=target[:, :3], cache=cache), full(model, source, target=target[:, :3]))
    assert_refuses(
        lambda: model(None, target[:, :1], attention_mask=source > 0, cache=cache), "no arguments about the source"
    )


def test_cropping_multi_section_positions() -> None:
    model, ids = build(tiny("mrope")), tokens(1, 8)
    rows = torch.tensor([[[0, 1, 1, 1, 1]], [[0, 1, 1, 2, 2]], [[0, 1, 2, 1, 2]]])
    expected = full(model, ids, positions=torch.cat([rows, torch.arange(3, 6).expand(3, 1, 3)], dim=-1))
    cache = model.new_cache(1, 12)
    full(model, ids[:, :5], positions=rows, cache=cache)
    full(model, tokens(1, 2, seed=9), cache=cache)
    cache.crop(2)
    close(full(model, ids[:, 5:], cache=cache), expected[:, 5:])


def test_a_first_call_has_the_gradients_of_the_full_forward() -> None:
    model, ids = build(tiny("rotary")), tokens(1, 8)
    grads = []
    for cache in (None, model.new_cache(1, 8)):
        model.zero_grad()
        model(ids, cache=cache).square().sum().backward()
        grads.append(model.decoder.blocks[0].attention.qkv.weight.grad.clone())
    assert torch.allclose(*grads, rtol=1e-4, atol=1e-4)


def test_a_cache_of_another_dtype_than_its_model() -> None:
    model, ids = build(tiny("rotary", attention=VIEWS["window"])), tokens(2, 20)
    cache = model.new_cache(2, 40)
    full(model, ids[:, :9], cache=cache)
    rough = full(model, ids[:, 9:], cache=cache.to(dtype=torch.bfloat16))
    assert (rough - full(model, ids)[:, 9:]).abs().mean() < 0.1  # keys and values rounded to 8 bits


def test_a_row_may_pause_while_another_continues() -> None:
    model, ids = build(tiny("rotary")), tokens(2, 9)
    cache = model.new_cache(2, 12)
    full(model, ids[:, :4], cache=cache)
    attention_mask = torch.tensor([[True, True, True], [False, False, False]])
    logits = full(model, ids[:, 4:7], attention_mask=attention_mask, cache=cache)
    assert cache.used == [7, 4]
    close(logits[0], full(model, ids[:1, :7], length=12)[0, 4:])
    step = full(model, torch.stack([ids[0, 7:8], ids[1, 4:5]]), cache=cache)
    close(step[1], full(model, ids[1:, :5], length=12)[0, 4:])


def test_capped_sinks_at_positions_with_gaps() -> None:
    attention = phasor.SoftmaxAttentionConfig(window=6, sink_tokens=2, cap_sinks=True)
    model, ids, apart = build(tiny("rotary", attention=attention)), tokens(1, 8), torch.arange(8) * 50
    whole = full(model, ids, positions=apart)
    close(full(model, ids[:, :6], positions=apart[:6]), whole[:, :6])


@pytest.mark.parametrize("wrong", [1.5, None, "ab", True, [1.5, 1], torch.tensor(1.5)])
def test_wrong_arguments_of_crop_and_reorder(wrong: object) -> None:
    model = build(tiny("rotary"))
    cache = model.new_cache(2, 8)
    full(model, tokens(2, 4), cache=cache)
    assert_refuses(lambda: cache.crop(wrong), "crop takes")
    assert_refuses(lambda: cache.reorder(wrong), "reorder takes")
    assert cache.used == 4

"""Gated delta attention: the formula, and that documents, padding, chunks and caches change nothing."""

import pytest
import torch
import torch.nn.functional as F
from device import DEVICE
from schemes import build, tiny, tokens

import phasor
from phasor.config import LayerConfig
from phasor.evaluation.stream import evaluate_stream
from phasor.kv_cache.static import StaticKVCache
from phasor.models.windows import window_config
from phasor.nn import layer_step
from phasor.nn.record import Record
from phasor.nn.sequence import sequence_info
from phasor.ops.linear_attention import linear_attention_step

SAME = 1e-12  # float64, of the largest value: the same sums in another order
CLOSE = 1e-6  # float32, of the largest value: the rounding of sums over rows of 11 tokens
COUNT = 11
DELTA = phasor.GatedDeltaAttentionConfig(num_heads=6, num_key_heads=2, key_dim=5, value_dim=7, conv_width=3)
HYBRID = {"layers": (LayerConfig(attention=DELTA), LayerConfig(attention="gated-delta"), {}), "num_layers": 3}


def hybrid(scheme="rotary", **changes):
    """Two layers with a state, one with softmax attention."""
    return build(tiny(scheme, **HYBRID | changes))


def assert_close(found, expected, limit=SAME):
    assert (found - expected).abs().max() <= limit * expected.abs().max()


@torch.no_grad()
def test_it_is_the_formula_of_gated_deltanet():
    """The recurrence of the paper, head by head and token by token, with the weights of the module."""
    model = build(tiny("none", attention=DELTA, num_layers=1)).double()
    attention, x = model.decoder.blocks[0].attention, torch.randn(1, COUNT, 32, dtype=torch.float64)
    ctx = model.decoder._self_attention_contexts(x, sequence_info(1, COUNT, x.device), None, None, [Record()])[0]
    found = attention(x, ctx)
    rows, gates = attention.qkvz.weight.view(2, 2 * 5 + 2 * 21, 32), attention.gates.weight.view(2, 2, 3, 32)
    weights = attention.convolution.view(2, 2 * 5 + 21, 3)
    results = []
    for head in range(6):
        group, own = divmod(head, 3)
        inputs = {"q": slice(0, 5), "k": slice(5, 10), "v": slice(10 + 7 * own, 17 + 7 * own)}
        mixed = {}
        for name, part in inputs.items():
            projected = F.pad(x[0] @ rows[group, part].T, (0, 0, 2, 0))
            windows = torch.stack([projected[t : t + 3] for t in range(COUNT)])  # [T, W, features]
            mixed[name] = F.silu(torch.einsum("twf,fw->tf", windows, weights[group, part]))
        q, k = (mixed[name] / (mixed[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in "qk")
        z = x[0] @ rows[group, 31 + 7 * own : 38 + 7 * own].T
        beta, time = (x[0] @ gates[group, which, own] for which in range(2))
        alpha = torch.exp(-attention.A_log[head].exp() * F.softplus(time + attention.dt_bias[head]))
        state = torch.zeros(5, 7, dtype=torch.float64)
        for t in range(COUNT):
            state = alpha[t] * (state - beta[t].sigmoid() * torch.outer(k[t], k[t] @ state))
            state = state + beta[t].sigmoid() * torch.outer(k[t], mixed["v"][t])
            y = q[t] * 5**-0.5 @ state
            y = y / (y.square().mean() + 1e-6).sqrt() * attention.norm.weight * F.silu(z[t])
            results.append((t, head, y))
    y = torch.stack([torch.cat([y for t, _, y in results if t == token]) for token in range(COUNT)])
    assert_close(found[0], y @ attention.out.weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_documents_are_those_alone_gradients_too(dtype):
    ids, sizes = tokens(1, COUNT), [4, 1, 6]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))[None]

    def results(dtype):
        """Outputs and gradients, packed and alone."""
        model = hybrid().to(dtype)
        weight = model.decoder.blocks[0].attention.qkvz.weight
        alone = torch.cat([model(piece) for piece in ids.split(sizes, dim=1)], dim=1)
        both = model(ids, document_ids=documents), alone
        return [*both, *(torch.autograd.grad(y.square().sum(), weight)[0] for y in both)]

    packed, alone, packed_grad, alone_grad = results(dtype)
    limit = CLOSE if dtype == torch.float32 else SAME
    assert_close(packed, alone, limit)
    rounding = (alone_grad - results(torch.float64)[3]).abs().max() / alone_grad.abs().max()
    assert_close(packed_grad, alone_grad, max(limit, 2 * float(rounding)))  # what float32 costs documents alone


@pytest.mark.parametrize("real", [slice(4, None), slice(0, 5), [0, 2, 3, 7]], ids=["left", "right", "between"])
def test_padding_is_as_if_it_were_not_there(real):
    model, ids = hybrid().double(), tokens(2, COUNT)
    mask = torch.ones(2, COUNT, dtype=torch.bool)
    mask[1] = False
    mask[1, real] = True
    padded = model(ids, attention_mask=mask)
    assert_close(padded[1][mask[1]], model(ids[1, mask[1]][None])[0])
    assert_close(padded[0], model(ids[:1])[0])


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * COUNT, [5, 6], [9, 1, 1], [2, 1, 8]], ids=str)
def test_chunks_of_padded_rows_equal_one_pass(sizes):
    """Rows of other lengths, padded in every chunk on another side, with documents that begin inside and between."""
    model, ids = hybrid().double(), tokens(2, COUNT)
    documents = torch.tensor([[3] * 5 + [7] * 6, [2] * 9 + [4] * 2])
    expected = model(ids, document_ids=documents)
    cache, pieces = model.new_cache(2, 3 * COUNT), []
    for number, (piece, own) in enumerate(zip(ids.split(sizes, 1), documents.split(sizes, 1), strict=True)):
        pad = (2, 1) if number % 2 else (0, 3)
        mask = F.pad(torch.ones_like(piece, dtype=torch.bool), pad)
        around = [torch.full((2, count), value) for count, value in zip(pad, (8, 9), strict=True)]
        given = {"document_ids": torch.cat((around[0], own, around[1]), dim=1), "attention_mask": mask}
        pieces.append(model(F.pad(piece, pad), cache=cache, **given)[mask].view(2, piece.shape[1], -1))
    assert_close(torch.cat(pieces, dim=1), expected)


@torch.no_grad()
def test_rows_without_a_token_in_a_call_keep_their_state():
    model, ids = hybrid().double(), tokens(2, COUNT)
    cache, mask = model.new_cache(2, 2 * COUNT), torch.ones(2, 4, dtype=torch.bool)
    model(ids[:, :4], cache=cache)
    mask[1] = False
    model(ids[:, 4:8], cache=cache, attention_mask=mask)
    assert cache.used == [8, 4]
    found = model(torch.stack((ids[0, 8:], ids[1, 4:7])), cache=cache)
    assert_close(found[0], model(ids[:1])[0, 8:])
    assert_close(found[1], model(ids[1:])[0, 4:7])


@torch.no_grad()
def test_a_cache_is_as_large_after_many_tokens_and_never_full():
    model = build(tiny("none", attention=DELTA))
    cache, ids = model.new_cache(1, 1), tokens(1, 4 * COUNT)
    size = cache.nbytes
    found = torch.cat([model(piece, cache=cache) for piece in ids.split(7, dim=1)], dim=1)
    assert (cache.nbytes, cache.used, cache.endless) == (size, 4 * COUNT, True)
    assert_close(found, model(ids), 1e-5)


@torch.no_grad()
def test_states_are_in_float32_in_files_and_copies(tmp_path):
    model, ids = hybrid().bfloat16(), tokens(2, COUNT)
    cache = model.new_cache(2, COUNT)
    model(ids[:, :5], cache=cache)
    cache.save(tmp_path / "cache")
    for other in (cache, cache.copy(), phasor.KVCache.load(tmp_path / "cache", DEVICE), cache.to(dtype=torch.float16)):
        assert [{name: x.dtype for name, x in states.items()} for states in other.states[:1]] == [
            {"state": torch.float32, "inputs": other.dtype}
        ]
        assert torch.equal(other.states[0]["state"].cpu(), cache.states[0]["state"].cpu())
    assert cache.to(dtype=torch.float64).states[0]["state"].dtype == torch.float64
    copy = cache.copy()
    model(ids[:, 5:], cache=cache)
    assert not torch.equal(copy.states[0]["state"], cache.states[0]["state"])
    assert torch.equal(
        model(ids[:, 5:], cache=copy), model(ids[:, 5:], cache=phasor.KVCache.load(tmp_path / "cache", DEVICE))
    )


@torch.no_grad()
def test_a_state_is_cropped_as_a_whole_or_to_an_earlier_one():
    model, ids = hybrid().double(), tokens(2, COUNT)
    expected, cache = model(ids), model.new_cache(2, COUNT, spare=4)
    model(ids[:, :5], cache=cache)
    earlier = cache.copy()
    model(ids[:, 5:8] + 1, cache=cache)
    with pytest.raises(ValueError, match="crop takes 0 or all 8 tokens, not 3"):
        cache.crop(3)
    cache.crop(0)
    cache.crop(3, earlier.states)
    assert cache.used == 5
    assert_close(model(ids[:, 5:], cache=cache), expected[:, 5:])
    cache.crop([0, COUNT])
    assert not any(x[1].any() for states in cache.states for x in states.values())
    cache.crop([COUNT, 0])
    assert_close(model(ids, cache=cache), expected)


@torch.no_grad()
def test_static_caches_reorder_states():
    model, ids = hybrid().double(), tokens(3, COUNT)
    cache = model.new_cache(3, COUNT)
    model(ids[:, :2], cache=cache)
    static = StaticKVCache(cache)
    pieces = [model(ids[:, 2:3], cache=static)]
    static.reorder(torch.tensor([2, 0, 0]), 3)
    order = [2, 0, 0]
    pieces = [pieces[0][order], *(model(ids[order, i : i + 1], cache=static) for i in range(3, COUNT))]
    assert_close(torch.cat(pieces, dim=1), model(ids[order])[:, 2:])


@torch.no_grad()
@pytest.mark.parametrize("is_static", [False, True])
def test_one_token_changes_states_where_they_are(is_static, monkeypatch):
    """In one operation for each layer: no other state is computed and copied."""
    model, ids, changed = hybrid(), tokens(2, COUNT), []

    def step(*tensors):
        changed.append(tensors[5].data_ptr())
        return linear_attention_step(*tensors)

    monkeypatch.setattr(layer_step, "linear_attention_step", step)
    cache = model.new_cache(2, COUNT)
    model(ids[:, :-1], cache=cache)
    assert not changed
    y = model(ids[:, -1:], cache=StaticKVCache(cache) if is_static else cache)
    assert changed == [cache.states[i]["state"].data_ptr() for i in range(2)]
    assert_close(y, model(ids)[:, -1:], 1e-5)


def test_a_chunk_after_a_cache_has_gradients():
    model, ids = hybrid().double(), tokens(2, COUNT)
    cache = model.new_cache(2, COUNT)
    for piece in ids.split(4, dim=1):
        model(piece, cache=cache).square().sum().backward()
    assert model.decoder.blocks[0].attention.gates.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_beams_and_streams_without_end():
    model, prompt = hybrid(), tokens(1, 5)[0].tolist()
    best = phasor.generate(model, prompt, max_new_tokens=4, num_beams=3)
    beams = [(prompt, 0.0)]
    for _ in range(4):
        grown = [
            ([*text, token], score + float(own))
            for text, score in beams
            for token, own in enumerate(model(torch.tensor([text]))[0, -1].log_softmax(-1))
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:3]
    assert list(best) == beams[0][0][5:]
    endless = build(tiny("none", attention=DELTA))
    stream = phasor.stream(endless, prompt, max_new_tokens=None)
    found = [next(stream) for _ in range(30)]
    assert found == list(phasor.generate(endless, prompt, max_new_tokens=30))


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 4])
def test_speculative_decoding_goes_back_to_earlier_states(window):
    model, draft = hybrid(), build(tiny("rotary"), seed=3)
    model = model if window is None else phasor.Transformer(window_config(model.config, window)).eval()
    prompt = [5, 7, 5, 9, 5, 7, 5, 9, 5, 7]
    greedy = list(phasor.generate(model, prompt, max_new_tokens=20))
    assert list(phasor.generate(model, prompt, max_new_tokens=20, draft=draft)) == greedy
    assert list(phasor.generate(model, prompt, max_new_tokens=20, prompt_lookup_tokens=2)) == greedy
    with pytest.raises(ValueError, match="layers that keep a state cannot do"):
        phasor.generate(draft, prompt, max_new_tokens=20, draft=model)


def test_a_long_text_is_read_with_a_state_in_place_of_a_window(tmp_path):
    model, ids = build(tiny("none", attention=DELTA, max_length=8)), tokens(1, 64)
    (tmp_path / "tokens.bin").write_bytes(ids[0].cpu().numpy().astype("uint16").tobytes())
    found = evaluate_stream(model, tmp_path / "tokens.bin", token_dtype="uint16", chunk=5, device=str(ids.device))
    expected = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_positions_act_in_layers_that_take_them():
    config = tiny("rotary", **HYBRID)
    assert [config.layer(i).position.kind for i in range(3)] == ["none", "none", "rotary"]
    with pytest.raises(ValueError, match="gated-delta attention takes no positions: leave it out"):
        tiny("none", layers=(LayerConfig(attention=DELTA, position="rotary"), {}))


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="gated-delta attention is for decoders, and this is an encoder"):
        tiny("none", attention=DELTA, shape="encoder")
    with pytest.raises(ValueError, match=r"num_heads \(6\) is not divisible by num_key_heads \(4\)"):
        tiny("none", attention=DELTA.replace(num_key_heads=4))
    with pytest.raises(ValueError, match="prefix_length is for models without gated-delta attention"):
        hybrid()(tokens(1, COUNT), prefix_length=3)
    with pytest.raises(ValueError, match="a window is for layers that keep keys"):
        window_config(tiny("none", attention=DELTA), 4)
    windowed = window_config(tiny("rotary", **HYBRID), 4)
    assert [windowed.layer(i).attention.window for i in range(3)] == [None, None, 4]


def test_its_cost_does_not_grow_with_the_keys():
    config = tiny("none", attention=DELTA)
    flops = DELTA.flops_per_token(config, 10)
    assert flops == DELTA.flops_per_token(config, 10**6) == 6 * 6 * 5 * 7 + 2 * 3 * (2 * 2 * 5 + 6 * 7)

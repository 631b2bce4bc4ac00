"""The fused step of generation: every kernel against float64, and the whole against steps without it."""

from __future__ import annotations

import copy
import gc
import math

import numpy as np
import pytest
import torch
import triton.language as tl
from decoding import speaker
from schemes import VIEWS, build, relative_change, tiny, tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import interpreter

import phasor
from phasor.generation import fused_step, loop, steps
from phasor.generation.compiled import State
from phasor.nn.positions.phase import cos_sin_of
from phasor.ops import constants, dispatch
from phasor.ops.decode import decode_attention, gemv, lm_head_argmax
from phasor.ops.decode.tiles import Tiles, tiles_of

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of sums over some hundred features
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 4, 6, 2]]


@pytest.fixture(autouse=True)
def bfloat16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies the bits of bfloat16 matrices as whole numbers, and cuts where devices round."""
    multiply, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def rounded(data, old, new, mode):
        if (old, new) != (tl.float32, tl.bfloat16):
            return convert(data, old, new, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(data.shape)

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle(rounded(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as on a GPU, without its graphs; the rest of the model in plain torch, which is quicker here."""
    monkeypatch.setattr(steps, "why_not", lambda model: None)
    monkeypatch.setattr(loop, "why_not", lambda model: None)
    monkeypatch.setattr(fused_step, "why_not", lambda model: None)


@pytest.fixture
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program a kernel, or a few: the interpreter takes its time over each."""
    monkeypatch.setattr(gemv, "tiles_of", lambda *sizes, **kind: Tiles(64, 64, 1))
    monkeypatch.setattr(decode_attention, "FEW", decode_attention.Reading(16, 1, 1))
    monkeypatch.setattr(decode_attention, "PROGRAMS", 4)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "tiles"),
    [
        (1, 48, 37, Tiles(4, 32, 1)),
        (1, 64, 8, tiles_of(1, 4096, 2048)),
        (1, 64, 8, tiles_of(1, 2048, 2048)),
        (1, 64, 8, tiles_of(1, 2048, 8192)),
        (3, 80, 37, Tiles(16, 32, 1, 2)),
        (16, 40, 16, tiles_of(16, 2048, 2048)),
    ],
)
def test_projections(rows, inputs, outputs, tiles, dtype):
    x, weight, bias = drawn(rows, inputs, dtype=dtype), drawn(outputs, inputs, dtype=dtype), drawn(outputs, dtype=dtype)
    scale, residual = drawn(inputs, dtype=dtype), drawn(rows, outputs, dtype=dtype)
    wide = [t.double() for t in (x, weight, bias, scale, residual)]
    norm = gemv.Norm(scale, 1.0, 1e-3)
    made = rms_norm(wide[0], wide[3], 1.0, 1e-3) @ wide[1].mT + wide[2]

    plain = gemv.project(x, weight, torch.empty(rows, outputs, dtype=dtype), tiles=tiles)
    assert relative_change(plain.double(), wide[0] @ wide[1].mT) < ROUNDING[dtype]
    out = residual.clone()
    gemv.project(x, weight, out, norm=norm, bias=bias, residual=out, multiplier=0.5, tiles=tiles)
    assert relative_change(out.double(), wide[4] + 0.5 * made) < ROUNDING[dtype]

    logits, best = torch.empty(rows, outputs, dtype=dtype), torch.full((rows,), lm_head_argmax.LOWEST)
    lm_head_argmax.vote(x, weight, logits, best, norm=norm, bias=bias, multiplier=0.5, tiles=tiles)
    assert relative_change(logits.double(), 0.5 * made) < ROUNDING[dtype]
    chosen, history, turn = torch.zeros(rows, dtype=torch.int64), torch.zeros(3, rows).long(), torch.tensor([7])
    counts, places = torch.arange(rows), torch.arange(rows) + 2**40
    lm_head_argmax.finish(best, chosen, history, turn, counts, places)
    assert chosen.tolist() == logits.argmax(-1).tolist() == history[7 % 3].tolist()
    assert turn.tolist() == [8]
    assert counts.tolist() == list(range(1, rows + 1))
    assert places.tolist() == [n + 2**40 for n in counts.tolist()]
    assert set(best.tolist()) == {lm_head_argmax.LOWEST}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", fused_step.ACTIVATIONS)
def test_activations(name, rows):
    config = phasor.FeedForwardConfig(activation=name, bias=True)
    width, hidden = 24, 21
    outputs = hidden * (2 if config.gated else 1)
    x, weight, bias, scale = drawn(rows, width), drawn(outputs, width), drawn(outputs), drawn(width)
    normed = rms_norm(x.double(), scale.double(), 0.0, 1e-5)
    made = normed @ weight.double().mT + bias.double()
    expected = phasor.nn.feed_forward.activate(made, config)
    tiles, norm = Tiles(8, 16, 1), gemv.Norm(scale, 0.0, 1e-5)
    given = {"gated": config.gated, "norm": norm, "bias": bias, "tiles": tiles}
    kind = fused_step.ACTIVATIONS[name]
    found = gemv.feed(x, weight, torch.empty(rows, hidden), kind, **given)
    assert relative_change(found.double(), expected) < ROUNDING[torch.float32]
    alone = gemv.gate(made.float(), torch.empty(rows, hidden), kind, gated=config.gated)
    assert relative_change(alone.double(), expected) < ROUNDING[torch.float32]


def test_of_equal_logits_the_first_wins_and_the_lowest_can_win():
    x, weight = torch.ones(1, 4), torch.tensor([-3.0, -1.0, -2.0, -1.0, -1.0])[:, None].expand(5, 4).contiguous()
    logits, best, chosen = torch.empty(1, 5), torch.full((1,), lm_head_argmax.LOWEST), torch.zeros(1, dtype=torch.int64)
    where = torch.zeros(2, 1).long(), torch.zeros(1).long(), torch.zeros(1).long(), torch.zeros(1).long()
    for outputs in (4, 1):
        lm_head_argmax.vote(x, weight, logits, best, tiles=Tiles(outputs, 16, 1))
        lm_head_argmax.finish(best, chosen, *where)
        assert chosen.tolist() == [1]


def attention_in_float64(
    qkv, keys, values, counts, positions, shared, scale, inc, factor, width, adjacent, norms, sinks
):
    """Row by row and head by head; the cache gets the entry, and what is seen are the slots that hold a token."""
    rows, slots, groups, dim = keys.shape
    out = torch.empty(rows, groups, shared, dim, dtype=torch.float64)
    for row in range(rows):
        made = qkv[row].view(groups, shared + 2, dim).double()
        asked, key, value = made[:, :shared], made[:, shared : shared + 1], made[:, -1]
        if norms is not None:
            asked = rms_norm(
                asked, norms.queries.double().expand(groups * shared, dim).view_as(asked), norms.offset, norms.eps
            )
            key = rms_norm(key, norms.keys.double().expand(groups, dim)[:, None], norms.offset, norms.eps)
        if width:
            cos, sin = (factor * t for t in cos_sin_of(positions[row], inc, torch.float64))
            pairing = "adjacent" if adjacent else "half"
            asked, key = (phasor.ops.rope.rope.rotate_pairs_ref(t, cos, sin, pairing) for t in (asked, key))
        count = int(counts[row])
        slot = count if count < sinks else sinks + (count - sinks) % (slots - sinks)
        keys[row, slot], values[row, slot] = key[:, 0], value
        held = min(count + 1, slots)
        for group in range(groups):
            k, v = keys[row, :held, group], values[row, :held, group]
            out[row, group] = (scale * asked[group] @ k.mT).softmax(-1) @ v
    return out.view(rows, -1)


CASES = {
    # rows' tokens, slots, groups, heads a group, width of a head, rotated, adjacent, norm weights, sinks
    "one token": ([0], 32, 1, 1, 8, 8, False, None, 0),
    "no rotation": ([5, 31, 0], 32, 2, 3, 12, 0, False, None, 0),
    "half": ([17, 3], 40, 2, 4, 16, 16, False, None, 0),
    "adjacent": ([39], 40, 1, 2, 16, 16, True, None, 0),
    "partial": ([9, 40], 41, 2, 2, 20, 6, False, None, 0),
    "partial adjacent": ([9], 41, 2, 1, 20, 6, True, None, 0),
    "norm": ([21, 5], 32, 2, 2, 16, 16, False, "head", 0),
    "norm by head": ([21], 32, 2, 3, 16, 8, True, "heads", 0),
    "ring": ([3, 17, 18, 40], 18, 1, 2, 8, 8, False, None, 0),
    "ring and sinks": ([1, 20, 23, 100], 21, 2, 2, 8, 8, False, None, 3),
    "several blocks a program": ([47, 48, 100], 50, 2, 2, 8, 8, False, None, 2),
}


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_attention(case, splits):
    held, slots, groups, shared, dim, width, adjacent, normed, sinks = CASES[case]
    rows = len(held)
    counts, positions = torch.tensor(held), torch.tensor(held) + 2**36 * torch.arange(rows)
    qkv = drawn(rows, groups * (shared + 2) * dim)
    keys, values = drawn(rows, slots, groups, dim), drawn(rows, slots, groups, dim)
    empty = torch.arange(slots)[None] >= counts[:, None]
    keys[empty], values[empty] = math.nan, math.nan  # what holds no token is not read
    inc = torch.randint(-(2**62), 2**62, (width // 2,))
    norms = None
    if normed is not None:
        shapes = ((dim,), (dim,)) if normed == "head" else ((groups * shared, dim), (groups, dim))
        norms = decode_attention.HeadNorm(*(drawn(*shape) for shape in shapes), 1.0, 1e-3)
    wide = keys.double(), values.double()
    expected = attention_in_float64(qkv, *wide, counts, positions, shared, 0.3, inc, 0.9, width, adjacent, norms, sinks)
    desk = decode_attention.Desk(rows, groups, shared, dim, torch.device("cpu"))
    desk.splits = min(desk.splits, splits)
    turning = decode_attention.Turning(inc, 0.9, width, adjacent) if width else None
    given = {"scale": 0.3, "turning": turning, "norm": norms, "sinks": sinks}
    given["reading"] = decode_attention.Reading(16 if splits == 1 else 8, 1, 1)
    found = decode_attention.attend(
        qkv, keys, values, counts, positions, torch.empty(rows, groups * shared * dim), desk, **given
    )
    assert relative_change(found.double(), expected) < 2e-6
    assert int(desk.arrived.abs().sum()) == 0
    for cache, truth in zip((keys, values), wide, strict=True):
        torch.testing.assert_close(cache.double(), truth, atol=2e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize("splits", [1, 3])
def test_what_the_kernel_before_writes_is_read_after_it_ends(splits, monkeypatch):
    """Until then the projection is not there, and neither the cache nor the result is touched."""
    qkv, keys, values = drawn(1, 4 * 8), drawn(1, 24, 1, 8), drawn(1, 24, 1, 8)
    counts, inc = torch.tensor([20]), torch.randint(-(2**62), 2**62, (4,))
    wide = keys.double(), values.double()
    expected = attention_in_float64(qkv, *wide, counts, counts, 2, 0.3, inc, 1.0, 8, False, None, 0)
    late, out = torch.full_like(qkv, math.nan), torch.full((1, 16), math.nan)
    before, waits = (keys.clone(), values.clone()), []

    def follow(overlap):
        if not waits:
            assert out.isnan().all()
            assert torch.equal(keys, before[0])
            assert torch.equal(values, before[1])
        waits.append(overlap)
        late.copy_(qkv)

    monkeypatch.setattr(decode_attention, "follow", follow)
    desk = decode_attention.Desk(1, 1, 2, 8, torch.device("cpu"))
    desk.splits = splits
    given = {"scale": 0.3, "turning": decode_attention.Turning(inc, 1.0, 8, False)}
    given["reading"] = decode_attention.Reading(8, 1, 1)
    decode_attention.attend(late, keys, values, counts, counts, out, desk, **given)
    assert len(waits) == splits
    assert relative_change(out.double(), expected) < 2e-6


def test_phases_at_positions_up_to_2_to_the_36():
    """Queries of one pair of features `(1, 0)`: the scores with keys that are unit vectors are cosine and sine."""
    inc = torch.randint(-(2**63), 2**63 - 1, (8,))
    positions = torch.randint(0, 2**36, (40,))
    qkv = torch.zeros(40, 3, 16)
    qkv[:, 1, :8] = 1.0  # the key that goes into the cache
    keys, values = torch.zeros(40, 4, 1, 16), torch.zeros(40, 4, 1, 16)
    desk = decode_attention.Desk(40, 1, 1, 16, torch.device("cpu"))
    turning, reading = decode_attention.Turning(inc, 1.0, 16, False), decode_attention.Reading(16, 1, 1)
    given = torch.zeros(40).long(), positions, torch.empty(40, 16), desk
    decode_attention.attend(qkv.flatten(1), keys, values, *given, scale=1.0, turning=turning, reading=reading)
    truth = torch.cat(cos_sin_of(positions[:, None], inc, torch.float64), dim=-1)
    assert (keys[:, 0, 0].double() - truth).abs().max() < 2e-7


MODELS = {
    "llama": {},
    "no position": {"position": "none"},
    "adjacent, partial": {"position": phasor.RotaryConfig(pairing="adjacent", width=4)},
    "yarn": {"position": phasor.RotaryConfig(extension=phasor.YaRN(factor=4.0, original_length=64))},
    "multi-head": {"num_kv_heads": 4},
    "tied": {"embedding": phasor.EmbeddingConfig(scale="sqrt")},
    "biases": {
        "attention": phasor.AttentionConfig(bias=("q", "k", "v", "out")),
        "feedforward": {"activation": "gelu", "bias": True},
    },
    "norm of heads": {
        "attention": phasor.AttentionConfig(qk_norm="head"),
        "norm": phasor.RMSNormConfig(unit_offset=True),
    },
    "multiplier": {"placement": phasor.PreConfig(multiplier=0.3), "head": phasor.LanguageHeadConfig(multiplier=0.2)},
    "window": {"attention": VIEWS["window"]},
    "sinks": {"attention": VIEWS["sinks"]},
    "layers that differ": {
        "num_layers": 2,
        "layers": ({"attention": VIEWS["window"]}, {"position": phasor.NoPositionConfig()}),
    },
}


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(("rows", "most"), [(1, 16), (3, 16), (3, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_step(name, rows, most, monkeypatch):
    if rows > most and name not in ("llama", "biases", "norm of heads", "multiplier"):
        pytest.skip("many rows share all but the projections with few")
    monkeypatch.setattr(gemv, "MOST", most)
    few = {"embedding": phasor.EmbeddingConfig(tied=False), "num_layers": 1, **MODELS[name]}
    model, ids = build(tiny("rotary", **few)), tokens(rows, 10)
    real = torch.ones(rows, 6, dtype=torch.bool)
    if rows > 1:
        real[1, :4] = False
    with dispatch.force_path("triton"):
        assert fused_step.why_not(model) is None
    with torch.inference_mode():
        cache, plain = model.new_cache(rows, 24), model.new_cache(rows, 24)
        for each in (cache, plain):
            model(ids[:, :6], attention_mask=real, cache=each)
        state, fed, history, turn = (
            State.of(cache),
            ids[:, 6].clone(),
            torch.zeros(4, rows).long(),
            torch.zeros(1).long(),
        )
        fused = fused_step.FusedStep(model, state, fed, history, turn)
        for at in range(6, 10):
            fed.copy_(ids[:, at])
            expected = model(ids[:, at : at + 1], cache=plain)[:, 0]
            found = fused()
            assert relative_change(found, expected) < 3e-6
            assert fed.tolist() == found.argmax(-1).tolist() == history[(at - 6) % 4].tolist()
        assert state.counts.tolist() == [n + 4 for n in real.sum(-1).tolist()]


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (1, torch.float16), (2, torch.float16)]
)
def test_logits_in_half_precision_are_as_near_to_float64_as_those_of_plain_steps(rows, dtype):
    model = build(tiny("rotary", embedding=phasor.EmbeddingConfig(tied=False))).to(dtype)
    exact, ids = copy.deepcopy(model).double(), tokens(rows, 9)
    with torch.inference_mode():
        caches = [m.new_cache(rows, 16) for m in (model, model, exact)]
        for m, cache in zip((model, model, exact), caches, strict=True):
            m(ids[:, :6], cache=cache)
        state, fed = State.of(caches[0]), ids[:, 6].clone()
        fused = fused_step.FusedStep(model, state, fed, torch.zeros(4, rows).long(), torch.zeros(1).long())
        off = torch.zeros(2, dtype=torch.float64)
        for at in range(6, 9):
            fed.copy_(ids[:, at])
            column = ids[:, at : at + 1]
            plain, truth = (m(column, cache=c)[:, 0] for m, c in zip((model, exact), caches[1:], strict=True))
            off += torch.stack([(logits.double() - truth).square().sum() for logits in (fused(), plain)])
    assert off[0] < 1.5 * off[1]


CALLS = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 1},
    {"max_new_tokens": 12, "stop": (11, 30, 7)},
    {"max_new_tokens": 5, "temperature": 0.9, "top_p": 0.8, "seed": 4},
    {"max_new_tokens": 5, "repetition_penalty": 1.4},
]


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_generation_says_the_same(options, request):
    model = speaker(attention=VIEWS["sinks"], num_layers=1, num_kv_heads=1)
    plain = phasor.generate(model, PROMPTS, **options)
    with dispatch.force_path("triton"):
        assert steps.why_not(model) is None
    request.getfixturevalue("on_the_device")
    assert phasor.generate(model, PROMPTS, **options) == plain
    assert list(phasor.stream(model, PROMPTS[2], **options)) == plain[2]


@pytest.mark.usefixtures("large_tiles")
def test_endless_streams_side_by_side(request):
    model = speaker(attention=VIEWS["window"], num_layers=1, num_kv_heads=1)
    prompts = [[1, 2, 3], [4, 5]]
    expected = [phasor.generate(model, prompt, max_new_tokens=8) for prompt in prompts]
    request.getfixturevalue("on_the_device")
    both = [phasor.stream(model, prompt, max_new_tokens=None) for prompt in prompts]
    found = [[], []]
    for _ in range(8):
        for said, one in zip(found, both, strict=True):
            said.append(next(one))
    assert found == expected


@pytest.mark.usefixtures("large_tiles", "on_the_device")
def test_steps_are_kept_for_the_next_text_and_made_anew_for_other_weights():
    model = speaker(num_layers=1, num_kv_heads=1)
    first = phasor.generate(model, PROMPTS, max_new_tokens=3)
    _, kept = steps.KEPT[model]
    assert phasor.generate(model, PROMPTS, max_new_tokens=4)[0][:3] == first[0]
    assert steps.KEPT[model][1] is kept
    old = model.head.weight
    model.head.weight = torch.nn.Parameter(old.detach().flip(0).clone())
    assert phasor.generate(model, PROMPTS, max_new_tokens=3) != first
    assert steps.KEPT[model][1] is not kept
    alive = len(steps.KEPT)
    del model, kept
    gc.collect()
    assert len(steps.KEPT) < alive


REFUSED = {
    "the norm is not an RMS norm": {"norm": "layernorm"},
    "norms do not stand before every sub-layer and at the end": {"placement": "post"},
    "the embedding has a norm, token types or a width of its own": {"embedding": {"norm": True}},
    "the head does more than one projection": {"head": phasor.LanguageHeadConfig(softcap=30.0)},
    "positions are neither rotary nor absent": {"position": "alibi"},
    "positions are added to the embeddings": {
        "position": "sinusoidal",
        "layers": (phasor.LayerConfig(position="none"),),
    },
    "positions have several axes, decay, turn values or depend on the length": {"position": "xpos"},
    "attention has a softcap, sink logits, a clip or capped sinks": {"attention": {"softcap": 20.0}},
    "queries and keys are normed all heads together": {"attention": {"qk_norm": "whole"}},
    "only some of queries, keys and values have a bias": {"attention": {"bias": ("q", "v")}},
    "the feed-forward network has experts": {"feedforward": {"activation": "swiglu", "experts": {"num_experts": 4}}},
    "no kernel has the activation 'swiglu-clamped'": {"feedforward": {"activation": "swiglu-clamped"}},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_fused_step_is_not_for(reason):
    model = speaker(**REFUSED[reason])
    with dispatch.force_path("triton"):
        assert fused_step.why_not(model) == reason
        assert steps.why_not(model) is not None
    assert len(phasor.generate(model, [1, 2], max_new_tokens=3)) == 3


def test_what_keeps_steps_on_the_host():
    model = speaker()
    assert steps.why_not(model) == "the model is not on a GPU"
    with dispatch.force_path("reference"):
        assert steps.why_not(model) == fused_step.why_not(model) == "the reference path is forced"
    with dispatch.force_path("triton"):
        assert fused_step.why_not(model.double()).startswith("the weights are not float32")
        model.float().decoder.blocks[0].register_forward_hook(lambda *_: None)
        assert steps.why_not(model) == "a part of the model has hooks, which run on the host"
    assert "source" in steps.why_not(speaker("sinusoidal", shape="encoder-decoder"))
    assert "length" in steps.why_not(speaker("rotary-dynamic-ntk"))


class Script:
    """Steps that say a script, and note what was asked of them."""

    def __init__(self, said: list[list[int]]) -> None:
        self.said, self.launched, self.read_so_far = said, 1, 0

    def launch(self) -> None:
        self.launched += 1

    def read(self) -> list[int]:
        assert self.read_so_far < self.launched, "it would wait for a step that nobody began"
        self.read_so_far += 1
        return self.said[self.read_so_far - 1]


@pytest.mark.parametrize("most", [1, 2, steps.AHEAD, steps.AHEAD + 1, 40])
def test_no_more_steps_are_launched_than_tokens_wanted(most):
    script = Script([[i] for i in range(most)])
    assert list(steps.ahead(script, most)) == script.said
    assert script.launched == most


def test_steps_are_launched_before_the_first_is_read_and_never_many_too_many():
    script = Script([[i] for i in range(100)])
    tokens_as_they_come = steps.ahead(script, None)
    for read in range(1, 50):
        next(tokens_as_they_come)
        assert script.launched == read + steps.AHEAD


class Adapted(torch.nn.Linear):
    """A projection with an adapter that is not in its weight."""

    def forward(self, x):
        return super().forward(x) - 2 * super().forward(x.roll(1, -1))


class Other(phasor.Transformer):
    """A model that may decode in a way of its own."""


def adapt(model, where):
    block = model.decoder.blocks[0]
    part = {"qkv": block.attention, "out": block.attention, "up": block.feedforward, "down": block.feedforward}[where]
    old = getattr(part, where)
    new = Adapted(old.in_features, old.out_features, bias=old.bias is not None)
    new.weight, new.bias = old.weight, old.bias
    setattr(part, where, new)


@pytest.mark.parametrize("where", ["qkv", "out", "up", "down"])
def test_replaced_parts_are_not_passed_over(where):
    model = speaker(num_layers=1, num_kv_heads=1)
    plain = phasor.generate(model, [1, 2], max_new_tokens=4)
    adapt(model, where)
    with dispatch.force_path("triton"):
        assert fused_step.why_not(model) == "a part of the model was replaced"
        said = phasor.generate(model, [1, 2], max_new_tokens=4)
    assert said == phasor.generate(model, [1, 2], max_new_tokens=4)
    assert phasor.generate(model, [1, 2], max_new_tokens=4) != plain


def test_another_norm_forward_or_class_is_not_passed_over():
    model = speaker(num_layers=1)
    model.decoder.norm = torch.nn.RMSNorm(model.config.dim)
    with dispatch.force_path("triton"):
        assert fused_step.why_not(model) == "a part of the model was replaced"
    model = speaker(num_layers=1)
    model.__class__ = Other
    with dispatch.force_path("triton"):
        assert steps.why_not(model) == "the model has a class of its own"
    model = speaker(num_layers=1)
    model.decoder.blocks[0].forward = model.decoder.blocks[0].forward
    with dispatch.force_path("triton"):
        assert steps.why_not(model) == "the forward of a part was replaced, and may need the host"


@pytest.mark.usefixtures("large_tiles", "on_the_device")
def test_replaced_parts_make_steps_anew():
    model = speaker(num_layers=1, num_kv_heads=1)
    phasor.generate(model, [1, 2], max_new_tokens=3)
    kept = steps.KEPT[model][1]
    model.decoder.dropout = torch.nn.Dropout(0.5)
    phasor.generate(model, [1, 2], max_new_tokens=3)
    assert steps.KEPT[model][1] is not kept


@pytest.mark.usefixtures("large_tiles")
def test_steps_of_a_model_that_steps_on_the_host_go():
    model = speaker(num_layers=1, num_kv_heads=1)
    with dispatch.force_path("triton"):
        phasor.generate(model, [1, 2], max_new_tokens=2)
    assert model in steps.KEPT
    phasor.generate(model, [1, 2], max_new_tokens=2)
    assert model not in steps.KEPT


def test_constants_outlive_the_table_for_whoever_holds_them(monkeypatch):
    monkeypatch.setattr(constants, "MADE", {})
    monkeypatch.setattr(constants, "MOST", 2)
    where = torch.device("cpu"), torch.int64
    first = constants.constant((1, 2), *where)
    held = constants.constants()
    assert any(x is first for x in held)
    with FakeTensorMode():
        constants.constant((3, 4), *where)
    assert constants.constant((1, 2), *where) is first  # a stand-in clears nothing, and is not kept
    assert type(constants.constant((3, 4), *where)) is torch.Tensor
    constants.constant((5, 6), *where)
    assert len(constants.constants()) == 2

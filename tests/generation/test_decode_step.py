"""The fused decoding step against steps without it, and the models it is for."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from decode_kernels import bfloat16_in_the_interpreter, large_tiles, on_the_device  # noqa: F401
from decoding import speaker
from device import DEVICE, ON_GPU
from schemes import VIEWS, build, relative_change, tiny, tokens
from torch._subclasses.fake_tensor import FakeTensorMode

import phasor
from phasor.config import AttentionConfig
from phasor.generation.runners import RETAINED, STEP_RUNNERS, StepSpec, cuda_graph, fused
from phasor.generation.runners.cuda_graph import LOOKAHEAD, StepBuffers, run_async
from phasor.kv_cache.paged import PagedKVCache
from phasor.kv_cache.static import StaticKVCache
from phasor.kv_cache.static_paged import StaticPagedKVCache
from phasor.nn.attention.softmax.module import SoftmaxAttention
from phasor.nn.kinds import KindModule
from phasor.ops import constants, dispatch
from phasor.ops.decode import experts_one_row, gemv, split_k_gemm

PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 4, 6, 2]]


MODELS = {
    "llama": {},
    "no position": {"position": "none"},
    "adjacent, partial": {"position": phasor.RotaryConfig(pairing="adjacent", rotary_dim=4)},
    "yarn": {"position": phasor.RotaryConfig(extension=phasor.YaRN(factor=4.0, original_length=64))},
    "multi-head": {"num_kv_heads": 4},
    "tied": {"embedding": phasor.EmbeddingConfig(scale="sqrt")},
    "biases": {
        "attention": phasor.SoftmaxAttentionConfig(bias=("q", "k", "v", "out")),
        "feedforward": {"activation": "gelu", "bias": True},
    },
    "norm of heads": {
        "attention": phasor.SoftmaxAttentionConfig(qk_norm="head"),
        "norm": phasor.RMSNormConfig(unit_offset=True),
    },
    "multiplier": {"placement": phasor.PreConfig(multiplier=0.3), "head": phasor.LanguageHeadConfig(multiplier=0.2)},
    "window": {"attention": VIEWS["window"]},
    "sinks": {"attention": VIEWS["sinks"]},
    "sink logits": {"attention": phasor.SoftmaxAttentionConfig(sink_logits=True, window=4)},
    "experts": {"feedforward": {"activation": "swiglu", "experts": {"num_experts": 5}}},
    "experts as in gpt-oss": {
        "attention": phasor.SoftmaxAttentionConfig(sink_logits=True, bias=("q", "k", "v", "out")),
        "feedforward": {
            "activation": "swiglu-clamped",
            "bias": True,
            "experts": {"num_experts": 6, "top_k": 3, "router_bias": True},
        },
    },
    "experts, not normalized": {
        "placement": phasor.PreConfig(multiplier=0.3),
        "feedforward": {"activation": "gelu", "experts": {"num_experts": 4, "hidden_dim": 20, "normalize": False}},
    },
    "a shared expert": {"feedforward": {"activation": "swiglu", "experts": {"num_experts": 4, "shared_dim": 16}}},
    "alibi": {"position": "alibi", "num_layers": 2},
    "alibi and sinks": {"position": "alibi", "attention": VIEWS["sinks"]},
    "t5": {"position": "t5"},
    "sandwich": {"position": "sandwich"},
    "fire": {"position": "fire"},
    "two biases": {"position": phasor.CombinedConfig(schemes=("alibi", "kerple"))},
    "positions on the input": {"position": "sinusoidal"},
    # Heads with a state.
    "gated delta": {"attention": "gated-delta"},
    "gated delta, groups": {
        "attention": phasor.GatedDeltaAttentionConfig(
            num_heads=6, num_key_heads=2, key_dim=5, value_dim=7, conv_width=3
        )
    },
    "gated delta, biases": {"attention": phasor.GatedDeltaAttentionConfig(conv_bias=True, bias=True)},
    "gated delta without a convolution": {"attention": phasor.GatedDeltaAttentionConfig(conv_width=None)},
    "mamba2": {
        "attention": phasor.Mamba2AttentionConfig(num_key_heads=1),
        "placement": phasor.PreConfig(multiplier=0.3),
    },
    "mamba2, groups": {
        "attention": phasor.Mamba2AttentionConfig(num_heads=6, num_key_heads=2, key_dim=5, value_dim=7, bias=True)
    },
    "retention": {"attention": "retention", "position": "rotary"},
    "retention, adjacent pairs": {
        "attention": phasor.RetentionAttentionConfig(
            num_heads=6, num_key_heads=2, key_dim=6, value_dim=7, conv_width=2
        ),
        "position": phasor.RotaryConfig(pairing="adjacent", rotary_dim=4),
    },
    "states and keys": {
        "num_layers": 2,
        "layers": ({"attention": "gated-delta"}, {"position": "rotary"}),
    },
    # Attention, or a feed-forward network, as a module.
    "forget gates": {"position": "forget", "num_layers": 2},
    "self-extend": {"position": phasor.SelfExtendConfig(window=4, group=2)},
    "shaw": {"position": "shaw"},
    "xpos": {"position": "xpos"},
    "soft-cap": {"attention": {"softcap": 20.0}},
    "norm of all heads": {"attention": {"qk_norm": "whole"}},
    "some biases": {"attention": {"bias": ("q", "v")}},
    "latent": {"attention": "latent", "num_layers": 2},
    "latent, queries of a low rank": {  # as wide as the latent vector with its key
        "attention": phasor.LatentAttentionConfig(
            q_rank=16, rope_dim=4, kv_rank=12, bias=("q_down", "kv_down", "out"), norm_eps=1e-3
        )
    },
    "latent, chosen keys": {
        "attention": phasor.LatentAttentionConfig(
            q_rank=16, rope_dim=4, kv_rank=12, indexer={"num_heads": 2, "head_dim": 8, "top_k": 3}
        )
    },
    "activation": {"feedforward": {"activation": "swiglu-clamped"}},
    "sigmoid router": {"feedforward": {"activation": "swiglu", "experts": {"num_experts": 4, "scores": "sigmoid"}}},
    "layers of one sub-layer": {
        "num_layers": 4,
        "layers": (
            {"attention": "mamba2", "feedforward": {"hidden_dim": 0}},
            {"attention": "none", "feedforward": {"activation": "relu2"}},
            {"feedforward": {"hidden_dim": 0}},
            {"attention": "none", "feedforward": {"activation": "gelu", "experts": {"num_experts": 4}}},
        ),
    },
    "layers that differ": {
        "num_layers": 2,
        "layers": ({"attention": VIEWS["window"]}, {"position": phasor.NoPositionConfig()}),
    },
}


@pytest.mark.sample(4)
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(("rows", "most"), [(1, 16), (3, 16), (3, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_fused_step(name, rows, most, monkeypatch):
    if rows > most and name not in (
        "llama",
        "alibi",
        "a shared expert",
        "latent",
        "latent, queries of a low rank",
        "biases",
        "norm of heads",
        "multiplier",
        "experts as in gpt-oss",
        "gated delta",
        "mamba2",
        "retention",
    ):
        pytest.skip("many rows share all but the projections with few")
    monkeypatch.setattr(gemv, "MAX_GEMV_ROWS", most)
    check_logits(name, rows)


@pytest.mark.usefixtures("large_tiles")
def test_a_kind_of_attention_brings_its_part_of_the_step(monkeypatch):
    """A kind that is defined here, whose queries, keys and values no kernel projects."""

    class OwnConfig(phasor.SoftmaxAttentionConfig, kind="own"):
        """Attention that is known here alone."""

    class FusedOwn:
        takes_context = True

        def __init__(self, attention, step):
            self.attention, self.step = attention, step

        def __call__(self, x, norm, ctx, biases):
            y = self.attention(self.step.normalize(x, norm)[:, None], ctx)[:, 0]
            calls.append(len(y))
            x += y

    class Own(SoftmaxAttention, config=OwnConfig):
        def decode_kernel_why_not(self):
            return None

        def fused_attention(self, step, scheme, index):
            return FusedOwn(self, step)

    calls = []
    monkeypatch.setitem(MODELS, "own", {"attention": OwnConfig(softcap=20.0)})
    try:
        check_logits("own", 2)
    finally:
        del AttentionConfig.kinds["own"], KindModule.modules_by_config[OwnConfig]
    assert calls == [2] * 4


@pytest.mark.usefixtures("large_tiles")
def test_logits_with_a_router_too_large_for_every_program(monkeypatch):
    monkeypatch.setattr(experts_one_row, "MAX_ROUTER_BYTES", 0)
    check_logits("experts as in gpt-oss", 1)


def check_logits(name: str, rows: int) -> None:
    """Four fused steps of a model give the logits and tokens of plain steps."""
    few = {"embedding": phasor.EmbeddingConfig(tied=False), "num_layers": 1, **MODELS[name]}
    model, ids = build(tiny("rotary", **few)), tokens(rows, 10)
    real = torch.ones(rows, 6, dtype=torch.bool)
    if rows > 1:
        real[1, :4] = False
    with dispatch.force_path("triton"):
        assert fused.fused_step_why_not(model) is None
    with torch.inference_mode():
        cache, plain = model.new_cache(rows, 24), model.new_cache(rows, 24)
        for each in (cache, plain):
            model(ids[:, :6], attention_mask=real, cache=each)
        buffers = StepBuffers(StaticKVCache(cache))
        step = fused.FusedStep(model, buffers)
        for position in range(6, 10):
            buffers.tokens.copy_(ids[:, position])
            expected = model(ids[:, position : position + 1], cache=plain)[:, 0]
            logits = step()
            assert relative_change(logits, expected) < 3e-6
            assert buffers.tokens.tolist() == logits.argmax(-1).tolist() == buffers.history[position - 6].tolist()
        assert buffers.cache.counts.tolist() == [n + 4 for n in real.sum(-1).tolist()]


@pytest.mark.sample(2)
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("most", [16, 2])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_fused_step_over_pages(name, most, monkeypatch):
    """Steps of rows of a paged cache, of changing rows in changing order, and of one that only fills them up."""
    monkeypatch.setattr(gemv, "MAX_GEMV_ROWS", most)
    model = build(tiny("rotary", **{"embedding": phasor.EmbeddingConfig(tied=False), "num_layers": 1, **MODELS[name]}))
    ids, sizes = tokens(4, 20), [6, 1, 13, 3]
    with torch.inference_mode():
        expected = model(ids)
        cache = PagedKVCache(model.config, max_rows=4, pages=40, page_size=4, most_new=3, device=DEVICE)
        rows = [cache.new_row() for _ in sizes][::-1]
        for row, own, size in zip(rows, ids, sizes, strict=True):
            for start in range(0, size, 3):
                piece = own[None, start : min(start + 3, size)]
                cache.reserve(row, piece.shape[1])
                model(piece, cache=cache.call([row]))
        steps = StaticPagedKVCache(cache, 3, blocks=6)
        buffers = StepBuffers(steps)
        step = fused.FusedStep(model, buffers)
        for chosen in ([0, 1, 2], [2, 0], [3], [1, 3, 2], [2, 1, 3], [0, 2, 3], [2, 3, 0]):
            fed = [rows[i].count for i in chosen]
            for i in chosen:
                cache.reserve(rows[i], 1)
            steps.set_rows([rows[i] for i in chosen])
            buffers.tokens.zero_()
            buffers.tokens[: len(chosen)] = ids[chosen, fed]
            logits = step()[: len(chosen)]
            cache.commit([rows[i] for i in chosen], [1] * len(chosen))
            assert relative_change(logits, expected[chosen, fed]) < 1e-5
            assert buffers.tokens[: len(chosen)].tolist() == logits.argmax(-1).tolist()
    for tensors in cache.layers:
        assert not any(x[0].any() for x in tensors.values())  # the page of rows that have none


@pytest.mark.sample(2)
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (1, torch.float16), (2, torch.float16)]
)
def test_logits_in_half_precision_are_as_near_to_float64_as_those_of_plain_steps(rows, dtype):
    check_half_precision("llama", rows, dtype)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    "name", ["biases", "multiplier", "experts as in gpt-oss", "gated delta", "latent", "latent, queries of a low rank"]
)
def test_projections_of_several_rows_by_the_split_k_kernel(name, monkeypatch):
    monkeypatch.setattr(split_k_gemm, "BLOCK_K", 16)
    used, multiply = [], split_k_gemm.split_k_gemm
    monkeypatch.setattr(split_k_gemm, "split_k_gemm", lambda *args, **given: used.append(0) or multiply(*args, **given))
    check_half_precision(name, 3, torch.bfloat16)
    assert len(used) >= 2


def check_half_precision(name: str, rows: int, dtype: torch.dtype) -> None:
    """Three fused steps are about as far from float64 as plain ones."""
    few = {"embedding": phasor.EmbeddingConfig(tied=False), "num_layers": 1, **MODELS[name]}
    model = build(tiny("rotary", **few)).to(dtype)
    exact, ids = copy.deepcopy(model).double(), tokens(rows, 9)
    with torch.inference_mode():
        caches = [m.new_cache(rows, 16) for m in (model, model, exact)]
        for m, cache in zip((model, model, exact), caches, strict=True):
            m(ids[:, :6], cache=cache)
        buffers = StepBuffers(StaticKVCache(caches[0]))
        step = fused.FusedStep(model, buffers)
        off = torch.zeros(2, dtype=torch.float64)
        for position in range(6, 9):
            buffers.tokens.copy_(ids[:, position])
            column = ids[:, position : position + 1]
            plain, expected = (m(column, cache=c)[:, 0] for m, c in zip((model, exact), caches[1:], strict=True))
            off += torch.stack([(logits.double() - expected).square().sum() for logits in (step(), plain)])
    assert off[0] < 1.5 * off[1]


CALLS = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 1},
    {"max_new_tokens": 12, "stop": (11, 30, 7)},
    {"max_new_tokens": 5, "temperature": 0.9, "top_p": 0.8, "seed": 4},
    {"max_new_tokens": 5, "repetition_penalty": 1.4},
]


@pytest.mark.sample(3)
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_fused_generation_gives_the_same_tokens(options, request):
    model = speaker(attention=VIEWS["sinks"], num_layers=1, num_kv_heads=1)
    with dispatch.force_path("reference"):
        plain = phasor.generate(model, PROMPTS, **options)
    with dispatch.force_path("triton"):
        assert STEP_RUNNERS.explain(StepSpec(model)) == ("fused kernels in one CUDA graph", {})
    request.getfixturevalue("on_the_device")
    assert phasor.generate(model, PROMPTS, **options) == plain
    assert list(phasor.stream(model, PROMPTS[2], **options)) == plain[2]


@pytest.mark.usefixtures("large_tiles")
def test_two_endless_streams_at_once(request):
    model = speaker(attention=VIEWS["window"], num_layers=1, num_kv_heads=1)
    prompts = [[1, 2, 3], [4, 5]]
    with dispatch.force_path("reference"):
        expected = [phasor.generate(model, prompt, max_new_tokens=8) for prompt in prompts]
    request.getfixturevalue("on_the_device")
    both = [phasor.stream(model, prompt, max_new_tokens=None) for prompt in prompts]
    streams_read = [[], []]
    for _ in range(8):
        for generated, one in zip(streams_read, both, strict=True):
            generated.append(next(one))
    assert streams_read == expected


@pytest.mark.usefixtures("large_tiles", "on_the_device")
def test_runners_are_retained_for_the_next_request_and_rebuilt_for_other_weights():
    model = speaker(num_layers=1, num_kv_heads=1)
    first = phasor.generate(model, PROMPTS, max_new_tokens=3)
    retained = RETAINED[model].latest
    assert phasor.generate(model, PROMPTS, max_new_tokens=4)[0][:3] == first[0]
    assert RETAINED[model].latest is retained
    old = model.head.weight
    model.head.weight = torch.nn.Parameter(old.detach().flip(0).clone())
    assert phasor.generate(model, PROMPTS, max_new_tokens=3) != first
    assert RETAINED[model].latest is not retained
    num_alive = len(RETAINED)
    del model, retained
    gc.collect()
    assert len(RETAINED) < num_alive


REFUSED = {
    "the norm is not an RMS norm with a weight": {"norm": "layernorm"},
    "the placement is not a norm before every sub-layer and at the end": {"placement": "post"},
    "the embedding has a norm, token types or another width than the model": {"embedding": {"norm": True}},
    "the head does more than one projection": {"head": phasor.LanguageHeadConfig(softcap=30.0)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_without_a_fused_step(reason):
    model = speaker(**REFUSED[reason])
    with dispatch.force_path("triton"):
        assert fused.fused_step_why_not(model) == reason
        assert (cuda_graph.graph_step_why_not(model) is None) == ON_GPU  # a CUDA graph of the plain step needs no more
    assert len(phasor.generate(model, [1, 2], max_new_tokens=3)) == 3


def test_models_without_a_cuda_graph():
    model = speaker()
    assert cuda_graph.graph_step_why_not(speaker().cpu()) == "the model is not on a GPU"
    with dispatch.force_path("reference"):
        assert cuda_graph.graph_step_why_not(model) == fused.fused_step_why_not(model) == "the reference path is forced"
    with dispatch.force_path("triton"):
        assert fused.fused_step_why_not(model.double()).startswith("the weights are not float32")
        model.float().decoder.blocks[0].register_forward_hook(lambda *_: None)
        assert cuda_graph.graph_step_why_not(model) == "a part of the model has hooks, which run on the host"


class Script:
    """Steps that say a script, and note what was asked of them."""

    def __init__(self, generated: list[list[int]]) -> None:
        self.generated, self.launched, self.read_so_far = generated, 1, 0

    def launch(self) -> None:
        self.launched += 1

    def read(self) -> list[int]:
        assert self.read_so_far < self.launched, "it would wait for a step that nobody began"
        self.read_so_far += 1
        return self.generated[self.read_so_far - 1]


@pytest.mark.parametrize("most", [1, 2, LOOKAHEAD, LOOKAHEAD + 1, 40])
def test_as_many_steps_are_launched_as_tokens(most):
    script = Script([[i] for i in range(most)])
    assert list(run_async(script, most)) == script.generated
    assert script.launched == most


def test_steps_are_launched_lookahead_steps_before_they_are_read():
    script = Script([[i] for i in range(100)])
    tokens_as_they_come = run_async(script, None)
    for read in range(1, 50):
        next(tokens_as_they_come)
        assert script.launched == read + LOOKAHEAD


class LinearWithAdapter(torch.nn.Linear):
    """A projection with an adapter that is not in its weight."""

    def forward(self, x):
        return super().forward(x) - 2 * super().forward(x.roll(1, -1))


class OtherTransformer(phasor.Transformer):
    """A model that may decode in another way."""


def adapt(model, where):
    block = model.decoder.blocks[0]
    part = {"qkv": block.attention, "out": block.attention, "up": block.feedforward, "down": block.feedforward}[where]
    old = getattr(part, where)
    new = LinearWithAdapter(old.in_features, old.out_features, bias=old.bias is not None)
    new.weight, new.bias = old.weight, old.bias
    setattr(part, where, new)


@pytest.mark.parametrize("where", ["qkv", "out", "up", "down"])
def test_replaced_parts_are_not_bypassed(where):
    model = speaker(num_layers=1, num_kv_heads=1)
    plain = phasor.generate(model, [1, 2], max_new_tokens=4)
    adapt(model, where)
    with dispatch.force_path("triton"):
        assert fused.fused_step_why_not(model) == "a part of the model was replaced"
        generated = phasor.generate(model, [1, 2], max_new_tokens=4)
    assert generated == phasor.generate(model, [1, 2], max_new_tokens=4)
    assert phasor.generate(model, [1, 2], max_new_tokens=4) != plain


def test_another_norm_forward_or_class_is_not_bypassed():
    model = speaker(num_layers=1)
    model.decoder.norm = torch.nn.RMSNorm(model.config.dim)
    with dispatch.force_path("triton"):
        assert fused.fused_step_why_not(model) == "a part of the model was replaced"
    model = speaker(num_layers=1)
    model.__class__ = OtherTransformer
    with dispatch.force_path("triton"):
        assert cuda_graph.graph_step_why_not(model) == "the model is of a subclass"
    model = speaker(num_layers=1)
    model.decoder.blocks[0].forward = model.decoder.blocks[0].forward
    with dispatch.force_path("triton"):
        assert cuda_graph.graph_step_why_not(model) == "the forward of a part was replaced, and may need the host"


@pytest.mark.usefixtures("large_tiles", "on_the_device")
def test_replaced_parts_rebuild_the_runner():
    model = speaker(num_layers=1, num_kv_heads=1)
    phasor.generate(model, [1, 2], max_new_tokens=3)
    retained = RETAINED[model].latest
    model.decoder.dropout = torch.nn.Dropout(0.5)
    phasor.generate(model, [1, 2], max_new_tokens=3)
    assert RETAINED[model].latest is not retained


@pytest.mark.usefixtures("large_tiles")
def test_a_retained_runner_is_freed_once_it_is_not_used():
    model = speaker(num_layers=1, num_kv_heads=1)
    with dispatch.force_path("triton"):
        phasor.generate(model, [1, 2], max_new_tokens=2)
    assert model in RETAINED
    with dispatch.force_path("reference"):
        phasor.generate(model, [1, 2], max_new_tokens=2)
    assert model not in RETAINED


def test_constants_outlive_their_cache(monkeypatch):
    monkeypatch.setattr(constants, "CACHE", {})
    monkeypatch.setattr(constants, "MAX_CACHED", 2)
    where = DEVICE, torch.int64
    first = constants.constant((1, 2), *where)
    held = constants.cached_constants()
    assert any(x is first for x in held)
    with FakeTensorMode():
        constants.constant((3, 4), *where)
    assert constants.constant((1, 2), *where) is first  # a stand-in clears nothing, and is not kept
    assert type(constants.constant((3, 4), *where)) is torch.Tensor
    constants.constant((5, 6), *where)
    assert len(constants.cached_constants()) == 2

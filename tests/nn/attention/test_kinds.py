"""The contract of kinds of attention, for all of them and for one that is defined here, with wider values than keys."""

import copy
from math import prod

import pytest
import torch
import torch.nn.functional as F
from device import DEVICE
from schemes import build, tiny, tokens
from torch import nn

import phasor
from phasor.adapters import add_adapter, split_rows
from phasor.adapters.layers import adaptable_layers
from phasor.config import AttentionConfig
from phasor.config.cached import CachedTensor
from phasor.config.parameters import parameters_of
from phasor.config.weights import linear, with_prefixes
from phasor.generation.runners.fused import attention_why_not, layers_of, model_why_not
from phasor.inspect.kinds import describe_kinds
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.attention.base import Attention, attend, build_attention
from phasor.nn.kinds import KindModule
from phasor.nn.record import Record
from phasor.nn.sequence import sequence_info
from phasor.parallel import plan
from phasor.parallel.cuts import check_parts
from phasor.parallel.tensor import cut_weights

COUNT = 11
SAME = 1e-12  # float64, of the largest value: the same sums in another order


def wide_values() -> type[AttentionConfig]:
    """A kind whose values have another width than its keys."""

    class WideValuesConfig(AttentionConfig, kind="wide-values"):
        """Attention with values of any width."""

        value_dim: int = 12

        def cached_per_token(self, model):
            shapes = {"keys": (model.num_kv_heads, model.head_dim), "values": (model.num_kv_heads, self.value_dim)}
            return {name: CachedTensor(shape) for name, shape in shapes.items()}

        def output_width(self, model):
            return model.num_heads * self.value_dim

        def weights(self, model, *, cross=False):
            queries, keys, values = self.query_width(model), model.num_kv_heads * model.head_dim, model.num_kv_heads
            rows = {"q": queries, "k": keys, "v": values * self.value_dim}
            projections = {name: linear(count, model.dim, cut=0) for name, count in rows.items()}
            return with_prefixes(projections | {"out": linear(model.dim, self.output_width(model), cut=1, bias=True)})

    class WideValues(Attention, config=WideValuesConfig):
        def __init__(self, config, model, *, cross=False):
            super().__init__()
            self.scale, self.head_dim, self.value_dim = model.head_dim**-0.5, model.head_dim, config.value_dim
            self.q = nn.Linear(model.dim, model.num_heads * model.head_dim, bias=False)
            self.k = nn.Linear(model.dim, model.num_kv_heads * model.head_dim, bias=False)
            self.v = nn.Linear(model.dim, model.num_kv_heads * config.value_dim, bias=False)
            self.out = nn.Linear(model.num_heads * config.value_dim, model.dim)

        def forward(self, x, ctx):
            ctx = ctx.for_layer(x)
            q = ctx.position.on_query(self.q(x).unflatten(-1, (-1, self.head_dim)), ctx.prepared)  # [B, T, H, D]
            k = ctx.position.on_key(self.k(x).unflatten(-1, (-1, self.head_dim)), ctx.prepared)  # [B, T, K, D]
            v = self.v(x).unflatten(-1, (-1, self.value_dim))  # [B, T, K, E]
            k, v = ctx.step.update(keys=k, values=v)
            return self.out(attend(q, k, v, ctx, ctx.score_mod(scale=self.scale)).flatten(-2))

        def keep_part(self, index, count):
            """The shapes of the weights say how many heads there are."""

    return WideValuesConfig


OUTSIDE = "wide-values"
EXAMPLES = {name: example for cls in AttentionConfig.kinds.values() for name, example in cls.examples().items()}


@pytest.fixture(params=[*EXAMPLES, OUTSIDE])
def attention(request):
    """The examples of all kinds, and one of a kind that is registered for the test alone."""
    if request.param != OUTSIDE:
        yield EXAMPLES[request.param]
        return
    config = wide_values()
    yield config()
    del AttentionConfig.kinds[OUTSIDE], KindModule.modules_by_config[config]


def full(model, ids, **args):
    with torch.no_grad():
        return model(ids, **args)


def assert_same(found, expected):
    assert (found - expected).abs().max() < SAME * expected.abs().max()


def test_a_kind_is_known_by_its_name(attention):
    kind = attention.kind
    assert describe_kinds("attention")[kind]
    config = tiny("rotary", attention=attention.to_dict())
    assert config.attention == attention
    assert phasor.ModelConfig.from_json(config.to_json()) == config
    assert tiny("rotary", attention=kind).attention == type(attention)()


def test_weights_are_those_declared(attention):
    config = tiny("rotary", attention=attention)
    for cross in (False, True)[: 1 + attention.supports_cross]:
        module = build_attention(attention, config, cross=cross)
        declared = {name: weight.shape for name, weight in attention.weights(config, cross=cross).items()}
        assert declared == {name: tuple(weight.shape) for name, weight in module.named_parameters()}


@pytest.mark.sample(50)
@pytest.mark.parametrize("scheme", ["rotary", "alibi", "forget", "xpos"])
def test_caches_equal_the_full_forward(attention, scheme, tmp_path):
    """Dynamic and static, in chunks of several sizes, also after a file and with rows in another order."""
    chooses = getattr(attention, "indexer", None) is not None
    once = attention.kind == "latent" or getattr(attention, "qk_norm_after_positions", False)
    summed = attention.kind == "retention"  # keys are not kept
    if (once or summed) and scheme in {"xpos", *(("alibi", "forget") if chooses or summed else ())}:
        with pytest.raises(ValueError, match=f"(and not|such as) '{scheme}'"):
            tiny(scheme, attention=attention)
        return
    model, ids = build(tiny(scheme, attention=attention)).double(), tokens(3, COUNT)
    expected, cache = full(model, ids), model.new_cache(3, COUNT)
    pieces = [full(model, piece, cache=cache) for piece in ids[:, :8].split([5, 1, 2], dim=1)]
    cache.save(tmp_path / "cache")
    cache = phasor.KVCache.load(tmp_path / "cache", DEVICE)
    cache.reorder([2, 0, 1])
    ids, expected = ids[[2, 0, 1]], expected[[2, 0, 1]]
    pieces = [torch.cat(pieces, dim=1)[[2, 0, 1]], full(model, ids[:, 8:9], cache=cache)]
    static = StaticKVCache(cache)
    pieces += [full(model, ids[:, i : i + 1], cache=static) for i in range(9, COUNT)]
    assert_same(torch.cat(pieces, dim=1), expected)


def test_a_cache_has_the_bytes_declared(attention):
    model = build(tiny("none", attention=attention))
    cache = model.new_cache(2, 3)
    tokens, sequences = (
        sum(prod(tensor.shape) for tensor in declared.values())
        for declared in (attention.cached_per_token(model.config), attention.cached_per_sequence(model.config))
    )
    assert attention.cached_elements(model.config) == tokens
    assert cache.nbytes == 2 * 2 * (3 * tokens + sequences) * 4


def test_generation_takes_the_likeliest_tokens(attention):
    model, prompt = build(tiny("rotary", attention=attention)).double(), tokens(1, 5)
    ids = prompt
    for _ in range(6):
        ids = torch.cat([ids, full(model, ids)[:, -1:].argmax(-1)], dim=1)
    assert list(phasor.generate(model, prompt[0].tolist(), max_new_tokens=6)) == ids[0, 5:].tolist()


def test_weights_of_attention_are_recorded(attention):
    model, record = build(tiny("rotary", attention=attention)).double(), phasor.Record("attention")
    ids = tokens(2, COUNT)
    assert_same(full(model, ids, record=record), full(model, ids))
    recorded = [] if attention.keeps_state else [(2, 4, COUNT, COUNT)] * 2
    assert [weights.shape for weights in record.attention] == recorded


def test_plans_count_the_weights(attention):
    config = tiny("rotary", attention=attention)
    with torch.device("meta"):
        model = phasor.Transformer(config)
    assert parameters_of(config).total == sum(weight.numel() for weight in model.parameters())
    planned = plan(config, devices=4, mesh="tensor=2,context=2", context=64, batch_tokens=1024)
    assert planned.parameters == parameters_of(config).total
    assert (planned.exchange.context > 0) == (attention.gathered_elements(config) > 0)
    assert 0 < planned.mfu < 1


@pytest.mark.parametrize("adapted", [False, True], ids=["", "adapted"])
def test_parts_of_the_heads_add_up(attention, adapted):
    """What a mesh with tensor=2 computes; the bias of the output is added once, and adapters are cut as the layers."""
    whole = build(tiny("rotary", attention=attention)).double()
    if adapted:
        if not any(layer.target == "attention" for layer in adaptable_layers(whole)):
            pytest.skip("a kind without projections")
        add_adapter(whole, phasor.LoRAConfig(rank=2, targets=("attention",)))
        for name, weight in whole.named_parameters():
            if name.endswith(".B"):
                torch.nn.init.normal_(weight)
        check_parts(whole, split_rows(whole), 2)
    parts = [copy.deepcopy(whole) for _ in range(2)]
    for index, part in enumerate(parts):
        cut_weights(part, index, 2)
    x = torch.randn(2, COUNT, 32, dtype=torch.float64)

    def attended(model):
        seq = sequence_info(2, COUNT, x.device)
        ctx = model.decoder._self_attention_contexts(x, seq, None, None, [Record()] * 9)[0]
        with torch.no_grad():
            return model.decoder.blocks[0].attention(x, ctx)

    assert_same(sum(map(attended, parts)), attended(whole))


def test_a_folder_reads_back(attention, tmp_path):
    model, ids = build(tiny("rotary", attention=attention)), tokens(1, COUNT)
    phasor.save(model, tmp_path / "model")
    other = phasor.load(tmp_path / "model", device=DEVICE)
    assert other.config == model.config
    assert torch.equal(full(other, ids), full(model, ids))


def test_projections_are_quantized(attention):
    model, ids = build(tiny("rotary", attention=attention, dim=64)), tokens(1, COUNT)
    small = phasor.quantize(model)
    assert any(weight.dtype == torch.int8 for weight in small.decoder.blocks[0].attention.buffers())
    expected = full(model, ids)
    assert (full(small, ids) - expected).norm() < 0.1 * expected.norm()


def test_layers_may_differ_in_kind(attention):
    config = tiny("rotary", layers=[{"attention": attention}, {"attention": {"window": 4}}])
    assert [config.layer(i).attention for i in range(2)] == [attention, phasor.SoftmaxAttentionConfig(window=4)]
    model, ids = build(config).double(), tokens(2, COUNT)
    cache = model.new_cache(2, COUNT)
    pieces = [full(model, piece, cache=cache) for piece in ids.split(3, dim=1)]
    assert_same(torch.cat(pieces, dim=1), full(model, ids))
    assert phasor.backends(config, device="cuda").ops
    assert parameters_of(config).total == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("attention", [OUTSIDE], indirect=True)
def test_values_may_be_wider_than_keys(attention):
    """Against torch's attention in float64, one head at a time."""
    config = tiny("none", attention=attention)
    model, x = build(config).double(), torch.randn(1, COUNT, 32, dtype=torch.float64)
    module = model.decoder.blocks[0].attention
    ctx = model.decoder._self_attention_contexts(x, sequence_info(1, COUNT, x.device), None, None, [Record()] * 9)[0]
    heads = []
    for head in range(config.num_heads):
        own = head // (config.num_heads // config.num_kv_heads)
        rows = (module.q, head, 8), (module.k, own, 8), (module.v, own, 12)
        q, k, v = (x @ layer.weight[index * width : (index + 1) * width].T for layer, index, width in rows)
        heads.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    expected = module.out(torch.cat(heads, dim=-1))
    assert_same(module(x, ctx).detach(), expected.detach())


@pytest.mark.parametrize("attention", [OUTSIDE], indirect=True)
def test_what_a_kind_does_not_have_is_refused(attention):
    with pytest.raises(ValueError, match="wide-values attention has no cross-attention"):
        tiny("rotary", attention=attention, shape="encoder-decoder")
    with pytest.raises(ValueError, match="wide-values attention takes no window"):
        attention.with_window(4, 0, False)
    with pytest.raises(ValueError, match="unknown field of WideValuesConfig 'window'"):
        tiny("rotary", attention={"kind": "wide-values", "window": 4})
    model = build(tiny("rotary", attention=attention))
    assert model_why_not(model) is None
    reasons = [attention_why_not(*each) for each in layers_of(model.decoder)]
    assert all("no decode kernel has WideValues" in reason for reason in reasons)


def test_a_mapping_without_a_kind_is_softmax_attention():
    config = tiny("rotary", attention={"window": 4})
    assert config.attention == phasor.SoftmaxAttentionConfig(window=4)
    plain = config.to_dict()
    del plain["attention"]["kind"]  # as configuration files had it before there were kinds
    assert phasor.ModelConfig.from_dict(plain) == config

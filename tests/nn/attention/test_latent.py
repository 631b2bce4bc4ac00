"""Latent attention against a plain computation in float64: all keys and values expanded, and a dense mask."""

import random

import pytest
import torch
import torch.nn.functional as F
from device import DEVICE, ON_GPU
from schemes import build, tiny, tokens

import phasor
from phasor.config.parameters import parameters_of
from phasor.nn.attention import base
from phasor.nn.attention.latent import indexer
from phasor.nn.attention.latent import module as latent
from phasor.nn.attention.latent.config import IndexerConfig, LatentAttentionConfig

COUNT = 23
SAME = 1e-11  # float64, of the largest value: the same sums in another order
SEEDS = range(3)


def random_attention(rng: random.Random, indexed: bool) -> LatentAttentionConfig:
    rope = rng.choice([2, 4, 6])
    indexer = IndexerConfig(num_heads=rng.choice([5, 9]), head_dim=rope + rng.choice([0, 3]), top_k=rng.choice([1, 4]))
    return LatentAttentionConfig(
        q_rank=rng.choice([None, 6, 17]) if not indexed else 7,
        kv_rank=rng.choice([None, 3, 14, 40]),
        rope_dim=rope,
        value_dim=rng.choice([None, 1, 5, 12]),
        bias=rng.choice([(), ("out",), ("kv_down", "out")]),
        scale=rng.choice([None, 0.7]),
        norm_eps=rng.choice([None, 1e-2]),
        indexer=indexer if indexed else None,
    )


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, positions, rope):
    """Halves of the first features `[B, T, H, rope]`, rotated by the angles of the paper."""
    angle = positions[:, :, None].double() * 10000.0 ** (-torch.arange(0, rope, 2, device=x.device).double() / rope)
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    a, b, rest = x[..., : rope // 2], x[..., rope // 2 : rope], x[..., rope:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def latent_attention_ref(module, x, positions, visible, bias=0.0):
    """Outputs and weights `[B, H, T, S]`, for positions `[B, T]`, what queries see `[B, T, S]`, and a bias."""
    config, heads, width = module.config, module.num_heads, module.head_dim
    rope, value = config.rope_dim, module.out.in_features // heads
    weight = {name: part.double() for name, part in module.state_dict(keep_vars=True).items()}
    eps = config.norm_eps or 1e-6
    if config.q_rank is None:
        source, q = x, x @ weight["q.weight"].T
    else:
        source = rms(F.linear(x, weight["q_down.weight"], weight.get("q_down.bias")), weight["q_norm.weight"], eps)
        q = source @ weight["q_up.weight"].T
    q = rotate(q.unflatten(-1, (heads, width)), positions, rope)
    down = F.linear(x, weight["kv_down.weight"], weight.get("kv_down.bias"))
    up = rms(down[..., rope:], weight["kv_norm.weight"], eps) @ weight["kv_up.weight"].T
    up = up.unflatten(-1, (heads, width - rope + value))
    shared = rotate(down[:, :, None, :rope], positions, rope).expand(-1, -1, heads, -1)
    k, v = torch.cat([shared, up[..., : width - rope]], dim=-1), up[..., width - rope :]
    if config.indexer is not None:
        count, size = config.indexer.num_heads, config.indexer.head_dim
        index_q = rotate((source @ weight["indexer.q.weight"].T).unflatten(-1, (count, size)), positions, rope)
        norm = weight["indexer.k_norm.weight"], weight["indexer.k_norm.bias"]
        index_k = F.layer_norm(x @ weight["indexer.k.weight"].T, (size,), *norm, eps=1e-6)
        index_k = rotate(index_k[:, :, None], positions, rope)[:, :, 0]
        scores = torch.einsum("bthd,bsd->bhts", index_q, index_k).relu()
        scores = torch.einsum("bhts,bth->bts", scores, x @ weight["indexer.head_weights.weight"].T)
        scores = scores.masked_fill(~visible, float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : config.indexer.top_k]
        visible = visible & torch.zeros_like(visible).scatter(-1, best, True)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (config.scale or width**-0.5) + bias
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1).nan_to_num()
    y = torch.einsum("bhts,bshv->bthv", weights, v).flatten(2)
    return F.linear(y, weight["out.weight"], weight.get("out.bias")), weights


def arguments(rng: random.Random, kind: str, batch: int):
    """Arguments of a forward, and what they mean: positions, and what queries see."""
    causal = torch.ones(COUNT, COUNT, dtype=torch.bool, device=DEVICE).tril().expand(batch, -1, -1)
    count = torch.arange(COUNT, device=DEVICE).expand(batch, -1)
    if kind == "padding":
        empty = torch.tensor([[rng.randrange(9)] for _ in range(batch)], device=DEVICE)
        real = count >= empty
        return {"attention_mask": real}, (count - empty).clamp(min=0), causal & real[:, None] & real[:, :, None]
    if kind == "documents":
        ids = torch.tensor([sorted(rng.randrange(4) for _ in range(COUNT)) for _ in range(batch)], device=DEVICE)
        same = ids[:, :, None] == ids[:, None]
        return {"document_ids": ids}, (causal & same).sum(-1) - 1, causal & same
    if kind == "prefix":
        length = torch.tensor([rng.randrange(9) for _ in range(batch)], device=DEVICE)
        return {"prefix_length": length.tolist()}, count, causal | (count < length[:, None])[:, None]
    if kind == "positions":
        given = torch.tensor([sorted(rng.sample(range(500), COUNT)) for _ in range(batch)], device=DEVICE)
        return {"positions": given}, given, causal
    return {}, count, causal


def attended(model, ids, **args):
    """The input and the output of the first layer's attention."""
    seen = []
    hook = model.decoder.blocks[0].attention.register_forward_hook(
        lambda module, inputs, output: seen.append((inputs[0], output))
    )
    model(ids, **args)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("kind", ["plain", "padding", "documents", "prefix", "positions"])
@pytest.mark.parametrize("indexed", [False, True], ids=["dense", "indexer"])
@pytest.mark.parametrize("seed", SEEDS)
def test_latent_attention_equals_a_plain_computation(seed, indexed, kind):
    rng = random.Random(f"{seed} {kind}")
    config = tiny("rotary", attention=random_attention(rng, indexed), norm={"kind": "rmsnorm", "eps": 1e-6})
    model, batch = build(config, seed).double().to(DEVICE), rng.choice([1, 3])
    args, positions, visible = arguments(rng, kind, batch)
    module = model.decoder.blocks[0].attention
    with torch.no_grad():
        x, found = attended(model, tokens(batch, COUNT, seed=seed).to(DEVICE), **args)
        expected, weights = latent_attention_ref(module, x, positions, visible)
        record = phasor.Record("attention")
        model(tokens(batch, COUNT, seed=seed).to(DEVICE), record=record, **args)
    real = visible.any(-1)
    assert (found - expected)[real].abs().max() < SAME * expected.abs().max()
    recorded = record.attention[0].transpose(1, 2)[real]
    assert (recorded - weights.transpose(1, 2)[real]).abs().max() < SAME
    assert (recorded.sum(-1) - 1).abs().max() < SAME


@pytest.mark.parametrize("narrow", [False, True])
def test_values_have_zeros_only_where_a_kernel_needs_them(narrow, monkeypatch):
    widths = []

    def attend(q, k, v, *args):
        widths.append((k.shape[-1], v.shape[-1]))
        return base.attend(q, k, v, *args)

    monkeypatch.setattr(latent, "takes_narrow_values", lambda *args: narrow)
    monkeypatch.setattr(latent, "attend", attend)
    attention = LatentAttentionConfig(rope_dim=4, value_dim=6, kv_rank=64)
    model = build(tiny("rotary", attention=attention, head_dim=12), 0).double().to(DEVICE)
    with torch.no_grad():
        x, found = attended(model, tokens(2, COUNT).to(DEVICE))
        args = arguments(random.Random(0), "plain", 2)[1:]
        expected, _ = latent_attention_ref(model.decoder.blocks[0].attention, x, *args)
    assert (found - expected).abs().max() < SAME * expected.abs().max()
    assert set(widths) == {(12, 6 if narrow else 12)}


@pytest.mark.parametrize("indexed", [False, True], ids=["dense", "indexer"])
@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_equal_those_of_a_plain_computation(seed, indexed):
    rng = random.Random(seed)
    config = tiny("rotary", attention=random_attention(rng, indexed), norm={"kind": "rmsnorm", "eps": 1e-6})
    model = build(config, seed).double().to(DEVICE)
    module = model.decoder.blocks[0].attention
    args, positions, visible = arguments(rng, "documents", 2)
    x, found = attended(model, tokens(2, COUNT).to(DEVICE), **args)
    weights = [x, *(weight for weight in module.parameters() if weight.requires_grad)]
    chosen = torch.randn_like(found)
    expected, _ = latent_attention_ref(module, x, positions, visible)
    grads = [torch.autograd.grad((y * chosen).sum(), weights, retain_graph=True) for y in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).abs().max() <= SAME * theirs.abs().max()
    if indexed:
        assert not any(weight.requires_grad for weight in module.indexer.parameters())


@pytest.mark.parametrize("seed", SEEDS)
def test_rotary_and_alibi_together_equal_a_plain_computation(seed):
    rng = random.Random(seed)
    config = tiny("combined", attention=random_attention(rng, False), norm={"kind": "rmsnorm", "eps": 1e-6})
    model, ids = build(config, seed).double().to(DEVICE), tokens(2, COUNT, seed=seed).to(DEVICE)
    args, positions, visible = arguments(rng, "plain", 2)
    slopes = 2.0 ** -torch.arange(2, 9, 2, device=DEVICE).double()  # of four heads, from the paper
    bias = -slopes[:, None, None] * (positions[:, None, :, None] - positions[:, None, None]).abs()
    with torch.no_grad():
        x, found = attended(model, ids, **args)
        expected, _ = latent_attention_ref(model.decoder.blocks[0].attention, x, positions, visible, bias)
    assert (found - expected).abs().max() < SAME * expected.abs().max()


INDEXED = {"kind": "latent", "q_rank": 5, "indexer": {"num_heads": 9, "head_dim": 6, "top_k": 4}}
REFUSED = {
    "rotated values": ("rotary-values", {"kind": "latent"}, {}, "alone .* not 'rotary' on queries, keys, values"),
    "learned temperature": ("temperature", INDEXED, {}, "none with weights of heads, such as 'temperature'"),
    "an encoder": ("rotary", INDEXED, {"shape": "encoder"}, "indexer is for decoders, and this is an encoder"),
    "narrow indexer": (
        "rotary",
        INDEXED | {"indexer": {"head_dim": 1}},
        {},
        "at least the 2 rotated features .* not 1",
    ),
    "no norm": ("rotary", {"kind": "latent", "norm_eps": 0.1}, {"norm": "none"}, "norms with an eps, and not 'none'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_latent_attention_does_not_take_gets_a_sentence(case):
    scheme, attention, changes, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        tiny(scheme, attention=attention, **changes)


def test_a_temperature_for_all_heads_leaves_the_indexer_its_choice():
    """At the first position the factor is 0; there is nothing to choose."""
    position = {"kind": "combined", "schemes": ["rotary", {"kind": "temperature", "scale": 1.0}]}
    models = [build(tiny("rotary", attention=INDEXED, num_layers=1, position=each)) for each in ("rotary", position)]
    chosen = []
    for model in models:
        record = phasor.Record("attention")
        model.double()(tokens(2, COUNT), record=record)
        chosen.append(record.attention[0][:, :, 1:] > 0)
    assert torch.equal(*chosen)


@pytest.mark.sample(1)
@pytest.mark.parametrize("indexer", [None, {"num_heads": 5, "head_dim": 8, "top_k": 7}])
def test_compiled_blocks_equal_eager_ones(indexer):
    torch.manual_seed(0)
    attention = {"kind": "latent", "q_rank": 12, "indexer": indexer}
    sizes = {"vocab_size": 50, "dim": 32, "num_layers": 2, "num_heads": 4, "norm": "rmsnorm", "position": "rotary"}
    model = phasor.Transformer(phasor.ModelConfig(**sizes, attention=attention)).to(DEVICE).eval()
    ids, found = torch.randint(0, 50, (2, 20), device=DEVICE), []
    for compiled in (False, True):
        if compiled:
            model.compile(backend="inductor" if ON_GPU else "aot_eager")  # of which the latter takes no C++
        model.zero_grad()
        logits = model(ids)
        logits.square().mean().backward()
        found.append([logits.detach(), *(w.grad.clone() for w in model.parameters() if w.grad is not None)])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-4)


SHARED = [False, True, True, True, False, True]  # which layers attend to what an earlier one chose


def sharing(**fields):
    own = {"kind": "latent", "q_rank": 6, "rope_dim": 4, "indexer": {"num_heads": 9, "head_dim": 6, "top_k": 4}}
    layers = [{"attention": own | {"shared_index": shared}} for shared in SHARED]
    return build(tiny("rotary", num_layers=len(SHARED), layers=layers, **fields)).double()


def test_layers_attend_to_the_tokens_that_an_earlier_one_chose():
    model, ids, record = sharing(), tokens(2, 15), phasor.Record("attention")
    with torch.no_grad():
        model(ids, record=record)
    seen = [weights[:, 0] > 0 for weights in record.attention]  # [B, T, S]
    assert all(bool((mask[:, 4:].sum(-1) == 4).all()) for mask in seen)
    for index, source in enumerate([0, 0, 0, 0, 4, 4]):
        assert model.config.shared_source(index) == source
        assert torch.equal(seen[index], seen[source])
    assert not torch.equal(seen[0], seen[4])


@pytest.mark.parametrize("block", [1 << 24, 1])
def test_what_layers_share_is_chosen_once_in_a_forward_and_its_backward(block, monkeypatch):
    chosen, choose = [], indexer.Index.choose_block
    monkeypatch.setattr(indexer, "BLOCK_ELEMENTS", block)
    monkeypatch.setattr(indexer.Index, "choose_block", lambda *args: chosen.append(choose(*args)) or chosen[-1])
    model, ids = sharing().train(), tokens(2, 15)
    model(ids).square().mean().backward()
    assert len(chosen) == SHARED.count(False) * (1 if block > 1 else 15)
    if block == 1:
        assert all(each.shape == (2, 1, 4) for each in chosen)


def test_layers_that_share_an_index_have_no_indexer_and_keep_no_keys_of_one(tmp_path):
    model, ids = sharing(), tokens(2, 15)
    with torch.no_grad():
        expected, cache = model(ids), model.new_cache(2, 15)
        pieces = [model(piece, cache=cache) for piece in ids.split([6, 1, 1, 7], dim=1)]
    assert (torch.cat(pieces, dim=1) - expected).abs().max() < 1e-12
    kept = [set(model.config.cached_per_token(i)) for i in range(len(SHARED))]
    assert kept == [{"latents"} | (set() if shared else {"index_keys"}) for shared in SHARED]
    assert parameters_of(model.config).total == sum(weight.numel() for weight in model.parameters())
    assert [block.attention.indexer is None for block in model.decoder.blocks] == SHARED
    with pytest.raises(ValueError, match="shared_index needs indexer"):
        phasor.LatentAttentionConfig(shared_index=True)

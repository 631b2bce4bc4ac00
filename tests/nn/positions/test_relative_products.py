"""Schemes that multiply queries and keys with vectors of the distance, against transformers and the papers' formulas.

All in float64: rounding is near 1e-15, and a wrong row, sign or scale shows at any size. XLNet's frequencies are
float32, so that its sinusoids of distances up to 22 are off by at most 22 * 2^-24 = 1.3e-6. DeBERTa's scale is float32,
so that scores, here below 10, are off by at most 10 * 2^-24 = 6e-7.
"""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from device import DEVICE
from one_layer import COUNT, DIM, HEAD_DIM, HEADS, OneLayer
from schemes import SCHEMES, build, relative_change, tiny, tokens
from torch import Tensor, nn
from transformers import DebertaV2Config, Wav2Vec2BertConfig, XLNetConfig
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, make_log_bucket_position
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

import phasor
from phasor import CombinedConfig, DisentangledConfig, Record, ShawConfig, TransformerXLConfig
from phasor.nn.positions.disentangled.module import row_bounds
from phasor.ops.attention import DistanceRows, Mask, ProductBias, RelativeValues, ScoreMod, attention, attention_ref

EXACT, FLOAT32_FREQUENCIES, FLOAT32_SCALE = 1e-12, 1e-5, 1e-6
NAMES = [name for name, scheme in SCHEMES.items() if scheme.reads_heads]


BIASED = {"attention": {"bias": ("q", "k", "v")}}


def fill(linear: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


@torch.no_grad()
def test_relative_key_is_that_of_transformers():
    ours = OneLayer(ShawConfig(max_distance=5, values=False), **BIASED)
    sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "attention_dropout": 0.0}
    reach = {"left_max_position_embeddings": 5, "right_max_position_embeddings": 5}
    config = Wav2Vec2BertConfig(position_embeddings_type="relative_key", **sizes, **reach)
    config._attn_implementation = "eager"
    theirs = Wav2Vec2BertSelfAttention(config).double().eval()
    for name, pair in ours.projections().items():
        fill(getattr(theirs, f"linear_{name}"), *pair)
    theirs.linear_out = nn.Identity()
    theirs.distance_embedding.weight.copy_(ours.scheme.vectors[0].flip(0))  # their rows count key minus query
    assert relative_change(ours(), theirs(ours.x)[0]) < EXACT


def shaw_formula(layer: OneLayer, position: ShawConfig) -> Tensor:
    """Equations (3) and (4) of the paper, one query and one key after the other; and BERT's product with the key."""
    q, k, v = layer.heads()
    heads = 1 if position.share_heads else layer.attention.num_kv_heads
    tables = [table.view(-1, heads, HEAD_DIM) for table in layer.scheme.parameters()]
    y = torch.zeros_like(q)
    for b in range(len(q)):
        for h in range(HEADS):
            own = [table[:, h * heads // HEADS] for table in tables]
            for i in range(COUNT):
                row = [max(-position.max_distance, min(i - j, position.max_distance)) for j in range(COUNT)]
                a = own[0][[r + position.max_distance for r in row]]
                scores = (k[b, :, h] + a) @ q[b, i, h]
                if position.key_products:
                    scores = scores + (k[b, :, h] * a).sum(-1)
                weights = (scores / math.sqrt(HEAD_DIM)).softmax(0)
                values = v[b, :, h]
                if position.values:
                    values = values + own[1][[r + position.max_distance for r in row]]
                y[b, i, h] = weights @ values
    return y.flatten(2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", [name for name in SCHEMES if name.startswith("shaw")])
def test_shaw_is_the_formula_of_the_paper(name, kv_heads):
    layer = OneLayer(SCHEMES[name], num_kv_heads=kv_heads)
    assert relative_change(layer(), shaw_formula(layer, SCHEMES[name])) < EXACT


@pytest.mark.parametrize(("buckets", "most"), [(256, 512), (8, 12), (4, 5), (32, 128), (64, 65), (16, 1000), (10, 7)])
def test_the_rows_of_distances_are_those_of_deberta(buckets, most):
    distance = torch.arange(-2 * most, 2 * most + 1)
    theirs = (make_log_bucket_position(distance, buckets, most) + buckets).clamp(0, 2 * buckets - 1)
    assert torch.equal(torch.bucketize(distance, torch.tensor(row_bounds(buckets, most)), right=True), theirs)


DEBERTA = {
    "v3": {"share_att_key": True},
    "own projections": {},
    "c2p": {"pos_att_type": ("c2p",)},
    "p2c, shared": {"pos_att_type": ("p2c",), "share_att_key": True},
    "no buckets": {"position_buckets": None, "max_relative_positions": 9, "norm_rel_ebd": False},
}


@torch.no_grad()
@pytest.mark.parametrize("name", DEBERTA)
def test_disentangled_attention_is_that_of_deberta(name):
    position = DisentangledConfig(**{"position_buckets": 8, "max_relative_positions": 14, **DEBERTA[name]})
    ours = OneLayer(position, **BIASED)
    config = DebertaV2Config(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        relative_attention=True,
        position_buckets=position.position_buckets or -1,
        max_relative_positions=position.max_relative_positions,
        pos_att_type=list(position.pos_att_type),
        share_att_key=position.share_att_key,
    )
    theirs = DisentangledSelfAttention(config).double().eval()
    names = {"q": "query_proj", "k": "key_proj", "v": "value_proj", "c2p": "pos_key_proj", "p2c": "pos_query_proj"}
    pairs = ours.projections()
    if not position.share_att_key:
        pairs |= zip(position.pos_att_type, zip(ours.scheme.weight, ours.scheme.bias, strict=True), strict=True)
    for part, pair in pairs.items():
        fill(getattr(theirs, names[part]), *pair)
    vectors, norm = ours.scheme.table, ours.scheme.norm
    if norm is not None:
        vectors = nn.functional.layer_norm(vectors, (DIM,), norm.weight, norm.bias, eps=1e-7)
    everything = torch.ones(1, 1, COUNT, COUNT)
    assert relative_change(ours(), theirs(ours.x, everything, rel_embeddings=vectors)[0]) < FLOAT32_SCALE


@torch.no_grad()
def test_transformer_xl_is_the_relative_attention_of_xlnet():
    ours = OneLayer(TransformerXLConfig())
    config = XLNetConfig(vocab_size=9, d_model=DIM, n_layer=1, n_head=HEADS, d_inner=DIM)
    theirs = XLNetRelativeAttention(config).double().eval().to(DEVICE)
    projection, content, position = ours.scheme.layer_weights(0)
    theirs.r_w_bias.copy_(content.view(HEADS, HEAD_DIM))
    theirs.r_r_bias.copy_(position.view(HEADS, HEAD_DIM))
    sinusoids = XLNetModel(config).relative_positional_encoding(COUNT, COUNT).double()  # [2 T, 1, dim]
    r = (sinusoids @ projection.T).unflatten(-1, (HEADS, HEAD_DIM)).expand(-1, 2, -1, -1)
    q, k, v = (x.transpose(0, 1) for x in ours.heads())
    expected = theirs.rel_attn_core(q, k, v, r).transpose(0, 1).flatten(2)
    assert relative_change(ours(), expected) < FLOAT32_FREQUENCIES


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_transformer_xl_is_the_formula_of_the_paper(kv_heads):
    layer = OneLayer(TransformerXLConfig(base=50.0, share_biases=True), num_kv_heads=kv_heads)
    projection, u, v = (x.unflatten(0, (HEADS, HEAD_DIM)) for x in layer.scheme.layer_weights(0))
    q, k, values = layer.heads()
    distance = torch.arange(COUNT, dtype=torch.float64)[:, None] - torch.arange(COUNT, dtype=torch.float64)
    angles = distance[..., None] * 50.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    r = torch.cat((angles.sin(), angles.cos()), dim=-1)  # [T, T, dim]
    scores = torch.einsum("bihd,bjhd->bhij", q + u, k) + torch.einsum("bihd,hdf,ijf->bhij", q + v, projection, r)
    expected = torch.einsum("bhij,bjhd->bihd", (scores / math.sqrt(HEAD_DIM)).softmax(-1), values)
    assert relative_change(layer(), expected.flatten(2)) < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_queries_give_the_values_and_gradients_of_the_reference(name):
    model, ids = build(tiny(name)).double(), tokens(2, 19)
    positions = torch.tensor([[0, 1, 2, 3, 7, 8, 9, 11, 12, 13, 40, 41, 42, 43, 44, 45, 46, 90, 91], [*range(19)]])

    def gradients(**given: object) -> list[Tensor]:
        y = model(ids, positions=positions, **given)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        return [y, *torch.autograd.grad(y.square().mean(), weights)]

    expected = gradients(record=Record("attention"))  # weights are recorded by the reference alone
    with mock.patch("phasor.ops.attention.blocks.BLOCK", 4):
        found = gradients()
    largest = max(float(b.abs().max()) for b in expected[1:])  # that of a bias on all keys is 0, but for rounding
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < EXACT * largest


@pytest.mark.parametrize("table_heads", [1, 2, 4])
def test_a_single_query_takes_the_products_of_its_keys_alone(table_heads):
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, n, heads, 6, generator=generator).double() for n, heads in ((3, 4), (9, 2)))
    rows = DistanceRows(torch.tensor([[8, 9, 10]]), torch.arange(9)[None], reach=4)
    table = torch.randn(9, table_heads, 6, generator=generator).double()
    bias, keys = ProductBias(q, k, rows, 0.5, key_table=table), torch.arange(9)
    singly = [bias.block(torch.tensor([i]), keys, torch.float64) for i in range(3)]
    together = bias.block(torch.arange(3), keys, torch.float64)
    assert relative_change(torch.cat(singly, dim=2), together) < EXACT


def test_products_of_half_precision_are_not_rounded_to_it():
    generator = torch.Generator().manual_seed(6)
    q, k, table = (torch.randn(*shape, 64, generator=generator).bfloat16() for shape in ((1, 9, 2), (1, 9, 2), (5, 2)))
    rows, index = DistanceRows(torch.arange(9)[None], torch.arange(9)[None], reach=2), torch.arange(9)
    exact = ProductBias(q.double(), k.double(), rows, 0.125, table.double(), table.double())
    found = ProductBias(q, k, rows, 0.125, table, table).block(index, index)
    assert relative_change(found.double(), exact.block(index, index, torch.float64)) < 1e-6  # float32


def test_relative_values_are_averaged_with_the_weights_that_dropout_leaves():
    q = torch.randn(1, 5, 1, 4)
    at = torch.arange(5)[None]
    values = RelativeValues(DistanceRows(at, at, reach=4), torch.ones(9, 1, 4))
    score_mod = ScoreMod(scale=0.5, relative_values=values, dropout=0.5)
    for attend in (attention, lambda *args: attention_ref(*args)[0]):
        torch.manual_seed(0)
        with_ones = attend(q, q, torch.zeros_like(q), Mask(), score_mod)
        torch.manual_seed(0)
        expected = attend(q, q, torch.ones_like(q), Mask(), replace(score_mod, relative_values=None, softcap=1e9))
        assert torch.allclose(with_ones, expected, atol=1e-6)


def test_they_are_not_combined_with_what_changes_queries_keys_or_scores():
    for kind in ("shaw", "disentangled", "transformerxl", "cope", "pope"):
        with pytest.raises(ValueError, match=f"cannot contain '{kind}', which reads queries or keys"):
            CombinedConfig(schemes=("rotary", kind))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"position_buckets": 7}, "an even number of at least 4"),
        ({"position_buckets": 64, "max_relative_positions": 33}, "greater than half"),
        ({"pos_att_type": ()}, "must list c2p, p2c or both"),
        ({"pos_att_type": ("c2p", "c2p")}, "must list c2p, p2c or both"),
        ({"max_relative_positions": 0}, "at least 1"),
    ],
)
def test_bad_fields_of_disentangled_attention_are_named(fields, words):
    with pytest.raises(ValueError, match=words):
        DisentangledConfig(**fields)


def test_sinusoids_of_the_distance_need_pairs():
    with pytest.raises(ValueError, match="the model has 33 features"):
        phasor.ModelConfig(vocab_size=9, dim=33, num_layers=1, num_heads=3, head_dim=11, position="transformerxl")

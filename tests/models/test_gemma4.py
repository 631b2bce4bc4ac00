"""Gemma 4's text models: what layers share and have of their own, in caches, batches and compiled blocks."""

import json
import random
from math import prod

import pytest
import torch
import transformers
from families.cases import redraw
from families.gemma import gemma4_config, is_scalar, scale_queries

import phasor
from phasor.checkpoints.convert import convert
from phasor.checkpoints.load import read_config
from phasor.config.parameters import parameters_of
from phasor.kv_cache.static import StaticKVCache
from phasor.parallel.mesh import Mesh, mesh_why_not

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SAME = 1e-12  # float64, of logits near 1: the same sums in another order
COUNT = 23
TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
# The lowest layer is last of neither type, two layers of either type share keys, and every part is there.
WHOLE = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 5,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": True,
    "rms_norm_eps": 1e-2,  # so that little activations do not make float32 cost more
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
    "layer_types": [*TYPES, "full_attention"],
}

# Experts beside the networks, and no layer that shares.
EXPERTS = WHOLE | {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0}
EXPERTS |= {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}


@pytest.fixture(scope="module", params=["shared", "experts"])
def folder(request, tmp_path_factory):
    return save_theirs(tmp_path_factory.mktemp("gemma4"), WHOLE if request.param == "shared" else EXPERTS)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return save_theirs(tmp_path_factory.mktemp("gemma4"), WHOLE)


def save_theirs(folder, changes):
    """The folder of a model of theirs, with every weight redrawn."""
    fields = gemma4_config(random.Random(3)).to_dict()
    for name in ("per_layer_config", "layer_types", "rope_parameters"):
        del fields[name]
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**fields | changes))
    redraw(model, is_scalar)
    with torch.no_grad():
        scale_queries(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def model(folder):
    return phasor.load(folder).double()


def tokens(*shape):
    return torch.randint(0, 55, shape, generator=torch.Generator().manual_seed(5))


def in_float64(theirs, monkeypatch):
    """Theirs with norms, scores of experts, angles and scales of embeddings in float64, not in float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype: x.softmax(dim))
    theirs.config._experts_implementation = "eager"
    for table in (part for part in theirs.modules() if hasattr(part, "scalar_embed_scale")):
        table.embed_scale = torch.tensor(table.scalar_embed_scale, dtype=torch.float64)
    rotary, rope = theirs.model.rotary_emb, theirs.config.rope_parameters
    for kind in ("sliding_attention", "full_attention"):
        width = theirs.config.per_layer_config[kind].head_dim
        pairs = torch.arange(0, width, 2, dtype=torch.float64) / width
        frequencies = rope[kind]["rope_theta"] ** -pairs
        turned = int(rope[kind].get("partial_rotary_factor", 1.0) * width // 2)
        setattr(rotary, f"{kind}_inv_freq", torch.where(torch.arange(width // 2) < turned, frequencies, 0.0))
    monkeypatch.setattr(type(rotary), "forward", float64_angles)


def float64_angles(self, x, position_ids, layer_type):
    angles = position_ids[..., None].double() * getattr(self, f"{layer_type}_inv_freq")
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


@torch.no_grad()
def test_logits_are_the_same_in_float64(folder, model, monkeypatch):
    theirs = transformers.Gemma4ForCausalLM.from_pretrained(folder).double().eval()
    in_float64(theirs, monkeypatch)
    expected = theirs(tokens(2, COUNT)).logits
    assert float((model(tokens(2, COUNT)) - expected).abs().max()) < 1e-10


def test_a_cache_holds_shared_keys_once(shared):
    """Three layers of six have keys and values: one global, with one head of 20 features, and two local ones."""
    model = phasor.load(shared)
    config, cache = model.config, model.new_cache(2, 7)
    assert [config.shared_source(i) for i in range(6)] == [0, 1, 2, 1, 2, 1]
    assert [len(tensors) for tensors in cache.layers] == [2, 2, 2, 0, 0, 0]
    assert cache.layers[1]["keys"].shape == (2, 7, 1, 20)
    local = config.num_kv_heads * config.head_dim
    shapes = [prod(kept.shape) for i in range(6) for kept in config.cached_per_token(i).values()]
    assert shapes == [local, local, 20, 20, local, local]


@torch.no_grad()
def test_caches_equal_the_full_forward(model, tmp_path):
    """In chunks past the window, through a file, with rows in another order, and in static memory."""
    ids = tokens(3, COUNT)
    expected, cache = model(ids), model.new_cache(3, COUNT)
    pieces = [model(piece, cache=cache) for piece in ids[:, :17].split([9, 1, 7], dim=1)]
    cache.save(tmp_path / "cache")
    cache, order = phasor.KVCache.load(tmp_path / "cache"), [2, 0, 1]
    cache.reorder(order)
    pieces = [torch.cat(pieces, dim=1)[order], model(ids[order, 17:19], cache=cache)]
    static = StaticKVCache(cache)
    pieces += [model(ids[order, i : i + 1], cache=static) for i in range(19, COUNT)]
    assert float((torch.cat(pieces, dim=1) - expected[order]).abs().max()) < SAME


@torch.no_grad()
def test_packed_documents_and_padding_equal_each_alone(model):
    one, other = tokens(1, 9), tokens(1, 14)
    packed = model(torch.cat((one, other), dim=1), document_ids=torch.tensor([[0] * 9 + [1] * 14]))
    assert float((packed - torch.cat((model(one), model(other)), dim=1)).abs().max()) < SAME
    real = torch.arange(14)[None] >= 5
    padded = model(torch.cat((one[:, :1].expand(1, 5), one), dim=1), attention_mask=real)
    assert float((padded[:, 5:] - model(one)).abs().max()) < SAME


@pytest.mark.slow
def test_compiled_blocks_equal_eager_ones_and_every_weight_learns(model):
    ids = tokens(2, COUNT)
    expected = model.loss(ids[:, :-1], targets=ids[:, 1:]).total
    expected.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    assert [name for name, gradient in gradients.items() if not gradient.abs().max() > 0] == []
    model.zero_grad()
    model.compile(backend="aot_eager")
    found = model.loss(ids[:, :-1], targets=ids[:, 1:]).total
    found.backward()
    assert abs(found.item() - expected.item()) < SAME
    far = {name: float((weight.grad - gradients[name]).abs().max()) for name, weight in model.named_parameters()}
    assert max(far.values()) < SAME * max(float(gradient.abs().max()) for gradient in gradients.values())


def test_a_plan_counts_its_weights(model):
    assert parameters_of(model.config).total == sum(weight.numel() for weight in model.parameters())


def test_a_conversion_is_checked_against_transformers(folder, tmp_path):
    found = convert(folder, tmp_path / "native", check=True)
    assert found.missed == ()
    assert found.largest < 5e-5  # theirs in float32 is that far from itself in float64 with these weights


def test_what_is_missing_is_named(shared, tmp_path):
    fields = json.loads((shared / "config.json").read_text())
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 6}
    wrong = {
        "use_bidirectional_attention": {"use_bidirectional_attention": "all"},
        "networks of several widths beside experts": experts,
        "per_layer_config must have head_dim and num_key_value_heads": {"per_layer_config": {"9": {"head_dim": 4}}},
        "vocab_size_per_layer_input": {"vocab_size_per_layer_input": 5},
    }
    for sentence, changed in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps(fields | changed))
        with pytest.raises(ValueError, match=sentence):
            read_config(tmp_path)


def test_a_mesh_says_what_it_cannot_cut(model):
    what = "per_layer_width" if model.per_layer is not None else "branch_norms"
    assert f"({what}) cannot be cut: tensor can be 1" in mesh_why_not(model.config, Mesh(tensor=2), 64)


def test_experts_with_what_they_do_not_take_are_refused(folder):
    config = phasor.load(folder).config
    mixture = {"num_experts": 4, "shared_dim": 8, "branch_norms": True, "expert_scale": True}
    network = {"activation": "swiglu", "experts": mixture}
    with pytest.raises(ValueError, match="branch_norms takes the placement 'pre' or 'sandwich', not 'post'"):
        phasor.ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=1, placement="post", feedforward=network)
    with pytest.raises(ValueError, match="branch_norms needs shared_dim"):
        config.replace(feedforward=network | {"experts": mixture | {"shared_dim": None}})
    with pytest.raises(ValueError, match="expert_scale is for experts without a bias"):
        config.replace(feedforward=network | {"bias": True})


def test_keys_of_layers_that_share_them_are_passed_through(shared, tmp_path):
    """Published files have projections that no layer uses; they come back with the model."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(shared / "model.safetensors")
    extra = "model.layers.4.self_attn.k_proj.weight"
    save_file(tensors | {extra: torch.ones(3, 3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((shared / "config.json").read_bytes())
    phasor.save(phasor.load(tmp_path), tmp_path / "back", format="hf")
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[extra], torch.ones(3, 3))

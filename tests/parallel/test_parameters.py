"""The weights that a plan counts are those of the model itself, and their shards those of FSDP2."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from schemes import SCHEMES, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import phasor
from phasor.checkpoints.load import read_config
from phasor.checkpoints.text_part import MULTIMODAL
from phasor.config.parameters import parameters_of
from phasor.config.weights import with_prefixes
from phasor.models.presets import PRESETS
from phasor.nn.block import Block
from phasor.parallel.processes import AXES
from phasor.parallel.shards import shard_blocks

PUBLISHED = sorted((Path(__file__).parents[1] / "published").glob("*.json"))


def shapes(weights):
    return Counter(tuple(weight.shape) for weight in weights)


def check_shapes(config: phasor.ModelConfig) -> None:
    with torch.device("meta"):
        model = phasor.Transformer(config)
    counted = parameters_of(config)
    assert counted.total == sum(weight.numel() for weight in model.parameters())
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    found = Counter(frozenset(shapes(block.parameters()).items()) for block in blocks)
    expected: Counter = Counter()
    for block, count in counted.blocks:
        expected[frozenset(shapes(block).items())] += count
    assert expected == found
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    assert shapes(counted.outside) == shapes(w for w in model.parameters() if id(w) not in inside)
    head = {"pooler": config.head.pooler_weights(config), "head": config.head.weights(config)}
    named = config.embedding.weights(config) | with_prefixes(head)
    around = {n: tuple(w.shape) for n, w in model.named_parameters() if not n.startswith(("encoder.", "decoder."))}
    assert {name: weight.shape for name, weight in named.items()} == around


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_weights_of_the_model(name):
    check_shapes(phasor.preset(name, num_layers=3))  # more layers are more of the same


@pytest.mark.parametrize(
    "path",
    [path if n % 7 == 0 else pytest.param(path, marks=pytest.mark.slow) for n, path in enumerate(PUBLISHED)],
    ids=lambda path: path.stem,
)
def test_published_models_have_the_weights_of_the_model(path, tmp_path):
    published = json.loads(path.read_text())
    fields = published.get("config", published)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path, "text" if fields["model_type"] in MULTIMODAL else None)
    depth = max(2, len(config.layers))
    encoder = None if config.num_encoder_layers is None else depth + 1
    check_shapes(config.replace(num_layers=min(depth, config.num_layers), num_encoder_layers=encoder))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_state_the_shapes_of_what_they_learn(scheme):
    check_shapes(tiny(scheme))
    if SCHEMES[scheme].axes == 1:
        check_shapes(tiny(scheme, shape="encoder-decoder", embedding={"source_vocab_size": 40}))


PARTS = {
    "biases": {"attention": {"bias": ("q", "v", "out"), "qk_norm": "heads", "sink_logits": True}, "norm": "layernorm"},
    "whole": {"attention": {"qk_norm": "whole", "qk_norm_bias": False}, "norm": "layernorm", "placement": "sandwich"},
    "shared expert": {
        "feedforward": {"bias": True, "experts": {"num_experts": 4, "shared_dim": 24, "shared_gate": True}},
        "placement": {"kind": "parallel", "shared_norm": False},
    },
    "wide": {"embedding": {"width": 16, "project": "sum", "token_types": 2, "norm": True}, "head": "mlm"},
    "narrow": {
        "embedding": {"width": 16, "tied": False},
        "shape": "encoder",
        "head": {"kind": "none", "project": True},
    },
    "pooled": {"shape": "encoder", "head": "pooled", "placement": {"kind": "pre", "first_norm": False}},
    "dense layers": {
        "shape": "encoder",
        "head": {"kind": "pooled", "dense": [{"out_features": 5}, {"out_features": 3}]},
    },
    "classifier": {
        "shape": "encoder",
        "head": {"kind": "sequence-classifier", "dense": "gelu-tanh", "dense_norm": True},
    },
    "sides of two widths": {
        "shape": "encoder-decoder",
        "embedding": {"width": 16, "source_vocab_size": 40},
        "encoder": {"dim": 48},
    },
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_have_the_weights_of_the_model(part):
    check_shapes(tiny("rotary", **PARTS[part]))


@pytest.fixture(scope="module", params=[3, 8])
def shards(request):
    """A world of this many processes, of which this is the first."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["llama-3.1", "t5", "gpt-2", "grok-1"])
def test_the_first_process_holds_what_fsdp_gives_it(name, shards):
    """Weights, gradients and moments all have these sizes; 3 processes divide few of the shapes."""
    config = phasor.preset(name, dim=40, num_heads=4, num_layers=2, vocab_size=101)
    model = phasor.Transformer(config)
    shard_blocks(model, init_device_mesh("cpu", (1, shards, 1, 1), mesh_dim_names=AXES), None)
    held = sum(weight.to_local().numel() for weight in model.parameters())
    assert parameters_of(config).local(1, shards) == held

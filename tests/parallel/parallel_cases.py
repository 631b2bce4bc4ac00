"""Models, batches and recipes that several processes train, and one process for comparison."""

from __future__ import annotations

import torch

from phasor.config import ModelConfig
from phasor.config.recipe import Recipe
from phasor.data.batch import Batch
from phasor.models.presets import preset
from phasor.transformer import Transformer

VOCABULARY, ROWS, LENGTH = 37, 6, 32
EXPERTS = {"experts": {"num_experts": 4, "top_k": 2, "hidden_dim": 16, "shared_dim": 24}, "bias": True}
MODELS = {
    "tied llama": {"preset": "llama-2", "num_kv_heads": 2, "embedding": {"tied": True}},
    "encoder-decoder": {"preset": "t5", "num_encoder_layers": 2, "head_dim": 8},
    "alibi": {"preset": "bloom"},
    "deepnorm": {"placement": "deepnorm", "position": "rotary", "norm": "layernorm"},
    "experts": {"position": "rotary", "feedforward": EXPERTS},
    "few experts": {"position": "rotary", "feedforward": {"experts": EXPERTS["experts"] | {"num_experts": 2}}},
    "encoder": {"preset": "bert", "head": {"kind": "mlm"}},
    "windows and sinks": {
        "position": {"kind": "rotary", "extension": {"kind": "dynamic-ntk", "factor": 2.0, "original_length": 16}},
        "attention": {"window": 6, "sink_tokens": 2, "sink_logits": True, "qk_norm": "heads", "bias": ["q", "out"]}
        | {"softcap": 20.0},
        "feedforward": {"bias": True},
        "placement": {"kind": "parallel"},
        "num_kv_heads": 2,
    },
    "capped sinks": {
        "position": "alibi",
        "attention": {
            "window": 6,
            "sink_tokens": 2,
            "cap_sinks": True,
            "qk_norm": "head",
            "qk_norm_bias": False,
            "bias": ["q", "out"],
        },
    },
    "xpos": {"position": "xpos", "attention": {"window": 6}},
    "learned": {"preset": "gpt-2"},
    "kerple": {"position": "kerple"},
    "accumulated": {"position": "accumulated"},
    "forget gates": {"position": {"kind": "combined", "schemes": ["rotary", "forget"]}},
    "sandwich": {"position": "sandwich"},
    "shaw": {"position": {"kind": "shaw", "max_distance": 5, "share_heads": False}, "num_kv_heads": 2},
    "transformerxl": {"position": "transformerxl"},
    "pope": {"position": "pope", "num_kv_heads": 2},
    "cope": {"position": {"kind": "cope", "max_position": 9}},
    "profiles": {"position": {"kind": "profiles", "extent": 9, "rank": 3, "log_floor": 5}, "num_kv_heads": 2},
    "rotated output": {"position": {"kind": "rotary", "rotate_values": True, "rotate_output": True}},
    "disentangled": {"position": {"kind": "disentangled", "position_buckets": 8, "max_relative_positions": 12}},
    "shared projections": {"position": {"kind": "disentangled", "share_att_key": True, "norm_rel_ebd": False}},
    "latent": {"position": "rotary", "norm": "rmsnorm", "attention": {"kind": "latent", "q_rank": 12}},
    "indexer": {
        "position": "rotary",
        "attention": {"kind": "latent", "q_rank": 12, "indexer": {"num_heads": 5, "head_dim": 6, "top_k": 7}},
    },
    "states": {
        "position": "rotary",
        "layers": [{"attention": "gated-delta"}, {"attention": "retention"}, {"attention": "mamba2"}, {}],
        "num_layers": 4,
    },
    "learned slopes": {"position": {"kind": "alibi", "learned": True}},
    "chunked": {"position": "rotary", "attention": {"sparse": {"kind": "chunked", "chunk": 5}}},
    "strided": {
        "position": "rotary",
        "attention": {"sparse": {"kind": "strided", "block": 3, "local": 2, "stride": 3}},
    },
    "dilated": {"position": "rotary", "attention": {"sparse": {"kind": "dilated", "dilation": 3}}},
    "top-k": {"position": "rotary", "attention": {"sparse": {"kind": "top-k", "block": 4, "top_k": 2}}},
}


def config(name: str) -> ModelConfig:
    fields = {"dim": 32, "num_heads": 4, "num_layers": 2, "vocab_size": VOCABULARY, "hidden_dim": 48, "max_length": 64}
    fields |= MODELS[name] | {"dropout": {"residual": 0.0, "attention": 0.0, "feedforward": 0.0, "embedding": 0.0}}
    named = fields.pop("preset", None)
    return ModelConfig.from_dict(fields) if named is None else preset(named, **fields)


def model(name: str) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config(name))


def recipe(**train: object) -> Recipe:
    return Recipe.from_dict(
        {
            "train": {"device": "cpu", "batch_tokens": ROWS * LENGTH, **train},
            "data": {"sequence_length": LENGTH},
            "optimizer": {"lr": 3e-3},
            "schedule": {"kind": "constant", "warmup": 0},
        }
    )


class PackedBatches:
    """Rows of documents of uneven lengths, with uneven weights; their number does not fit four processes."""

    per_epoch = 5

    def __init__(self, name: str) -> None:
        self.pairs = config(name).shape == "encoder-decoder"

    def __getitem__(self, index: int) -> Batch:
        draw = torch.Generator().manual_seed(index)
        rows = ROWS - index % 2
        tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=draw)
        weights = torch.rand(rows, LENGTH, generator=draw).round(decimals=1)
        weights[0, 5:] = 0.0
        fields = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        if not self.pairs:
            ends = torch.randint(1, LENGTH, (rows, 1), generator=draw)
            return Batch(**fields, document_ids=(torch.arange(LENGTH) >= ends).long())
        source = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=draw)
        lengths = torch.randint(3, LENGTH, (rows, 1), generator=draw)
        return Batch(**fields, source=source, source_attention_mask=torch.arange(LENGTH) < lengths)

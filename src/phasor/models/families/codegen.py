"""CodeGen 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from phasor.config import ModelConfig
from phasor.models.families.gptj import GPTJ
from phasor.models.layout import Layout, Piece, Rule, linear

SHARDS = 4  # of the pretraining, the same for every size


@dataclass(frozen=True)
class ByShard(Layout):
    """Queries, values and keys of a quarter of the heads, then those of the next."""

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        if model.num_heads % SHARDS:
            raise ValueError(f"its number of heads is divisible by {SHARDS}, and {model.num_heads} is not")
        if model.num_kv_heads != model.num_heads:
            raise ValueError(f"it has as many key/value heads as heads, and num_kv_heads is {model.num_kv_heads}")
        heads = ours.unflatten(0, (SHARDS, model.num_heads // SHARDS, 3, model.head_dim))
        views = [heads[shard, :, part] for shard in range(SHARDS) for part in (0, 2, 1)]
        return [Piece(view, (view.shape[0] * view.shape[1], *view.shape[2:])) for view in views]


class CodeGen(GPTJ):
    """GPT-J with one projection for queries, keys and values."""

    model_type = "codegen"
    title = "CodeGen"
    architectures = {"lm": "CodeGenForCausalLM", "none": "CodeGenModel"}
    fields = {n: e for n, e in GPTJ.fields.items() if n not in ("rotary", "scale_attn_weights")}
    derived = ("transformer.h.*.attn.causal_mask",)

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.qkv", f"{theirs}.qkv_proj", ByShard())


FAMILY = CodeGen()

"""GPT-J 6B."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config import ModelConfig
from phasor.models.entries import Field, Pinned
from phasor.models.families._gpt import GPTLike
from phasor.models.layout import Rule, linear, projections


class GPTJ(GPTLike):
    """Parallel after one norm, adjacent pairs of part of a head, biases in the feed-forward network and the head."""

    model_type = "gptj"
    title = "GPT-J"
    architectures = {"lm": "GPTJForCausalLM", "none": "GPTJModel"}
    parts = GPTLike.parts | {
        "position": "rotary",
        "position.pairing": "adjacent",
        "placement": "parallel",
        "head.bias": True,
    }
    fields = GPTLike.fields | {
        "embd_pdrop": Field("dropout.embedding", default=0.0),
        "attn_pdrop": Field("dropout.attention", default=0.0),
        "resid_pdrop": Field("dropout.residual", default=0.0),
        "rotary": Pinned(True),
        "rotary_dim": Field("position.rotary_dim", default=64),
        "scale_attn_weights": Pinned(True),
        "tie_word_embeddings": Field("embedding.tied", default=False),
    }

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield from linear("head", "lm_head")
        yield from linear("decoder.norm", "transformer.ln_f")
        block, layer = "decoder.blocks.{i}", "transformer.h.{i}"
        yield from linear(f"{block}.residual.norms.0", f"{layer}.ln_1")
        yield from self.attention(f"{block}.attention", f"{layer}.attn")
        yield from linear(f"{block}.attention.out", f"{layer}.attn.out_proj")
        yield from linear(f"{block}.feedforward.up", f"{layer}.mlp.fc_in")
        yield from linear(f"{block}.feedforward.down", f"{layer}.mlp.fc_out")

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(ours, theirs)


FAMILY = GPTJ()

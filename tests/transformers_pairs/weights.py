"""The pieces that every pair is made of: sizes, redrawn weights, and rules from their weight names to ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from phasor import ModelConfig, Transformer

transformers.logging.set_verbosity_error()

EPS = 1e-2
LAYERS, DIM, HIDDEN, VOCAB, HEADS = 3, 48, 56, 61, 4
ROWS, TOKENS = 2, 23


class Theirs:
    """Their weights by name; keeps track of which were used."""

    def __init__(self, model: nn.Module) -> None:
        self.state = model.state_dict()
        self.used: set[int] = set()

    def __call__(self, name: str) -> Tensor:
        self.used.add(self.state[name].data_ptr())
        return self.state[name]

    def leftover(self, model: nn.Module) -> list[str]:
        """Learned weights that no rule of the case took; tied ones count once."""
        learned = (name for name, p in model.named_parameters() if p.requires_grad)
        return [name for name in learned if self.state[name].data_ptr() not in self.used]


@dataclass
class Case:
    theirs: nn.Module
    config: ModelConfig
    rules: Any  # from their weights to ours
    inputs: dict[str, Tensor] = field(default_factory=dict)  # beside the tokens, for theirs
    arguments: dict[str, Tensor] = field(default_factory=dict)  # the same for ours


def redraw(model: nn.Module) -> nn.Module:
    """Matrices keep activations near one; vectors (norms, biases, sinks) are standard normal."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model.eval()


def qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """One projection out of three, by key/value group: the group's queries, its key, its value."""
    return torch.cat([x.unflatten(0, (groups, -1)) for x in (q, k, v)], dim=1).flatten(0, 1)


def kv(k: Tensor, v: Tensor, groups: int) -> Tensor:
    return torch.cat([x.unflatten(0, (groups, -1)) for x in (k, v)], dim=1).flatten(0, 1)


def both(theirs: Theirs, ours: str, name: str) -> dict[str, Tensor]:
    """A weight and, where there is one, its bias."""
    found = {f"{ours}.weight": theirs(f"{name}.weight")}
    if f"{name}.bias" in theirs.state:
        found[f"{ours}.bias"] = theirs(f"{name}.bias")
    return found


def fuse(theirs: Theirs, ours: str, names: list[str], join: Any) -> dict[str, Tensor]:
    """Several of their projections as one of ours, biases too."""
    found = {f"{ours}.weight": join(*(theirs(f"{name}.weight") for name in names))}
    if f"{names[0]}.bias" in theirs.state:
        found[f"{ours}.bias"] = join(*(theirs(f"{name}.bias") for name in names))
    return found


def concatenate(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def llama_attention(theirs: Theirs, ours: str, layer: str, config: ModelConfig) -> dict[str, Tensor]:
    names = [f"{layer}.self_attn.{p}_proj" for p in "qkv"]
    found = fuse(theirs, f"{ours}.attention.qkv", names, lambda *x: qkv(*x, config.num_kv_heads))
    found |= both(theirs, f"{ours}.attention.out", f"{layer}.self_attn.o_proj")
    for part in "qk":
        if f"{layer}.self_attn.{part}_norm.weight" in theirs.state:
            found |= both(theirs, f"{ours}.attention.{part}_norm", f"{layer}.self_attn.{part}_norm")
    return found


def llama_glu(theirs: Theirs, ours: str, mlp: str) -> dict[str, Tensor]:
    found = fuse(theirs, f"{ours}.up", [f"{mlp}.gate_proj", f"{mlp}.up_proj"], concatenate)
    return found | both(theirs, f"{ours}.down", f"{mlp}.down_proj")


def llama_experts(theirs: Theirs, ours: str, mlp: str) -> dict[str, Tensor]:
    return {
        f"{ours}.router.weight": theirs(f"{mlp}.gate.weight"),
        f"{ours}.up": theirs(f"{mlp}.experts.gate_up_proj").transpose(1, 2),
        f"{ours}.down": theirs(f"{mlp}.experts.down_proj").transpose(1, 2),
    }


def llama_rules(*norms: str, feedforward: Any = llama_glu) -> Any:
    """The names most decoders share; `norms` are those of a block in the order they run."""

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = both(theirs, "tokens", "model.embed_tokens") | both(theirs, "decoder.norm", "model.norm")
        if not config.embedding.tied:
            found |= both(theirs, "head", "lm_head")
        for i in range(config.num_layers):
            ours, layer = f"decoder.blocks.{i}", f"model.layers.{i}"
            found |= llama_attention(theirs, ours, layer, config)
            found |= feedforward(theirs, f"{ours}.feedforward", f"{layer}.mlp")
            for n, norm in enumerate(norms):
                found |= both(theirs, f"{ours}.residual.norms.{n}", f"{layer}.{norm}")
        return found

    return rules


PRE = ("input_layernorm", "post_attention_layernorm")
SIZES = {"vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": HEADS, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
OURS = {"vocab_size": VOCAB, "dim": DIM, "hidden_dim": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS}


def same_names(prefix: str, names: dict[str, str]) -> Any:
    """Rules for models whose fused projection is already in our order, head by head q, k, v."""

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = {}
        for ours, name in names.items():
            for i in range(config.num_layers if "{}" in ours else 1):
                found |= both(theirs, ours.format(i), prefix + name.format(i))
        if not config.embedding.tied:
            found |= both(theirs, "head", "lm_head")
        return found

    return rules


def token_types() -> Tensor:
    return torch.randint(0, 2, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))


def right_padding() -> Tensor:
    attention_mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    attention_mask[1, 15:] = False
    return attention_mask


def make(build: Any) -> tuple[Case, Transformer]:
    """Their model redrawn, and ours with the same weights: every one of theirs used, every one of ours given."""
    case = build()
    redraw(case.theirs)
    theirs = Theirs(case.theirs)
    model = Transformer(case.config).eval()
    model.load_state_dict(case.rules(theirs, case.config), strict=True)
    assert theirs.leftover(case.theirs) == []
    return case, model

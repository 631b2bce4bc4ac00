"""Decoders with latent attention, as DeepSeek's files have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from phasor.config import ModelConfig
from phasor.models.entries import (
    GATES,
    Activation,
    Draft,
    Field,
    FieldEntry,
    Pinned,
    require_kind,
)
from phasor.models.families._llama import LlamaLike
from phasor.models.families._routed import FirstDense, Routed
from phasor.models.fields import Fields
from phasor.models.layout import Layout, Piece, Rule, linear
from phasor.models.rope import RopeParameters, parameters
from phasor.nn.attention.latent.config import LatentAttentionConfig
from phasor.nn.positions import RotaryConfig, YaRN

SAME_SCALE = 1e-12  # how far two scales may be apart that are one


def latent(config: ModelConfig) -> LatentAttentionConfig:
    """The attention of a model, which has to be latent."""
    return require_kind(config.layer(0).attention, LatentAttentionConfig)


@dataclass(frozen=True)
class RotatedLast(Layout):
    """Rows whose rotated features come last in theirs and first in ours: of every head, or once for all of them."""

    by_head: bool

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        rope, groups = latent(model).sizes(model).rope, model.num_heads if self.by_head else 1
        rows = ours.unflatten(0, (groups, -1))
        parts = (part for group in rows for part in (group[rope:], group[:rope]))
        return [Piece(part, tuple(part.shape)) for part in parts]


class HeadWidths(FieldEntry):
    """`qk_nope_head_dim` and `qk_rope_head_dim`, which make a head; with `head_dim` for the second in newer files.

    `default` is the first where a file has none, and with `whole` it is the head that `head_dim` says.
    """

    def __init__(self, default: int = 128, *, whole: bool = False) -> None:
        self.default, self.whole = default, whole

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        rope = f.positive("qk_rope_head_dim", 64)
        draft["head_dim"] = f.positive(name, self.default) + rope
        draft["attention.rope_dim"] = rope
        f.expect("head_dim", draft["head_dim"] if self.whole else rope)
        f.expect("qk_head_dim", draft["head_dim"])

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        sizes = latent(config).sizes(config)
        return {name: sizes.nope, "qk_rope_head_dim": sizes.rope}


class LatentSize(Field):
    """A width of latent attention, which follows from the heads where it is left out in ours."""

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return getattr(latent(config).resolve(config), self.paths[0].removeprefix("attention."))


class LatentBias(Field):
    """A bias of the projections to latent vectors, and of the output."""

    def __init__(self) -> None:
        super().__init__("attention.bias", default=False)

    def decode(self, value: Any, draft: Draft) -> Any:
        down = ("kv_down",) if draft["attention.q_rank"] is None else ("q_down", "kv_down")
        return (*down, "out") if value else ()

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return bool(value)


class SameHeads(FieldEntry):
    """A number of key/value heads that has to be the number of heads."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        f.expect(name, draft["num_heads"])

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {name: config.num_heads}


class LatentRope(RopeParameters):
    """`rope_parameters`, of which YaRN's `mscale_all_dim` scales scores as well; pairs as `rope_interleave` says."""

    def scheme(self, f: Fields, draft: Draft, base: float, partial: float | None) -> RotaryConfig:
        rotary = super().scheme(f, draft, base, partial)
        if rotary.extension is not None and not isinstance(rotary.extension, YaRN):
            f.inside(parameters(f, None, {}), "rope_parameters.").expect("mscale_all_dim", None, 0)
        if (factor := score_factor(rotary)) != 1.0:
            draft["attention.scale"] = draft["head_dim"] ** -0.5 * factor
        return rotary.replace(pairing="adjacent" if self.is_interleaved(f) else "half")

    def is_interleaved(self, f: Fields) -> bool:
        return f.flag("rope_interleave", True)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        position, scale = self.rotary(config), latent(config).scale
        expected = config.head_dim**-0.5 * score_factor(position)
        if scale is not None and abs(scale / expected - 1) > SAME_SCALE:
            raise ValueError(
                f"its scale follows from the width of heads and YaRN's mscale_all_dim, {expected:.6g}, and "
                f"attention.scale is {scale:.6g}"
            )
        return super().write(name, config) | {"rope_interleave": position.pairing == "adjacent"}


class AdjacentRope(LatentRope):
    """Pairs are always adjacent, and no field says so."""

    def is_interleaved(self, f: Fields) -> bool:
        return True

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        written = super().write(name, config)
        if not written.pop("rope_interleave"):
            raise ValueError("it rotates adjacent features, and position.pairing is 'half'")
        return written


def score_factor(position: RotaryConfig) -> float:
    """What YaRN multiplies the scores of latent attention by, besides what it does to rotated features.

    >>> score_factor(RotaryConfig())
    1.0
    """
    extension = position.extension
    if not isinstance(extension, YaRN) or not extension.mscale_all_dim:
        return 1.0
    return float(extension.sharpening(extension.mscale_all_dim)) ** 2


class ExpertsByLayer(FirstDense):
    """`mlp_layer_types`, "dense" or "sparse" for each layer; where it is missing the first layers are dense."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        super().read(f, "first_k_dense_replace", draft)
        config = draft.config()
        types = f.get(name, None)
        if types is None:
            return
        if not isinstance(types, list) or len(types) != config.num_layers or not set(types) <= {"dense", "sparse"}:
            raise ValueError(f"{f.file}: {name} must have 'dense' or 'sparse' for each of {config.num_layers} layers")
        mixture = config.feedforward.experts
        draft.layers["feedforward.experts"] = [None if kind == "dense" else mixture for kind in types]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        networks = (config.layer(i).feedforward for i in range(config.num_layers))
        return {name: ["dense" if network.experts is None else "sparse" for network in networks]}


class LatentLike(Routed):
    """Names and fields of DeepSeek's decoders."""

    parts = Routed.parts | {"attention": "latent", "attention.norm_eps": 1e-6}
    fields: ClassVar[dict[str, FieldEntry]] = {
        name: entry for name, entry in LlamaLike.fields.items() if name not in ("head_dim", "num_key_value_heads")
    } | {
        **Routed.mixture,
        "num_key_value_heads": SameHeads(),
        "qk_nope_head_dim": HeadWidths(),
        "q_lora_rank": Field("attention.q_rank", default=None, absent=1536),
        "kv_lora_rank": LatentSize("attention.kv_rank", default=512),
        "v_head_dim": LatentSize("attention.value_dim", default=128),
        "attention_bias": LatentBias(),
        "hidden_act": Activation("silu", GATES),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "rope_parameters": LatentRope(),
        "moe_layer_freq": Pinned(1),
    }
    harmless = frozenset({"pretraining_tp", "output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size"})

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.q", f"{theirs}.q_proj", RotatedLast(by_head=True))
        yield from linear(f"{ours}.q_down", f"{theirs}.q_a_proj")
        yield from linear(f"{ours}.q_norm", f"{theirs}.q_a_layernorm")
        yield from linear(f"{ours}.q_up", f"{theirs}.q_b_proj", RotatedLast(by_head=True))
        yield from linear(f"{ours}.kv_down", f"{theirs}.kv_a_proj_with_mqa", RotatedLast(by_head=False))
        yield from linear(f"{ours}.kv_norm", f"{theirs}.kv_a_layernorm")
        yield from linear(f"{ours}.kv_up", f"{theirs}.kv_b_proj")
        yield from linear(f"{ours}.out", f"{theirs}.o_proj")

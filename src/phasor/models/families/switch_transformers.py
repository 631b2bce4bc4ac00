"""Switch Transformers, and their encoders alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from phasor.config import EncoderConfig, LayerConfig, ModelConfig
from phasor.config.model import Side
from phasor.config.parameters import sides_of
from phasor.models.entries import ACTIVATIONS, Activation, Draft, FieldEntry, Pinned, Switch
from phasor.models.families._experts import OfMixture
from phasor.models.families._t5 import Depths, T5Like
from phasor.models.fields import Fields
from phasor.models.layout import Rule, Transposed, linear


def has_experts(layer: int, step: int) -> bool:
    """Whether a layer has experts, where every `step`-th does, from the second one on."""
    return step == 1 or (step > 1 and layer % step == 1)


class SparseSteps(FieldEntry):
    """`num_sparse_encoder_layers` and `num_sparse_decoder_layers`, or how many layers there are to one of them.

    It stands below all other fields of feed-forward networks. Where a file has no steps, no sparse layers at all make
    the second one sparse, as in transformers.
    """

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        config = draft.config()
        mixture, dense = config.feedforward, config.feedforward.replace(experts=None)
        sides = {side: self.sparse_layers(f, side, config.depth(side)) for side in sides_of(config)}
        own = sides.get("decoder", sides["encoder"])
        draft.layers["feedforward"] = [mixture if sparse else dense for sparse in own]
        if "decoder" in sides and sides["encoder"] != own:
            layers = (LayerConfig(feedforward=mixture if sparse else dense) for sparse in sides["encoder"])
            draft["encoder"] = EncoderConfig(layers=tuple(layers))

    def sparse_layers(self, f: Fields, side: Side, depth: int) -> list[bool]:
        count = f.get(f"num_sparse_{side}_layers", 3)
        step = f.get(f"{side}_sparse_step", depth // count if count > 0 else depth)
        return [has_experts(i, step) for i in range(depth)]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for side in sides_of(config):
            model, depth = config.for_side(side), config.depth(side)
            sparse = [model.layer(i).feedforward.experts is not None for i in range(depth)]
            steps = (step for step in range(depth + 2) if [has_experts(i, step) for i in range(depth)] == sparse)
            step = next(steps, None)
            if step is None:
                raise ValueError(f"every n-th layer of its {side} has experts, from the second one on")
            fields |= {f"num_sparse_{side}_layers": sum(sparse), f"{side}_sparse_step": step}
        return fields


class SwitchTransformers(T5Like):
    """T5 with one of several experts for each token in some layers, weighted by its probability.

    No token is left out: what transformers computes, as long as no more than `expert_capacity` tokens of a row choose
    the same expert, and so in all rows of no more tokens than that.
    """

    model_type = "switch_transformers"
    title = "Switch Transformers"
    architectures = {"lm": "SwitchTransformersForConditionalGeneration", "none": "SwitchTransformersModel"}
    aliases = {"SwitchTransformersEncoderModel": "none"}
    encoder = "SwitchTransformersEncoderModel"
    experts_at = None
    parts = T5Like.parts | {"feedforward.experts.top_k": 1, "feedforward.experts.normalize": False}
    fields: ClassVar[dict[str, FieldEntry]] = T5Like.fields | {
        "num_layers": Depths(encoder, absent=12),
        "dense_act_fn": Activation("relu", ACTIVATIONS),
        "num_experts": OfMixture("feedforward.experts.num_experts", default=8),
        "router_bias": OfMixture("feedforward.experts.router_bias", default=False),
        "router_dtype": Pinned("float32"),
        "tie_word_embeddings": Switch("head.multiplier", on="rsqrt", off=1.0, default=True),
        "num_sparse_encoder_layers": SparseSteps(),
    }
    # How training is regularized, which outputs are returned, what T5 has for its networks, and the capacity.
    harmless = T5Like.harmless | frozenset(
        """
        add_router_probs decoder_sparse_step encoder_sparse_step expert_capacity feed_forward_proj is_gated_act
        num_sparse_decoder_layers router_aux_loss_coef router_ignore_padding_tokens router_jitter_noise router_type
        router_z_loss_coef
        """.split()  # noqa: SIM905
    )

    def differs_from_transformers(self, config: ModelConfig) -> str:
        return (
            "transformers leaves out tokens of a row beyond the first expert_capacity that choose the same expert, "
            "and here every token has its expert"
        )

    def duplicates(self, config: ModelConfig) -> dict[str, str]:
        if not config.has_logits or getattr(config.head, "multiplier", None) != 1.0:
            return {}
        return self.copies | ({self.head: self.embedding} if config.embedding.tied else {})

    def network(self, ours: str, theirs: str, config: ModelConfig) -> Iterator[Rule]:
        for name, layer in (("up", "wi"), ("down", "wo")):
            yield from linear(f"{ours}.{name}", f"{theirs}.mlp.{layer}")
            yield Rule(f"{ours}.{name}", f"{theirs}.mlp.experts.expert_{{e}}.{layer}.weight", Transposed())
        yield from linear(f"{ours}.router", f"{theirs}.mlp.router.classifier")


FAMILY = SwitchTransformers()

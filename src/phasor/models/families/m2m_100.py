"""M2M-100 and NLLB."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, Activation, Draft, Field, FieldEntry, Pinned, Switch, require_kind
from phasor.models.families._bart import OLD_NAMES, BartLike
from phasor.models.fields import Fields
from phasor.nn.positions import SinusoidalConfig


class PositionsAfterPadding(FieldEntry):
    """`pad_token_id`, from after which positions count."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        pad = f.get(name, 1)
        draft.values |= {"position.offset": pad + 1, "position.padding_token": pad}

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        offset = require_kind(config.position, SinusoidalConfig).offset
        if not 1 <= offset <= config.vocab_size:
            raise ValueError("its positions count from after the number of a token, the padding")
        return {name: offset - 1}


class M2M100(BartLike):
    """Pre-norm, sines and then cosines of positions that count from after the padding token's number."""

    model_type = "m2m_100"
    title = "M2M-100, NLLB"
    architectures = {"lm": "M2M100ForConditionalGeneration", "none": "M2M100Model"}
    logits_bias = False
    parts = BartLike.parts | {
        "position": "sinusoidal",
        "position.layout": "halves",
        "position.spacing": "ends",
        "position.zero_padding": True,
        "placement": "pre",
    }
    fields = BartLike.fields | {
        "activation_function": Activation("relu", ACTIVATIONS, written=OLD_NAMES),
        "scale_embedding": Switch("embedding.scale", on="sqrt", off=1.0, default=False, absent=True),
        "attention_dropout": Field("dropout.attention", default=0.1),
        "pad_token_id": PositionsAfterPadding(),
        "normalize_before": Pinned(True),
        "add_final_layer_norm": Pinned(True),
        "normalize_embedding": Pinned(False),
        "static_position_embeddings": Pinned(True),
    }
    unsupported = frozenset()
    derived = (*BartLike.derived, "model.*coder.embed_positions.weights")


FAMILY = M2M100()

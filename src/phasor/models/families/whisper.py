"""Whisper: speech to text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.front_end import ConvolutionConfig, FrontEndConfig
from phasor.models.entries import Draft, Field, FieldEntry, Pinned, TableLength
from phasor.models.families._bart import BartLike
from phasor.models.family import Family
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear

# Of training, of classifiers of audio, of timestamps, and of generation in transformers.
HARMLESS = """
    apply_spec_augment begin_suppress_tokens classifier_proj_size forced_decoder_ids mask_feature_length
    mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob max_source_positions
    median_filter_width scale_embedding use_weighted_layer_sum
"""
STRIDES = (1, 2)  # of the convolutions


class MelBins(FieldEntry):
    """`num_mel_bins`, the features that two convolutions take, and the length of the encoder's table beside it."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        dim = draft["dim"]
        convolutions = tuple(ConvolutionConfig(features=dim, width=3, stride=by, padding=1) for by in STRIDES)
        draft["embedding.front_end"] = FrontEndConfig(features=f.positive(name, 80), convolutions=convolutions)
        draft["encoder.max_length"] = f.positive("max_source_positions", 1500)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        front_end = config.embedding.front_end
        if front_end is None:
            raise ValueError("its source are log-mel frames")
        return {name: front_end.features, "max_source_positions": config.for_side("encoder").max_length}


class Whisper(BartLike):
    """Pre-norm with learned positions on both sides; convolutions over log-mel frames, keys without a bias."""

    model_type = "whisper"
    title = "Whisper"
    architectures = {"lm": "WhisperForConditionalGeneration", "none": "WhisperModel"}
    logits_bias = False
    parts = BartLike.parts | {
        "attention.bias": ("q", "v", "out"),
        "position": "learned",
        "placement": "pre",
    }
    fields = {
        name: entry
        for name, entry in BartLike.fields.items()
        if name not in ("vocab_size", "max_position_embeddings", "scale_embedding")
    } | {
        "vocab_size": Field("vocab_size", default=51865),
        "tie_word_embeddings": Field("embedding.tied", default=True),
        "max_target_positions": TableLength(default=448),
        "num_mel_bins": MelBins(),
        "num_key_value_heads": Pinned(None),
    }
    unprefixed = ("proj_out.",)
    embedding = "model.decoder.embed_tokens.weight"
    head = "proj_out.weight"
    copies: ClassVar[dict[str, str]] = {}
    passthrough = ()
    harmless = BartLike.harmless | set(HARMLESS.split())
    unsupported = frozenset()

    def embedding_of(self, config: ModelConfig) -> str:
        return self.embedding

    def duplicates(self, config: ModelConfig) -> dict[str, str]:
        return Family.duplicates(self, config)

    def source_inputs(self, source: Tensor) -> dict[str, Tensor]:
        return {"input_features": source.mT}

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        for index in range(len(STRIDES)):
            yield from linear(f"front_end.{index}.convolution", f"model.encoder.conv{index + 1}")
        yield from self.stack("encoder", ("self_attn_layer_norm", "final_layer_norm"))
        yield from self.stack("decoder", ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"))


FAMILY = Whisper()

"""The configuration of a whole model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, NamedTuple

from phasor.config.attention import AttentionConfig
from phasor.config.cached import CachedTensor, merge_by_name
from phasor.config.front_end import FrontEndConfig
from phasor.config.heads import ClassifierConfig, HeadConfig, LanguageHeadConfig, LogitsConfig, NoHeadConfig
from phasor.config.parts import (
    DropoutConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    InitConfig,
    LayerNormConfig,
    NormalInitConfig,
    NormConfig,
    PlacementConfig,
    PreConfig,
)
from phasor.config.positions import Extension, PositionConfig
from phasor.config.schema import (
    MOST_FEATURES,
    MOST_HEAD_DIM,
    MOST_LAYERS,
    MOST_LENGTH,
    MOST_WIDTH,
    Config,
    by_kind,
    derived_field,
    names,
    positive,
    with_article,
)

SHAPES = {
    "encoder": "every token attends to every token",
    "decoder": "a token attends to itself and the tokens before it",
    "encoder-decoder": "a decoder that also attends to an encoder's output",
}
Shape = Literal["encoder", "decoder", "encoder-decoder"]
Side = Literal["encoder", "decoder"]


class LayerConfig(Config):
    """What one layer has different from the model; fields left out are the model's."""

    position: PositionConfig | None = None
    attention: AttentionConfig | None = None
    feedforward: FeedForwardConfig | None = None

    def check(self) -> None:
        if self.position is not None and "input" in self.position.acts_on:
            raise ValueError(
                f"LayerConfig.position is {self.position.kind!r}, which acts on the model's input and not in a layer; "
                "set it as ModelConfig.position"
            )


class EncoderConfig(Config):
    """What the encoder of an encoder-decoder has different from the decoder; fields left out are the model's.

    Where its width differs, the source has its own table of tokens, by `EmbeddingConfig.source_vocab_size`.

    >>> wide = EncoderConfig(dim=16, num_heads=4)
    >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=2, shape="encoder-decoder",
    ...     embedding={"source_vocab_size": 9}, encoder=wide)
    >>> config.for_side("encoder").head_dim, config.for_side("encoder").hidden_dim, config.hidden_dim
    (4, 64, 32)
    """

    dim: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_dim: int | None = None
    max_length: int | None = None
    layers: tuple[LayerConfig, ...] | None = None

    def check(self) -> None:
        positive(self, "dim", "num_heads", "num_kv_heads", most=MOST_FEATURES)
        positive(self, "head_dim", most=MOST_HEAD_DIM)
        positive(self, "hidden_dim", most=MOST_WIDTH)
        positive(self, "max_length", most=MOST_LENGTH)


class Layer(NamedTuple):
    """The parts of one layer, all of them resolved."""

    position: PositionConfig
    attention: AttentionConfig
    feedforward: FeedForwardConfig


class ModelConfig(Config):
    """One Transformer, every part a choice.

    A kind's name stands for its defaults: `norm="rmsnorm"` is `norm=RMSNormConfig()`. `layers` is a
    pattern repeated over the depth, for layers that differ (local and global attention, NoPE layers). With
    `num_blocks` neighboring layers share their weights: as many in a row as make that number of blocks (ALBERT).
    `encoder` is what an encoder has different from the decoder beside it.
    `max_length` is the length the model is meant for; `trained_length` the longest it was trained at, which training
    records.

    >>> config = ModelConfig(vocab_size=100, dim=64, num_layers=2, num_heads=4, position="rotary", norm="rmsnorm")
    >>> config.num_kv_heads, config.head_dim, config.hidden_dim
    (4, 16, 256)
    >>> ModelConfig.from_json(config.to_json()) == config
    True
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    shape: Shape = "decoder"
    num_encoder_layers: int | None = None
    num_blocks: int | None = None
    num_kv_heads: int = derived_field(lambda config: config.num_heads)
    head_dim: int = derived_field(lambda config: config.dim // max(config.num_heads, 1))  # `check` refuses 0 heads
    hidden_dim: int = derived_field(lambda config: 4 * config.dim)
    max_length: int = 2048
    trained_length: int | None = None
    position: PositionConfig = by_kind("none")
    attention: AttentionConfig = by_kind("softmax")
    feedforward: FeedForwardConfig = FeedForwardConfig()
    norm: NormConfig = LayerNormConfig()
    placement: PlacementConfig = PreConfig()
    final_norm: bool | None = None
    embedding: EmbeddingConfig = EmbeddingConfig()
    head: HeadConfig = LanguageHeadConfig()
    dropout: DropoutConfig = DropoutConfig()
    init: InitConfig = NormalInitConfig()
    layers: tuple[LayerConfig, ...] = ()
    encoder: EncoderConfig | None = None

    def check(self) -> None:
        positive(self, "num_layers", "num_encoder_layers", "num_blocks", most=MOST_LAYERS)
        positive(self, "dim", "num_heads", "num_kv_heads", most=MOST_FEATURES)
        positive(self, "head_dim", most=MOST_HEAD_DIM)
        positive(self, "vocab_size", "hidden_dim", most=MOST_WIDTH)
        positive(self, "max_length", "trained_length", most=MOST_LENGTH)
        if "head_dim" in self.left_out and self.dim % self.num_heads:
            raise ValueError(
                f"ModelConfig.dim ({self.dim}) is not divisible by num_heads ({self.num_heads}); "
                "change one of them or give head_dim"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig.num_heads ({self.num_heads}) is not divisible by num_kv_heads ({self.num_kv_heads})"
            )
        if self.num_encoder_layers is not None and self.shape != "encoder-decoder":
            raise ValueError(f"ModelConfig.num_encoder_layers is for an encoder-decoder, not for a {self.shape}")
        if self.embedding.source_vocab_size is not None and self.shape != "encoder-decoder":
            raise ValueError(f"EmbeddingConfig.source_vocab_size is for an encoder-decoder, not for a {self.shape}")
        if self.embedding.front_end is not None:
            self._check_front_end(self.embedding.front_end)
        if self.embedding.mask_token is not None and self.shape != "encoder":
            raise ValueError(f"EmbeddingConfig.mask_token is for an encoder, and not for {with_article(self.shape)}")
        if isinstance(self.head, NoHeadConfig) and self.head.project and self.embedding.width is None:
            raise ValueError("NoHeadConfig.project needs EmbeddingConfig.width: it is the width projected to")
        if self.shape != "encoder" and self.head.pooler not in ("none", "last", "last-dense"):
            raise ValueError(
                f"the pooler {self.head.pooler!r} needs an encoder, not {with_article(self.shape)}; "
                "a decoder may have the pooler 'last' or 'last-dense'"
            )
        if (
            self.shape == "encoder-decoder"
            and self.head.pooler != "none"
            and not isinstance(self.head, ClassifierConfig)
        ):
            raise ValueError("the pooler of an encoder-decoder is for the head 'sequence-classifier'")
        if self.layers and len(self.layers) > max(self.num_layers, self.num_encoder_layers or 0):
            raise ValueError(
                f"ModelConfig.layers lists {len(self.layers)} layers, but the model has {self.num_layers}: "
                "it is a pattern repeated over the depth"
            )
        for layer in map(self.layer, range(max(1, len(self.layers)))):
            if layer.position.acts_on and not layer.attention.takes_positions:
                raise ValueError(
                    f"LayerConfig.position is {layer.position.kind!r}, and {layer.attention.kind} attention takes no "
                    "positions: leave it out"
                )
            unfit = self.position if "input" in self.position.acts_on else layer.position
            if not (layer.attention.present or layer.feedforward.present):
                raise ValueError(
                    "a layer has attention, a feed-forward network or both: its attention is 'none', "
                    "and FeedForwardConfig.hidden_dim is 0"
                )
            name = type(layer.attention).__name__
            if layer.attention.cap_sinks and layer.position.follows_input:
                raise ValueError(
                    f"{name}.cap_sinks caps the distance to sink tokens, "
                    f"and the positions {layer.position.kind!r} follow the input instead"
                )
            if layer.attention.cap_sinks and ("input" in unfit.acts_on or unfit.axes > 1):
                raise ValueError(
                    f"{name}.cap_sinks needs positions of one axis that act inside layers, and not {unfit.kind!r}"
                )
            layer.attention.check_model(self)
        for index in range(max(self.depth("encoder"), self.depth("decoder")) if self.layers else 1):
            self.shared_source(index)  # or refused
        if self.embedding.per_layer_width is not None:
            self._check_layer_inputs()
        if self.placement.kind not in ("pre", "sandwich") and any(
            self.layer(index).feedforward.branch_norms for index in range(max(1, len(self.layers)))
        ):
            raise ValueError(
                f"ExpertsConfig.branch_norms takes the placement 'pre' or 'sandwich', not {self.placement.kind!r}"
            )
        if self.num_blocks is not None:
            self._check_blocks(self.num_blocks)
        if self.encoder is not None:
            self._check_encoder(self.encoder)
        if self.position not in self.layer_positions():
            self.position.check_model(self)
        for position, attention, _ in map(self.layer, range(max(1, len(self.layers)))):
            position.check_model(self.with_heads_of(attention))
        for index in range(max(1, len(self.layers))):
            self.cached_per_token(index)  # or refused

    def _check_blocks(self, count: int) -> None:
        if self.shape == "encoder-decoder":
            raise ValueError("ModelConfig.num_blocks is for an encoder or a decoder, not for an encoder-decoder")
        if self.num_layers % count:
            raise ValueError(
                f"ModelConfig.num_layers ({self.num_layers}) is not divisible by num_blocks ({count}): "
                "as many layers share each block"
            )
        if count < self.num_layers and isinstance(self.placement, PreConfig) and not self.placement.first_norm:
            raise ValueError("PreConfig.first_norm false makes the first layer another one than those that share it")
        for index in range(self.num_layers if self.layers else 0):
            first = index // self.layers_per_block * self.layers_per_block
            if self.layer(index)[1:] != self.layer(first)[1:]:
                raise ValueError(
                    f"layer {index} shares the weights of layer {first}, by ModelConfig.num_blocks ({count}), "
                    "and its attention or its feed-forward network is another one"
                )

    def _check_encoder(self, encoder: EncoderConfig) -> None:
        if self.shape != "encoder-decoder":
            raise ValueError(f"ModelConfig.encoder is for an encoder-decoder, not for {with_article(self.shape)}")
        try:
            side = self.for_side("encoder")
        except ValueError as error:
            raise ValueError(f"ModelConfig.encoder: {error}") from None
        own = self.embedding.source_vocab_size, self.embedding.front_end
        if side.dim != self.dim and own == (None, None):
            raise ValueError(
                f"EncoderConfig.dim ({encoder.dim}) is not the decoder's ({self.dim}), and they share a table of "
                "tokens: give EmbeddingConfig.source_vocab_size"
            )

    def _check_front_end(self, front_end: FrontEndConfig) -> None:
        if self.shape != "encoder-decoder":
            raise ValueError(f"EmbeddingConfig.front_end is for an encoder-decoder, not for {with_article(self.shape)}")
        if self.embedding.source_vocab_size is not None:
            raise ValueError("EmbeddingConfig.front_end takes features, and source_vocab_size is of tokens: give one")
        if self.embedding.width is not None or self.embedding.token_types:
            raise ValueError("EmbeddingConfig.front_end gives a source vectors without width and token_types")
        dim, given = self.for_side("encoder").dim, front_end.convolutions[-1].features
        if given != dim:
            raise ValueError(
                f"the last of FrontEndConfig.convolutions gives {given} features, and the encoder has {dim}"
            )

    def _check_layer_inputs(self) -> None:
        if self.shape != "decoder":
            raise ValueError(f"EmbeddingConfig.per_layer_width is for decoders, and this is an {self.shape}")
        for network in (self.layer(index).feedforward for index in range(max(1, len(self.layers)))):
            if not network.gated:
                raise ValueError(
                    "EmbeddingConfig.per_layer_width needs a gated activation, which gates the inputs of layers too, "
                    f"and not {network.activation.kind!r}"
                )

    @property
    def input_width(self) -> int:
        """Features of the vectors that positions and token types are added to."""
        return self.embedding.width or self.dim if self.embedding.project == "sum" else self.dim

    @property
    def has_logits(self) -> bool:
        """Whether the model ends in scores over its vocabulary."""
        return isinstance(self.head, LogitsConfig)

    @property
    def ends_in_norm(self) -> bool:
        """Whether a norm follows the last block: `final_norm`, or the placement's default."""
        return self.placement.final_norm if self.final_norm is None else self.final_norm

    @property
    def input_position(self) -> PositionConfig:
        """The model's own scheme, with what follows from the model filled in: the length of a learned table.

        Where it acts inside layers and each of them has its own, nothing of it is left, and it is none.
        """
        used = "input" in self.position.acts_on or self.position in self.layer_positions()
        return self.position.resolve(self) if used else PositionConfig.from_dict({"kind": "none"})

    @property
    def layers_per_block(self) -> int:
        """How many neighboring layers share their weights."""
        return self.num_layers // (self.num_blocks or self.num_layers)

    def depth(self, side: Side) -> int:
        """How many layers the encoder or the decoder has."""
        return self.num_encoder_layers or self.num_layers if side == "encoder" else self.num_layers

    def for_side(self, side: Side) -> ModelConfig:
        """The model as its encoder or its decoder takes it: what `encoder` names stands for the model's own."""
        return self if side == "decoder" or self.encoder is None else self._encoder_side

    @cached_property
    def _encoder_side(self) -> ModelConfig:
        given = {name: getattr(self.encoder, name) for name in names(EncoderConfig)}
        given = {name: value for name, value in given.items() if value is not None}
        return self.replace(num_layers=self.depth("encoder"), num_encoder_layers=None, encoder=None, **given)

    def layer(self, index: int) -> Layer:
        """The parts of one layer, filled in from the model's.

        >>> local = LayerConfig(attention={"window": 128})
        >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=3, num_heads=1, layers=(local, LayerConfig()))
        >>> [config.layer(i).attention.window for i in range(3)]
        [128, None, 128]
        """
        own = self.layers[index % len(self.layers)] if self.layers else LayerConfig()
        attention = own.attention or self.attention
        outside = "input" in self.position.acts_on or not attention.takes_positions
        in_layer = PositionConfig.from_dict({"kind": "none"}) if outside else self.position
        return Layer(
            position=own.position or in_layer,
            attention=attention,
            feedforward=own.feedforward or self.feedforward,
        )

    def shared_source(self, index: int) -> int:
        """The layer whose keys and values, or index, a layer takes: itself, or one before it whose it shares.

        That is the last one with the same positions, and with the attention that its own names.

        >>> shared = LayerConfig(attention={"shared_kv": True})
        >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=4, num_heads=1, layers=({}, {}, shared, shared))
        >>> [config.shared_source(i) for i in range(4)]
        [0, 1, 1, 1]
        """
        position, attention, _ = self.layer(index)
        if attention.shared_source is None:
            return index
        for earlier in reversed(range(index)):
            if self.layer(earlier)[:2] == (position, attention.shared_source):
                return earlier
        raise ValueError(
            f"layer {index} shares the {attention.shared_part} of a layer before it with the same attention and "
            "positions, and there is none"
        )

    def rotated_width(self, position: PositionConfig) -> int:
        """Features of a head that a scheme rotates unless it names fewer: all that attention in its layers allows."""
        layers = (self.layer(index) for index in range(max(1, len(self.layers))))
        widths = [layer.attention.rotated_width(self) for layer in layers if position in layer.position.parts]
        return min(widths, default=self.head_dim)

    def schemes(self, side: Side) -> tuple[list[tuple[PositionConfig, ModelConfig]], list[int]]:
        """The distinct schemes of a side, each with the model as it takes it, and the index of each layer's among them.

        The first is the model's own. Layers whose heads differ do not share a scheme.
        """
        layers = [self.layer(index) for index in range(self.depth(side))]
        used = [(layer.position, self.with_heads_of(layer.attention)) for layer in layers]
        own = next((one for one in used if one[0] == self.input_position), (self.input_position, self))
        found = list(dict.fromkeys([own, *used]))
        return found, [found.index(one) for one in used]

    def with_heads_of(self, attention: AttentionConfig) -> ModelConfig:
        """The model as positions in layers with this attention take it: its heads are those of the attention.

        Layers with other heads have no positions in it.

        >>> wide = LayerConfig(attention={"head_dim": 16})
        >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=4, num_heads=1, position="rotary", layers=(wide, {}))
        >>> found = config.with_heads_of(config.layer(0).attention)
        >>> config.head_dim, found.head_dim, [found.layer(i).position.kind for i in range(4)]
        (8, 16, ['rotary', 'none', 'rotary', 'none'])
        """
        return self._by_heads[attention.heads_of(self)]

    @cached_property
    def _by_heads(self) -> dict[tuple[int, int], ModelConfig]:
        """The model for each width and number of key/value heads that layers have."""
        own = map(self.layer, range(max(1, len(self.layers))))
        every = [layer._replace(attention=layer.attention.resolve(self)) for layer in own]
        if {layer.attention.heads_of(self) for layer in every} == {(self.head_dim, self.num_kv_heads)}:
            return {(self.head_dim, self.num_kv_heads): self}
        found: dict[tuple[int, int], ModelConfig] = {}
        for attention in (layer.attention for layer in every):
            heads = head_dim, num_kv_heads = attention.heads_of(self)
            if heads in found:
                continue
            other = LayerConfig(position=PositionConfig.from_dict({"kind": "none"}), attention=attention)
            layers = (LayerConfig(**x._asdict()) if x.attention.heads_of(self) == heads else other for x in every)
            found[heads] = self.replace(head_dim=head_dim, num_kv_heads=num_kv_heads, layers=tuple(layers))
        return found

    def cached_per_token(self, index: int) -> dict[str, CachedTensor]:
        """What one layer keeps for each token in a cache, by name: that of its attention and of its position scheme.

        >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=2, position="forget")
        >>> {name: (kept.shape, kept.dtype) for name, kept in config.cached_per_token(0).items()}
        {'keys': ((2, 4), None), 'values': ((2, 4), None), 'gate_sums': ((2,), 'int64')}
        """
        position, attention, _ = self.layer(index)
        kept = position.cached_per_token(self.with_heads_of(attention))
        return merge_by_name(attention.cached_per_token(self), kept)

    def cached_per_sequence(self, index: int) -> dict[str, CachedTensor]:
        """What one layer keeps for each sequence in a cache, by name: the state of its attention.

        >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=2, attention="gated-delta")
        >>> {name: kept.shape for name, kept in config.cached_per_sequence(0).items()}
        {'state': (2, 2, 4), 'inputs': (3, 16)}
        """
        return self.layer(index).attention.cached_per_sequence(self)

    def layer_positions(self) -> list[PositionConfig]:
        """The distinct schemes that act inside layers, in the order they first appear."""
        return list(dict.fromkeys(self.layer(i).position for i in range(max(1, len(self.layers)))))

    def with_extension(self, extension: Extension | None) -> ModelConfig:
        """The same model with another extension of its rotary scheme; layers that set their own rotary scheme keep it.

        Its `max_length` is the length that the extension reaches; where an extension is removed, the length before it.
        Where frequencies are chosen by the length of the text (dynamic extensions) it is the length from which they
        change.

        >>> from phasor.nn.positions import LinearScaling
        >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=2, num_heads=1, position="rotary", max_length=512)
        >>> extended = config.with_extension(LinearScaling(factor=2.0))
        >>> extended.position.extension.factor, extended.max_length, extended.with_extension(None) == config
        (2.0, 1024, True)
        """
        old = self.extendable_position()
        new = old.with_extension(extension)
        return self.change_layers(
            lambda layer: layer.replace(position=new) if layer.position == old else layer,
            position=new if self.position == old else self.position,
            max_length=self.extended_length(old, extension),
        )

    def change_layers(self, change: Callable[[LayerConfig], LayerConfig], **fields: Any) -> ModelConfig:
        """The same model with other fields, and every layer of its patterns changed."""
        encoder = self.encoder
        if encoder is not None and encoder.layers is not None:
            encoder = encoder.replace(layers=tuple(map(change, encoder.layers)))
        return self.replace(layers=tuple(map(change, self.layers)), encoder=encoder, **fields)

    def extendable_position(self) -> PositionConfig:
        """The scheme that an extension changes: the first one that can be extended, or the model's own."""
        schemes = [p for p in (self.position, *self.layer_positions()) if p.extendable]
        return schemes[0] if schemes else self.position

    def extended_length(self, scheme: PositionConfig, extension: Extension | None) -> int:
        """The maximum length where a scheme of this model gets another extension, or none."""
        if extension is None and getattr(scheme, "extension", None) is None:
            return self.max_length
        original = self.original_length(scheme)
        return original if extension is None else extension.extended_length(original)

    def original_length(self, *schemes: PositionConfig) -> int:
        """The length before any extension: by the extension of a scheme, or else the one the model was trained at.

        Where training did not record a length it is taken to be `max_length`. A scheme is one of `schemes`, by default
        those of all layers.

        >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=2, num_heads=1, position="rotary", max_length=512)
        >>> config.original_length(), config.replace(trained_length=128).original_length()
        (512, 128)
        """
        for scheme in schemes or self.layer_positions():
            extension: Extension | None = getattr(scheme, "extension", None)
            if extension is not None:
                return extension.trained_length(self.max_length)
        return self.trained_length or self.max_length

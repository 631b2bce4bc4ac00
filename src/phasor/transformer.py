"""The Transformer: embed, blocks, norm, head. One class for encoders, decoders and encoder-decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from types import NoneType
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig, PositionConfig
from phasor.config.generation import SpecialTokens
from phasor.config.model import Side
from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.protocol import EncoderOutput, KVCacheProtocol
from phasor.nn.attention.base import Attention, AttentionContext, CappedSinks, cap_sinks
from phasor.nn.block import Block
from phasor.nn.checks import (
    check_attention_mask,
    check_documents,
    check_model,
    check_sources,
    check_token_positions,
    check_token_types,
    prefix_lengths,
    require_tokens,
)
from phasor.nn.embedding import Embedding
from phasor.nn.front_end import FrontEnd
from phasor.nn.heads import BALANCE_WEIGHT, Loss, Pooler, build_head, head_loss
from phasor.nn.init import initialize
from phasor.nn.layer_input import LayerEmbedding
from phasor.nn.layer_step import CrossStep, LayerStep
from phasor.nn.moe import mixtures_of, routed_tokens
from phasor.nn.norm import build_norm
from phasor.nn.positions.base import Position, build_position
from phasor.nn.record import Record, as_record
from phasor.nn.sequence import KeyInfo, Length, SequenceArgs, SequenceInfo, count_text, sequence_info, shift_right
from phasor.ops.attention import Mask

NO_POSITION = Position()  # of cross-attention


class Stack(nn.Module):
    """Positions, blocks and the last norm of an encoder or a decoder."""

    def __init__(self, model: ModelConfig, side: Side) -> None:
        super().__init__()
        self.side = side
        self.layers = [model.layer(i) for i in range(model.depth(side))]
        schemes, self.scheme_index = model.schemes(side)
        self.schemes = [scheme for scheme, _ in schemes]
        self.index_in_scheme = [self.scheme_index[:i].count(which) for i, which in enumerate(self.scheme_index)]
        self.sources = [model.shared_source(i) for i in range(len(self.layers))]
        attentions = list(dict.fromkeys(layer.attention for layer in self.layers))
        self.attention_index = [attentions.index(layer.attention) for layer in self.layers]
        self.positions = nn.ModuleList(build_position(*scheme, side) for scheme in schemes)
        self.axes = max(scheme.axes for scheme in self.schemes)
        self.needs_length = any(scheme.depends_on_length for scheme in self.schemes)
        self.windowed = any(layer.attention.window or layer.attention.sparse for layer in self.layers)
        types = model.embedding.token_types
        width = model.input_width
        # Given a table it initializes none: on the meta device that would import half of PyTorch's compiler.
        self.token_types = nn.Embedding(types, width, _weight=torch.empty(types, width)) if types else None
        self.embedding_norm = build_norm(model.norm, width) if model.embedding.norm else nn.Identity()
        self.dropout = nn.Dropout(model.dropout.embedding)
        self.project = nn.Linear(width, model.dim) if model.embedding.project == "sum" else nn.Identity()
        self.block_index = [i // model.layers_per_block for i in range(len(self.layers))]
        distinct = enumerate(self.layers[:: model.layers_per_block])
        self.blocks = nn.ModuleList(Block(model, side, layer, first=i == 0) for i, layer in distinct)
        self.norm = build_norm(model.norm, model.dim) if model.ends_in_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        seq: SequenceInfo,
        *,
        token_types: Tensor | None = None,
        layer_inputs: Tensor | None = None,
        prefix_length: Tensor | None = None,
        memory: EncoderOutput | None = None,
        cache: KVCacheProtocol | None = None,
        record: Record | None = None,
    ) -> Tensor:
        record = as_record(record)
        x = self.position(0).on_input(x, seq)
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_types is None else self.token_types(token_types))
        x = self.project(self.dropout(self.embedding_norm(x)))
        records = record.per_layer(len(self.layers))
        contexts = self._self_attention_contexts(x, seq, prefix_length, cache, records)
        cross_contexts: list[AttentionContext] = []
        if memory is not None:
            cross_contexts = self._cross_attention_contexts(x, seq, memory, cache, records)
        inputs = repeat(None) if layer_inputs is None else layer_inputs.unbind(-2)
        for i, *given in zip(self.block_index, contexts, cross_contexts or repeat(None), records, inputs, strict=False):
            record.add_hidden(x)
            x = self.blocks[i](x, *given)
        record.collect(records)
        x = self.norm(x)
        record.add_hidden(x)
        if cache is not None:
            cache.commit()
            if memory is not None and cache.memory is None:
                cache.memory = memory
                cache.cross = [cast(CrossStep, ctx.step).kept or {} for ctx in cross_contexts]
        return x

    def position(self, which: int) -> Position:
        """The module of one of the stack's schemes; the first is the model's own."""
        return cast(Position, self.positions[which])

    def _self_attention_contexts(
        self,
        x: Tensor,
        seq: SequenceInfo,
        prefix_length: Tensor | None,
        cache: KVCacheProtocol | None,
        records: Sequence[Record],
    ) -> list[AttentionContext]:
        """The context of each layer's attention; every scheme prepares once for all the layers that use it."""
        schemes = [cast(Position, scheme) for scheme in self.positions]
        windows = [
            layer.attention.window if cache is not None and schemes[which].depends_on_window else None
            for layer, which in zip(self.layers, self.scheme_index, strict=True)
        ]
        prepared = {
            (which, window): schemes[which].prepare(replace(seq, cached_window=window), x)
            for which, window in dict.fromkeys(zip(self.scheme_index, windows, strict=True))
        }
        own_mask = Mask(
            causal=self.side == "decoder",
            prefix_length=prefix_length,
            key_mask=seq.attention_mask,
            query_document_ids=seq.document_ids,
            key_document_ids=seq.document_ids,
            order=seq.order,
        )
        rows = seq.rows
        own_step = LayerStep(own_mask, rows, counted=seq.max_distance is not None)
        steps = [own_step] * len(self.layers) if cache is None else cache.begin(seq, own_mask)
        contexts: list[AttentionContext] = []
        masks: dict[tuple[int, int, bool], Mask] = {}
        parts: dict[int, list[Tensor]] = {source: [] for i, source in enumerate(self.sources) if source != i}
        shared: dict[tuple[int, int, int], tuple[Any, CappedSinks | None]] = {}  # by layers with the same keys
        for index, (layer, which, step) in enumerate(zip(self.layers, self.scheme_index, steps, strict=True)):
            if self.sources[index] in parts:
                step = replace(step, shared=parts[self.sources[index]])
            mask_key = id(step.mask), self.attention_index[index], "scores" in layer.position.acts_on
            key, scheme = (which, *mask_key[:2]), schemes[which]
            assert step.key_positions is not None
            if mask_key not in masks:
                positions = (rows, step.key_positions) if mask_key[-1] else None
                attention = cast(Block, self.blocks[self.block_index[index]]).attention
                masks[mask_key] = attention.prepare_mask(step.mask, x, step.key_positions.shape[1], positions)
            if key not in shared:
                own_seq = replace(seq, cached_window=windows[index])
                sinks = cap_sinks(scheme, own_seq, layer.attention, x)
                capped = None if sinks is None else sinks.positions
                keys = KeyInfo(own_seq, masks[mask_key], step.key_positions, capped)
                shared[key] = scheme.prepare_keys(prepared[which, windows[index]], keys, x), sinks
            weights = scheme.layer_weights(self.index_in_scheme[index])
            ctx = AttentionContext(masks[mask_key], scheme, step, shared[key][0], weights, rows)
            ctx.capped_sinks, ctx.weights = shared[key][1], records[index].attention
            contexts.append(ctx)
        return contexts

    def schemes_with_max_positions(self, like: Tensor) -> list[PositionConfig]:
        """The schemes that are defined for some number of positions alone, through a cache too.

        >>> stack = Stack(ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=1, position="xpos"), "decoder")
        >>> [scheme.max_positions for scheme in stack.schemes_with_max_positions(torch.zeros(1))]
        [32768]
        """
        own = [scheme for scheme in self.schemes[:1] if "input" in scheme.acts_on and scheme.max_positions is not None]
        in_layers = [
            layer.position
            for layer, which in zip(self.layers, self.scheme_index, strict=True)
            if self.position(which).max_cached_positions(layer.attention.window, like) is not None
        ]
        return list(dict.fromkeys([*own, *in_layers]))

    def _cross_attention_contexts(
        self,
        x: Tensor,
        seq: SequenceInfo,
        memory: EncoderOutput,
        cache: KVCacheProtocol | None,
        records: Sequence[Record],
    ) -> list[AttentionContext]:
        """The context of each layer's cross-attention: the encoder's output, without positions.

        A layer projects its keys and values itself, unless the cache has them.
        """
        mask = Mask(
            key_mask=memory.attention_mask,
            query_document_ids=seq.document_ids,
            key_document_ids=memory.document_ids,
            aligned=False,
        )
        keys = (memory.hidden if memory.attention_mask is None else memory.attention_mask).shape[1]
        mask = cast(Attention, cast(Block, self.blocks[0]).cross).prepare_mask(mask, x, keys)
        kept: Sequence[dict[str, Tensor] | None] = [None if cache is None else {} for _ in self.layers]
        if cache is not None and cache.memory is not None:
            kept = cache.cross
        steps = [CrossStep(mask, None, memory.hidden, own) for own in kept]
        return [
            AttentionContext(mask, NO_POSITION, step, weights=record.cross_attention)
            for step, record in zip(steps, records, strict=True)
        ]


class Transformer(nn.Module):
    """A Transformer: decoder, encoder or encoder-decoder, with the parts its configuration names.

    Decoders and encoders take tokens `[B, T]`, encoder-decoders a source `[B, S]`, or features `[B, frames, features]`
    where they have a front end, and the already shifted target `[B, T]`; the result is the head's output, logits
    `[B, T, vocab]` by default.

    - `positions`: int64 `[T]`, `[B, T]`, or `[axes, B, T]` for axial and multi-section schemes. By default
      they count real tokens from 0 and restart in every document.
    - `attention_mask`: True where a token is real, `[B, T]`. `document_ids`: one id per token;
      tokens attend within their own document.
    - `length`: the length the sequence is planned to grow to, for schemes that depend on it: an integer, one per
      row, or one list per row with one per document. By default the number of real tokens.
    - `prefix_length`: how many first tokens of a row all tokens of a decoder can see (an integer, or one per row).
    - `token_types`: int64 `[B, T]` for models that have them.
    - `cache`: from `new_cache`; the tokens follow those it holds, and are added to them. An encoder-decoder's cache
      keeps the encoder's output too: after the first call it is `model(None, target, cache=cache)`.
    - `record`: a `Record` of intermediate results to keep.
    - `head`: False returns the hidden states `[B, T, dim]` that the head would take.

    For an encoder-decoder these describe the source, and `target_positions`, `target_attention_mask`,
    `target_document_ids` and `target_length` the target, which one that classifies sequences makes of the source.

    >>> import torch
    >>> model = Transformer(ModelConfig(vocab_size=50, dim=32, num_layers=2, num_heads=4, position="rotary"))
    >>> model(torch.randint(0, 50, (2, 7))).shape
    torch.Size([2, 7, 50])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_model(config)
        self.config, self.padding_token = config, getattr(config.input_position, "padding_token", None)
        self.tokens = Embedding(config, config.vocab_size)
        source_size = config.embedding.source_vocab_size
        self.source_tokens = None if source_size is None else Embedding(config.for_side("encoder"), source_size)
        self.front_end = None if config.embedding.front_end is None else FrontEnd(config.embedding.front_end)
        self.per_layer = None if config.embedding.per_layer_width is None else LayerEmbedding(config)
        self.encoder = None if config.shape == "decoder" else Stack(config.for_side("encoder"), "encoder")
        self.decoder = None if config.shape == "encoder" else Stack(config, "decoder")
        self.pooler = None if config.head.pooler == "none" else Pooler(config)
        self.head = build_head(config)
        self.tokenizer: Any = None  # a folder's tokenizer, where the model was loaded with one
        self.chat_template: Any = None  # a `ChatTemplate` instead of its folder's
        self.source_tokenizer: Any = None  # that of an encoder-decoder's source, where it is a different one
        self.special = SpecialTokens()
        self.generation_settings: dict[str, Any] = {}  # a folder's, under the names of generation_config.json
        self.origin: Any = None  # the folder it was loaded from, with the files and tensors that belong to it
        self.adapters: dict[str, Any] = {}  # by name, as `phasor.adapters` adds them
        self.newly_initialized: tuple[str, ...] = ()  # weights initialized when it was loaded with other positions
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all weights as the configuration's `init` says; on the meta device nothing happens."""
        if self.tokens.weight.is_meta:
            return
        side: Side = "encoder" if self.decoder is None else "decoder"
        for name, part in self.named_children():
            initialize(part, self.config, "encoder" if name == "encoder" else side)

    def forward(
        self,
        tokens: Tensor | None,
        target: Tensor | None = None,
        *,
        cache: KVCacheProtocol | None = None,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        length: Length | None = None,
        token_types: Tensor | None = None,
        prefix_length: int | Sequence[int] | Tensor | None = None,
        target_positions: Tensor | None = None,
        target_attention_mask: Tensor | None = None,
        target_document_ids: Tensor | None = None,
        target_length: Length | None = None,
        record: Record | None = None,
        head: bool = True,
    ) -> Tensor:
        record = as_record(record)
        args: SequenceArgs = {"positions": positions, "attention_mask": attention_mask}
        args |= {"document_ids": document_ids, "length": length}
        target_args: SequenceArgs = {
            "positions": target_positions,
            "attention_mask": target_attention_mask,
            "document_ids": target_document_ids,
            "length": target_length,
        }
        scored = attention_mask if target is None else target_attention_mask
        if self.config.shape == "encoder-decoder":
            if target is None:
                target = shift_right(tokens, self.special.start, self.config.head.of_sequence)
            if prefix_length is not None:
                raise ValueError("prefix_length is for decoders; all of an encoder-decoder's source can be seen")
            memory = None if cache is None else cache.memory
            if memory is None:
                record.encoder = Record(*record.keep)
                memory = self.encode(require_tokens(tokens), token_types=token_types, record=record.encoder, **args)
            elif tokens is not None or token_types is not None or any(x is not None for x in args.values()):
                raise ValueError(
                    "the cache holds its source already: continue with model(None, target, cache=cache) "
                    "and no arguments about the source"
                )
            hidden = self.decode(target, memory, cache=cache, record=record, **target_args)
        else:
            given = [f"target_{name}" for name, value in target_args.items() if value is not None]
            if target is not None or given:
                what = "a target" if target is not None else given[0]
                raise ValueError(f"{what} is for an encoder-decoder, and this is a {self.config.shape}")
            if self.decoder is not None:
                hidden = self.decode(
                    require_tokens(tokens),
                    token_types=token_types,
                    prefix_length=prefix_length,
                    cache=cache,
                    record=record,
                    **args,
                )
            elif prefix_length is not None or cache is not None:
                what = "prefix_length" if prefix_length is not None else "a cache"
                raise ValueError(f"{what} is for a decoder; an encoder sees every token at once")
            else:
                hidden = self.encode(require_tokens(tokens), token_types=token_types, record=record, **args).hidden
        if self.pooler is not None:
            record.pooled = self.pooler(hidden, scored)
        if not head:
            return hidden
        features = record.pooled if self.config.head.of_sequence and record.pooled is not None else hidden
        return features if self.head is None else self.head(features, self.tokens.table)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the blocks, in place: one graph serves all that are alike. Arguments are those of `torch.compile`.

        The model around its blocks stays eager. A block whose inner hooks change is compiled again. On a GPU, small
        batches are fastest with `mode="reduce-overhead"`, torch's CUDA graphs.

        >>> model = Transformer(ModelConfig(vocab_size=50, dim=32, num_layers=3, num_heads=4))
        >>> tokens = torch.randint(0, 50, (2, 8))
        >>> before = model(tokens)
        >>> model.compile(backend="eager")
        >>> torch.equal(model(tokens), before)
        True
        """
        for block in self.blocks():
            block.compile(*args, **options)

    def blocks(self) -> list[Block]:
        """The blocks of the encoder and of the decoder, in order; one that layers share stands there once."""
        stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
        return [cast(Block, block) for stack in stacks for block in stack.blocks]

    def loss(
        self,
        *inputs: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        balance_weight: float = BALANCE_WEIGHT,
        **args: Any,
    ) -> Loss:
        """The cross-entropy of `targets [B, T]`, a mean over tokens by their `weights [B, T]`, and its other terms.

        Inputs and other arguments are those of a forward pass, a cache included: a long text is read in chunks.
        Not all logits are held at once. Routed experts add their balancing loss, times `balance_weight`.

        >>> model = Transformer(ModelConfig(vocab_size=50, dim=32, num_layers=2, num_heads=4))
        >>> tokens = torch.randint(0, 50, (2, 8))
        >>> loss = model.loss(tokens[:, :-1], targets=tokens[:, 1:])
        >>> loss.total.backward()
        >>> loss.total.shape, bool(loss.total == loss.cross_entropy)
        (torch.Size([]), True)
        >>> cache = model.new_cache(2, 8)
        >>> with torch.no_grad():
        ...     first = model.loss(tokens[:, :3], targets=tokens[:, 1:4], cache=cache)
        ...     second = model.loss(tokens[:, 3:6], targets=tokens[:, 4:7], cache=cache)
        ...     whole = model.loss(tokens[:, :6], targets=tokens[:, 1:7])
        >>> torch.allclose((first.total + second.total) / 2, whole.total)
        True
        """
        if self.head is None or not self.config.has_logits:
            raise ValueError(f"a loss needs logits, and this model's head is {self.config.head.kind!r}")
        record = Record("router") if balance_weight and mixtures_of(self) else None
        hidden = self(*inputs, record=record, head=False, **args)
        loss = head_loss(
            self.head, hidden, self.tokens.table, targets, weights, label_smoothing=label_smoothing, z_loss=z_loss
        )
        if record is None:
            return loss
        return loss.add_balance([each for side in routed_tokens(self, record) for each in side], balance_weight)

    def encode(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        record: Record | None = None,
        **args: Unpack[SequenceArgs],
    ) -> EncoderOutput:
        """The encoder's hidden states, for a decoder to attend to."""
        if self.encoder is None:
            raise ValueError("a decoder has no encoder to encode with")
        embedding = next(x for x in (self.front_end, self.source_tokens, self.tokens) if x is not None)
        seq = self._sequence_info(self.encoder, embedding.places(tokens), None, **args)
        check_token_types(token_types, tokens, self.config.embedding.token_types)
        hidden = self.encoder(embedding(tokens, seq), seq, token_types=token_types, record=record)
        return EncoderOutput(hidden, seq.attention_mask, seq.document_ids)

    def decode(
        self,
        tokens: Tensor,
        memory: EncoderOutput | None = None,
        *,
        token_types: Tensor | None = None,
        prefix_length: int | Sequence[int] | Tensor | None = None,
        cache: KVCacheProtocol | None = None,
        record: Record | None = None,
        **args: Unpack[SequenceArgs],
    ) -> Tensor:
        """The decoder's hidden states."""
        if self.decoder is None:
            raise ValueError("an encoder has no decoder to decode with")
        if not isinstance(memory, EncoderOutput if self.config.shape == "encoder-decoder" else NoneType):
            raise ValueError("memory is what an encoder-decoder's encode() returns, and nothing else takes it")
        seq = self._sequence_info(self.decoder, self.tokens.places(tokens), cache, **args)
        if memory is not None:
            if len(memory.hidden) != len(tokens):
                raise ValueError(f"the source has {len(memory.hidden)} rows, and the target {len(tokens)}")
            check_sources((memory.document_ids, memory.attention_mask), (seq.document_ids, seq.attention_mask))
            if cache is not None and cache.memory is not None and cache.memory is not memory:
                raise ValueError("the cache holds another source: make a new cache for a new one")
        check_token_types(token_types, tokens, self.config.embedding.token_types)
        x = self.tokens(tokens)
        return self.decoder(
            x,
            seq,
            token_types=token_types,
            layer_inputs=None if self.per_layer is None else self.per_layer(tokens, x),
            prefix_length=None if prefix_length is None else prefix_lengths(prefix_length, tokens),
            memory=memory,
            cache=cache,
            record=record,
        )

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        length: int | Sequence[int] | None = None,
        spare: int = 0,
    ) -> KVCache:
        """An empty cache for sequences of up to `max_length` tokens, on the model's device and in its dtype.

        `length` is the length that sequences are planned to grow to, for schemes that depend on it: an integer or one
        per row, `max_length` by default. `spare` is how many tokens can be undone after a window's ring buffer has
        wrapped around.
        """
        if self.decoder is None:
            raise ValueError("an encoder sees every token at once and has nothing to cache")
        device, dtype = self.tokens.weight.device, self.tokens.dtype
        return KVCache(self.config, batch_size, max_length, length=length, spare=spare, device=device, dtype=dtype)

    def _sequence_info(
        self,
        stack: Stack,
        tokens: Tensor,
        cache: KVCacheProtocol | None,
        **args: Unpack[SequenceArgs],
    ) -> SequenceInfo:
        """Check the arguments of tokens; their positions and lengths."""
        rows, count = tokens.shape
        positions, attention_mask = args.get("positions"), args.get("attention_mask")
        check_token_positions(positions, tokens, {x.axes if x.acts_on else stack.axes for x in stack.schemes})
        check_documents(args.get("document_ids"), tokens)
        if cache is not None:
            config = getattr(cache, "config", None)
            if config is not self.config and config != self.config:
                raise ValueError("this cache was not made for this model: use model.new_cache(batch_size, max_length)")
            return cache.sequence_info(tokens, args)
        check_attention_mask(attention_mask, tokens, stack.windowed)
        given = positions, attention_mask, args.get("document_ids")
        if self.padding_token is not None and all(value is None for value in given):
            args["positions"] = count_text(tokens, self.padding_token)
        return sequence_info(rows, count, tokens.device, needs_length=stack.needs_length, **args)

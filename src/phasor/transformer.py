"""The Transformer: embed, blocks, norm, head. One class for encoders, decoders and encoder-decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.generation import SpecialTokens
from phasor.config.model import Layer, Side
from phasor.config.schema import shown, unknown
from phasor.kv_cache.dynamic import KVCache, Memory
from phasor.nn.attention import Attention, AttentionContext
from phasor.nn.checks import (
    check_documents,
    check_padding,
    check_sources,
    check_token_types,
    check_tokens,
    checked_positions,
    prefix_of,
)
from phasor.nn.embedding import Embedding
from phasor.nn.feed_forward import FeedForward
from phasor.nn.heads import Pooler, build_head
from phasor.nn.init import initialize
from phasor.nn.moe import Experts
from phasor.nn.norm import build_norm
from phasor.nn.positions import Position, build_position
from phasor.nn.residual import build_residual
from phasor.nn.sequence import Length, SequenceArgs, SequenceInfo, places
from phasor.ops.attention.mask import Mask

KEEPS = ("hidden", "attention", "cross_attention", "router")


class Record:
    """Asks a forward to keep what it computes on the way; the lists have an entry a layer.

    `hidden` is the input of every block and then the stack's output, `attention` and `cross_attention` are
    weights `[B, H, T, S]`, `router` the logits `[B, T, experts]` of every mixture of experts. In an
    encoder-decoder these are the decoder's, and `record.encoder` has the encoder's. `pooled` is the pooler's
    vector where the model has one.

    >>> import torch
    >>> model = Transformer(ModelConfig(vocab_size=50, dim=32, num_layers=2, num_heads=4))
    >>> record = Record("hidden", "attention")
    >>> logits = model(torch.randint(0, 50, (1, 7)), record=record)
    >>> len(record.hidden), record.attention[0].shape
    (3, torch.Size([1, 4, 7, 7]))
    """

    def __init__(self, *keep: str) -> None:
        for name in keep:
            if name not in KEEPS:
                raise unknown("thing to record", name, KEEPS)
        self.hidden: list[Tensor] | None = [] if "hidden" in keep else None
        self.attention: list[Tensor] | None = [] if "attention" in keep else None
        self.cross_attention: list[Tensor] | None = [] if "cross_attention" in keep else None
        self.router: list[Tensor] | None = [] if "router" in keep else None
        self.pooled: Tensor | None = None
        self.keep = keep
        self.encoder: Record = self


class Block(nn.Module):
    """Attention, cross-attention where there is an encoder, feed-forward: around them the placement's equation."""

    def __init__(self, model: ModelConfig, side: Side, layer: Layer, *, first: bool = False) -> None:
        super().__init__()
        crosses = side == "decoder" and model.shape == "encoder-decoder"
        self.attention = Attention(layer.attention, model)
        self.cross = Attention(layer.attention, model, cross=True) if crosses else None
        network = FeedForward if layer.feedforward.experts is None else Experts
        self.feedforward = network(layer.feedforward, model.dim, model.hidden_dim, model.dropout.feedforward)
        self.residual = build_residual(model, side, 3 if crosses else 2, first)

    def forward(
        self, x: Tensor, view: AttentionContext, across: AttentionContext | None, router: list[Tensor] | None
    ) -> Tensor:
        attend = partial(self.attention, view=view)
        routed = router is not None and isinstance(self.feedforward, Experts)
        feed = partial(self.feedforward, router_logits=router) if routed else self.feedforward
        if self.cross is None:
            return self.residual(x, attend, feed)
        return self.residual(x, attend, partial(self.cross, view=across), feed)


class Stack(nn.Module):
    """Positions, blocks and the last norm of an encoder or a decoder."""

    def __init__(self, model: ModelConfig, side: Side) -> None:
        super().__init__()
        self.side = side
        self.layers = [model.layer(i) for i in range(model.depth(side))]
        self.schemes = list(dict.fromkeys([model.input_position, *(layer.position for layer in self.layers)]))
        self.scheme_of = [self.schemes.index(layer.position) for layer in self.layers]
        self.positions = nn.ModuleList(build_position(scheme, model, side) for scheme in self.schemes)
        self.axes = max(scheme.axes for scheme in self.schemes)
        self.needs_length = any(scheme.depends_on_length for scheme in self.schemes)
        self.windowed = any(layer.attention.window is not None for layer in self.layers)
        types = model.embedding.token_types
        width = model.input_width
        # With a table of its own it draws none: on the meta device that would import half of PyTorch's compiler.
        self.token_types = nn.Embedding(types, width, _weight=torch.empty(types, width)) if types else None
        self.embedding_norm = build_norm(model.norm, width) if model.embedding.norm else nn.Identity()
        self.dropout = nn.Dropout(model.dropout.embedding)
        self.project = nn.Linear(width, model.dim) if model.embedding.project == "sum" else nn.Identity()
        self.blocks = nn.ModuleList(Block(model, side, layer, first=i == 0) for i, layer in enumerate(self.layers))
        self.norm = build_norm(model.norm, model.dim) if model.ends_in_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        at: SequenceInfo,
        *,
        token_types: Tensor | None = None,
        prefix_length: Tensor | None = None,
        memory: Memory | None = None,
        cache: KVCache | None = None,
        record: Record | None = None,
    ) -> Tensor:
        record = recorder(record)
        x = self.position(0).on_input(x, at)
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_types is None else self.token_types(token_types))
        x = self.project(self.dropout(self.embedding_norm(x)))
        views = self._views(x, at, prefix_length, cache, record)
        across = [None] * len(self.layers) if memory is None else self._across(at, memory, cache, record)
        for block, view, beyond in zip(self.blocks, views, across, strict=True):
            if record.hidden is not None:
                record.hidden.append(x)
            x = block(x, view, beyond, record.router)
        x = self.norm(x)
        if record.hidden is not None:
            record.hidden.append(x)
        if cache is not None:
            cache.finish()
            if memory is not None and cache.memory is None:
                cache.memory = memory
                cache.cross = [view.memory for view in across if view is not None and view.memory is not None]
        return x

    def position(self, which: int) -> Position:
        """The module of one of the stack's schemes; the first is the model's own."""
        return cast(Position, self.positions[which])

    def _views(
        self, x: Tensor, at: SequenceInfo, prefix_length: Tensor | None, cache: KVCache | None, record: Record
    ) -> list[AttentionContext]:
        """What each layer's attention sees; every scheme prepares once for all the layers that use it."""
        schemes = [cast(Position, scheme) for scheme in self.positions]
        prepared = [scheme.prepare(at, x) for scheme in schemes]
        rule = Mask(
            causal=self.side == "decoder",
            prefix_length=prefix_length,
            key_mask=at.attention_mask,
            query_document_ids=at.document_ids,
            key_document_ids=at.document_ids,
            order=at.order,
        )
        rows = at.rows
        steps = None if cache is None else cache.begin(at, rule, self.needs_length)
        views: list[AttentionContext] = []
        narrowed: dict[tuple[int, int | None, int], Mask] = {}
        for index, (layer, which) in enumerate(zip(self.layers, self.scheme_of, strict=True)):
            step = None if steps is None else steps[index]
            mask, key_positions = (rule, rows) if step is None else (step.mask, step.key_positions)
            key = (id(mask), layer.attention.window, layer.attention.sink_tokens)
            if key not in narrowed:
                narrowed[key] = mask.narrowed(*key[1:])
            capped = self._capped(x, at, layer, which) if layer.attention.cap_sinks else None
            view = AttentionContext(
                narrowed[key], schemes[which], prepared[which], rows, key_positions, None, step, capped
            )
            view.weights = record.attention
            views.append(view)
        return views

    def _capped(self, x: Tensor, at: SequenceInfo, layer: Layer, which: int) -> tuple[Any, Tensor]:
        """Positions no further along than window and sinks are long, for queries that meet sink tokens."""
        reach = (layer.attention.window or 0) + layer.attention.sink_tokens - 1
        rows = at.rows.minimum(at.origin() + reach)
        return self.position(which).prepare(replace(at, positions=rows, first=at.origin()), x), rows

    def _across(
        self, at: SequenceInfo, memory: Memory, cache: KVCache | None, record: Record
    ) -> list[AttentionContext]:
        """What each layer's cross-attention sees: the memory, without positions of its own."""
        rule = Mask(
            key_mask=memory.attention_mask,
            query_document_ids=at.document_ids,
            key_document_ids=memory.document_ids,
            aligned=False,
        )
        known = cache is not None and cache.memory is not None
        made = (
            cast(KVCache, cache).cross
            if known
            else [cast(Attention, block.cross).remember(memory.hidden) for block in self.blocks]
        )
        return [AttentionContext(rule, Position(), memory=pair, weights=record.cross_attention) for pair in made]


class Transformer(nn.Module):
    """A Transformer out of any sensible combination of parts.

    Decoders and encoders take tokens `[B, T]`, encoder-decoders a source `[B, S]` and the already shifted
    target `[B, T]`; the result is what the head gives out, logits `[B, T, vocab]` by default.

    - `positions`: int64 `[T]`, `[B, T]`, or `[axes, B, T]` for axial and multi-section schemes. By default
      they count real tokens from 0 and restart in every document.
    - `attention_mask`: True where a token is real, `[B, T]`. `document_ids`: one id per token;
      tokens attend within their own document.
    - `length`: what the sequence is planned to grow to, for schemes that depend on it: one number, one a row,
      or a list a row with one a document. By default the number of real tokens.
    - `prefix_length`: how many tokens of each row a decoder may see from everywhere (a number, or one a row).
    - `token_types`: int64 `[B, T]` for models that have them.
    - `cache`: what `new_cache` made; the tokens go on from those it holds, and are added to them. An
      encoder-decoder's cache keeps the source too: after the first call it is `model(None, target, cache=cache)`.
    - `record`: a `Record` of what to keep on the way.
    - `head`: False gives the hidden states `[B, T, dim]` that the head would take.

    For an encoder-decoder these speak of the source, and `target_positions`, `target_attention_mask`,
    `target_document_ids` and `target_length` of the target.

    >>> import torch
    >>> model = Transformer(ModelConfig(vocab_size=50, dim=32, num_layers=2, num_heads=4, position="rotary"))
    >>> model(torch.randint(0, 50, (2, 7))).shape
    torch.Size([2, 7, 50])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise ValueError(f"Transformer takes a ModelConfig, not {type(config).__name__}")
        self.config = config
        self.tokens = Embedding(config, config.vocab_size)
        source_size = config.embedding.source_vocab_size
        self.source_tokens = None if source_size is None else Embedding(config, source_size)
        self.encoder = None if config.shape == "decoder" else Stack(config, "encoder")
        self.decoder = None if config.shape == "encoder" else Stack(config, "decoder")
        self.pooler = None if config.head.pooler == "none" else Pooler(config)
        self.head = build_head(config)
        self.tokenizer: Any = None  # a folder's tokenizer, where the model was loaded with one
        self.source_tokenizer: Any = None  # that of an encoder-decoder's source, where it is another one
        self.special = SpecialTokens()
        self.origin: Any = None  # the folder it was loaded from, and what came along
        self.fresh: tuple[str, ...] = ()  # weights that were drawn anew when it was loaded with other positions
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights, as the configuration's `init` says; on the meta device there are none to draw."""
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
        cache: KVCache | None = None,
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
        record = recorder(record)
        about: SequenceArgs = {
            "positions": positions,
            "attention_mask": attention_mask,
            "document_ids": document_ids,
            "length": length,
        }
        about_target: SequenceArgs = {
            "positions": target_positions,
            "attention_mask": target_attention_mask,
            "document_ids": target_document_ids,
            "length": target_length,
        }
        if self.config.shape == "encoder-decoder":
            if target is None:
                raise ValueError("an encoder-decoder takes a source and a target: model(source, target)")
            if prefix_length is not None:
                raise ValueError("prefix is for a decoder alone; an encoder-decoder's source is seen from everywhere")
            memory = None if cache is None else cache.memory
            if memory is None:
                record.encoder = Record(*record.keep)
                memory = self.encode(present(tokens), token_types=token_types, record=record.encoder, **about)
            elif tokens is not None or token_types is not None or any(x is not None for x in about.values()):
                raise ValueError(
                    "the cache holds its source already: go on with model(None, target, cache=cache) "
                    "and nothing more about the source"
                )
            hidden = self.decode(target, memory, cache=cache, record=record, **about_target)
        else:
            given = [f"target_{name}" for name, value in about_target.items() if value is not None]
            if target is not None or given:
                what = "a target" if target is not None else given[0]
                raise ValueError(f"{what} is for an encoder-decoder, and this is a {self.config.shape}")
            if self.decoder is not None:
                hidden = self.decode(
                    present(tokens),
                    token_types=token_types,
                    prefix_length=prefix_length,
                    cache=cache,
                    record=record,
                    **about,
                )
            elif prefix_length is not None or cache is not None:
                what = "a prefix" if prefix_length is not None else "a cache"
                raise ValueError(f"{what} is for a decoder; an encoder sees every token at once")
            else:
                hidden = self.encode(present(tokens), token_types=token_types, record=record, **about).hidden
        if self.pooler is not None:
            record.pooled = self.pooler(hidden, attention_mask)
        if not head:
            return hidden
        if self.head is not None:
            return self.head(hidden, self.tokens.table)
        return record.pooled if self.config.head.kind == "pooled" and record.pooled is not None else hidden

    def encode(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        record: Record | None = None,
        **about: Unpack[SequenceArgs],
    ) -> Memory:
        """The encoder's hidden states, ready for a decoder to attend to."""
        if self.encoder is None:
            raise ValueError("a decoder has no encoder to encode with")
        embedding = self.tokens if self.source_tokens is None else self.source_tokens
        at = self._places(self.encoder, embedding, tokens, None, **about)
        check_token_types(token_types, tokens, self.config.embedding.token_types)
        hidden = self.encoder(embedding(tokens), at, token_types=token_types, record=record)
        return Memory(hidden, at.attention_mask, at.document_ids)

    def decode(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        *,
        token_types: Tensor | None = None,
        prefix_length: int | Sequence[int] | Tensor | None = None,
        cache: KVCache | None = None,
        record: Record | None = None,
        **about: Unpack[SequenceArgs],
    ) -> Tensor:
        """The decoder's hidden states."""
        if self.decoder is None:
            raise ValueError("an encoder has no decoder to decode with")
        if not isinstance(memory, Memory if self.config.shape == "encoder-decoder" else NoneType):
            raise ValueError("memory is what an encoder-decoder's encode() returns, and nothing else takes it")
        at = self._places(self.decoder, self.tokens, tokens, cache, **about)
        if memory is not None:
            if len(memory.hidden) != len(tokens):
                raise ValueError(f"the source has {len(memory.hidden)} rows, and the target {len(tokens)}")
            check_sources((memory.document_ids, memory.attention_mask), (at.document_ids, at.attention_mask))
            if cache is not None and cache.memory is not None and cache.memory is not memory:
                raise ValueError("the cache holds another source: make a new cache for a new one")
        check_token_types(token_types, tokens, self.config.embedding.token_types)
        return self.decoder(
            self.tokens(tokens),
            at,
            token_types=token_types,
            prefix_length=None if prefix_length is None else prefix_of(prefix_length, tokens),
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
        """An empty cache for sequences of up to `max_length` tokens, on the model's device and in its type.

        `length` is what sequences are planned to grow to, for schemes that depend on it: one number or one a row,
        `max_length` by default. `spare` is how many tokens can be undone after a window's ring has come around.
        """
        if self.decoder is None:
            raise ValueError("an encoder sees every token at once and has nothing to cache")
        device, dtype = self.tokens.weight.device, self.tokens.dtype
        return KVCache(self.config, batch_size, max_length, length=length, spare=spare, device=device, dtype=dtype)

    def _places(
        self,
        stack: Stack,
        embedding: Embedding,
        tokens: Tensor,
        cache: KVCache | None,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        length: Length | None = None,
    ) -> SequenceInfo:
        check_tokens(tokens, len(embedding.weight))
        rows, count = tokens.shape
        if positions is not None:
            for scheme in stack.schemes:
                checked_positions(positions, scheme.axes if scheme.acts_on else stack.axes)
            if positions.shape[-1] != count or positions.shape[:-1][-1:] not in ((), (1,), (rows,)):
                raise ValueError(f"positions {list(positions.shape)} do not fit tokens {list(tokens.shape)}")
        check_padding(attention_mask, tokens, stack.windowed, isinstance(cache, KVCache) and min(cache.counts) > 0)
        check_documents(document_ids, tokens)
        if cache is not None:
            if not isinstance(cache, KVCache) or (cache.config is not self.config and cache.config != self.config):
                raise ValueError("this cache was not made for this model: use model.new_cache(batch_size, max_length)")
            about = SequenceArgs(
                positions=positions, attention_mask=attention_mask, document_ids=document_ids, length=length
            )
            return cache.places(tokens, about, stack.needs_length)
        return places(
            rows,
            count,
            tokens.device,
            positions=positions,
            attention_mask=attention_mask,
            document_ids=document_ids,
            length=length,
            needs_length=stack.needs_length,
        )


def recorder(record: Record | None) -> Record:
    if not isinstance(record, Record | None):
        raise ValueError(f"record must be a Record of what to keep, not {shown(record)}")
    return Record() if record is None else record


def present(tokens: Tensor | None) -> Tensor:
    if tokens is None:
        raise ValueError("tokens are missing; only an encoder-decoder whose cache holds its source goes without")
    return tokens

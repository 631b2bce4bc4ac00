"""The Transformer: embed, blocks, norm, head. One class for encoders, decoders and encoder-decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from phasor.cache import Cache, Memory
from phasor.config import ModelConfig
from phasor.config.generation import SpecialTokens
from phasor.config.model import Layer, Side
from phasor.config.schema import shown, unknown
from phasor.kernels.mask import Mask
from phasor.parts.attention import Attention, View
from phasor.parts.checks import (
    check_documents,
    check_padding,
    check_sources,
    check_token_types,
    check_tokens,
    checked_positions,
    prefix_of,
)
from phasor.parts.embedding import Embedding
from phasor.parts.experts import Experts
from phasor.parts.feedforward import FeedForward
from phasor.parts.head import Pooler, build_head
from phasor.parts.init import initialise
from phasor.parts.norm import build_norm
from phasor.parts.places import About, Length, Places, places
from phasor.parts.positions import Position, build_position
from phasor.parts.residual import build_residual

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
        self.feedforward = network(layer.feedforward, model.dim, model.feedforward_width, model.dropout.feedforward)
        self.residual = build_residual(model, side, 3 if crosses else 2, first)

    def forward(self, x: Tensor, view: View, across: View | None, router: list[Tensor] | None) -> Tensor:
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
        at: Places,
        *,
        token_types: Tensor | None = None,
        prefix: Tensor | None = None,
        memory: Memory | None = None,
        cache: Cache | None = None,
        record: Record | None = None,
    ) -> Tensor:
        record = recorder(record)
        x = self.position(0).on_input(x, at)
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_types is None else self.token_types(token_types))
        x = self.project(self.dropout(self.embedding_norm(x)))
        views = self._views(x, at, prefix, cache, record)
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

    def _views(self, x: Tensor, at: Places, prefix: Tensor | None, cache: Cache | None, record: Record) -> list[View]:
        """What each layer's attention sees; every scheme prepares once for all the layers that use it."""
        schemes = [cast(Position, scheme) for scheme in self.positions]
        prepared = [scheme.prepare(at, x) for scheme in schemes]
        rule = Mask(
            causal=self.side == "decoder",
            prefix=prefix,
            key_padding=at.padding,
            query_documents=at.documents,
            key_documents=at.documents,
            order=at.order,
        )
        rows = at.rows
        steps = None if cache is None else cache.begin(at, rule, self.needs_length)
        views: list[View] = []
        narrowed: dict[tuple[int, int | None, int], Mask] = {}
        for index, (layer, which) in enumerate(zip(self.layers, self.scheme_of, strict=True)):
            step = None if steps is None else steps[index]
            mask, key_positions = (rule, rows) if step is None else (step.mask, step.key_positions)
            key = (id(mask), layer.attention.window, layer.attention.sink_tokens)
            if key not in narrowed:
                narrowed[key] = mask.narrowed(*key[1:])
            capped = self._capped(x, at, layer, which) if layer.attention.cap_sinks else None
            view = View(narrowed[key], schemes[which], prepared[which], rows, key_positions, None, step, capped)
            view.weights = record.attention
            views.append(view)
        return views

    def _capped(self, x: Tensor, at: Places, layer: Layer, which: int) -> tuple[Any, Tensor]:
        """Positions no further along than window and sinks are long, for queries that meet sink tokens."""
        reach = (layer.attention.window or 0) + layer.attention.sink_tokens - 1
        rows = at.rows.minimum(at.origin() + reach)
        return self.position(which).prepare(replace(at, positions=rows, first=at.origin()), x), rows

    def _across(self, at: Places, memory: Memory, cache: Cache | None, record: Record) -> list[View]:
        """What each layer's cross-attention sees: the memory, without positions of its own."""
        rule = Mask(
            key_padding=memory.padding,
            query_documents=at.documents,
            key_documents=memory.documents,
            aligned=False,
        )
        known = cache is not None and cache.memory is not None
        made = (
            cast(Cache, cache).cross
            if known
            else [cast(Attention, block.cross).remember(memory.hidden) for block in self.blocks]
        )
        return [View(rule, Position(), memory=pair, weights=record.cross_attention) for pair in made]


class Transformer(nn.Module):
    """A Transformer out of any sensible combination of parts.

    Decoders and encoders take tokens `[B, T]`, encoder-decoders a source `[B, S]` and the already shifted
    target `[B, T]`; the result is what the head gives out, logits `[B, T, vocab]` by default.

    - `positions`: int64 `[T]`, `[B, T]`, or `[axes, B, T]` for axial and multi-section schemes. By default
      they count real tokens from 0 and restart in every document.
    - `padding`: True where a token is real, `[B, T]`. `documents`: an id a token; tokens see their own document.
    - `length`: what the sequence is planned to grow to, for schemes that depend on it: one number, one a row,
      or a list a row with one a document. By default the number of real tokens.
    - `prefix`: how many tokens of each row a decoder may see from everywhere (a number, or one a row).
    - `token_types`: int64 `[B, T]` for models that have them.
    - `cache`: what `new_cache` made; the tokens go on from those it holds, and are added to them. An
      encoder-decoder's cache keeps the source too: after the first call it is `model(None, target, cache=cache)`.
    - `record`: a `Record` of what to keep on the way.
    - `head`: False gives the hidden states `[B, T, dim]` that the head would take.

    For an encoder-decoder these speak of the source, and `target_positions`, `target_padding`,
    `target_documents` and `target_length` of the target.

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
            initialise(part, self.config, "encoder" if name == "encoder" else side)

    def forward(
        self,
        tokens: Tensor | None,
        target: Tensor | None = None,
        *,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        length: Length | None = None,
        token_types: Tensor | None = None,
        prefix: int | Sequence[int] | Tensor | None = None,
        target_positions: Tensor | None = None,
        target_padding: Tensor | None = None,
        target_documents: Tensor | None = None,
        target_length: Length | None = None,
        record: Record | None = None,
        head: bool = True,
    ) -> Tensor:
        record = recorder(record)
        about: About = {"positions": positions, "padding": padding, "documents": documents, "length": length}
        about_target: About = {
            "positions": target_positions,
            "padding": target_padding,
            "documents": target_documents,
            "length": target_length,
        }
        if self.config.shape == "encoder-decoder":
            if target is None:
                raise ValueError("an encoder-decoder takes a source and a target: model(source, target)")
            if prefix is not None:
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
                    present(tokens), token_types=token_types, prefix=prefix, cache=cache, record=record, **about
                )
            elif prefix is not None or cache is not None:
                what = "a prefix" if prefix is not None else "a cache"
                raise ValueError(f"{what} is for a decoder; an encoder sees every token at once")
            else:
                hidden = self.encode(present(tokens), token_types=token_types, record=record, **about).hidden
        if self.pooler is not None:
            record.pooled = self.pooler(hidden, padding)
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
        **about: Unpack[About],
    ) -> Memory:
        """The encoder's hidden states, ready for a decoder to attend to."""
        if self.encoder is None:
            raise ValueError("a decoder has no encoder to encode with")
        embedding = self.tokens if self.source_tokens is None else self.source_tokens
        at = self._places(self.encoder, embedding, tokens, None, **about)
        check_token_types(token_types, tokens, self.config.embedding.token_types)
        hidden = self.encoder(embedding(tokens), at, token_types=token_types, record=record)
        return Memory(hidden, at.padding, at.documents)

    def decode(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        *,
        token_types: Tensor | None = None,
        prefix: int | Sequence[int] | Tensor | None = None,
        cache: Cache | None = None,
        record: Record | None = None,
        **about: Unpack[About],
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
            check_sources((memory.documents, memory.padding), (at.documents, at.padding))
            if cache is not None and cache.memory is not None and cache.memory is not memory:
                raise ValueError("the cache holds another source: make a new cache for a new one")
        check_token_types(token_types, tokens, self.config.embedding.token_types)
        return self.decoder(
            self.tokens(tokens),
            at,
            token_types=token_types,
            prefix=None if prefix is None else prefix_of(prefix, tokens),
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
    ) -> Cache:
        """An empty cache for sequences of up to `max_length` tokens, on the model's device and in its type.

        `length` is what sequences are planned to grow to, for schemes that depend on it: one number or one a row,
        `max_length` by default. `spare` is how many tokens can be undone after a window's ring has come around.
        """
        if self.decoder is None:
            raise ValueError("an encoder sees every token at once and has nothing to cache")
        device, dtype = self.tokens.weight.device, self.tokens.dtype
        return Cache(self.config, batch_size, max_length, length=length, spare=spare, device=device, dtype=dtype)

    def _places(
        self,
        stack: Stack,
        embedding: Embedding,
        tokens: Tensor,
        cache: Cache | None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        length: Length | None = None,
    ) -> Places:
        check_tokens(tokens, len(embedding.weight))
        rows, count = tokens.shape
        if positions is not None:
            for scheme in stack.schemes:
                checked_positions(positions, scheme.axes if scheme.acts_on else stack.axes)
            if positions.shape[-1] != count or positions.shape[:-1][-1:] not in ((), (1,), (rows,)):
                raise ValueError(f"positions {list(positions.shape)} do not fit tokens {list(tokens.shape)}")
        check_padding(padding, tokens, stack.windowed, isinstance(cache, Cache) and min(cache.counts) > 0)
        check_documents(documents, tokens)
        if cache is not None:
            if not isinstance(cache, Cache) or (cache.config is not self.config and cache.config != self.config):
                raise ValueError("this cache was not made for this model: use model.new_cache(batch_size, max_length)")
            about = About(positions=positions, padding=padding, documents=documents, length=length)
            return cache.places(tokens, about, stack.needs_length)
        return places(
            rows,
            count,
            tokens.device,
            positions=positions,
            padding=padding,
            documents=documents,
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

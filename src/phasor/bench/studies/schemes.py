"""The attention of every position scheme beside plain attention under the same mask, forward and with gradients.

What is timed is one layer between its projections: positions on queries, keys and scores, and attention. Each scheme
is compared with float64 first, gradients of all that it learns included, and is not timed if it is wrong.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor.bench.attention import gradient_errors
from phasor.bench.study import Study
from phasor.config import ModelConfig, PositionConfig
from phasor.config.schema import Config, unknown
from phasor.nn.attention.base import AttentionContext
from phasor.nn.record import Record
from phasor.nn.sequence import sequence_info
from phasor.transformer import Stack

# Relative to the norm, of outputs and of gradients: roundings of 8 bits, or of float32.
TOLERANCE = {torch.bfloat16: (1e-2, 4e-2), torch.float32: (1e-4, 1e-3)}
PLAIN = "none"
EXTRAS: dict[str, dict[str, Any]] = {"softcap": {"softcap": 50.0}, "sink logits": {"sink_logits": True}}
HEADS = {"num_heads": "heads", "num_kv_heads": "kv_heads", "head_dim": "head_dim"}
MASKS = ("causal", "window", "packed", "padded", "prefix")


def scheme_names() -> list[str]:
    """Plain attention, every scheme that acts inside layers on one row of positions, and what else changes scores.

    >>> names = scheme_names()
    >>> names[0], {"alibi", "rotary", "top-k"} <= set(names)
    ('none', True)
    """
    kinds = {name: PositionConfig.from_dict({"kind": name}) for name in PositionConfig.kinds}
    inside = [name for name, scheme in kinds.items() if {*scheme.acts_on} - {"input"} and scheme.axes == 1]
    return [PLAIN, *inside, *EXTRAS, "top-k"]


class SchemesSettings(Config):
    """Which schemes, all where none is named; under which masks; tokens and heads; and the tokens of the checks.

    A window has a sixteenth of the tokens, packed rows have eight documents, an eighth is padding or a prefix, and
    top-k attends to an eighth of the keys in blocks of `block`.
    """

    schemes: tuple[str, ...] = ()
    masks: tuple[str, ...] = ("causal",)
    tokens: int = 16384
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block: int = 128
    checked: int = 1237

    def check(self) -> None:
        for what, names, known in (("scheme", self.schemes, scheme_names()), ("mask", self.masks, MASKS)):
            for name in names:
                if name not in known:
                    raise unknown(what, name, known, PositionConfig.former_kinds)


GPU = SchemesSettings()
CPU = SchemesSettings(tokens=1024, heads=8, kv_heads=4, head_dim=64, checked=157)
TINY = SchemesSettings(tokens=40, heads=4, kv_heads=2, head_dim=16, block=4, checked=19, masks=("causal", "padded"))


class SchemeAttention:
    """One layer's attention with a scheme, from projected queries, keys and values to what its heads give."""

    def __init__(self, settings: SchemesSettings, name: str, mask: str, tokens: int, like: Tensor) -> None:
        self.of = settings, name, mask, tokens
        attention: dict[str, Any] = {"window": max(1, tokens // 16)} if mask == "window" else {}
        attention |= EXTRAS.get(name, {})
        if name == "top-k":
            top_k = max(1, tokens // settings.block // 8)
            attention["sparse"] = {"kind": "top-k", "block": settings.block, "top_k": top_k}
        sizes: dict[str, Any] = {"dim": settings.heads * settings.head_dim, "hidden_dim": 1, "max_length": tokens}
        sizes |= {key: getattr(settings, field) for key, field in HEADS.items()}
        position = {"kind": name if name in PositionConfig.kinds else PLAIN}
        config = ModelConfig.from_dict(
            {"vocab_size": 1, "num_layers": 1, **sizes, "position": position, "attention": attention}
        )
        torch.manual_seed(0)
        with like.device:
            self.stack = Stack(config, "decoder")
            for index in range(len(self.stack.positions)):
                self.stack.position(index).reset_parameters(config)
            self.attention = cast(Any, self.stack.blocks[0]).attention
            if self.attention.sinks is not None:
                nn.init.normal_(self.attention.sinks)
            self.x = torch.randn(1, tokens, config.dim).to(like.dtype)
            group = settings.heads // settings.kv_heads + 2
            self.projected = torch.randn(1, tokens, settings.kv_heads, group, settings.head_dim).to(like.dtype)
        self.stack.to(like.dtype).requires_grad_(False)
        self.attention.project = lambda x: self.projected
        self.attention.out = nn.Identity()

    @property
    def learned(self) -> list[Tensor]:
        """What gets gradients: queries, keys and values, and what the scheme or attention learns beside them."""
        own = [*self.stack.positions.parameters(), self.attention.sinks]
        return [self.projected, *(weight for weight in own if weight is not None)]

    def require_grad(self, needed: bool = True) -> None:
        for x in self.learned:
            x.requires_grad_(needed)

    def in_float64(self) -> SchemeAttention:
        """The same numbers in float64."""
        exact = SchemeAttention(*self.of, like=self.x.new_empty(0, dtype=torch.float64))
        for to, given in zip([exact.x, *exact.learned], [self.x, *self.learned], strict=True):
            to.data.copy_(given.data)
        return exact

    def context(self, record: Record | None = None) -> AttentionContext:
        """What a forward prepares once for all layers."""
        _, _, mask, tokens = self.of
        index = torch.arange(tokens, device=self.x.device)[None]
        real = index >= tokens // 8 if mask == "padded" else None
        documents = index * 8 // tokens if mask == "packed" else None
        seq = sequence_info(1, tokens, self.x.device, attention_mask=real, document_ids=documents, needs_length=True)
        prefix = torch.tensor([tokens // 8], device=self.x.device) if mask == "prefix" else None
        return self.stack._self_attention_contexts(self.x, seq, prefix, None, [record or Record()])[0]

    def __call__(self, ctx: AttentionContext) -> Tensor:
        y: Tensor = self.attention(self.x, ctx)
        return y


def run(study: Study) -> None:
    settings: SchemesSettings = study.settings
    names = list(dict.fromkeys([PLAIN, *(settings.schemes or scheme_names())]))
    for mask in settings.masks:
        plain: dict[str, Any] = {}
        for name in names:
            row: dict[str, Any] = {"scheme": name, "mask": mask, "tokens": settings.tokens}
            with study.noting_failure(row):
                row["errors"] = check(study, name, mask)
                row |= times(study, name, mask)
                plain = plain or row
                row["of plain"] = {key: row[key] / plain[key] for key in ("forward_ms", "both_ms")}
            study.add_row(row)


def check(study: Study, name: str, mask: str) -> dict[str, float]:
    """The errors of outputs and gradients against the reference in float64; a ValueError where they are too large."""
    settings: SchemesSettings = study.settings
    case = SchemeAttention(settings, name, mask, settings.checked, study.machine.random(0))
    exact = case.in_float64()
    case.require_grad()
    exact.require_grad()
    kept = slice(settings.checked // 8 if mask == "padded" else 0, None)
    recorded = exact(exact.context(Record("attention")))  # weights are recorded by the reference alone
    errors = gradient_errors(case(case.context()), case.learned, recorded, exact.learned, kept)
    for error, tolerance in zip(errors, TOLERANCE[study.machine.dtype], strict=True):
        study.check(f"{name}, {mask}", error, tolerance)
    return dict(zip(("output", "gradients"), errors, strict=True))


def times(study: Study, name: str, mask: str) -> dict[str, float]:
    """Milliseconds of a forward, and of one with gradients; what is prepared once for all layers is not in them."""
    settings: SchemesSettings = study.settings
    case = SchemeAttention(settings, name, mask, settings.tokens, study.machine.random(0))
    timer, direction = study.machine.timer, torch.randn_like(case.x)
    with torch.no_grad():
        ctx = case.context()
        forward = timer.back_to_back_ms(lambda: case(ctx))
    case.require_grad()
    ctx = case.context()
    learned = case.learned
    both = timer.back_to_back_ms(lambda: torch.autograd.grad(case(ctx), learned, direction, retain_graph=True))
    return {"forward_ms": forward, "both_ms": both}

"""Softmax attention in the fused decoding step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from phasor.nn.attention.base import AttentionContext
from phasor.nn.attention.fused import Biases, DecodingStep
from phasor.nn.norm import RMSNorm
from phasor.nn.positions.base import Position
from phasor.ops.attention import Bias
from phasor.ops.decode import QKNormArgs

if TYPE_CHECKING:
    from phasor.nn.attention.softmax.module import SoftmaxAttention


class FusedSoftmax:
    """Three kernels: norm, queries, keys and values; attention over the cache; output and residual."""

    def __init__(self, attention: SoftmaxAttention, step: DecodingStep, scheme: Position, index: int) -> None:
        from phasor.ops.decode.decode_attention import SplitKWorkspace, decode_attention

        cache, self.step, self.attention, self.attend = step.cache, step, attention, decode_attention
        self.keys, self.values = cache.layers[index]["keys"], cache.layers[index]["values"]
        self.heads = step.output(attention.out.in_features, "heads")
        sizes = len(self.heads), attention.num_kv_heads, attention.queries_per_kv, attention.head_dim
        self.workspace = step.share(("split keys", sizes), lambda: SplitKWorkspace(*sizes, self.heads.device))
        qk_norm = None
        if attention.has_qk_norm:
            q, k = cast(RMSNorm, attention.q_norm), cast(RMSNorm, attention.k_norm)
            qk_norm = QKNormArgs(cast(Tensor, q.weight), cast(Tensor, k.weight), q.offset, q.eps)
        self.given: dict[str, Any] = {
            "scale": attention.scale,
            "rope": scheme.rotary_args(cache.length, self.keys.device),
            "qk_norm": qk_norm,
            "sink_logits": attention.sinks,
            **cache.kernel_args(index),  # where a row's tokens are
        }
        self.takes_context = "scores" in scheme.config.acts_on  # for a bias

    def __call__(self, x: Tensor, norm: nn.Module, ctx: AttentionContext | None, biases: Biases) -> None:
        step, attention = self.step, self.attention
        heads = self.attend(
            step.project(x, attention.qkv, step.output(attention.qkv.out_features), norm),
            self.keys,
            self.values,
            step.cache.counts,
            step.positions,
            self.heads,
            self.workspace,
            bias=bias_row(ctx, biases) if self.takes_context and ctx is not None else None,
            pdl=step.pdl,
            **self.given,
        )
        step.add(heads, attention.out, x)


def bias_row(ctx: AttentionContext, biases: Biases) -> Tensor:
    """What positions add to the scores of a step, `[B or 1, H, slots]`; computed once for all layers with its keys."""
    key = id(ctx.position), id(ctx.step.key_positions)
    if key not in biases:
        bias, queries, keys = ctx.position.on_scores(ctx.prepared), ctx.positions, ctx.step.key_positions
        biases[key] = cast(Bias, bias)(cast(Tensor, queries), cast(Tensor, keys))[:, :, 0]
    return biases[key]

"""Attention: torch's SDPA backends, FlexAttention and phasor's kernel over key intervals, in TFLOP/s.

Checks first and times nothing if a result is wrong: every variant against float64 at an odd length, gradients
included, then at the length that is timed a sample of queries against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from phasor.bench.attention import AttentionInputs, forward_backward, gradient_errors, sample_error
from phasor.bench.peers import flex_attention, sdpa
from phasor.bench.study import Study, format_field
from phasor.config.schema import Config
from phasor.nn.positions import T5PositionConfig
from phasor.nn.positions.alibi.module import alibi_slopes
from phasor.nn.positions.t5.module import T5Bias
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import DistanceBias, Mask, ScoreMod, attention_ref, cudnn, flash

TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 2e-5}  # relative to the norm; two roundings of 8 bits, or float32
VARIANTS = ("causal", "alibi", "t5", "window 100 sinks", "padded", "document_ids", "softcap and sink logits")


class AttentionKernelSettings(Config):
    """Lengths that are timed, those at which FlexAttention is compiled, which takes a while, and the heads."""

    lengths: tuple[int, ...] = (4096, 16384, 32768, 131072)
    flex: tuple[int, ...] = (16384,)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    checked: int = 1237  # tokens of the checks against float64


GPU = AttentionKernelSettings()
TINY = AttentionKernelSettings(lengths=(19,), flex=(19,), heads=2, kv_heads=1, head_dim=16, checked=13)


class VariantInputs(AttentionInputs):
    """Queries, keys and values, with masks and score modifications by name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.positions = torch.arange(self.tokens, device=self.device)[None]
        config = T5PositionConfig(num_buckets=32, max_distance=128)
        self.t5 = T5Bias(config, num_heads=self.heads, bidirectional=False).to(self.device)
        torch.nn.init.normal_(self.table)
        self.slopes = torch.tensor(alibi_slopes(self.heads), device=self.device)
        self.sinks = torch.randn(self.heads, device=self.device).requires_grad_()

    def in_float64(self) -> VariantInputs:
        """The same values in float64, with gradients."""
        exact = VariantInputs(self.device, self.tokens, self.head_dim, self.heads, self.kv_heads, torch.float32)
        q, k, v = self.inputs
        exact.inputs = q.detach().double(), k.detach().double(), v.detach().double()
        exact.t5, exact.sinks = exact.t5.double(), self.sinks.detach().double().requires_grad_()
        exact.table.data.copy_(self.table.data)
        exact.slopes = self.slopes.double()
        exact.grad()
        return exact

    def rule(self, name: str) -> tuple[Mask, ScoreMod]:
        score_mod = ScoreMod(scale=self.head_dim**-0.5, query_positions=self.positions, key_positions=self.positions)
        mask = Mask(causal=True)
        if name == "alibi":
            score_mod.bias = DistanceBias(slopes=self.slopes)
        elif name == "t5":
            score_mod.bias = self.t5_bias
        elif name == "softcap and sink logits":
            score_mod.softcap, score_mod.sink_logits = 5.0, self.sinks
        elif name.startswith("window"):
            mask = replace(mask, window=int(name.split()[1]), sink_tokens=4 if "sinks" in name else 0)
        elif name == "padded":
            real = torch.ones_like(self.positions, dtype=torch.bool)
            real[:, : self.tokens // 3] = False
            mask = replace(mask, key_mask=real, order=real.cumsum(1) - real.long())
        elif name == "document_ids":
            ids = self.positions // 300
            mask = replace(mask, query_document_ids=ids, key_document_ids=ids)
        return mask, score_mod

    @property
    def table(self) -> Tensor:
        """The biases of T5, by bucket and head."""
        (table,) = self.t5.parameters()
        return table

    @property
    def t5_bias(self) -> Any:
        return self.t5.on_scores(self.t5.prepare(SequenceInfo(self.positions[0], self.tokens), self.inputs[0]))

    def ours(self, name: str) -> Tensor:
        return flash.flash_attention(*self.inputs, *self.rule(name))

    def learned_inputs(self, name: str) -> list[Tensor]:
        extra: dict[str, list[Tensor]] = {"t5": [self.table], "softcap and sink logits": [self.sinks]}
        return [*self.inputs, *extra.get(name, [])]

    def error(self, name: str, y: Tensor) -> float:
        mask, score_mod = self.rule(name)
        bias: Any = score_mod.bias

        def visible(queries: Tensor, heads: Tensor) -> Tensor:
            seen = mask.block(queries, self.positions[0])
            assert seen is not None
            return seen[0]

        def bias_rows(queries: Tensor) -> Tensor:
            found: Tensor = bias(self.positions[:, queries], self.positions)
            return found[0].detach()

        return sample_error(y, self.inputs, visible, None if bias is None else bias_rows)


def run(study: Study) -> None:
    settings: AttentionKernelSettings = study.settings
    study.result |= {"checks": [], "matmul_tflops": study.machine.arithmetic / 1e12, "rows": []}
    study.say(f"a large matmul runs at {study.result['matmul_tflops']:.3g} TFLOP/s")
    if study.on_gpu:
        order = [SDPBackend(x).name for x in torch._C._get_sdp_priority_order() if x >= 0]
        study.say(f"cuDNN {torch.backends.cudnn.version()}; torch asks its backends in the order {order}")
    check(study)
    for tokens in settings.lengths:
        sizes = settings.head_dim, settings.heads, settings.kv_heads
        case = VariantInputs(study.device, tokens, *sizes, study.machine.dtype)
        time_forms(study, case, tokens in settings.flex)


def check(study: Study) -> None:
    """Every variant against float64, gradients included."""
    settings: AttentionKernelSettings = study.settings
    for name in VARIANTS:
        for dtype in (torch.bfloat16, torch.float32) if study.on_gpu else (torch.float32,):
            head_dim = settings.head_dim if dtype == torch.bfloat16 else min(32, settings.head_dim)
            case = VariantInputs(study.device, settings.checked, head_dim, 4, 2, dtype)
            case.grad()
            exact = case.in_float64()
            kept = slice(settings.checked // 3 if name == "padded" else 0, None)
            expected = attention_ref(*exact.inputs, *exact.rule(name))[0]
            errors = gradient_errors(
                case.ours(name), case.learned_inputs(name), expected, exact.learned_inputs(name), kept
            )
            note_errors(study, name, dtype, errors)


def note_errors(study: Study, name: str, dtype: torch.dtype, errors: tuple[float, float]) -> None:
    """The errors of a result and its gradients; a ValueError where they are too large."""
    said = f"output off by {errors[0]:.1e}, gradients by {errors[1]:.1e}"
    good = errors[0] < TOLERANCE[dtype] and errors[1] < 2 * TOLERANCE[dtype]
    study.say(f"{name:24} {str(dtype)[6:]:9} {said}")
    study.result["checks"].append({"what": name, "dtype": str(dtype)[6:], "said": said, "good": good})
    if not good:
        raise ValueError(f"nothing is timed: {name} in {str(dtype)[6:]} is wrong: {said}")


def forms(study: Study, case: VariantInputs, with_flex: bool) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    """Who, what, and how to run it."""
    if study.on_gpu:
        yield "SDPA flash", "causal", lambda: sdpa(*case.inputs, SDPBackend.FLASH_ATTENTION)
        yield "SDPA cuDNN", "causal", lambda: sdpa(*case.inputs, SDPBackend.CUDNN_ATTENTION)
        yield (
            "phasor cuDNN",
            "causal",
            lambda: cudnn.call_cudnn(*case.inputs, case.head_dim**-0.5, True, case.inputs[0].requires_grad),
        )
    for name in ("causal", "alibi", "t5", "window 1024"):
        yield "phasor", name, partial(case.ours, name)
    for name in ("causal", "alibi", "t5") if with_flex else ():
        yield "Flex", name, flex(case, name)


def flex(case: VariantInputs, name: str) -> Callable[[], Tensor]:
    table = case.t5_bias.table.detach().t().contiguous()
    last = table.shape[1] - 1

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - case.slopes[h] * (i - j).abs()

    def t5(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, (i - j).clamp(0, last)]

    return flex_attention(case.inputs, causal, {"causal": None, "alibi": alibi, "t5": t5}[name])


def visible_pairs(name: str, tokens: int) -> float:
    window = min(tokens, int(name.split()[1])) if name.startswith("window") else tokens
    return window * (window + 1) / 2 + (tokens - window) * window


def time_forms(study: Study, case: VariantInputs, with_flex: bool) -> None:
    """A row for every form; at last, ours beside those of plain attention."""
    rows: list[dict[str, Any]] = []
    timer = study.machine.timer
    for who, what, call in forms(study, case, with_flex):
        row: dict[str, Any] = {"who": who, "what": what, "tokens": case.tokens, "head_dim": case.head_dim}
        flops = 4 * visible_pairs(what, case.tokens) * case.head_dim * case.heads
        with study.noting_failure(row):
            with torch.no_grad():
                case.grad(False)
                row["error"] = case.error(what, call())
                study.check(f"{who}, {what}", row["error"], TOLERANCE[study.machine.dtype])
                row["forward_ms"] = timer.back_to_back_ms(call)
            row["forward_tflops"] = flops / row["forward_ms"] / 1e9
            if who != "Flex":  # whose backward passes take minutes to compile
                case.grad()
                learned = case.learned_inputs(what) if who == "phasor" else case.inputs
                row["both_ms"] = timer.back_to_back_ms(forward_backward(call, learned))
                row["both_tflops"] = 3.5 * flops / row["both_ms"] / 1e9
        rows.append(row)
        study.add_row(row)
    plain = {r["who"]: r["forward_ms"] for r in rows if r["what"] == "causal" and "forward_ms" in r}
    for row in rows:
        if row["who"] == "phasor" and "forward_ms" in row:
            row["forward_over"] = {who: row["forward_ms"] / ms for who, ms in plain.items() if who != "phasor"}
            study.say(f"{row['what']}, {format_field('forward over', row['forward_over'])}")

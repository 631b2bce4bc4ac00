"""Linear attention beside full attention and flash-linear-attention, by length; one token with its state, and whole
decoding steps of a model that mixes such layers with softmax attention.

Each operation is compared with its recurrence in float64 at every length, gradients included, and timed where it is
right; decoding steps with a forward in float64.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.bench.attention import forward_backward, gradient_errors
from phasor.bench.checks import relative_error
from phasor.bench.decode_steps import decode_step_row, graph_runner
from phasor.bench.peers import compiling_in_parallel, is_installed, sdpa
from phasor.bench.study import Study
from phasor.config import AttentionConfig, ModelConfig
from phasor.config.schema import Config, unknown
from phasor.generation.runners import StepSpec
from phasor.ops.linear_attention import (
    GATED_DELTA,
    LinearAttentionArgs,
    gated_delta,
    gated_delta_ref,
    linear_attention_step,
    retention,
    retention_ref,
)
from phasor.transformer import Transformer

# Relative to the norm, of a result and of gradients. Several matrix products in a row round their operands to 8 bits.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
LOGITS_TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-4}  # after as many layers as the pattern has
REFERENCES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"delta": gated_delta_ref, "retention": retention_ref}
OPERATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"delta": gated_delta, "retention": retention}
BEFORE = 256  # tokens before those that are compared: of what is older, e^-25 is left


class LinearAttentionSettings(Config):
    """Lengths, up to which of them peers are timed, heads and features, and the rows that one token is timed with.

    The decoding steps are those of a model whose every fourth layer has softmax attention, and the others attention of
    one of the `kinds`, over a cache of `context` tokens.
    """

    operations: tuple[str, ...] = tuple(OPERATIONS)
    lengths: tuple[int, ...] = (4096, 16384, 65536, 262144, 1048576)
    longest_of_peers: int = 65536
    heads: int = 16
    head_dim: int = 128
    batches: tuple[int, ...] = (1, 16, 64)
    checked: int = 99  # tokens of the checks against float64
    kinds: tuple[str, ...] = ("gated-delta",)
    layers: int = 8
    dim: int = 2048
    hidden_dim: int = 6144
    vocab_size: int = 32768
    context: int = 8192

    def check(self) -> None:
        for name in self.operations:
            if name not in OPERATIONS:
                raise unknown("operation", name, OPERATIONS)
        for name in self.kinds:
            if name not in AttentionConfig.kinds:
                raise unknown("kind of attention", name, AttentionConfig.kinds)


GPU = LinearAttentionSettings()
SMALL: dict[str, Any] = {"layers": 4, "dim": 64, "hidden_dim": 96, "vocab_size": 99, "context": 64}
CPU = LinearAttentionSettings(
    lengths=(256, 1024, 4096), longest_of_peers=1024, heads=4, head_dim=32, batches=(1,), **SMALL
)
TINY = CPU.replace(lengths=(70, 330), longest_of_peers=70, heads=2, head_dim=16, checked=21, kinds=("mamba2",))


class LinearInputs:
    """Random queries, unit keys and values `[B, T, H, D]` and gates `[B, T, H]`, as projections give them."""

    def __init__(self, study: Study, tokens: int, batch: int = 1) -> None:
        self.tokens, heads, dim, dtype = tokens, study.settings.heads, study.settings.head_dim, study.machine.dtype
        random = torch.Generator(study.device).manual_seed(0)

        def normal() -> Tensor:
            return torch.randn(batch, tokens, heads, dim, generator=random, device=study.device)

        gates = torch.rand(2, batch, tokens, heads, generator=random, device=study.device)
        q, k = ((F.normalize(normal(), dim=-1) * scale).to(dtype) for scale in (dim**-0.5, 1.0))
        self.inputs = [q, k, normal().to(dtype), 0.1 * gates[0].log(), gates[1].to(dtype)]

    def of(self, name: str) -> list[Tensor]:
        """The inputs of an operation; only the delta rule has a strength."""
        return self.inputs if name == "delta" else self.inputs[:4]

    def grad(self, wanted: bool = True) -> None:
        for x in self.inputs:
            x.requires_grad_(wanted)


def ours(name: str, inputs: list[Tensor]) -> Tensor:
    return OPERATIONS[name](*(x.transpose(1, 2) for x in inputs))[0].transpose(1, 2)


def fla(name: str, inputs: list[Tensor]) -> Tensor:
    """flash-linear-attention's kernels in chunks."""
    q, k, v, g, *beta = inputs
    if name == "delta":
        call = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        y: Tensor = call(q, k, v, g=g, beta=beta[0], scale=1.0)[0]
        return y
    y = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla(q, k, v, g=g, scale=1.0)[0]
    return y


def run(study: Study) -> None:
    settings: LinearAttentionSettings = study.settings
    study.result |= {"copy bytes/s": study.machine.bandwidth, "rows": [], "slopes": {}}
    for name in settings.operations:
        for batch in settings.batches:
            time_token(study, name, batch)
    for kind in settings.kinds:
        time_model(study, kind)
    for name in settings.operations:
        for tokens in settings.lengths:
            time_length(study, name, LinearInputs(study, tokens))
        slopes(study, name)
    for tokens in settings.lengths:
        if tokens <= settings.longest_of_peers:
            case = LinearInputs(study, tokens)
            row: dict[str, Any] = {"who": "SDPA", "what": "full attention", "tokens": tokens}
            q, k, v = case.inputs[:3]
            time_call(study, row, partial(sdpa, q, k, v), case, [q, k, v])


def check(study: Study, name: str, case: LinearInputs) -> dict[str, float]:
    """The errors of the last tokens and of their gradients against the recurrence in float64."""
    start = max(0, case.tokens - study.settings.checked - BEFORE)
    last = [x[:, start:].clone().requires_grad_() for x in case.of(name)]
    inputs = [torch.cat((x[:, :start], own), dim=1) for x, own in zip(case.of(name), last, strict=True)]
    exact = [x.detach().double().requires_grad_() for x in last]
    expected = REFERENCES[name](*(x.transpose(1, 2) for x in exact))[0].transpose(1, 2)
    kept = slice(-study.settings.checked, None)
    errors = gradient_errors(ours(name, inputs)[:, start:], last, expected, exact, kept)
    study.check(f"{name} over {case.tokens} tokens", max(errors), TOLERANCE[study.machine.dtype])
    return dict(zip(("output", "gradients"), errors, strict=True))


def forms(study: Study, name: str, case: LinearInputs) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Who computes an operation, and how to run it."""
    yield "phasor", partial(ours, name, case.of(name))
    if study.on_gpu and is_installed("fla") and case.tokens <= study.settings.longest_of_peers:
        yield "fla", partial(fla, name, case.of(name))


def time_length(study: Study, name: str, case: LinearInputs) -> None:
    """A row for every form of an operation; a failure is a row that says so."""
    own: dict[str, Any] = {}
    expected: list[Tensor] = []
    for who, call in forms(study, name, case):
        row: dict[str, Any] = {"who": who, "what": name, "tokens": case.tokens}
        with study.noting_failure(row), torch.no_grad(), compiling_in_parallel():
            if who == "phasor":
                row["path"] = GATED_DELTA.explain(LinearAttentionArgs(*(x.transpose(1, 2) for x in case.inputs)))[0]
                with torch.enable_grad():
                    row["errors"] = check(study, name, case)
                expected, own = [call()], row
            elif expected:
                row["difference"] = relative_error([call()], expected)
        if "failed" not in row:
            time_call(study, row, call, case, case.of(name), own)
        else:
            study.add_row(row)


def time_call(
    study: Study,
    row: dict[str, Any],
    call: Callable[[], Tensor],
    case: LinearInputs,
    inputs: list[Tensor],
    own: dict[str, Any] | None = None,
) -> None:
    """Complete a row by its times, and those over phasor's `own`. The limit is a copy of the inputs and the output."""
    timer = study.machine.timer
    row["limit_ms"] = 1e3 * sum(x.nbytes for x in (*inputs, case.inputs[2])) / study.machine.bandwidth
    with study.noting_failure(row), compiling_in_parallel():
        with torch.no_grad():
            row["forward_ms"] = timer.back_to_back_ms(call)
        case.grad()
        row["both_ms"] = timer.back_to_back_ms(forward_backward(call, inputs))
    case.grad(False)
    if own is not None and own is not row:
        row["times_ours"] = {
            key: row[key] / own[key] for key in ("forward_ms", "both_ms") if key in row.keys() & own.keys()
        }
    study.add_row(row)


def slopes(study: Study, name: str) -> None:
    """How fast times grow from the shortest to the longest row: the difference of logarithms."""
    rows = [row for row in study.result["rows"] if (row["who"], row["what"]) == ("phasor", name) and "both_ms" in row]
    if len(rows) > 1:
        first, last = rows[0], rows[-1]
        growth = math.log(last["tokens"] / first["tokens"])
        found = {key: math.log(last[key] / first[key]) / growth for key in ("forward_ms", "both_ms")}
        study.result["slopes"][name] = found
        study.say(f"{name}: slopes from {first['tokens']:,} to {last['tokens']:,} tokens: {found}")


def time_token(study: Study, name: str, batch: int) -> None:
    """One token of each row, its state updated in place, in a CUDA graph; the limit reads and writes the state."""
    heads, dim = study.settings.heads, study.settings.head_dim
    row: dict[str, Any] = {"who": "phasor", "what": f"one token, {name}", "batch": batch}
    with study.noting_failure(row), torch.no_grad():
        inputs = [x.transpose(1, 2) for x in LinearInputs(study, 1, batch).of(name)]
        state = torch.randn(batch, heads, dim, dim, device=study.device)
        expected, after = REFERENCES[name](*(x.double() for x in (*inputs, state)))
        q, k, v, log_decay, *strength = inputs
        call = partial(linear_attention_step, q, k, v, log_decay, strength[0] if strength else None, state)
        row["error"] = relative_error([call(), state], [expected, after])
        study.check("one token", row["error"], TOLERANCE[study.machine.dtype])
        row["ms"] = study.machine.timer.graph_ms(call)
        row["of_limit"] = 2e3 * state.nbytes / study.machine.bandwidth / row["ms"]
    study.add_row(row)


def time_model(study: Study, kind: str) -> None:
    """Decoding steps of a model with layers of a kind and every fourth with softmax attention."""
    s: LinearAttentionSettings = study.settings
    checked: dict[str, Any] = {"who": "phasor", "what": f"decoding step, {kind} and softmax"}
    with study.noting_failure(checked):
        checked["error"] = check_model(study, build(study, kind, layers=4))
    model = build(study, kind, s.layers)
    for batch in s.batches:
        row = dict(checked)
        if "failed" not in row:
            with study.noting_failure(row):
                row |= decode_step_row(study, model, batch, s.context)
        study.add_row(row)


def build(study: Study, kind: str, layers: int) -> Transformer:
    """Widths as those of Qwen3-Next: twice as many heads with a state as have queries and keys."""
    s: LinearAttentionSettings = study.settings
    sizes = {"num_heads": 2 * s.heads, "num_key_heads": s.heads, "key_dim": s.head_dim, "value_dim": s.head_dim}
    with_state: dict[str, Any] = {"attention": {"kind": kind, **sizes}}
    config = ModelConfig.from_dict(
        {
            "vocab_size": s.vocab_size,
            "dim": s.dim,
            "num_layers": layers,
            "num_heads": s.heads,
            "num_kv_heads": max(1, s.heads // 8),
            "head_dim": 2 * s.head_dim,
            "hidden_dim": s.hidden_dim,
            "norm": {"kind": "rmsnorm", "eps": 1e-6},
            "position": {"kind": "rotary", "rotary_dim": s.head_dim // 2},
            "feedforward": {"activation": "swiglu"},
            "layers": [{} if i % 4 == 3 else with_state for i in range(layers)],
            "max_length": s.context + 1024,
        }
    )
    torch.manual_seed(0)
    with study.device:
        return Transformer(config).to(study.machine.dtype).eval()


@torch.inference_mode()
def check_model(study: Study, model: Transformer) -> float:
    """The error of the logits of three steps after a prompt against a forward in float64."""
    count = study.settings.checked
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, study.settings.vocab_size, (2, count + 3), generator=generator).to(study.device)
    runner = graph_runner(study, StepSpec(model, rows=2, max_length=count + 3))
    runner.prefill(ids[:, :count].tolist())
    found = torch.stack([runner.step(ids[:, index]).clone() for index in range(count, count + 3)], dim=1)
    expected = copy.deepcopy(model).double()(ids)[:, count:]
    error = relative_error([found], [expected])
    return study.check("a decoding step", error, LOGITS_TOLERANCE[study.machine.dtype])

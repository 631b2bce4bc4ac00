"""Linear attention beside full attention and flash-linear-attention, by length; and one token with its state.

Checks each operation first against its recurrence in float64, gradients included, and times none that is wrong.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.bench.attention import forward_backward, gradient_errors
from phasor.bench.checks import relative_error
from phasor.bench.peers import is_installed, sdpa
from phasor.bench.study import Study
from phasor.config.schema import Config
from phasor.ops.linear_attention import (
    GATED_DELTA,
    gated_delta,
    gated_delta_ref,
    linear_attention_step,
    retention,
    retention_ref,
)

# Relative to the norm, of a result and of gradients. Several matrix products in a row round their operands to 8 bits.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
REFERENCES = {"gated delta": gated_delta_ref, "retention": retention_ref}


class LinearAttentionSettings(Config):
    """Lengths that are timed, the heads and their features, and the rows of a batch that one token is timed with."""

    lengths: tuple[int, ...] = (4096, 16384, 65536)
    heads: int = 16
    head_dim: int = 128
    batches: tuple[int, ...] = (1, 16, 64)
    checked: int = 333  # tokens of the checks against float64


GPU = LinearAttentionSettings()
CPU = LinearAttentionSettings(lengths=(256, 1024), heads=4, head_dim=32, batches=(1,))
TINY = CPU.replace(lengths=(70,), heads=2, head_dim=16, checked=21)


class LinearInputs:
    """Random queries, unit keys and values `[B, T, H, D]` and gates `[B, T, H]`, as projections give them."""

    def __init__(self, study: Study, tokens: int, dtype: torch.dtype, batch: int = 1) -> None:
        self.tokens, heads, dim = tokens, study.settings.heads, study.settings.head_dim
        random = torch.Generator(study.device).manual_seed(0)
        shape = batch, tokens, heads
        q, k, v = torch.randn(3, *shape, dim, generator=random, device=study.device)
        gates = torch.rand(2, *shape, generator=random, device=study.device)
        q, k = F.normalize(q, dim=-1) * dim**-0.5, F.normalize(k, dim=-1)
        self.inputs = [q.to(dtype), k.to(dtype), v.to(dtype), 0.1 * gates[0].log(), gates[1].to(dtype)]

    def of(self, name: str) -> list[Tensor]:
        """The inputs of an operation; only the delta rule has a strength."""
        return self.inputs if name == "gated delta" else self.inputs[:4]

    def grad(self, wanted: bool = True) -> None:
        for x in self.inputs:
            x.requires_grad_(wanted)


def ours(name: str, inputs: list[Tensor]) -> Tensor:
    operation: Callable[..., tuple[Tensor, Tensor]] = gated_delta if name == "gated delta" else retention
    return operation(*(x.transpose(1, 2) for x in inputs))[0].transpose(1, 2)


def fla(name: str, inputs: list[Tensor]) -> Tensor:
    """flash-linear-attention's kernels in chunks."""
    q, k, v, g, *beta = inputs
    if name == "gated delta":
        call = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        y: Tensor = call(q, k, v, g=g, beta=beta[0], scale=1.0)[0]
        return y
    y = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla(q, k, v, g=g, scale=1.0)[0]
    return y


def run(study: Study) -> None:
    settings: LinearAttentionSettings = study.settings
    study.result |= {"copy bytes/s": study.machine.bandwidth, "checks": [], "rows": []}
    good = [name for name in REFERENCES if check(study, name)]
    for tokens in settings.lengths:
        time_length(study, LinearInputs(study, tokens, study.machine.dtype), good)
    for batch in settings.batches:
        time_step(study, batch)


def check(study: Study, name: str) -> bool:
    """Whether an operation equals its recurrence in float64, gradients included, in each dtype that is timed."""
    row: dict[str, Any] = {"what": name}
    with study.noting_failure(row):
        for dtype in dict.fromkeys((study.machine.dtype, torch.float32)):
            case = LinearInputs(study, study.settings.checked, dtype)
            case.grad()
            exact = [x.detach().double().requires_grad_() for x in case.of(name)]
            expected = REFERENCES[name](*(x.transpose(1, 2) for x in exact))[0].transpose(1, 2)  # type: ignore[operator]
            errors = gradient_errors(ours(name, case.of(name)), case.of(name), expected, exact)
            row[str(dtype)[6:]] = dict(zip(("output", "gradients"), errors, strict=True))
            study.check(f"{name} in {str(dtype)[6:]}", max(errors), TOLERANCE[dtype])
    study.result["checks"].append(row)
    study.say(", ".join(f"{key}: {value}" for key, value in row.items()))
    return "failed" not in row


def forms(study: Study, case: LinearInputs, good: list[str]) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    """Who, what, and how to run it."""
    for name in good:
        yield "phasor", name, partial(ours, name, case.of(name))
        if study.on_gpu and is_installed("fla"):
            yield "fla", name, partial(fla, name, case.of(name))
    yield "SDPA", "full attention", partial(sdpa, *case.inputs[:3])


def time_length(study: Study, case: LinearInputs, good: list[str]) -> None:
    """A row for every form; a failure is a row that says so. The limit is a copy of the inputs and of the output."""
    timer, ours_ms = study.machine.timer, {}
    expected: dict[str, Tensor] = {}
    for who, what, call in forms(study, case, good):
        row: dict[str, Any] = {"who": who, "what": what, "tokens": case.tokens}
        inputs = case.inputs[:3] if who == "SDPA" else case.of(what)
        size = sum(x.nbytes for x in (*inputs, case.inputs[2]))
        row["limit_ms"] = 1e3 * size / study.machine.bandwidth
        with study.noting_failure(row):
            with torch.no_grad():
                y = call()
                if who == "phasor":
                    expected[what] = y
                    row["path"] = GATED_DELTA.explain(*(x.transpose(1, 2) for x in case.inputs))[0]
                elif who == "fla":
                    row["difference"] = relative_error([y], [expected[what].double()])
                row["forward_ms"] = timer.back_to_back_ms(call)
            case.grad()
            row["both_ms"] = timer.back_to_back_ms(forward_backward(call, inputs))
        case.grad(False)
        if who == "phasor":
            ours_ms[what] = row
        elif what in ours_ms:
            measured = {"forward_ms", "both_ms"} & row.keys() & ours_ms[what].keys()
            row["times_ours"] = {key: row[key] / ours_ms[what][key] for key in sorted(measured)}
        study.add_row(row)


def time_step(study: Study, batch: int) -> None:
    """One token of each row, its state updated in place, in a CUDA graph; the limit reads and writes the state."""
    heads, dim = study.settings.heads, study.settings.head_dim
    row: dict[str, Any] = {"who": "phasor", "what": "one token", "batch": batch}
    with study.noting_failure(row), torch.no_grad():
        inputs = [x.transpose(1, 2) for x in LinearInputs(study, 1, study.machine.dtype, batch).inputs]
        state = torch.randn(batch, heads, dim, dim, device=study.device)
        inputs.append(state)
        expected, after = gated_delta_ref(*(x.double() for x in inputs))
        y = linear_attention_step(*inputs)
        row["error"] = relative_error([y, state], [expected, after])
        study.check("one token", row["error"], TOLERANCE[study.machine.dtype])
        row["ms"] = study.machine.timer.graph_ms(lambda: linear_attention_step(*inputs))
        row["of_limit"] = 2e3 * state.nbytes / study.machine.bandwidth / row["ms"]
    study.add_row(row)

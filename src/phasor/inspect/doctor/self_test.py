"""A self-test of some seconds: what the installed kernels compute beside float64 formulas that are written out here."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from pathlib import Path

import torch
from torch import Tensor

from phasor.checkpoints import load, save
from phasor.config.schema import shorten
from phasor.models.presets import preset
from phasor.nn.positions.rotary.module import Rotary
from phasor.ops.attention import Mask, ScoreMod, attention
from phasor.ops.cross_entropy import linear_cross_entropy
from phasor.ops.glu import glu
from phasor.ops.norm import norm
from phasor.transformer import Transformer

FAR = 2**36  # up to where angles are exact
ANGLES = 4.5e-8  # half a unit in the last place of float32, and the phase's own error at 2^36
SUMS = 1e-5  # of float32 sums of a few hundred products, relative to the largest result
LOGITS = 1e-4  # the same after two layers
DIGITS = 60


@dataclass(frozen=True)
class Check:
    """One check of the self-test: the largest error beside its bound, or what went wrong."""

    name: str
    device: str
    error: float | None
    bound: float
    seconds: float
    problem: str | None = None


def self_test(devices: tuple[str, ...]) -> Iterator[Check]:
    """The checks on each device; one that fails does not keep the others from running."""
    for device in devices:
        for name, (run, bound) in CHECKS.items():
            begun = time.perf_counter()
            try:
                with torch.no_grad():
                    error = run(torch.device(device))
                problem = None if error <= bound else f"the error is {error:.1e}, above {bound:.1e}"
            except Exception as wrong:  # any of them belongs in the report
                error, problem = None, f"{type(wrong).__name__}: {shorten(' '.join(str(wrong).split()), 300)}"
            yield Check(name, device, error, bound, time.perf_counter() - begun, problem)


def random_tensor(*shape: int, seed: int, device: torch.device) -> Tensor:
    """Normal numbers in float32, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected result."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def rotary_error(device: torch.device) -> float:
    """Cosines and sines at positions up to 2^36, beside angles in sixty decimal digits."""
    positions = [0, 1, 2**20 + 7, 2**30 - 1, FAR - 12_345, FAR]
    rope = Rotary(head_dim=32, base=10000.0).to(device)
    cos, sin = rope.cos_sin(torch.tensor(positions, device=device))
    worst = 0.0
    with localcontext() as context:
        context.prec = DIGITS
        turn = 2 * pi()
        step = Decimal(10000).ln() / 16
        for i in range(16):
            frequency = (-step * i).exp()
            for row, position in enumerate(positions):
                angle = float(position * frequency % turn)
                worst = max(worst, abs(float(cos[row, i]) - math.cos(angle)))
                worst = max(worst, abs(float(sin[row, i]) - math.sin(angle)))
    return worst


def pi() -> Decimal:
    """Machin's formula, pi = 16 atan(1/5) - 4 atan(1/239), in the digits of the context."""

    def atan_of_inverse(x: int) -> Decimal:
        power = total = Decimal(1) / x
        n = 1
        while abs(power) > Decimal(10) ** -(DIGITS + 5):
            power, n = -power / (x * x), n + 2
            total += power / n
        return total

    return 16 * atan_of_inverse(5) - 4 * atan_of_inverse(239)


def attention_error(device: torch.device) -> float:
    """Causal attention with fewer key than query heads."""
    q = random_tensor(2, 63, 4, 16, seed=0, device=device)
    k, v = (random_tensor(2, 63, 2, 16, seed=seed, device=device) for seed in (1, 2))
    found = attention(q, k, v, Mask(causal=True), ScoreMod(scale=0.25))
    keys, values = (x.double().repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.double(), keys) * 0.25
    hidden = torch.ones(63, 63, dtype=torch.bool, device=device).triu(1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return relative_error(found, torch.einsum("bhts,bshd->bthd", weights, values))


def norm_error(device: torch.device) -> float:
    """RMSNorm."""
    x, weight = random_tensor(7, 96, seed=3, device=device), random_tensor(96, seed=4, device=device)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    return relative_error(norm(x, weight, None, eps=1e-6), expected)


def glu_error(device: torch.device) -> float:
    """SwiGLU: the gate is the first half."""
    x = random_tensor(7, 192, seed=5, device=device)
    gate, up = x.double().chunk(2, dim=-1)
    return relative_error(glu(x, "swiglu"), gate / (1 + (-gate).exp()) * up)


def cross_entropy_error(device: torch.device) -> float:
    """The cross-entropy of rows by a table of the vocabulary."""
    hidden, table = random_tensor(31, 48, seed=6, device=device), random_tensor(101, 48, seed=7, device=device)
    targets = torch.arange(31, device=device) * 3
    found = linear_cross_entropy(hidden, table, targets, torch.ones(31, device=device)).loss
    logits = hidden.double() @ table.double().T
    expected = logits.logsumexp(-1) - logits[torch.arange(31, device=device), targets]
    return relative_error(found, expected.sum())


def tiny_model() -> Transformer:
    """A model of two layers, with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer(preset("llama-3.1", dim=64, num_heads=4, num_kv_heads=2, num_layers=2, vocab_size=97)).eval()


def decoding_error(device: torch.device) -> float:
    """A decoding step after a prompt in the cache, beside the whole text at once in float64."""
    model = tiny_model().to(device)
    tokens = torch.arange(3, 20, device=device)[None]
    cache = model.new_cache(1, 32)
    model(tokens[:, :-1], cache=cache)
    step = model(tokens[:, -1:], cache=cache)
    wide = copy.deepcopy(model).double()
    return relative_error(step[:, -1], wide(tokens, length=32)[:, -1])


def folder_error(device: torch.device) -> float:
    """A model written and read again in both formats: how many of its weights have other bits."""
    model = tiny_model()
    tokens = torch.arange(9)[None]
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        for format in ("phasor", "hf"):
            save(model, Path(place, format), format)
            again = load(Path(place, format), device)
            own = model.state_dict()
            wrong += sum(not torch.equal(weight.cpu(), own[name]) for name, weight in again.state_dict().items())
            wrong += int(not torch.isfinite(again(tokens.to(device))).all())
    return float(wrong)


CHECKS: dict[str, tuple[Callable[[torch.device], float], float]] = {
    "rotary at 2^36": (rotary_error, ANGLES),
    "attention": (attention_error, SUMS),
    "norm": (norm_error, SUMS),
    "gated activation": (glu_error, SUMS),
    "cross-entropy": (cross_entropy_error, SUMS),
    "decoding step": (decoding_error, LOGITS),
    "save and load": (folder_error, 0.0),
}

"""Linear cross-entropy, norms, gated activations, float8 and AdamW beside torch, torch.compile and Liger.

Every result is compared with float64 first, and a wrong one gets no time. The floor is what must be read and written
at the speed of a device copy; that of the cross-entropy is its three matmuls by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phasor.bench.checks import relative_error
from phasor.bench.peers import is_installed, liger
from phasor.bench.study import Study
from phasor.config import EmbeddingConfig
from phasor.config.schema import Config, unknown
from phasor.models.presets import preset
from phasor.ops import cross_entropy, dispatch, float8, glu, norm
from phasor.ops.adamw import AdamW
from phasor.transformer import Transformer

BF16 = 2**-8  # one unit in the last place, relative to the power of two below
FLOAT8 = 2**-5  # three bits after the first, on average
Call = Callable[[], Any]


class FusedSettings(Config):
    """Which parts are timed, and the sizes of the rows."""

    parts: tuple[str, ...] = ("cross-entropy", "norm", "gated", "float8", "optimizer")
    tokens: int = 16384
    dim: int = 2048
    hidden_dim: int = 8192
    vocabularies: tuple[int, ...] = (32000, 128256)

    def check(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise unknown("part of the workload fused", part, PARTS)


def run(study: Study) -> None:
    study.result["rows"] = []
    fused = FusedKernels(study)
    with dispatch.force_path("triton"):
        for part in study.settings.parts:
            PARTS[part](fused)


class FusedKernels:
    """Times of kernels: a table per workload, with a row for each implementation."""

    def __init__(self, study: Study) -> None:
        self.study, self.timer = study, study.machine.timer
        s: FusedSettings = study.settings
        self.tokens, self.dim, self.hidden_dim, self.vocabularies = s.tokens, s.dim, s.hidden_dim, s.vocabularies
        self.bytes_per_ms = study.machine.bandwidth / 1e3
        self.liger = study.on_gpu and is_installed("liger_kernel")
        if not self.liger:
            study.say("Liger is not installed, or there is no GPU: it is left out")

    def randn(self, *shape: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator(self.study.device).manual_seed(seed)
        x = torch.randn(*shape, generator=generator, device=self.study.device) * scale
        return x.to(dtype or self.study.machine.dtype).requires_grad_()

    def variants(self, ours: Any, plain: Any, theirs: Any = None) -> dict[str, Any]:
        """phasor, Liger where it is installed, torch, and on a GPU torch compiled."""
        found = {"phasor": ours}
        if self.liger and theirs is not None:
            found["Liger"] = theirs
        found["torch"] = plain
        if self.study.machine.compiles:
            found["torch.compile"] = torch.compile(plain)
        return found

    def table(
        self,
        title: str,
        calls: dict[str, Call],
        expected: list[Tensor],
        allowed: float,
        floor: float,
        read: Callable[[Any], Any] = tuple,
    ) -> None:
        """Check and time each call; `floor` is in milliseconds, and `read` makes of a result what is checked."""
        for name, call in calls.items():
            row: dict[str, Any] = {"workload": title, "name": name, "floor_ms": floor}
            with self.study.noting_failure(row):
                row["error"] = max(relative_error([a], [b]) for a, b in zip(read(call()), expected, strict=True))
                self.study.check(name, row["error"], allowed)
                row["ms"], row["gib"] = 1e3 * self.timer(call), self.timer.peak_gib(call)
            self.study.add_row(row)

    def tables(
        self,
        title: str,
        variants: dict[str, Callable[..., Any]],
        inputs: tuple[Tensor, ...],
        directions: tuple[Tensor, ...],
        floors: tuple[float, float],
    ) -> None:
        """Forward alone, then with the backward pass; expected is the plain form in float64."""

        def as_list(y: Any) -> list[Tensor]:
            return list(y) if isinstance(y, tuple) else [y]

        def forward(f: Callable[..., Any]) -> Call:
            return torch.no_grad()(lambda: as_list(f(*inputs)))

        def backward(f: Callable[..., Any]) -> Call:
            def call() -> list[Tensor]:
                ys = as_list(f(*inputs))
                return [*ys, *torch.autograd.grad(ys, inputs, directions)]

            return call

        wide = [x.detach().double().requires_grad_() for x in inputs]
        expected = as_list(variants["torch"](*wide))
        # One rounding of the result, of a sum before it, or of the direction that comes back.
        self.table(f"{title}, forward", {n: forward(f) for n, f in variants.items()}, expected, BF16, floors[0])
        expected += torch.autograd.grad(expected, wide, [d.double() for d in directions])
        both = {n: backward(f) for n, f in variants.items()}
        self.table(f"{title}, forward and backward", both, expected, BF16, floors[1])

    def matmul_ms(self, h: Tensor, w: Tensor) -> float:
        """The time of the three matmuls of a cross-entropy alone, on all rows at once."""
        with torch.no_grad():
            logits = h @ w.T
            return 1e3 * self.timer(lambda: (torch.mm(h, w.T, out=logits), torch.mm(logits, w), torch.mm(logits.T, h)))

    def cross_entropies(self) -> None:
        for vocabulary in self.vocabularies:
            h, w = self.randn(self.tokens, self.dim), self.randn(vocabulary, self.dim, scale=0.05, seed=1)
            targets = torch.randint(0, vocabulary, (self.tokens,), device=self.study.device)
            expected = cross_entropy_float64(h, w, targets)
            losses = self.loss_variants(h, w, targets)

            def with_gradients(f: Callable[[], Tensor], h: Tensor = h, w: Tensor = w) -> Call:
                def call() -> list[Tensor]:
                    loss = f()
                    return [loss, *torch.autograd.grad(loss, (h, w))]

                return call

            title = f"linear cross-entropy {self.tokens} x {self.dim} x {vocabulary}"
            calls, limit = {name: with_gradients(f) for name, f in losses.items()}, self.matmul_ms(h, w)
            # Logits of size 2 are rounded, then their gradient, then the result, each by at most half a unit.
            self.table(f"{title}, forward and backward", calls, expected, 3 * BF16, limit)
            no_grad = torch.no_grad()(lambda ours=losses["phasor"]: [ours()])
            self.table(f"{title}, no gradients", {"phasor": no_grad}, expected[:1], 1e-3, limit / 3)

    def loss_variants(self, h: Tensor, w: Tensor, targets: Tensor) -> dict[str, Callable[[], Tensor]]:
        weights = torch.ones(self.tokens, device=self.study.device)
        found: dict[str, Callable[[], Tensor]] = {
            "phasor": lambda: cross_entropy.linear_cross_entropy(h, w, targets, weights).loss / len(h)
        }
        if self.liger:
            theirs = liger("transformers.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss")()
            found["Liger"] = lambda: theirs(w, h, targets)
        found["torch, logits held"] = lambda: F.cross_entropy(F.linear(h, w).float(), targets)
        if self.study.machine.compiles:
            compiled = torch.compile(chunked_cross_entropy)
            found["torch.compile, chunked"] = lambda: compiled(h, w, targets)
        return found

    def norms(self) -> None:
        x, r, weight = (
            self.randn(self.tokens, self.dim),
            self.randn(self.tokens, self.dim, seed=1),
            self.randn(self.dim),
        )
        dy, ds = (self.randn(self.tokens, self.dim, seed=i).detach() for i in (3, 4))
        size = x.nbytes / self.bytes_per_ms

        def plain(x: Tensor, weight: Tensor) -> Tensor:
            return torch.rms_norm(x, (self.dim,), weight, 1e-5)

        def plain_sum(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return x + r, plain(x + r, weight)

        def ours(x: Tensor, weight: Tensor) -> Tensor:
            return norm.norm(x, weight, None, eps=1e-5)

        def ours_sum(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return norm.add_norm(x, r, weight, None, eps=1e-5)

        def liger_norm(x: Tensor, weight: Tensor) -> Tensor:
            function = liger("ops.rms_norm", "LigerRMSNormFunction")
            y: Tensor = function.apply(x, weight, 1e-5, 0.0, "llama", False)
            return y

        def liger_sum(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            y, s = liger("ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction").apply(x, r, weight, 1e-5)
            return s, y

        about = f"{self.tokens} x {self.dim}"
        single, both = self.variants(ours, plain, liger_norm), self.variants(ours_sum, plain_sum, liger_sum)
        self.tables(f"rmsnorm {about}", single, (x, weight), (dy,), (2 * size, 5 * size))
        self.tables(f"sum and rmsnorm {about}", both, (x, r, weight), (ds, dy), (4 * size, 8 * size))
        self.norms_around_sum(size)

    def norms_around_sum(self, size: float) -> None:
        """Norms on both sides of a residual sum, as Gemma's."""
        shapes = ((self.tokens, self.dim),) * 2 + ((self.dim,),) * 2 + ((self.tokens, self.dim),) * 2
        x, branch, weight, next_weight, *directions = (self.randn(*shape, seed=i) for i, shape in enumerate(shapes))

        def ours(x: Tensor, branch: Tensor, weight: Tensor, next_weight: Tensor) -> tuple[Tensor, Tensor]:
            return norm.norm_add_norm(x, branch, weight, None, next_weight, None, eps=1e-5, offset=1.0)

        def apart(x: Tensor, branch: Tensor, weight: Tensor, next_weight: Tensor) -> tuple[Tensor, Tensor]:
            total = x + norm.norm(branch, weight, None, eps=1e-5, offset=1.0)
            return total, norm.norm(total, next_weight, None, eps=1e-5, offset=1.0)

        def plain(x: Tensor, branch: Tensor, weight: Tensor, next_weight: Tensor) -> tuple[Tensor, Tensor]:
            return norm.norm_add_norm_ref(x, branch, weight, None, next_weight, None, 1e-5, 1.0)

        variants = {"phasor, apart": apart, **self.variants(ours, plain)}
        grads = directions[0].detach(), directions[1].detach()
        title = f"rmsnorm, sum and rmsnorm {self.tokens} x {self.dim}"
        self.tables(title, variants, (x, branch, weight, next_weight), grads, (4 * size, 10 * size))

    def activations(self) -> None:
        x, dy = self.randn(self.tokens, 2 * self.hidden_dim), self.randn(self.tokens, self.hidden_dim, seed=1).detach()
        size = dy.nbytes / self.bytes_per_ms

        def theirs(x: Tensor) -> Any:
            return liger("ops.swiglu", "LigerFusedGateUpSiLUMulFunction").apply(x)

        def plain(x: Tensor) -> Tensor:
            return glu.glu_ref(x, "swiglu")

        variants = self.variants(lambda x: glu.glu(x, "swiglu"), plain, theirs)
        self.tables(f"swiglu {self.tokens} x {self.hidden_dim}", variants, (x,), (dy,), (3 * size, 8 * size))

    def float8_kernels(self) -> None:
        """The activation and its gradient as float8 rows, and the transpose of such rows."""
        from phasor.ops.float8 import kernels

        x = self.randn(self.tokens, 2 * self.hidden_dim).detach()
        dy = self.randn(self.tokens, self.hidden_dim, seed=1).detach()
        wide_x = x.double().requires_grad_()
        exact_y = glu.glu_ref(wide_x, "swiglu")
        (gradient,) = torch.autograd.grad(exact_y, wide_x, dy.double())
        size = dy.numel() / self.bytes_per_ms  # a byte for each feature

        def exact(found: tuple[Tensor, Tensor]) -> list[Tensor]:
            bits, scale = found
            return [bits.double() * scale.double()]

        def plain(x: Tensor) -> tuple[Tensor, Tensor]:
            return float8.quantize_rows(glu.glu_ref(x, "swiglu"))

        def plain_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            gate, up = x.float().chunk(2, -1)
            s = torch.sigmoid(gate)
            return float8.quantize_rows(torch.cat((dy * up * s * (1 + gate * (1 - s)), dy * gate * s), -1).to(x.dtype))

        def plain_transpose(bits: Tensor, factor: Tensor) -> Tensor:
            return (bits.float() * factor).to(float8.FLOAT8).t().contiguous()

        def calls(ours: Callable[..., Any], plain: Callable[..., Any], *args: Tensor) -> dict[str, Call]:
            found = {"phasor": ours} | ({"torch.compile": torch.compile(plain)} if self.study.machine.compiles else {})
            return {name: partial(f, *args) for name, f in found.items()}

        title = f"swiglu in float8 {self.tokens} x {self.hidden_dim}"
        forward = calls(lambda x: kernels.glu_float8(x, "swiglu"), plain, x)
        self.table(title, forward, [exact_y.detach()], FLOAT8, 5 * size, read=exact)
        backward = calls(lambda dy, x: kernels.glu_float8_backward(dy, x, "swiglu"), plain_backward, dy, x)
        self.table(f"{title}, backward", backward, [gradient], FLOAT8, 8 * size, read=exact)
        bits, scale = kernels.glu_float8_backward(dy, x, "swiglu")
        factor = scale / scale.amax()
        expected = (bits.float() * factor).to(float8.FLOAT8).t()
        transposes = calls(float8.transpose, plain_transpose, bits, factor)
        title = f"float8 transpose {self.tokens} x {2 * self.hidden_dim}"
        self.table(title, transposes, [expected], 0.0, 4 * size, read=lambda result: [result])

    def optimizers(self) -> None:
        """A first step, with gradients so small that the formula's eps shows, over the weights that are trained."""
        with torch.device("meta"):
            config = preset("llama-2", **self.study.machine.sizes.model, embedding=EmbeddingConfig(tied=True))
            shapes = [weight.shape for weight in Transformer(config).parameters()]
        fields: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-8, "fused": True}
        half = torch.tensor(0.5, device=self.study.device)

        def stepping(kind: type[torch.optim.AdamW], clips: bool) -> Call:
            weights = [self.randn(*shape, seed=i) for i, shape in enumerate(shapes)]
            for i, weight in enumerate(weights):
                weight.grad = self.randn(*weight.shape, scale=2e-8 if clips else 1e-8, seed=100 + i).detach()
            optimizer = kind(weights, **fields)
            gradients = [weight.grad for weight in weights if weight.grad is not None]

            def step() -> list[Tensor]:
                if isinstance(optimizer, AdamW):
                    optimizer.scale = half if clips else None
                elif clips:
                    torch._foreach_mul_(gradients, half)
                optimizer.step()
                return [weights[0].detach(), weights[-1].detach()]

            return step

        expected = []
        for i in (0, len(shapes) - 1):
            w = self.randn(*shapes[i], seed=i).detach().double()
            g = self.randn(*shapes[i], scale=1e-8, seed=100 + i).detach().double()
            expected.append(w - 0.01 * (0.1 * w + g / (g.abs() + 1e-8)))
        count = sum(shape.numel() for shape in shapes)
        dtype = self.study.machine.dtype_name
        for clips in (False, True):
            title = f"AdamW's step, {count / 1e9:.2f} B {dtype} weights{', clipped' if clips else ''}"
            for name, kind in (("phasor", AdamW), ("torch, fused", torch.optim.AdamW)):
                self.table(title, {name: stepping(kind, clips)}, expected, BF16, 14 * count / self.bytes_per_ms)


def cross_entropy_float64(h: Tensor, w: Tensor, targets: Tensor) -> list[Tensor]:
    """The mean and its gradients in float64, some rows at a time."""
    h64, w64 = h.detach().double(), w.detach().double()
    loss, dh, dw = torch.zeros((), device=h.device, dtype=torch.float64), [], torch.zeros_like(w64)
    for part in torch.arange(len(h), device=h.device).split(2048):
        logits = h64[part] @ w64.T
        lse = logits.logsumexp(-1, keepdim=True)
        loss += (lse[:, 0] - logits.gather(1, targets[part, None])[:, 0]).sum()
        dlogits = logits.sub_(lse).exp_()
        dlogits.scatter_add_(1, targets[part, None], dlogits.new_full((len(part), 1), -1.0))
        dh.append(dlogits @ w64 / len(h))
        dw += dlogits.T @ h64[part] / len(h)
    return [loss / len(h), torch.cat(dh), dw]


def chunked_cross_entropy(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """What one writes by hand for torch.compile: chunks that are computed again in the backward pass."""

    def some(h: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).float(), targets, reduction="sum")

    parts = zip(h.split(4096), targets.split(4096), strict=True)
    each = [checkpoint(some, *part, use_reentrant=False) for part in parts]
    return torch.stack(each).sum() / len(h)


PARTS: dict[str, Callable[[FusedKernels], None]] = {
    "cross-entropy": FusedKernels.cross_entropies,
    "norm": FusedKernels.norms,
    "gated": FusedKernels.activations,
    "float8": FusedKernels.float8_kernels,
    "optimizer": FusedKernels.optimizers,
}
GPU = FusedSettings()
# Without float8, which Triton's interpreter does not round to as a GPU does.
TINY = FusedSettings(
    parts=("cross-entropy", "norm", "gated", "optimizer"), tokens=7, dim=16, hidden_dim=32, vocabularies=(33,)
)

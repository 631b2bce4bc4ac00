"""How exact are rotary angles? phasor's against the usual float products, positions 2^8 to 2^36, checked with mpmath.

Builds a small model, explains its positions, measures the worst error of cos and sin for each way to compute them,
shows that its logits do not depend on where a text starts, and plots the errors.

    python examples/precision.py [--out out/precision.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import mpmath
import torch
from rich.console import Console
from rich.table import Table

import phasor
from phasor.cli import main as command

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HEAD_DIM, BASE = 128, 10000.0
POWERS = range(8, 37, 2)
SAMPLES = 24  # random positions below each power of two


def exact_cos_sin(positions: list[int], pairs: list[int]) -> torch.Tensor:
    """Cosine and sine of position * base^(-2i/d) to 60 digits, rounded to float64: [positions, pairs, 2]."""
    mpmath.mp.dps = 60
    rows = []
    for position in positions:
        angles = [position * mpmath.mpf(BASE) ** (mpmath.mpf(-2 * i) / HEAD_DIM) for i in pairs]
        rows.append([[float(mpmath.cos(a)), float(mpmath.sin(a))] for a in angles])
    return torch.tensor(rows, dtype=torch.float64)


def float_cos_sin(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The usual way: frequencies and positions in a floating-point dtype, multiplied, and cosine and sine of that."""
    frequencies = (1.0 / BASE ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)).to(dtype)
    angles = positions.to(dtype)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=-1).double()


def worst_errors() -> dict[str, list[float]]:
    rope = phasor.Rotary(head_dim=HEAD_DIM, base=BASE)
    pairs = list(range(0, HEAD_DIM // 2, 3))
    errors: dict[str, list[float]] = {"phasor": [], "float32 product": [], "bfloat16 product": []}
    generator = torch.Generator().manual_seed(0)
    for power in POWERS:
        low, high = 2 ** (power - 1), 2**power
        positions = torch.randint(low, high, (SAMPLES,), generator=generator)
        exact = exact_cos_sin(positions.tolist(), pairs)
        results = {
            "phasor": torch.stack(rope.cos_sin(positions), dim=-1).double(),
            "float32 product": float_cos_sin(positions, torch.float32),
            "bfloat16 product": float_cos_sin(positions, torch.bfloat16),
        }
        for name, values in results.items():
            errors[name].append(float((values[:, pairs] - exact).abs().max()))
    return errors


def small_llama() -> phasor.Transformer:
    torch.manual_seed(0)
    return phasor.Transformer(phasor.preset("llama-3.1", dim=128, num_heads=8, num_layers=4, vocab_size=1000)).eval()


def logit_changes(model: phasor.Transformer) -> dict[int, float]:
    """How much the logits of a text change when its positions are shifted by 2^p, relative to their size, by p."""
    torch.manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, 64))
    with torch.no_grad():
        logits = model(tokens)
        shifted = {p: model(tokens, positions=torch.arange(64) + 2**p) for p in (10, 20, 30)}
    return {p: float((other - logits).abs().max() / logits.abs().max()) for p, other in shifted.items()}


def plot(errors: dict[str, list[float]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 4.8))
    positions = [2.0**p for p in POWERS]
    styles = {
        "phasor": ("#0072b2", "o"),
        "float32 product": ("#e69f00", "s"),
        "bfloat16 product": ("#999999", "^"),
    }
    for name, values in errors.items():
        color, marker = styles[name]
        axis.plot(positions, values, color=color, marker=marker, markersize=5, linewidth=1.8, label=name)
    axis.axhline(2**-25, color="black", linewidth=0.8, linestyle=":")
    axis.text(positions[0], 2**-25 / 1.25, "rounding to float32", fontsize=8, va="top")
    axis.axhline(1.0, color="#cc0000", linewidth=0.8, linestyle=":")
    axis.text(2.0**15, 0.8, "error as large as the value itself", fontsize=8, va="top", color="#cc0000")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylim(5e-9, 8)
    axis.set_xlabel("position")
    axis.set_ylabel("worst error of cos and sin")
    axis.set_title(f"Rotary angles against exact values (head dimension {HEAD_DIM}, base {BASE:,.0f})")
    axis.grid(True, which="major", alpha=0.25)
    axis.legend(loc="center right", frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.stem + ".part" + path.suffix)
    figure.savefig(temporary, dpi=150)
    temporary.replace(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/precision.png"))
    args = parser.parse_args()
    console = Console()

    model = small_llama()
    config = model.config
    count = sum(p.numel() for p in model.parameters())
    console.print(
        f"A small Llama 3.1: {count:,} parameters, {config.num_layers} layers, head dimension {config.head_dim}."
    )
    small = args.out.parent / "small-llama.json"
    small.parent.mkdir(parents=True, exist_ok=True)
    small.write_text(config.to_json(), encoding="utf-8")
    command(["explain", str(small)])

    with console.status("computing the exact values to 60 digits ..."):
        errors = worst_errors()
    table = Table(title="worst error of cos and sin", title_justify="left")
    table.add_column("positions up to", justify="right")
    for name in errors:
        table.add_column(name, justify="right")
    for row, power in enumerate(POWERS):
        table.add_row(f"2^{power}", *(f"{values[row]:.1e}" for values in errors.values()))
    console.print(table)

    for power, change in logit_changes(model).items():
        console.print(f"the same text shifted by 2^{power} positions: logits change by {change:.1e} of their size")
    plot(errors, args.out)
    console.print(f"figure: {args.out}")


if __name__ == "__main__":
    main()

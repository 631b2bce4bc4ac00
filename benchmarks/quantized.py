"""Perplexity of a run's model with its weights in 8 and 4 bits, on the run's validation texts, on a CPU.

python benchmarks/quantized.py RUN [--out benchmarks/results/quantized-perplexity.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import phasor
from phasor.evaluation.evaluator import encode_to_store, language_metrics
from phasor.evaluation.run import open_run

WEIGHTS = {"8 bits": (8, 32), "4 bits, groups of 32": (4, 32), "4 bits, groups of 64": (4, 64)}


@torch.inference_mode()
def measure(run: Path) -> dict[str, Any]:
    """The perplexity by weights, and by how many percent it is above that of float32."""
    trained = open_run(run, "cpu")
    models = {name: phasor.quantize(trained.model, bits, group_size=group) for name, (bits, group) in WEIGHTS.items()}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        store, _ = encode_to_store(trained, trained.valid_texts(), Path(folder))
        for name, model in {"float32": trained.model, **models}.items():
            metrics = language_metrics(dataclasses.replace(trained, model=model), store, lambda done, total: None)
            found[name] = {"perplexity": metrics["perplexity"], "tokens": metrics["tokens"]}
    for row in found.values():
        row["percent above float32"] = 100 * (row["perplexity"] / found["float32"]["perplexity"] - 1)
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "weights": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run of a language model")
    parser.add_argument("--out", type=Path, help="write the results there")
    given = parser.parse_args()
    text = json.dumps(measure(given.run), indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Loading a sharded checkpoint: time and peak anonymous memory, beside transformers on the same folder.

The folder is a Llama-shaped model of random weights, written by transformers. Every load is a process by itself. Runs
alternate, and the least of them stands beside their median. Both libraries leave tensors in the mapped file where
they can, to be read when they are first used: so the time until the first token's logits stands beside that of the
call. Before anything is timed, both must give the same logits. The limit is copying as many bytes once.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from phasor.bench.peers import quiet, require
from phasor.bench.study import Study, format_field
from phasor.config.schema import Config

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}  # of logits of order 1


class LoadingSettings(Config):
    """The sizes of the model, and how often each library loads it."""

    dim: int = 1024
    layers: int = 12
    vocabulary: int = 32000
    runs: int = 5
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


CPU = LoadingSettings()
TINY = LoadingSettings(dim=128, layers=2, vocabulary=96, runs=1, dtypes=("float32",))


def run(study: Study) -> None:
    require("transformers", "loading")
    settings: LoadingSettings = study.settings
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=settings.dim,
        intermediate_size=11 * settings.dim // 4,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.dim // 64,
        num_key_value_heads=settings.dim // 128,
        vocab_size=settings.vocabulary,
    )
    with tempfile.TemporaryDirectory() as folder:
        with quiet():
            transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")
        for dtype in settings.dtypes:
            found = study.result[f"into {dtype}"] = compare(study, Path(folder), dtype)
            for name, row in found.items():
                study.say(format_field(f"into {dtype}, {name}", row))
            study.save()


def load_once(library: str, folder: Path, dtype: str, mode: str = "time") -> dict[str, Any]:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    command = [sys.executable, "-m", "phasor.bench.load_once", library, str(folder), dtype, mode, str(size)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def compare(study: Study, folder: Path, dtype: str) -> dict[str, dict[str, float]]:
    libraries = ("phasor", "transformers")
    ours, theirs = (torch.tensor(load_once(library, folder, dtype, "check")["logits"]) for library in libraries)
    study.check(f"the logits in {dtype}", float((ours - theirs).abs().max()), TOLERANCE[dtype])
    times: dict[str, list[dict[str, Any]]] = {library: [] for library in libraries}
    for _ in range(study.settings.runs):
        for library, found in times.items():
            found.append(load_once(library, folder, dtype))
    result = {}
    for library, found in times.items():
        watched = [load_once(library, folder, dtype, "watch") for _ in range(2)]
        size = watched[0]["model"]
        result[library] = {"model": size, "peak / model": max(one["peak"] for one in watched) / size}
        for what, name in (("call", "seconds"), ("first logits", "ready")):
            seconds = [one[name] for one in found]
            result[library] |= {f"{what}, median": statistics.median(seconds), f"{what}, least": min(seconds)}
    result["copy once"] = {"seconds": load_once("phasor", folder, dtype, "copy")["copy"]}
    return result

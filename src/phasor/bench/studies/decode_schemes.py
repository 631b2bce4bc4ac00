"""Decoding steps with every position scheme beside rotary: which runner takes them, and their rate over rotary's.

Checked first: a few steps of a small model of each scheme give the logits of a forward without a cache in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from phasor.bench.checks import relative_error
from phasor.bench.decode_steps import decode_step_row, graph_runner
from phasor.bench.study import Study
from phasor.config import PositionConfig
from phasor.config.schema import Config, unknown
from phasor.generation.runners import StepSpec
from phasor.models.presets import preset
from phasor.transformer import Transformer

ROTARY = "rotary"
SMALL: dict[str, Any] = {
    "dim": 256,
    "hidden_dim": 704,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,
    "vocab_size": 1000,
}
TOLERANCE = 1e-3  # of float32 logits, relative to their norm; angles of selective rotary are rounded sums


def scheme_names() -> list[str]:
    """Rotary, then every other scheme of one row of positions that has defaults, in alphabetical order.

    >>> scheme_names()[:3]
    ['rotary', 'accumulated', 'alibi']
    """
    schemes = {name: PositionConfig.from_dict({"kind": name}) for name in sorted(PositionConfig.kinds)}
    return [ROTARY, *(name for name, x in schemes.items() if x.axes == 1 and name not in (ROTARY, "combined"))]


class DecodeSchemesSettings(Config):
    """Which schemes, all where none is named; rows, tokens in the cache, layers, and the tokens of the checks."""

    schemes: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1, 16)
    context: int = 8192
    layers: int = 8
    checked: int = 40

    def check(self) -> None:
        for name in self.schemes:
            if name not in scheme_names():
                raise unknown("scheme", name, scheme_names(), PositionConfig.former_kinds)


GPU = DecodeSchemesSettings()
CPU = DecodeSchemesSettings(batches=(1,), context=256, layers=2)
TINY = DecodeSchemesSettings(schemes=("alibi", "forget"), batches=(2,), context=40, layers=1, checked=7)


def run(study: Study) -> None:
    settings: DecodeSchemesSettings = study.settings
    names = list(dict.fromkeys([ROTARY, *(settings.schemes or scheme_names())]))
    rotary: dict[int, float] = {}
    for name in names:
        error: dict[str, Any] = {"scheme": name}
        with study.noting_failure(error):
            error["error"] = check(study, name)
        for batch in settings.batches:
            row = dict(error)
            if "failed" not in row:
                with study.noting_failure(row):
                    sizes = study.machine.sizes.model | {"num_layers": settings.layers}
                    row |= decode_step_row(study, build(study, name, sizes), batch, settings.context)
                    rotary.setdefault(batch, row["tokens/s"])
                    row["of rotary"] = row["tokens/s"] / rotary[batch]
            study.add_row(row)


def build(study: Study, name: str, sizes: dict[str, Any], dtype: torch.dtype | None = None) -> Transformer:
    torch.manual_seed(0)
    with study.device:
        model = Transformer(preset("llama-2", **sizes, position=name, max_length=study.settings.context + 1024))
    return model.to(dtype or study.machine.dtype).eval()


@torch.inference_mode()
def check(study: Study, name: str) -> float:
    """The error of the logits of three steps; a ValueError where it is too large."""
    model = build(study, name, SMALL, torch.float32)
    count = study.settings.checked
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SMALL["vocab_size"], (2, count + 3), generator=generator).to(study.device)
    runner = graph_runner(study, StepSpec(model, rows=2, max_length=count + 3, lengths=[count + 3] * 2))
    runner.prefill(ids[:, :count].tolist())
    found = torch.stack([runner.step(ids[:, index]).clone() for index in range(count, count + 3)], dim=1)
    expected = copy.deepcopy(model).double()(ids, length=count + 3)[:, count:]
    return study.check(f"decoding with {name}", relative_error([found], [expected]), TOLERANCE)

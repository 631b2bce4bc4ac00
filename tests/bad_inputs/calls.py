"""Calls of public functions with what they do not take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import phasor

WRONG: list[Any] = [
    None,
    3,
    1.5,
    b"x",
    object(),
    [],
    {},
    "\ud800",
    "no/such",
    True,
    torch.zeros(2),
    Path("no/such"),
    "\0",
]
Place = dict[str, Any]


def calls() -> dict[str, Callable[[Place], Any]]:
    found: list[tuple[str, Callable[[Place], Any]]] = []

    def add(name: str, call: Callable[[Place, Any], Any], wrong: list[Any]) -> None:
        for i, value in enumerate(wrong):
            found.append((f"{name}-{i}-{type(value).__name__}", lambda place, value=value: call(place, value)))

    not_none = WRONG[1:]
    not_number = [x for x in WRONG if x is not None and x is not True and type(x) is not int] + [-1, 0, 1 << 70]
    not_device = [x for x in not_none if x is not WRONG[1]]
    add("load", lambda p, x: phasor.load(x), WRONG)
    add("load-device", lambda p, x: phasor.load(p["model"], device=x), not_device)
    add("load-dtype", lambda p, x: phasor.load(p["model"], dtype=x), [*not_none, torch.int8, "float32"])
    add("load-position", lambda p, x: phasor.load(p["model"], position=x), not_none)
    add("load-extension", lambda p, x: phasor.load(p["model"], extension=x), not_none)
    add("save-model", lambda p, x: phasor.save(x, p["out"] / "new"), WRONG)
    add("save-folder", lambda p, x: phasor.save(p["loaded"], x), [None, 3, 1.5, b"x", object(), [], {}, True, "\0"])
    add("save-format", lambda p, x: phasor.save(p["loaded"], p["out"] / "new", x), WRONG)
    add("save-over", lambda p, x: phasor.save(p["loaded"], p[x]), ["file", "notes", "text"])
    add("convert", lambda p, x: phasor.convert(x, p["out"] / "new"), WRONG)
    add("convert-to", lambda p, x: phasor.convert(p["model"], x), [None, 3, 1.5, b"x", object(), [], {}, True, "\0"])
    add("convert-format", lambda p, x: phasor.convert(p["model"], p["out"] / "new", x), not_none)
    add("generate-model", lambda p, x: phasor.generate(x, [1]), WRONG)
    add("generate", lambda p, x: phasor.generate(p["loaded"], x, max_new_tokens=1), not_none)
    add(
        "generate-none",
        lambda p, x: phasor.generate(p["loaded"], x),
        [None, [None], [[]], [-1], [99], [1.5], [True], ["a"]],
    )
    add("generate-options", lambda p, x: phasor.generate(p["loaded"], [1], x), not_none)
    add("generate-field", lambda p, x: phasor.generate(p["loaded"], [1], nothing=x), [1])
    add("generate-draft", lambda p, x: phasor.generate(p["loaded"], [1], draft=x), not_none)
    add("stream", lambda p, x: list(phasor.stream(x, [1])), WRONG)
    add("stream-prompt", lambda p, x: list(phasor.stream(p["loaded"], x)), WRONG)
    add("train", lambda p, x: phasor.train(x), WRONG)
    add("train-resume", lambda p, x: phasor.train(phasor.Recipe(out=str(p["out"] / "r")), resume=x), [None, 3, "x", []])
    add("evaluate", lambda p, x: phasor.evaluate(x), WRONG)
    add("evaluate-model", lambda p, x: phasor.evaluate(p[x]), ["loaded"])
    add("evaluate-data", lambda p, x: phasor.evaluate(p["run"], x), not_none)
    add("evaluate-limit", lambda p, x: phasor.evaluate(p["run"], limit=x), not_number)
    add("evaluate-beams", lambda p, x: phasor.evaluate(p["run"], num_beams=x), not_number)
    add("evaluate-device", lambda p, x: phasor.evaluate(p["run"], device=x), not_device)
    add("translate", lambda p, x: phasor.translate(x, ["a"]), WRONG)
    add("translate-texts", lambda p, x: phasor.translate(p["run"], x), WRONG)
    add("explain", lambda p, x: phasor.explain(x), WRONG)
    add("explain-other", lambda p, x: phasor.explain("preset:gpt-2", x), not_none)
    add("explain-length", lambda p, x: phasor.explain("preset:gpt-2", length=x), not_number)
    add("kinds", lambda p, x: phasor.kinds(x), WRONG)
    add("preset", lambda p, x: phasor.preset(x), WRONG)
    add("preset-field", lambda p, x: phasor.preset("gpt-2", dim=x), not_number)
    add("quantize", lambda p, x: phasor.quantize(x), WRONG)
    add("quantize-weights", lambda p, x: phasor.quantize(p["loaded"], x), WRONG)
    add("exact_rotary", lambda p, x: phasor.exact_rotary(x), WRONG)
    add("backends", lambda p, x: phasor.backends(x), not_none)
    add("backends-device", lambda p, x: phasor.backends("preset:gpt-2", device=x), not_device)
    add("backends-dtype", lambda p, x: phasor.backends("preset:gpt-2", dtype=x), not_none)
    add("backends-length", lambda p, x: phasor.backends("preset:gpt-2", length=x), not_number)
    add("recipe-file", lambda p, x: phasor.Recipe.from_file(x), WRONG)
    add("recipe-dict", lambda p, x: phasor.Recipe.from_dict(x), [x for x in WRONG if not isinstance(x, dict)])
    add("recipe-json", lambda p, x: phasor.Recipe.from_json(x), WRONG)
    add("config-json", lambda p, x: phasor.ModelConfig.from_json(x), WRONG)
    add("transformer", lambda p, x: phasor.Transformer(x), WRONG)
    add("cache-file", lambda p, x: phasor.KVCache.load(x), WRONG)
    add(
        "cache-save",
        lambda p, x: p["loaded"].new_cache(1, 4).save(x),
        [None, 3, 1.5, b"x", object(), [], {}, True, "\0"],
    )
    add("cache-rows", lambda p, x: p["loaded"].new_cache(x, 4), [x for x in not_number if x is not True])
    add("verify", lambda p, x: phasor.verify(x), WRONG)
    add(
        "balancing",
        lambda p, x: phasor.balancing_loss([torch.zeros(1, 4)], x),
        [x for x in WRONG if type(x) is not int],
    )
    return dict(found)

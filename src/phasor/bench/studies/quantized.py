"""Greedy decoding on the CPU with weights in float32, 8 and 4 bits, beside transformers and CTranslate2.

All hold the same weights, of a Llama of 150 M parameters by default. Before anything is timed, float32 must give the
tokens of transformers, and the logits of each quantized model those of its dequantized weights in float64, within the
rounding of the kernels. Runs alternate, and medians count. The part "products" times the products of one layer's size
and of the LM head's by themselves, for several numbers of rows.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phasor.bench import ctranslate2
from phasor.bench.checks import relative_error
from phasor.bench.llama import llama_pair
from phasor.bench.peers import is_installed, require, transformers_tokens
from phasor.bench.sizes import llama_sizes
from phasor.bench.study import Study, format_field
from phasor.bench.timing import alternate, call_seconds
from phasor.config.schema import Config
from phasor.generation import generate
from phasor.nn.quantized import Quantized
from phasor.ops.quantized import (
    QUANTIZED_LINEAR,
    dequantize,
    pack_int4,
    quantize_int4,
    quantize_int8,
    quantized_linear,
)
from phasor.quantization import quantize
from phasor.transformer import Transformer

TOLERANCE = 0.04  # of logits, relative: rows of every product are rounded to 8 bits, or to bfloat16 with the results


class QuantizedSettings(Config):
    """The sizes of the model, the batches, and whether compiled steps, or products by themselves, are timed too.

    Those are of a projection of a layer and of the LM head, or of `shapes`, with each number of `rows`.
    """

    batch: tuple[int, ...] = (1, 4)
    tokens: int = 64
    runs: int = 5
    dim: int = 768
    layers: int = 12
    vocabulary: int = 32000
    decoding: bool = True
    compiled: bool = False
    products: bool = False
    shapes: tuple[str, ...] = ()
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)


CPU = QuantizedSettings()
TINY = QuantizedSettings(batch=(2,), tokens=3, runs=1, dim=64, layers=2, vocabulary=96, products=True, rows=(1, 40))


def run(study: Study) -> None:
    require("transformers", "quantized")
    settings: QuantizedSettings = study.settings
    study.result |= {"threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}
    for batch in settings.batch if settings.decoding else ():
        key = f"{settings.layers} layers, {settings.dim} wide, vocabulary {settings.vocabulary}, batch {batch}"
        study.result[key] = measure(study, batch)
        study.save()
    if settings.products:
        study.result["products, least milliseconds"] = time_products(study)


def measure(study: Study, batch: int) -> dict[str, Any]:
    settings: QuantizedSettings = study.settings
    heads, tokens = settings.dim // 64, settings.tokens
    sizes = llama_sizes(settings.dim, 8 * settings.dim // 3, settings.layers, heads, heads, settings.vocabulary)
    ours, theirs = llama_pair(sizes)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, settings.vocabulary, (batch, 16), generator=generator).tolist()
    models = {"float32": ours, "8 bits": quantize(ours), "4 bits": quantize(ours, bits=4)}
    checks = {name: check(study, ours, model, name) for name, model in models.items() if model is not ours}

    def decode(model: Transformer, compile: bool = False) -> Callable[[], object]:
        return lambda: generate(model, prompts, max_new_tokens=tokens, compile=compile)

    calls: dict[str, Callable[[], object]] = {f"phasor, {name}": decode(model) for name, model in models.items()}
    if settings.compiled:
        calls |= {f"phasor, {name}, compiled": decode(model, True) for name, model in models.items()}
    calls["transformers, float32"] = lambda: transformers_tokens(theirs, prompts, tokens)
    if is_installed("ctranslate2"):
        calls |= ctranslate2.calls(theirs, prompts, tokens)
    else:
        study.say("CTranslate2 is not installed: it is left out")
    expected = calls["transformers, float32"]()
    for name, call in calls.items():  # which also warms all of them up
        if call() != expected and name in ("phasor, float32", "CTranslate2, float32"):
            raise ValueError(f"{name} does not give the tokens of transformers: nothing is timed")
    times = {name: statistics.median(values) for name, values in alternate(calls, settings.runs).items()}
    rates = {name: batch * tokens / took for name, took in times.items()}
    study.say(f"batch {batch}, prompts of 16, {tokens} new tokens")
    for name, rate in rates.items():
        study.say(f"  {name}: {rate:.1f} tokens/s, {rate / rates['phasor, float32']:.2f} times float32")
    for name, distances in checks.items():
        study.say(f"  {format_field(name, distances)}")
    return {"tokens/s": rates, "checks": checks}


def check(study: Study, model: Transformer, small: Transformer, name: str) -> dict[str, float]:
    """How far a quantized model is from its dequantized weights, in a prompt and in decoding, and from the original."""
    tokens = torch.randint(1, model.config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(3))
    cache = small.new_cache(1, 8)
    with torch.inference_mode():
        found, original = small(tokens), model(tokens)
        steps = torch.cat([small(tokens[:, i : i + 1], cache=cache) for i in range(8)], dim=1)
    expected = exact_logits(model, small, tokens)
    kernels, decoded = relative_error([found], [expected]), relative_error([steps], [expected])
    study.check(f"{name}: logits", max(kernels, decoded), TOLERANCE)
    return {
        "logits against dequantized weights in float64": kernels,
        "the same, token by token": decoded,
        "logits against float32": relative_error([found], [original]),
    }


def exact_logits(model: Transformer, small: Transformer, tokens: Tensor) -> Tensor:
    """Logits of the dequantized weights, in float64."""
    exact = copy.deepcopy(model).double()
    state = exact.state_dict()
    for name, part in small.named_modules():
        if isinstance(part, Quantized):
            state[f"{name}.weight"].copy_(dequantize(part.matrix, torch.float64))
    with torch.inference_mode():
        logits: Tensor = exact(tokens)
    return logits


def time_products(study: Study) -> dict[str, dict[str, float]]:
    """The least milliseconds of a product, by shape and number of rows."""
    settings, result = study.settings, {}
    of_model = (f"{outputs}x{settings.dim}" for outputs in (3 * settings.dim, settings.vocabulary))
    for shape in settings.shapes or of_model:
        outputs, inputs = (int(size) for size in shape.split("x"))
        copies = max(1, study.machine.sizes.copy_bytes // (outputs * inputs))  # more than a cache holds
        weights = [torch.randn(outputs, inputs) for _ in range(copies)]
        matrices: dict[str, list[Any]] = {
            "float32": weights,
            "8 bits": [quantize_int8(w) for w in weights],
            "4 bits": [pack(study, w) for w in weights],
        }
        for rows in settings.rows:
            x = torch.randn(rows, inputs)
            label = f"{outputs} x {inputs}, {rows} rows"
            result[label] = least_milliseconds(x, matrices, study.machine.sizes.seconds / 5)
            path = QUANTIZED_LINEAR.explain(x, matrices["4 bits"][0], None)[0]
            study.say(f"{format_field(label, result[label])} ms ({path})")
    return result


def least_milliseconds(x: Tensor, matrices: dict[str, list[Any]], seconds: float) -> dict[str, float]:
    took: dict[str, list[float]] = {name: [] for name in matrices}
    until = time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < until or len(took["float32"]) < 3:
            for name, each in matrices.items():
                took[name] += [call_seconds(partial(quantized_linear, x, matrix)) for matrix in each]
    return {name: 1e3 * min(values) for name, values in took.items()}


def pack(study: Study, weight: Tensor) -> Any:
    """A weight in 4 bits as the kernels take it, whose product is checked."""
    matrix = quantize_int4(weight)
    matrix = matrix._replace(packed=pack_int4(matrix))
    x = torch.randn(2, weight.shape[1])
    exact = F.linear(x.double(), dequantize(matrix, torch.float64))
    study.check("a product in 4 bits", relative_error([quantized_linear(x, matrix)], [exact]), TOLERANCE)
    return matrix

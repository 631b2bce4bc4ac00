"""Findings in sentences of the pages: each is put together from the results that it is about, and looked up.

Tables, and figures with a unit beside files of results, are compared in test_measurements.py.
"""

import json
import math
from functools import cache
from typing import Any

import pytest
from test_pages import ROOT, prose

from phasor.evaluation.compare.settings import SIZES, SMALL

RESULTS = ROOT / "benchmarks" / "results"


@cache
def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def ratio(numerator: float, denominator: float, digits: int = 2) -> str:
    return f"{numerator / denominator:.{digits}f}"


def percents(values: list[float]) -> str:
    return listed_texts([f"{100 * value:.0f} %" for value in values])


def listed_texts(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def training_on_a_gpu() -> list[str]:
    runs = [results("training-gpu"), results("training-gpu-32k")]
    (plain, eighth), (plain_32k, eighth_32k) = (
        [
            ratio(run["systems"][name]["tokens_per_s"], run["systems"]["liger"]["tokens_per_s"])
            for name in run["systems"]
        ][:2]
        for run in runs
    )
    limit, limit_32k = (ratio(run["limit"]["tokens_per_s"], run["systems"]["liger"]["tokens_per_s"]) for run in runs)
    watts = [system["watts"] for run in runs for system in run["systems"].values()]
    products = [run["limit"]["products"] for run in runs]
    losses = {name: system["losses"] for name, system in runs[0]["systems"].items()}
    liger, float8 = (
        [abs(a / b - 1) for a, b in zip(losses[name], losses["phasor"], strict=True)]
        for name in ("liger", "phasor-float8")
    )
    close = next(step for step, change in enumerate(float8) if change > 0.005)
    return [
        f"That is {plain} times Liger's throughput in bfloat16 and {eighth} times in float8; {plain_32k} and "
        f"{eighth_32k} times at 32 k.",
        f"the card draws {min(watts):.0f} to {max(watts):.0f} W where {products[0]['limit_watts']:.0f} are allowed",
        f"the matrix products alone to {products[0]['mhz']:,.0f} MHz, a training step to "
        f"{runs[0]['systems']['phasor']['mhz']:,.0f}.",
        f"is {limit} times at 4 k, and {limit_32k} times at 32 k, where attention alone takes "
        f"{runs[1]['limit']['attention']['ms']:.0f} of our {runs[1]['systems']['phasor']['ms']:.0f} ms.",
        f"a model's matrix products at a sustained {products[0]['tflops']} to {products[1]['tflops']}.",
        f"Liger's are those of bfloat16 within {100 * max(liger):.1f} %; float8's stay within 0.5 % for {close} "
        f"steps, and within {100 * max(float8):.1f} % after that.",
    ]


def decoding_on_a_gpu() -> list[str]:
    run = results("decode_gpu")
    limit, int8 = run["limit, tokens/s at batch 1"], run["int8 against bfloat16, random weights"]
    shares = [system["tokens/s after the prompt"] / limit for system in run["batch 1"].values()]
    return [
        f"allows {limit:,.0f} tokens/s at the copy bandwidth of that run, {run['copy bytes/s'] / 1e12:.1f} TB/s, of "
        f"which these are {percents(shares)}.",
        f"by {int8['mean KL']:.4f} nats (mean KL)",
        f"is the same in {100 * int8['same likeliest token']:.0f} % of them.",
    ]


def latent_attention() -> list[str]:
    steps = [row for row in results("latent")["rows"] if row.get("runner") == "FusedRunner"]
    theirs = [row for row in results("latent")["rows"] if row.get("runner") == "transformers"]
    training = results("latent-training")["rows"]
    ours, peer = (row for row in training if row["what"] == "training layer")
    plain, padded = (
        next(row for row in training if row.get("way") == way)
        for way in ("phasor, as the layer calls it", "torch's choice, padded")
    )
    latent, rope, heads = 512, 64, 128
    operations = heads * 2 * (latent + rope + latent) / (2 * (latent + rope))  # scores and sums, per byte in bfloat16
    return [
        f"With {heads} heads, as in DeepSeek V3, there are {operations:.0f} operations for every byte",
        f"takes {steps[0]['step_ms']:.2f} ms at batch 1 and {steps[1]['step_ms']:.2f} ms at batch 16: "
        f"{percents([step['of limit'] for step in steps])} of the limit of reading weights and cache. transformers "
        f"takes {theirs[0]['step_ms']:.2f} and {theirs[1]['step_ms']:.1f} ms.",
        f"takes {ours['forward_ms']:.2f} ms forward and {ours['both_ms']:.2f} ms with gradients; that of transformers "
        f"{peer['forward_ms']:.2f} and {peer['both_ms']:.2f} ms.",
        f"the attention alone takes {plain['forward_ms']:.2f} and {plain['both_ms']:.2f} ms, and filled up with zeros "
        f"{padded['forward_ms']:.2f} and {padded['both_ms']:.2f} ms.",
    ]


def sparse_attention() -> list[str]:
    times = {
        row["tokens"]: row["forward_ms"]
        for row in results("sparse")["rows"]
        if (row["who"], row["what"]) == ("phasor", "top-k, 8192 keys")
    }
    assert len(times) == 4
    for tokens, milliseconds in times.items():
        n = tokens / 131_072
        assert milliseconds == pytest.approx(67.4 * n + 10.3 * n**2, rel=0.02)
    parts = results("sparse")["parts"]["131072"]
    return [
        f"{times[1_048_576] / times[131_072]:.0f} times for 8 times the tokens.",
        "The four times are within 2 % of `67.4 n + 10.3 n^2` ms",
        f"mean keys and the choice take {parts['choice']:.1f} ms, the lists {parts['lists']:.1f} ms.",
    ]


def scaling() -> list[str]:
    seconds = {
        (row["rule"], row["both"]): row["seconds"] for row in results("scaling")["rows"] if row["tokens"] == 1 << 20
    }
    slopes = results("scaling")["slopes"]
    assert all(slope["bytes"] == pytest.approx(1, abs=0.1) for slope in slopes.values())
    full, window = ([seconds[rule, both] for both in (False, True)] for rule in ("all tokens", "window of 1024"))
    return [
        f"A million tokens take {full[0]:.1f} s forward and {full[1]:.0f} s with the backward pass, "
        f"{1e3 * window[0]:.0f} and {1e3 * window[1]:.0f} ms with the window. Memory is linear in both.",
    ]


def quantized_weights() -> list[str]:
    name = "12 layers, 768 wide, vocabulary 32000, batch 1"
    x86, arm = (results(f"quantized-{machine}")[name]["tokens/s"] for machine in ("x86_64", "aarch64"))
    bits4, bits8 = (
        [ratio(run[f"phasor, {bits} bits, compiled"], run["phasor, float32, compiled"]) for run in (x86, arm)]
        for bits in (4, 8)
    )
    theirs = [ratio(run["phasor, 4 bits, compiled"], run["CTranslate2, int8"]) for run in (x86, arm)]
    small = results("quantized-aarch64")["8 layers, 512 wide, vocabulary 32000, batch 1"]["tokens/s"]
    return [
        f"A model of 8 layers and dimension 512 ran at {small['phasor, float32']:.1f} tokens/s in float32 on ARM, and "
        f"compiled at {small['phasor, 4 bits, compiled']:.1f} in 4 bits and {small['phasor, 8 bits, compiled']:.1f} in "
        f"8; CTranslate2's int8 at {small['CTranslate2, int8']:.1f}.",
        f"4 bits at batch 1 are {bits4[0]} times as fast on x86 and {bits4[1]} times on ARM, and 8 bits {bits8[0]} "
        f"and {bits8[1]} times. 4 bits are {theirs[0]} and {theirs[1]} times as fast as CTranslate2's int8.",
    ]


def errors_on_a_gpu() -> list[str]:
    (rows,) = [part for name, part in results("device").items() if name.startswith("forward and backward")]
    worst = max(gpu / cpu for row in rows for gpu, cpu in zip(row["gpu"], row["cpu"], strict=True))
    models = {row["model"] for row in rows}
    assert len(models) == 1 + 12
    return [
        "`benchmarks/device.py` runs forward and backward of it and of twelve others.",
        f"at most {math.ceil(10 * worst) / 10:.1f} times those of the CPU in the same dtype",
    ]


def rotary() -> list[str]:
    errors = results("rotary")["errors"]
    worst = max(error for name, error in errors.items() if "float32" in name)
    assert max(error for name, error in errors.items() if "bfloat16" in name) == pytest.approx(0.5, abs=1e-3)
    calls = {name: run for name, run in results("rotary")["milliseconds"].items() if name.startswith("one token")}
    ours, fused, theirs = (
        [f"{end([run['host, us'][who] for run in calls.values()]):.0f}" for end in (min, max)]
        for who in ("phasor", "phasor, from projection", "Liger")
    )
    copies = [f"{1e3 * end(run['floor'] for run in calls.values()):.1f}" for end in (min, max)]
    return [
        f"The largest error is {worst:.1e} in float32 and half a unit in the last place in bfloat16".replace(
            "e-0", "e-"
        ),
        f"than copies of as many bytes ({' to '.join(copies)} us)",
        f"The host takes {' to '.join(ours)} us for a call, {' to '.join(fused)} from the projection as models do it, "
        f"and {' to '.join(theirs)} for Liger's.",
    ]


def training_on_a_cpu() -> list[str]:
    ours, plain, trainer = results("training")["tokens_per_second"].values()
    outside = sorted(results("training")["outside"])[1]
    return [
        f"phasor is {ratio(ours, plain)} times as fast as plain torch and {ratio(ours, trainer)} times as fast as the "
        f"Trainer. Of its time {100 * outside:.1f} % is spent outside the model and the optimizer.",
    ]


def translation() -> list[str]:
    runs = [results(f"translation-en-{language}")["systems"] for language in ("es", "zh")]
    millions = runs[0]["Marian of transformers"]["parameters"] / 1e6
    times = [f"{run['translation']['train_and_prepare_s']:.1f} s" for run in runs]
    return [
        f"{results('translation-en-es')['test_sentences']:,} source sentences are held out",
        f"with {millions:.2f} million parameters, in a plain loop",
        f"with it `translation` took {' and '.join(times)}.",
    ]


def the_default_run() -> list[str]:
    run = results("language-model")
    return [
        f"{run['steps']} optimizer steps of {run['batch_tokens']:,} tokens on the sources of Python "
        f"{run['python'].rpartition('.')[0]}'s standard library, one thread of a CPU",
        f"It took {run['seconds']} s.",
    ]


def dequantized_products() -> list[str]:
    """Half a byte is read, and two are written and read again."""
    machine, moved, rows = results("bench-h200"), 0.5 + 2 + 2, 8192
    share = (moved / machine["bandwidth"]) / (2 * rows / machine["arithmetic"])
    return [
        f"that moves {moved} bytes per weight, and takes {100 * share:.0f} % of the time of a product with {rows:,} "
        "rows at the bandwidth and arithmetic that `phasor bench` measured on an H200.",
    ]


def perplexity_of_quantized_weights() -> list[str]:
    (tokens,) = {run["tokens"] for run in results("quantized-perplexity")["weights"].values()}
    return [f"on its {tokens:,} validation tokens"]


def conversations() -> list[str]:
    run, base = results("chat"), results("language-model")
    return [
        f"makes a language model of {base['parameters']:,} parameters",
        f"After {run['steps']:,} steps on {run['examples']['train']:,} conversations, {run['processor_seconds']} s of "
        f"processor time, the loss is {run['evaluate']['loss']:.2f} per token of the replies to "
        f"{run['examples']['validation']} questions that were held out",
    ]


def extensions() -> list[str]:
    about, parts = results("extensions")["about"], results("extensions")["results"]
    documents = [{units for seed in part["seeds"] for units in [seed["units"]]} for part in parts.values()]
    assert documents == [{"87 documents"}] * 2 + [{"52 documents"}] * 2
    return [
        f"({about['parameters'] / 1e6:.1f} million parameters, trained at {about['trained_length']} for",
        "The first two columns are over 87 documents with one factor of 4, the last two over 52 longer ones with one "
        "of 8,",
    ]


def minutes() -> list[str]:
    return [f"{['one', 'two', 'three', 'four'][round(results('language-model')['seconds'] / 60) - 1]} minutes"]


def comparisons() -> list[str]:
    one, every = results("compare"), results("compare-all")
    assert one["parameters"] == every["parameters"]
    tokens = [run["steps"] * SIZES[SMALL].batch_tokens for run in (one, every)]
    assert [round(count / 1e6, 2) for count in tokens] == [0.51, 0.26]  # half and a quarter of a million
    found = {(row["extension"], row["length"]): row for row in one["rows"]}
    sinks = found["rotary (sinks)", 1024]["difference"]
    return [
        f"This is one seed of a model of {one['parameters'] / 1e6:.1f} million parameters, after half a million "
        "tokens.",
        f"This is one seed of {every['parameters'] / 1e6:.1f} million parameters after a quarter of a million tokens",
        f"{one['documents']['used']} held-out documents are long enough for {1024:,} tokens, with {one['targets']:,} "
        "targets.",
        f"four sinks change the loss at 16 times the trained length by {sinks['estimate']:.3f} ± "
        f"{sinks['half_width']:.3f}.",
    ]


def streams() -> list[str]:
    run, offset = results("stream"), results("stream-offset")
    limits = run["limits"]["1024"].values()  # of multiplications and of activations, one after the other
    million, billion = run["one stream, by phasor evaluate --stream"]
    assert (million["tokens"], billion["tokens"]) == (10**6, 10**9)
    assert million["peak_memory_bytes"] == billion["peak_memory_bytes"]
    exact = [row["phasor"] for row in offset["losses"] if row["dtype"] == "float32"]
    assert abs(exact[0] - exact[1]) < 1e-6
    return [
        f"on an H200: {billion['seconds']:.0f} s ({billion['tokens_per_second'] / 1e6:.1f} million tokens/s) in "
        f"chunks of {billion['chunk']:,}",
        f"The most memory in use was {billion['peak_memory_bytes']:,} bytes after 10^6 tokens and after 10^9.",
        f"would take {1e-6 / sum(1 / limit for limit in limits):.1f} million tokens/s",
        "the loss from position 10^9 on is that from 0 on, within 1e-6 in float32.",
    ]


FINDINGS = {
    "docs/speed.md": [
        training_on_a_gpu, decoding_on_a_gpu, latent_attention, sparse_attention, scaling, quantized_weights,
        errors_on_a_gpu, rotary,
    ],
    "docs/training.md": [training_on_a_cpu, translation, the_default_run, minutes],
    "docs/fine-tuning.md": [conversations, dequantized_products],
    "docs/generation.md": [perplexity_of_quantized_weights],
    "docs/commands.md": [minutes],
    "README.md": [minutes],
    "docs/compare.md": [comparisons],
    "docs/long-context.md": [extensions, streams],
}  # fmt: skip


@pytest.mark.parametrize(
    ("page", "findings"), [(page, found) for page, all_found in FINDINGS.items() for found in all_found]
)
def test_findings_of_results(page, findings):
    for said in findings():
        assert said in prose(page)

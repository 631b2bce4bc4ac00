"""Greedy decoding on the CPU with weights in float32, 8 and 4 bits, compared with transformers and CTranslate2.

All hold the same weights, of a Llama of 150 M parameters by default. Before anything is timed, float32 must give the
tokens of transformers, and the logits of each quantized model those of its dequantized weights in float64, within the
rounding of the kernels. Runs alternate, and medians count. CTranslate2 is asked where it is installed, in processes
of its own: in ours its OpenMP calls bind to torch's library, and after the first of them compiled steps are slower.
Products of one layer's size and of the LM head's are timed by themselves with --products, for several numbers of rows.

    OMP_NUM_THREADS=2 python benchmarks/quantized.py [--tokens 64] [--runs 5] [--batch 1 4] [--products]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import phasor
from phasor.bench.llama import llama_pair
from phasor.bench.sizes import llama_sizes
from phasor.bench.timing import alternate
from phasor.nn.quantized import Quantized
from phasor.ops.quantized import QUANTIZED_LINEAR, dequantize, quantize_int4, quantize_int8, quantized_linear

TOLERANCE = 0.04  # of logits, relative: rows of every product are rounded to 8 bits, or to bfloat16 with the results


def exact_logits(model: phasor.Transformer, small: phasor.Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the dequantized weights, in float64."""
    exact = copy.deepcopy(model).double()
    state = exact.state_dict()
    for name, part in small.named_modules():
        if isinstance(part, Quantized):
            state[f"{name}.weight"].copy_(dequantize(part.matrix, torch.float64))
    with torch.inference_mode():
        return exact(tokens)


def check(model: phasor.Transformer, small: phasor.Transformer, name: str) -> dict[str, float]:
    """How far a quantized model is from its dequantized weights, in a prompt and in decoding, and from the original."""
    tokens = torch.randint(1, model.config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(3))
    cache = small.new_cache(1, 8)
    with torch.inference_mode():
        found, original = small(tokens).double(), model(tokens).double()
        steps = torch.cat([small(tokens[:, i : i + 1], cache=cache) for i in range(8)], dim=1).double()
    expected = exact_logits(model, small, tokens)
    size = expected.norm()
    kernels, decoded = float((found - expected).norm() / size), float((steps - expected).norm() / size)
    if max(kernels, decoded) > TOLERANCE:
        raise SystemExit(f"{name}: logits are {max(kernels, decoded):.2g} away from its weights': nothing is timed")
    return {
        "logits against dequantized weights in float64": kernels,
        "the same, token by token": decoded,
        "logits against float32": float((found - original).norm() / original.norm()),
    }


def save_for_ctranslate2(theirs: Any, folder: str) -> None:
    """Write a Llama of transformers as CTranslate2 reads it."""
    from ctranslate2.specs import TransformerDecoderModelSpec
    from ctranslate2.specs.common_spec import Activation

    config = theirs.config
    spec = TransformerDecoderModelSpec.from_config(
        config.num_hidden_layers,
        config.num_attention_heads,
        activation=Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=10000.0,
        num_heads_kv=None if config.num_key_value_heads == config.num_attention_heads else config.num_key_value_heads,
    )
    state = {name: x.detach().float().numpy() for name, x in theirs.state_dict().items()}

    def join(*names: str) -> Any:
        return torch.cat([theirs.state_dict()[name].detach().float() for name in names]).numpy()

    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = state["model.embed_tokens.weight"]
    decoder.layer_norm.gamma = state["model.norm.weight"]
    decoder.projection.weight = state["lm_head.weight"]
    for i, layer in enumerate(decoder.layer):
        prefix = f"model.layers.{i}."
        layer.self_attention.layer_norm.gamma = state[prefix + "input_layernorm.weight"]
        layer.self_attention.linear[0].weight = join(*(f"{prefix}self_attn.{x}_proj.weight" for x in "qkv"))
        layer.self_attention.linear[1].weight = state[prefix + "self_attn.o_proj.weight"]
        layer.ffn.layer_norm.gamma = state[prefix + "post_attention_layernorm.weight"]
        layer.ffn.linear_0.weight = state[prefix + "mlp.gate_proj.weight"]
        layer.ffn.linear_0_noact.weight = state[prefix + "mlp.up_proj.weight"]
        layer.ffn.linear_1.weight = state[prefix + "mlp.down_proj.weight"]
    words = [str(i) for i in range(config.vocab_size)]
    spec.register_vocabulary(words)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = words[0]
    spec.config.layer_norm_epsilon = config.rms_norm_eps
    spec.validate()
    spec.optimize()
    spec.save(folder)


def serve_ctranslate2(pipe: Any, kind: str, folder: str, prompts: list[list[int]], tokens: int, threads: int) -> None:
    """Decode greedily whenever the pipe asks for it."""
    import ctranslate2

    generator = ctranslate2.Generator(folder, compute_type=kind, intra_threads=threads)
    words = [[str(i) for i in prompt] for prompt in prompts]
    with contextlib.suppress(EOFError):  # at the end
        while pipe.recv():
            found = generator.generate_batch(
                words, max_length=tokens, min_length=tokens, include_prompt_in_result=False, beam_size=1
            )
            pipe.send([one.sequences_ids[0] for one in found])


def ctranslate2_calls(theirs: Any, prompts: list[list[int]], tokens: int) -> dict[str, Callable[[], object]]:
    """Greedy decoding by CTranslate2 from the same weights; empty where it is not installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        return {}
    folder = tempfile.mkdtemp()
    save_for_ctranslate2(theirs, folder)
    context = multiprocessing.get_context("spawn")

    def call(kind: str) -> Callable[[], object]:
        here, there = context.Pipe()
        args = there, kind, folder, prompts, tokens, torch.get_num_threads()
        context.Process(target=serve_ctranslate2, args=args, daemon=True).start()

        def run() -> object:
            here.send(True)
            return here.recv()

        return run

    return {f"CTranslate2, {kind}": call(kind) for kind in ("float32", "int8")}


def measure(sizes: dict[str, Any], batch: int, tokens: int, runs: int, compiled: bool) -> dict[str, Any]:
    ours, theirs = llama_pair(sizes)
    ours.eval()
    theirs.eval()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, sizes["vocab_size"], (16,), generator=generator).tolist() for _ in range(batch)]
    models = {"float32": ours, "8 bits": phasor.quantize(ours), "4 bits": phasor.quantize(ours, bits=4)}
    checks = {name: check(ours, model, name) for name, model in models.items() if model is not ours}

    def own(model: phasor.Transformer, compile: bool = False) -> Callable[[], object]:
        return lambda: phasor.generate(model, prompts, max_new_tokens=tokens, compile=compile)

    def run_theirs() -> list[list[int]]:
        given = torch.tensor(prompts)
        out = theirs.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return out[:, given.shape[1] :].tolist()

    calls: dict[str, Callable[[], object]] = {f"phasor, {name}": own(model) for name, model in models.items()}
    if compiled:
        calls |= {f"phasor, {name}, compiled": own(model, True) for name, model in models.items()}
    calls["transformers, float32"] = run_theirs
    if calls["phasor, float32"]() != run_theirs():
        raise SystemExit("float32 does not give the tokens of transformers: nothing is timed")
    others = ctranslate2_calls(theirs, prompts, tokens)
    if others and others["CTranslate2, float32"]() != run_theirs():
        raise SystemExit("CTranslate2 does not give the tokens of transformers in float32: nothing is timed")
    calls |= others
    for call in calls.values():
        call()
    found = {name: statistics.median(values) for name, values in alternate(calls, runs).items()}
    rates = {name: batch * tokens / took for name, took in found.items()}
    print(f"batch {batch}, prompts of 16, {tokens} new tokens")
    for name, rate in rates.items():
        print(f"  {name}: {rate:.1f} tokens/s, {rate / rates['phasor, float32']:.2f} times float32")
    for name, distances in checks.items():
        print(f"  {name}: " + ", ".join(f"{what} {x:.2g}" for what, x in distances.items()))
    return {"tokens/s": rates, "checks": checks}


def products(dim: int, vocabulary: int, seconds: float = 0.3) -> dict[str, dict[str, float]]:
    """The least milliseconds of a product, for a projection of a layer and for the LM head."""
    result = {}
    for outputs in (3 * dim, vocabulary):
        copies = max(1, (1 << 26) // (outputs * dim))  # more than a cache holds
        weights = [torch.randn(outputs, dim) for _ in range(copies)]
        small: dict[str, list[Any]] = {
            "float32": weights,
            "8 bits": [quantize_int8(w) for w in weights],
            "4 bits": [pack(w) for w in weights],
        }
        for rows in (1, 2, 4, 8, 16, 32, 64, 128):
            x = torch.randn(rows, dim)
            took: dict[str, list[float]] = {name: [] for name in small}
            until = time.perf_counter() + seconds
            with torch.inference_mode():
                while time.perf_counter() < until or len(took["float32"]) < 3:
                    for name, matrices in small.items():
                        for matrix in matrices:
                            begun = time.perf_counter()
                            quantized_linear(x, matrix)
                            took[name].append(time.perf_counter() - begun)
            label = f"{outputs} x {dim}, {rows} rows"
            result[label] = {name: 1e3 * min(values) for name, values in took.items()}
            path = QUANTIZED_LINEAR.explain(x, small["4 bits"][0], None)[0]
            shown = ", ".join(f"{name} {value:.3f}" for name, value in result[label].items())
            print(f"{label}: {shown} ms ({path})", flush=True)
    return result


def pack(weight: torch.Tensor) -> Any:
    from phasor.ops.quantized import pack_int4

    matrix = quantize_int4(weight)
    matrix = matrix._replace(packed=pack_int4(matrix))
    x = torch.randn(2, weight.shape[1])
    exact = F.linear(x.double(), dequantize(matrix, torch.float64))
    assert (quantized_linear(x, matrix) - exact).norm() < TOLERANCE * exact.norm()
    return matrix


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    options.add_argument("--dim", type=int, default=768)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--vocabulary", type=int, default=32000)
    options.add_argument("--compiled", action="store_true", help="compiled steps too")
    options.add_argument("--products", action="store_true", help="products by themselves instead of decoding")
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = options.parse_args()
    file = given.out / f"quantized-{platform.machine()}.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    result["threads"], result["cpu"] = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    if given.products:
        result["products, least milliseconds"] = products(given.dim, given.vocabulary)
    else:
        heads = given.dim // 64
        sizes = llama_sizes(given.dim, 8 * given.dim // 3, given.layers, heads, heads, given.vocabulary)
        for batch in given.batch:
            key = f"{given.layers} layers, {given.dim} wide, vocabulary {given.vocabulary}, batch {batch}"
            result[key] = measure(sizes, batch, given.tokens, given.runs, given.compiled)
    given.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

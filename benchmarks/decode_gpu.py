"""Greedy decoding on a GPU beside transformers' generate, and the limit that reading the weights sets.

Checked first: small models say the same tokens in float32 whether steps run on the device or on the host, and the
logits of the fused step in bfloat16 are as near as those of plain steps to what the same weights, of bfloat16 or of
int8, give in float32. Nothing is timed otherwise.

    python benchmarks/decode_gpu.py [--batch 1 64] [--skip eager hf hf-compiled] [--profile] [--out benchmarks/results]
    python benchmarks/decode_gpu.py --sweep [projections rows attention int8 int8-rows experts step]
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import phasor
from phasor.bench.sizes import FULL, GPU
from phasor.generation.runners import RETAINED, fused
from phasor.generation.runners.cuda_graph import StepBuffers
from phasor.kv_cache.static import StaticKVCache
from phasor.ops import dispatch
from phasor.ops.decode import (
    ExpertsArgs,
    NormArgs,
    RotaryArgs,
    Tiles,
    decode_attention,
    decode_attention_ref,
    experts,
    experts_one_row,
    experts_ref,
    gemv,
    lm_head_argmax,
    project_ref,
)
from phasor.ops.decode.tiles import SMALL_N
from phasor.ops.quantized import Matrix, dequantize, quantize_int8

SHAPE: dict[str, Any] = FULL.model
PROMPT, NEW = 512, 256
SMALL = {"dim": 256, "hidden_dim": 704, "num_layers": 3, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 1000}
DEVICE = torch.device("cuda")
BATCHES = {1: 130, 5: 900, 64: 130, 80: 130}  # rows and tokens held of the check of logits: vectors, few rows, matrices


def model_of(dtype: torch.dtype = torch.bfloat16, **shape: Any) -> phasor.Transformer:
    torch.manual_seed(0)
    with DEVICE:
        return phasor.Transformer(phasor.preset("llama-2", **shape)).to(dtype).eval()


def prompts(batch: int, length: int, vocab: int) -> list[list[int]]:
    return torch.randint(1, vocab, (batch, length), generator=torch.Generator().manual_seed(1)).tolist()


# Checks


def check_tokens() -> None:
    """Float32: the same tokens by steps on the device and by plain steps; ragged prompts, windows, stops."""
    window = phasor.AttentionConfig(window=16, sink_tokens=4)
    cases: dict[str, dict[str, Any]] = {
        "fused": {},
        "fused, window": {"attention": window},
        "fused, norm of heads": {"attention": phasor.AttentionConfig(qk_norm="head", bias=("q", "k", "v"))},
        "fused, int8": {},
        "fused, int8, tied": {"embedding": phasor.EmbeddingConfig()},
        "graph of plain steps": {"norm": "layernorm", "position": "alibi"},
    }
    for name, changes in cases.items():
        model = model_of(torch.float32, **SMALL, init="fan-in", **changes)
        model = phasor.quantize(model) if "int8" in name else model
        assert (fused.why_not(model) is None) == name.startswith("fused"), fused.why_not(model)
        for batch in (1, 3, 40):
            given = [p[: 1 + (37 * i) % 90] for i, p in enumerate(prompts(batch, 90, 1000))]
            stops = [None, tuple(range(0, 1000, 50))] if batch == 3 else [None]
            for options in ({"max_new_tokens": 40} | ({"stop": stop} if stop else {}) for stop in stops):
                with dispatch.force_path("reference"):
                    expected = phasor.generate(model, given, **options)
                for _ in range(2):  # captured, then reused
                    found = phasor.generate(model, given, **options)
                    same = sum(a == b for a, b in zip(found, expected, strict=True)) / batch
                    if same < 0.95:  # a tie in the last bit may part one text of many
                        raise SystemExit(f"{name}, {batch} rows: only {same:.0%} of the texts are those of plain steps")
    print("tokens in float32 are those of plain steps")


def check_logits() -> dict[str, float]:
    """At the real size, with weights in bfloat16 and in int8; and how far apart the two are."""
    model = model_of(**{**SHAPE, "num_layers": 4})
    small = phasor.quantize(model)
    check_logits_of(model, "bfloat16")
    check_logits_of(small, "int8")
    ids = torch.tensor(prompts(4, 256, SHAPE["vocab_size"]), device=DEVICE)
    with torch.inference_mode():
        log_p, log_q = (copy.deepcopy(m).float()(ids).log_softmax(-1) for m in (model, small))
    apart = {
        "mean KL": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "same likeliest token": float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()),
    }
    print(f"int8 against bfloat16, random weights: {', '.join(f'{name} {x:.2g}' for name, x in apart.items())}")
    return apart


def check_logits_of(model: phasor.Transformer, name: str) -> None:
    """The fused step's logits, and the plain step's, against those of the same weights in float32."""
    exact = copy.deepcopy(model).float()
    for batch, held in BATCHES.items():
        ids = torch.tensor(prompts(batch, held + 10, SHAPE["vocab_size"]), device=DEVICE)
        with torch.inference_mode():
            caches = [m.new_cache(batch, held + 64) for m in (model, model, exact)]
            for m, cache in zip((model, model, exact), caches, strict=True):
                m(ids[:, :held], cache=cache)
            buffers = StepBuffers(StaticKVCache(caches[0]))
            step = fused.FusedStep(model, buffers)
            worst = [0.0, 0.0]
            for at in range(held, held + 10):
                buffers.tokens.copy_(ids[:, at])
                column = ids[:, at : at + 1]
                plain, expected = (m(column, cache=c)[:, 0] for m, c in zip((model, exact), caches[1:], strict=True))
                for i, logits in enumerate((step(), plain)):
                    worst[i] = max(worst[i], float((logits.float() - expected).norm() / expected.norm()))
        print(f"logits by {name} weights, {batch} rows: off by {worst[0]:.1e} fused, {worst[1]:.1e} plain")
        if not worst[0] < 1.3 * worst[1]:
            raise SystemExit("the fused step is less exact than the plain one: nothing is timed")


# Times


def copy_speed() -> float:
    """Bytes per second of a plain copy on the device, those read and those written."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    b, times = torch.empty_like(a), []
    for _ in range(10):  # not in a graph, where a slower engine copies
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        b.copy_(a)
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended))
    return 2 * a.nbytes / (1e-3 * statistics.median(times))


def graph_time(body: Callable[[], object], count: int = 1, replays: int = 5) -> float:
    """Microseconds of a body (once of the `count` times it runs in a graph); the least of some replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            body()
    graph.replay()
    times = []
    for _ in range(replays):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(1e3 * begun.elapsed_time(ended) / count)
    return min(times)


def seconds(call: Callable[[int], object], runs: int = 3) -> dict[str, float]:
    """Medians: of all new tokens from the prompt on, and the steps after the first alone."""
    call(NEW)
    call(1)

    def median(count: int) -> float:
        times = []
        for _ in range(runs):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call(count)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    whole, first = median(NEW), median(1)
    return {"whole": whole, "step": (whole - first) / (NEW - 1)}


def bytes_read(model: phasor.Transformer) -> int:
    """What a step reads of a model: everything but the table of tokens, of which it looks one up."""
    weights = itertools.chain(model.named_parameters(), model.named_buffers())
    return sum(w.nbytes for name, w in weights if name != "tokens.weight")


def compare(batch: int, speed: float, skip: list[str]) -> dict[str, Any]:
    given = prompts(batch, PROMPT, SHAPE["vocab_size"])
    model, found = model_of(**SHAPE), {}
    limit = speed / bytes_read(model)

    def by(which: phasor.Transformer) -> Callable[[int], Any]:
        return lambda count: phasor.generate(which, given, max_new_tokens=count)

    ours = by(model)

    def note(name: str, call: Callable[[int], object], runs: int = 3, own: float = limit) -> None:
        try:
            took = seconds(call, runs)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            return
        finally:
            RETAINED.clear()
            gc.collect()
        rate, by_step = batch * NEW / took["whole"], batch / took["step"]
        found[name] = {"tokens/s": rate, "tokens/s after the prompt": by_step, **took}
        part = f", {by_step / limit:.0%} of the limit of reading bfloat16 weights" if batch == 1 else ""
        part += f", {by_step / own:.0%} of its own" if batch == 1 and own != limit else ""
        print(f"  {name}: {rate:,.0f} tokens/s, {by_step:,.0f} after the prompt{part}", flush=True)

    note("phasor", ours)
    small = phasor.quantize(model)
    note("phasor-int8", by(small), own=speed / bytes_read(small))
    supports_pdl, why_not = fused.supports_pdl, fused.why_not
    if "variants" not in skip:
        fused.supports_pdl = lambda device: False
        note("phasor, kernels one after the other", ours)
        fused.supports_pdl = supports_pdl
        fused.why_not = lambda *_: "for comparison"
        note("phasor, plain step as a graph", ours)
        fused.why_not = why_not
    if "eager" not in skip:
        with dispatch.force_path("reference"):
            note("phasor, plain steps", ours, runs=1)
    if {"hf", "hf-compiled"} - set(skip):
        theirs, ids = peer(), torch.tensor(given, device=DEVICE)

        def run_generate(count: int, **more: Any) -> Any:
            wanted = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
            return theirs.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **wanted, **more)

        if "hf" not in skip:
            note("transformers", run_generate, runs=1)
        if "hf-compiled" not in skip:
            note("transformers, compiled", lambda count: run_generate(count, cache_implementation="static"), runs=2)
    return found


def peer() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    names = {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "vocab_size": "vocab_size",
    }
    config = LlamaConfig(**{names[name]: value for name, value in SHAPE.items()}, max_position_embeddings=4096)
    with DEVICE:
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def profile(batch: int) -> None:
    """Where the time of a step goes, by kernel."""
    model, given = model_of(**SHAPE), prompts(batch, PROMPT, SHAPE["vocab_size"])
    phasor.generate(model, given, max_new_tokens=2)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        phasor.generate(model, given, max_new_tokens=33)
        torch.cuda.synchronize()
    print(record.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=48))


# Sweeps


class Projection:
    """One of a layer's projections with many different weights, so that the L2 cache serves none of them."""

    def __init__(self, role: str, rows: int, small: bool = False) -> None:
        dim, hidden, vocab = SHAPE["dim"], SHAPE["hidden_dim"], SHAPE["vocab_size"]
        sizes = {
            "qkv": (dim, 3072),
            "out": (dim, dim),
            "up": (dim, 2 * hidden),
            "down": (hidden, dim),
            "head": (dim, vocab),
        }
        self.role, (self.inputs, self.outputs) = role, sizes[role]
        self.size = 1 if small else 2  # bytes of a weight
        self.count = max(2, min(64, int(8e8 / (self.size * self.inputs * self.outputs))))

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

        def weight() -> Matrix:
            weight = drawn(self.outputs, self.inputs)
            return quantize_int8(weight) if small else weight

        self.weights = [weight() for _ in range(self.count)]
        self.x, self.y, self.hidden = drawn(rows, self.inputs), drawn(rows, self.outputs), drawn(rows, hidden)
        self.argmax = torch.full((rows,), lm_head_argmax.EMPTY_ARGMAX, device=DEVICE)
        self.norm = None if role in ("out", "down") else NormArgs(drawn(self.inputs), 0.0, 1e-5)
        x = self.x.double()
        x = x if self.norm is None else F.rms_norm(x, (self.inputs,), self.norm.weight.double(), 1e-5)
        self.expected = x @ dequantize(self.weights[0], torch.float64).mT
        if role == "up":
            self.expected = F.silu(self.expected[:, :hidden]) * self.expected[:, hidden:]

    def run(self, weight: Matrix, tiles: Tiles, pdl: bool) -> torch.Tensor:
        given: dict[str, Any] = {"norm": self.norm, "tiles": tiles, "pdl": pdl}
        if self.role == "up":
            return gemv.project_activate(self.x, weight, self.hidden, "silu", glu=True, **given)
        if self.role == "head":
            lm_head_argmax.lm_head_argmax(self.x, weight, self.y, self.argmax, **given)
            return self.y
        return gemv.project(self.x, weight, self.y, **given)

    def speed(self, tiles: Tiles, pdl: bool) -> float:
        """Terabytes of weights a second; 0 where the kernel fails, which is said."""
        try:
            found = self.run(self.weights[0], tiles, pdl).double()
            off = float((found - self.expected).norm() / self.expected.norm())
            if not off < 1e-2:
                raise ValueError(f"wrong by {off:.1e}")
            took = graph_time(lambda: [self.run(w, tiles, pdl) for w in self.weights]) / self.count
        except Exception as error:
            print(f"{self.role} {tiles}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            return 0.0
        return self.terabytes_per_second(took)

    def terabytes_per_second(self, took: float) -> float:
        return 1e-6 * self.size * self.inputs * self.outputs / took


def sweep_projections(rows: int, tiles: list[Tiles], small: bool = False) -> None:
    """Every projection over settings: the best first, then the best without pdl, and cuBLAS."""
    for role in ("qkv", "out", "up", "down", "head"):
        one = Projection(role, rows, small)
        rated = sorted(((one.speed(setting, True), setting) for setting in tiles), reverse=True)
        alone = one.speed(rated[0][1], False)
        plain = [dequantize(w, torch.bfloat16) for w in one.weights]
        linear = one.terabytes_per_second(graph_time(lambda: [F.linear(one.x, w) for w in plain]) / one.count)  # noqa: B023
        shown = "  ".join(
            f"{setting[0]}x{setting[1]},{setting[2]}w,{setting[3]}s {speed:.2f}" for speed, setting in rated
        )
        print(
            f"{role:5} {rows} rows, {'int8' if small else 'bf16'}, TB/s: {shown} | best without pdl {alone:.2f} | "
            f"cuBLAS in bf16 {linear:.2f}, with as many weights a second",
            flush=True,
        )


class AttentionChain:
    """The attention of layers as a step has it: projections with weights of their own before and after it."""

    def __init__(self, batch: int, context: int, layers: int = 12) -> None:
        size = GPU.families
        self.batch, self.layers, self.num_kv_heads, self.head_dim = batch, layers, size.kv_heads, size.dim // size.heads
        self.group, slots = size.heads // size.kv_heads, 128 * (context // 128 + 1)
        width = (size.heads + 2 * size.kv_heads) * self.head_dim

        def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_(std=scale)

        torch.manual_seed(0)
        cache_bytes = 4 * batch * slots * size.kv_heads * self.head_dim
        count = max(2, min(layers, 2**31 // cache_bytes))
        self.caches = [drawn(2, batch, slots, size.kv_heads, self.head_dim) for _ in range(count)]
        self.before = [drawn(width, size.dim, scale=size.dim**-0.5) for _ in range(layers)]
        self.after = [drawn(size.dim, size.dim, scale=size.dim**-0.5) for _ in range(layers)]
        self.norm = NormArgs(drawn(size.dim), 0.0, 1e-5)
        self.x, self.y, self.qkv = drawn(batch, size.dim), drawn(batch, size.dim), drawn(batch, width)
        self.out, self.lengths = torch.empty_like(self.x), torch.full((batch,), context, device=DEVICE)
        rope = phasor.Rotary(head_dim=self.head_dim)
        self.rope = RotaryArgs(torch.tensor(rope.fixed.increments, device=DEVICE), 1.0, self.head_dim, False)
        self.tiles: decode_attention.KVTiles | None = None
        self.workspace = decode_attention.SplitKWorkspace(batch, self.num_kv_heads, self.group, self.head_dim, DEVICE)
        gemv.project(self.x, self.before[0], self.qkv, norm=self.norm)
        self.checked = [0, batch - 1]  # rows
        keys, values = self.caches[0][:, self.checked].double()
        given = {"scale": self.head_dim**-0.5, "rope": self.rope}
        counts = self.lengths[self.checked]
        self.expected = decode_attention_ref(self.qkv[self.checked].double(), keys, values, counts, counts, **given)

    def attend(self, layer: int, pdl: bool = True) -> None:
        keys, values = self.caches[layer % len(self.caches)]
        decode_attention.decode_attention(
            self.qkv, keys, values, self.lengths, self.lengths, self.out, self.workspace,
            scale=self.head_dim**-0.5, rope=self.rope, tiles=self.tiles, pdl=pdl,
        )  # fmt: skip

    def run(self, attends: bool = True) -> None:
        for layer in range(self.layers):
            gemv.project(self.x, self.before[layer], self.qkv, norm=self.norm, pdl=True)
            if attends:
                self.attend(layer)
            gemv.project(self.out, self.after[layer], self.y, residual=self.x, pdl=True)

    def microseconds(self, tiles: decode_attention.KVTiles) -> float:
        """Of one layer; infinite where the kernel fails, which is said."""
        self.tiles = tiles
        try:
            gemv.project(self.x, self.before[0], self.qkv, norm=self.norm)
            self.attend(0, pdl=False)
            off = float((self.out[self.checked].double() - self.expected).norm() / self.expected.norm())
            if not off < 1e-2:
                raise ValueError(f"wrong by {off:.1e}")
            return graph_time(self.run) / self.layers
        except Exception as error:
            print(f"  attention {tuple(tiles)}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            return float("inf")


CONTEXTS = (64, 128, 256, 512, 2048, 16384, 131072)
KV_TILES = [
    decode_attention.KVTiles(*size)
    for size in ((64, 2, 2), (64, 4, 2), (128, 4, 2), (128, 8, 2), (256, 4, 2), (256, 8, 2), (512, 8, 2))
]


def sweep_attention(batch: int) -> None:
    """Microseconds of a layer's two projections with attention between them, by the tiles of keys and the context."""
    print(f"attention between its projections, {batch} rows: us per layer by context; keys of a tile, warps, stages")
    print(f"{'':28}" + "".join(f"{context:>9}" for context in CONTEXTS))
    used = decode_attention.choose_kv_tiles(max(2, decode_attention.TARGET_PROGRAMS // batch), 64, 2)
    times: dict[Any, list[float]] = {"without attention": [], **{tuple(tiles): [] for tiles in KV_TILES}}
    for context in CONTEXTS:
        chain = AttentionChain(batch, context)
        times["without attention"].append(graph_time(partial(chain.run, attends=False)) / chain.layers)
        for tiles in KV_TILES:
            times[tuple(tiles)].append(chain.microseconds(tiles))
        del chain
        torch.cuda.empty_cache()
    for name, row in times.items():
        label = f"{name}{', used' if name == tuple(used) else ''}"
        print(f"{label:28}" + "".join(f"{took:9.2f}" for took in row), flush=True)


class Mixture:
    """Mixtures of experts for one row, as in the benchmark of families, with so many weights that L2 serves none."""

    def __init__(self, layers: int = 8) -> None:
        size = GPU.families
        self.dim, self.hidden, self.count, self.top_k = size.dim, 2 * size.dim, size.experts, 2

        def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(shape, device=DEVICE)).bfloat16()

        def layer() -> ExpertsArgs:
            up = drawn(self.count, self.dim, 2 * self.hidden, scale=self.dim**-0.5)
            down = drawn(self.count, self.hidden, self.dim, scale=self.hidden**-0.5)
            return ExpertsArgs(up, down, None, None, "silu", True, self.top_k, True)

        torch.manual_seed(0)
        self.layers = [layer() for _ in range(layers)]
        self.routers = [drawn(self.count, self.dim, scale=self.dim**-0.5) for _ in range(layers)]
        self.x, self.norm = drawn(1, self.dim), NormArgs(drawn(self.dim), 0.0, 1e-5)
        self.out, self.logits = torch.empty_like(self.x), self.x.new_empty(1, self.count)
        self.bytes = self.top_k * 3 * self.dim * self.hidden * 2
        norm, args = self.norm._replace(weight=self.norm.weight.double()), self.layers[0]
        wide, x = args._replace(up=args.up.double(), down=args.down.double()), self.x.double()
        logits = project_ref(x, self.routers[0].double(), norm=norm)
        self.expected = experts_ref(x, logits, wide, norm=norm, residual=x)

    def by_four_kernels(self) -> Callable[[int], torch.Tensor]:
        """Router, choice, up and down, one kernel each."""
        space = experts.ExpertsWorkspace(1, self.layers[0], torch.bfloat16, DEVICE)
        given: dict[str, Any] = {"norm": self.norm, "pdl": True}

        def run(i: int) -> torch.Tensor:
            logits = gemv.project(self.x, self.routers[i], self.logits, **given)
            return experts.experts(self.x, logits, self.layers[i], self.out, space, residual=self.x, **given)

        return run

    def by_two_kernels(self) -> Callable[[int], torch.Tensor]:
        """Router, choice and up in one kernel, and down."""
        space = experts_one_row.OneRowWorkspace(self.layers[0], torch.bfloat16, DEVICE)
        given: dict[str, Any] = {"norm": self.norm, "residual": self.x, "pdl": True}

        def run(i: int) -> torch.Tensor:
            return experts_one_row.experts_one_row(self.x, self.routers[i], self.layers[i], self.out, space, **given)

        return run

    def microseconds(self, run: Callable[[int], torch.Tensor]) -> float:
        """Of one layer; infinite where the kernels fail, which is said."""
        try:
            results = [run(0).clone() for _ in range(3)]
            off = float((results[0].double() - self.expected).norm() / self.expected.norm())
            if not off < 1e-2:
                raise ValueError(f"wrong by {off:.1e}")
            if not all(torch.equal(results[0], each) for each in results):
                raise ValueError("not the same bits in every run")
            return graph_time(lambda: [run(i) for i in range(len(self.layers))], replays=10) / len(self.layers)
        except Exception as error:
            print(f"  {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            return float("inf")

    def note(self, name: object, took: float, speed: float) -> None:
        rate = self.bytes / (1e-6 * took)
        print(f"  {took:6.2f} us {1e-12 * rate:.2f} TB/s, {rate / speed:.0%} of a copy: {name}", flush=True)


UP_TILES = [
    Tiles(*size)
    for size in (
        *((32, 128, 4, 4), (32, 256, 8, 3), (32, 128, 8), (32, 128, 4), (32, 256, 8), (32, 256, 4), (32, 512, 8)),
        *((16, 256, 4), (16, 256, 8), (16, 512, 8), (64, 256, 8), (16, 1024, 8)),
    )
]
DOWN_TILES = [  # with the number of programs
    *((Tiles(32, 512, 8), 264), (Tiles(32, 512, 4), 264), (Tiles(32, 256, 4), 528), (Tiles(32, 256, 8), 264)),
    *((Tiles(64, 256, 8), 264), (Tiles(64, 256, 4), 264), (Tiles(64, 512, 8), 132), (Tiles(32, 1024, 8), 132)),
]


def sweep_experts(speed: float) -> None:
    """Mixtures of experts for one row: router and choice in kernels of their own or not, tiles, and whole steps."""
    mixture = Mixture()
    print(f"experts of one row, {mixture.bytes / 1e6:.1f} MB a layer; tiles as outputs x inputs, warps, stages")
    mixture.note("router and choice in kernels of their own", mixture.microseconds(mixture.by_four_kernels()), speed)
    mixture.note("merged, tiles as they are", mixture.microseconds(mixture.by_two_kernels()), speed)
    used = experts_one_row.UP_TILES, experts_one_row.DOWN_TILES, experts_one_row.DOWN_PROGRAMS
    rated = []
    for tiles in UP_TILES:
        experts_one_row.UP_TILES = tiles
        rated.append((mixture.microseconds(mixture.by_two_kernels()), tiles))
    for took, tiles in sorted(rated):
        mixture.note(f"up {tuple(tiles)}", took, speed)
    experts_one_row.UP_TILES = best = min(rated)[1]
    both = []
    for tiles, programs in DOWN_TILES:
        experts_one_row.DOWN_TILES, experts_one_row.DOWN_PROGRAMS = tiles, programs
        both.append((mixture.microseconds(mixture.by_two_kernels()), tiles, programs))
    for took, tiles, programs in sorted(both):
        mixture.note(f"up {tuple(best)}, down {tuple(tiles)}, {programs} programs", took, speed)
    del mixture
    torch.cuda.empty_cache()
    experts_one_row.DOWN_TILES, experts_one_row.DOWN_PROGRAMS = min(both)[1:]
    is_small, none_is = experts_one_row.router_is_small, lambda router: False
    cases = {"merged, best tiles": is_small, "router and choice in kernels of their own": none_is}
    model = mixture_model()
    for name, experts_one_row.router_is_small in cases.items():
        step_by_kernel(model, name)
    experts_one_row.router_is_small = is_small
    experts_one_row.UP_TILES, experts_one_row.DOWN_TILES, experts_one_row.DOWN_PROGRAMS = used


def mixture_model() -> phasor.Transformer:
    """Mixtral as in the benchmark of families."""
    size = GPU.families
    network = {"activation": "swiglu", "experts": {"num_experts": size.experts, "top_k": 2}}
    shape = {"dim": size.dim, "hidden_dim": 2 * size.dim, "num_layers": size.layers, "num_heads": size.heads}
    shape |= {"num_kv_heads": size.kv_heads, "vocab_size": size.vocabulary, "embedding": {"tied": False}}
    return model_of(**shape, feedforward=network, init="fan-in")


def sweep_step() -> None:
    """Microseconds of a token of Mixtral, by the step in a graph and by the host's clock, with one change at a time."""
    model, size = mixture_model(), GPU.families
    given = prompts(1, size.prompt, size.vocabulary)
    by_hand = gemv.choose_tiles

    def tiles_for(few: Tiles | None = None, many: Tiles | None = None) -> Callable[..., Tiles]:
        """These tiles for few outputs and for many, those of a layer's projections and of the head."""
        return lambda rows, outputs, inputs, **kind: (
            (few if outputs <= SMALL_N else many) or by_hand(rows, outputs, inputs, **kind)
        )

    changes: dict[str, tuple[Any, str, Any]] = {"as it is": (gemv, "choose_tiles", by_hand)}
    for tiles in (KV_TILES[0], KV_TILES[3], KV_TILES[5]):
        changes[f"attention {tuple(tiles)}"] = (decode_attention, "SPLIT_TILES", tiles)
    for tiles in (Tiles(1, 1024, 1), Tiles(2, 1024, 1), Tiles(2, 1024, 2), Tiles(4, 1024, 2), Tiles(8, 1024, 4)):
        changes[f"projections {tuple(tiles)[:3]}"] = (gemv, "choose_tiles", tiles_for(few=tiles))
    for tiles in (Tiles(2, 1024, 1), Tiles(4, 1024, 1), Tiles(4, 1024, 2), Tiles(8, 1024, 4), Tiles(16, 1024, 8)):
        changes[f"head {tuple(tiles)[:3]}"] = (gemv, "choose_tiles", tiles_for(many=tiles))
    for name, (where, what, value) in changes.items():
        before = getattr(where, what)
        setattr(where, what, value)
        RETAINED.clear()
        try:
            (step, off), token = step_microseconds(model), token_microseconds(model, given)
            print(f"  {step:6.1f} us of a step, {token:6.1f} a token, logits off by {off:.1e}: {name}", flush=True)
        finally:
            setattr(where, what, before)
            RETAINED.clear()


@torch.inference_mode()
def step_microseconds(model: phasor.Transformer) -> tuple[float, float]:
    """Of one of four steps in a graph, after 96 tokens; and how far the first one's logits are from plain ones."""
    cache, ids = model.new_cache(1, 128), torch.tensor(prompts(1, 97, model.config.vocab_size), device=DEVICE)
    plain = model(ids)[0, -1].float()
    model(ids[:, :-1], cache=cache)
    buffers = StepBuffers(StaticKVCache(cache))
    step = fused.FusedStep(model, buffers)
    buffers.tokens.copy_(ids[:, -1])
    off = float((step()[0].float() - plain).norm() / plain.norm())
    if not off < 0.2:  # an undecided router may choose another expert
        raise SystemExit(f"the fused step's logits are off by {off:.1e}: nothing is timed")
    return graph_time(step, count=4, replays=5), off


def token_microseconds(model: phasor.Transformer, given: list[list[int]], runs: int = 10) -> float:
    """Of a token by the host's clock, the prefill not included."""
    took = []
    for count in (GPU.families.new, 1):
        phasor.generate(model, given, max_new_tokens=count, stop=())
        times = []
        for _ in range(runs):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            phasor.generate(model, given, max_new_tokens=count, stop=())
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        took.append(statistics.median(times))
    return 1e6 * (took[0] - took[1]) / (GPU.families.new - 1)


@torch.inference_mode()
def step_by_kernel(model: phasor.Transformer, name: str) -> None:
    """Microseconds of a step in a graph, and of its kernels when each waits for the one before."""
    cache = model.new_cache(1, 256)
    model(torch.tensor(prompts(1, 64, model.config.vocab_size), device=DEVICE), cache=cache)
    step = fused.FusedStep(model, StepBuffers(StaticKVCache(cache)))
    print(f"a step of {model.config.num_layers} layers, {name}: {graph_time(step, replays=20):.1f} us")
    step.pdl = False
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in record.key_averages() if event.device_time_total > 0]
    for event in sorted(kernels, key=lambda event: -event.device_time_total)[:12]:
        print(f"  {event.device_time_total:7.1f} us  {event.count:3} x {event.device_time:6.2f}  {event.key[:60]}")


SIZES = ((2, 1024, 4), (4, 512, 2), (4, 1024, 4), (8, 512, 4), (2, 2048, 4), (4, 2048, 8), (8, 1024, 8), (1, 2048, 4))
VECTORS = [Tiles(*size) for size in SIZES]
SWEEPS = ["projections", "attention", "rows", "int8", "int8-rows", "experts", "step"]
MATRICES = [Tiles(16, 128, 4, 6), Tiles(16, 256, 4, 4), Tiles(32, 128, 4, 6), Tiles(32, 256, 4, 4)]


BYTES = [
    Tiles(*size)
    for size in (
        *((1, 2048, 4), (2, 2048, 4), (4, 2048, 4), (8, 2048, 4), (2, 1024, 2)),
        *((4, 1024, 2), (2, 512, 1), (4, 512, 1), (8, 512, 1), (2, 4096, 8), (4, 4096, 8)),
    )
]
BYTE_MATRICES = [Tiles(16, 256, 4, 4), Tiles(32, 256, 4, 3), Tiles(64, 128, 4, 4), Tiles(64, 256, 8, 3)]


def sweep(what: list[str]) -> None:
    speed = copy_speed()
    print(f"copy {speed / 1e12:.2f} TB/s")
    if "step" in what:
        sweep_step()
    if "experts" in what:
        sweep_experts(speed)
    if "projections" in what:
        sweep_projections(1, VECTORS)
    if "attention" in what:
        sweep_attention(1)
        sweep_attention(16)
    if "rows" in what:
        sweep_projections(16, MATRICES)
    if "int8" in what:
        sweep_projections(1, BYTES, small=True)
    if "int8-rows" in what:
        sweep_projections(16, BYTE_MATRICES, small=True)
        sweep_projections(64, BYTE_MATRICES, small=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    known = ["variants", "eager", "hf", "hf-compiled"]
    options.add_argument("--skip", nargs="*", default=[], choices=known)
    options.add_argument("--sweep", nargs="*", choices=SWEEPS)
    options.add_argument("--profile", action="store_true")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    if given.sweep is not None:
        return sweep(given.sweep or SWEEPS)
    begun = time.perf_counter()
    check_tokens()
    apart = check_logits()
    print(f"checked in {time.perf_counter() - begun:.0f} s", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    speed = copy_speed()
    model = model_of(**SHAPE)
    read, less = bytes_read(model), bytes_read(phasor.quantize(model))
    del model
    limit = speed / read
    print(
        f"a copy moves {speed / 1e12:.2f} TB/s: {read / 1e9:.2f} GB of weights can be read {limit:,.0f} times "
        f"a second, {less / 1e9:.2f} GB in int8 {speed / less:,.0f} times"
    )
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy bytes/s": speed,
        "bytes of weights": read, "limit, tokens/s at batch 1": limit, "shape": SHAPE, "prompt": PROMPT, "new": NEW,
        "bytes of weights in int8": less, "limit in int8, tokens/s at batch 1": speed / less,
        "int8 against bfloat16, random weights": apart,
    }  # fmt: skip
    for batch in given.batch:
        print(f"batch {batch}, prompt {PROMPT}, {NEW} new tokens", flush=True)
        result[f"batch {batch}"] = compare(batch, speed, given.skip)
        if given.profile:
            profile(batch)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "decode_gpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

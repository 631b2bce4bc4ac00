"""Reading a stream of tokens in chunks through a sliding-window cache: tokens/s by chunk and window, and memory.

    python benchmarks/stream.py [--full] [--out benchmarks/results/stream.json]
    python benchmarks/stream.py --offset 1000000000 --model FOLDER --text FILE [--window 512] [--out FILE]

Beside it `transformers`: a Mistral with the same weights and its own sliding-window cache, where its masks of chunk by
chunk and window fit. Before anything is timed, the hidden states of chunks are compared with those of one forward over
all tokens, and with those of `transformers`. The limit is the multiplications of a token at the rate of one large
matmul, and the activations that a token's layers must read and write at the bandwidth of a copy.

With `--offset` the loss of a model's text is measured at position 0 and at that offset, in float32 and bfloat16.

By default the sizes are a CPU's; with `--full` 8 layers of 512 and windows of 1,024 and 4,096 in bfloat16, on a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import phasor
from phasor.bench.llama import quiet
from phasor.bench.timing import Timer, arithmetic, bandwidth
from phasor.checkpoints.swap_positions import swap_config
from phasor.evaluation.stream import evaluate_stream
from phasor.evaluation.token_source import open_tokens
from phasor.models.windows import window_config


@dataclass(frozen=True)
class Setup:
    """What is measured: a model, its windows, the chunks, and how many tokens a measurement reads (or SECONDS)."""

    model: dict[str, int]
    windows: tuple[int, ...]
    chunks: tuple[int, ...]
    tokens: int
    theirs_up_to: int  # the longest chunk for transformers, whose mask is of chunk by chunk and window
    dtype: torch.dtype


SMALL = Setup(
    {"vocab_size": 256, "dim": 128, "hidden_dim": 352, "num_layers": 2, "num_heads": 4},
    windows=(128, 512),
    chunks=(128, 512, 2048, 8192),
    tokens=16384,
    theirs_up_to=2048,
    dtype=torch.float32,
)
FULL = Setup(
    {"vocab_size": 8192, "dim": 512, "hidden_dim": 1408, "num_layers": 8, "num_heads": 4},
    windows=(1024, 4096),
    chunks=(1024, 4096, 16384, 65536),
    tokens=1 << 23,
    theirs_up_to=16384,
    dtype=torch.bfloat16,
)
SECONDS = 4.0
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative to the largest hidden state


def build(setup: Setup, window: int, device: torch.device) -> phasor.Transformer:
    torch.manual_seed(0)
    config = phasor.preset("llama-2", **setup.model, attention=phasor.AttentionConfig(window=window))
    return phasor.Transformer(config).to(device, setup.dtype).eval()


def build_theirs(model: phasor.Transformer, setup: Setup) -> Any:
    """The same model as transformers loads it; None where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    with tempfile.TemporaryDirectory() as folder, quiet():
        phasor.save(model, folder, format="hf")
        loaded = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(
            folder, dtype=setup.dtype, attn_implementation="sdpa"
        )
    if type(loaded).__name__ != "MistralForCausalLM":
        raise SystemExit(f"a window makes a {type(loaded).__name__}, and not a Mistral, in transformers")
    return loaded.to(model.tokens.weight.device).eval().model


class Ours:
    """Chunks through phasor's cache."""

    def __init__(self, model: phasor.Transformer, window: int) -> None:
        self.model, self.cache = model, model.new_cache(1, window)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, cache=self.cache, head=False)


class OursWithLoss(Ours):
    """The same with the loss of the next token."""

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens, targets=tokens.roll(-1, 1), cache=self.cache).total


class Theirs:
    """Chunks through transformers' cache, which keeps a window for each layer."""

    def __init__(self, model: Any, window: int) -> None:
        self.model = model
        self.cache = importlib.import_module("transformers").DynamicCache(config=model.config)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True).last_hidden_state


def check(setup: Setup, model: phasor.Transformer, theirs: Any, window: int) -> dict[str, float]:
    """How far chunks are from one forward over all tokens, and from transformers; stops where that is too far."""
    count = 4 * window + 5
    tokens = torch.randint(0, setup.model["vocab_size"], (1, count), device=model.tokens.weight.device)
    expected = model(tokens, head=False).float()
    readers = {"phasor": Ours(model, window)} | ({} if theirs is None else {"transformers": Theirs(theirs, window)})
    found = {}
    for name, reader in readers.items():
        states = torch.cat([reader(x) for x in tokens.split(window + 3, dim=1)], dim=1).float()
        found[name] = float((states - expected).abs().max() / expected.abs().max())
        if not found[name] <= ALLOWED[setup.dtype]:
            raise SystemExit(f"{name} is off by {found[name]:.1e} at a window of {window}: nothing is timed")
    return found


def measure(reader: Any, setup: Setup, chunk: int, device: torch.device) -> dict[str, float]:
    """Tokens per second of a stream that has filled its window, and the most memory it takes."""
    tokens = torch.randint(0, setup.model["vocab_size"], (1, chunk), device=device)
    for _ in range(3):
        reader(tokens)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun, calls = time.perf_counter(), 0
    while calls < 2 or (calls * chunk < setup.tokens and time.perf_counter() - begun < SECONDS):
        reader(tokens)
        calls += 1
        if device.type == "cuda" and calls % 8 == 0:  # time is read of work that is done, and not of a queue
            torch.cuda.synchronize()
    if device.type == "cuda":
        torch.cuda.synchronize()
    rate = calls * chunk / (time.perf_counter() - begun)
    if device.type == "cuda":
        return {"tokens/s": rate, "peak GiB": torch.cuda.max_memory_allocated() / 2**30}
    return {"tokens/s": rate, "peak GiB of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def limits(setup: Setup, model: phasor.Transformer, device: torch.device) -> dict[int, dict[str, float]]:
    """For each window the tokens per second of a token's multiplications, and of its layers' activations.

    A layer reads and writes at least: the normalized states before each half, queries, keys and values, the attention's
    result, both sums, and the feed-forward network's hidden states; each once.
    """
    on_gpu, sizes = device.type == "cuda", setup.model
    timer = Timer(device, 20, 5.0)
    rate = arithmetic(timer, 8192 if on_gpu else 1024, setup.dtype)
    copy = bandwidth(timer, 1 << 30 if on_gpu else 1 << 26)
    weights = sum(p.numel() for p in model.decoder.parameters()) if model.decoder is not None else 0
    moved = 2 * sizes["num_layers"] * (8 * sizes["dim"] + 3 * sizes["hidden_dim"]) * setup.dtype.itemsize
    found = {}
    for window in setup.windows:
        attention = 4 * sizes["num_layers"] * window * sizes["dim"]
        found[window] = {
            "multiplications, tokens/s": rate / (2 * weights + attention),
            "activations, tokens/s": copy / moved,
        }
    return found


def series(setup: Setup, window: int, device: torch.device) -> list[dict[str, Any]]:
    model = build(setup, window, device)
    theirs = build_theirs(model, setup)
    errors = check(setup, model, theirs, window)
    print(
        f"window {window}: off by " + ", ".join(f"{error:.1e} ({name})" for name, error in errors.items()), flush=True
    )
    rows = []
    for chunk in setup.chunks:
        readers: dict[str, Any] = {"phasor": Ours(model, window), "phasor with loss": OursWithLoss(model, window)}
        if theirs is not None and chunk <= setup.theirs_up_to:
            readers["transformers"] = Theirs(theirs, window)
        for name, reader in readers.items():
            try:
                found = measure(reader, setup, chunk, device)
            except torch.OutOfMemoryError:
                print(f"  {name}, chunks of {chunk}: does not fit")
                continue
            rows.append({"window": window, "chunk": chunk, "who": name, **found})
            memory = next(value for key, value in found.items() if key.startswith("peak"))
            print(f"  {name:18} chunk {chunk:6} {found['tokens/s']:14,.0f} tokens/s {memory:7.2f} GiB", flush=True)
    return rows


def offset_losses(given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The loss of 4,096 tokens of a text at position 0 and at an offset, by phasor and by transformers."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model = phasor.load(given.model, device, dtype)
        model = swap_config(model, window_config(model.config, given.window, None))
        tokens = torch.from_numpy(open_tokens(given.text, model, special=True).read(0, 4096)).to(device)[None]
        with tempfile.TemporaryDirectory() as folder, quiet():
            phasor.save(model, folder, format="hf")
            theirs = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        theirs = theirs.to(device).eval()
        for offset in (0, given.offset):
            found = evaluate_stream(model, given.text, chunk=1024, offset=offset, limit=4096)["loss"]
            positions = torch.arange(4095, device=device)[None] + offset
            logits = theirs(input_ids=tokens[:, :-1], position_ids=positions).logits[0].double()
            other = float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]))
            rows.append({"dtype": str(dtype)[6:], "offset": offset, "phasor": found, "transformers": other})
            print(f"{str(dtype)[6:]:9} offset {offset:13,}: phasor {found:.7f}, transformers {other:.7f}", flush=True)
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--full", action="store_true", help="the sizes of a GPU")
    options.add_argument("--out", type=Path, default=Path("benchmarks/results/stream.json"))
    options.add_argument("--offset", type=int, help="compare the losses at this offset, and time nothing")
    options.add_argument("--model", type=Path, help="the folder of a model, for --offset")
    options.add_argument("--text", type=Path, help="a text for it")
    options.add_argument("--window", type=int, help="give its layers a window")
    given = options.parse_args()
    if given.offset is not None:
        with torch.inference_mode():
            losses = offset_losses(given, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        given.out.write_text(json.dumps({"torch": torch.__version__, "losses": losses}, indent=1) + "\n")
        return
    if given.full and not torch.cuda.is_available():
        raise SystemExit("--full needs a GPU")
    setup = FULL if given.full else SMALL
    device = torch.device("cuda" if given.full else "cpu")
    with torch.inference_mode():
        rows = [row for window in setup.windows for row in series(setup, window, device)]
        limit = limits(setup, build(setup, setup.windows[0], device), device)
    for window, each in limit.items():
        best = max(row["tokens/s"] for row in rows if row["window"] == window and row["who"] == "phasor")
        parts = ", ".join(f"{name} {value:,.0f}" for name, value in each.items())
        share = best * sum(1 / value for value in each.values())
        print(f"window {window}: limits by {parts}; phasor reaches {share:.0%} of both one after the other")
    where = torch.cuda.get_device_name() if given.full else "cpu"
    result = {
        "device": where,
        "torch": torch.__version__,
        "sizes": setup.model,
        "dtype": str(setup.dtype)[6:],
        "limits": limit,
        "rows": rows,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

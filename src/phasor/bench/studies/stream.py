"""Reading a stream of tokens in chunks through a sliding-window cache: tokens/s by chunk and window, and memory.

Beside it transformers: a Mistral with the same weights and its own sliding-window cache, where its masks of chunk by
chunk and window fit. Before anything is timed, the hidden states of chunks are compared with those of one forward over
all tokens. The limit is the multiplications of a token at the rate of one large matmul, and the activations that a
token's layers must read and write at the bandwidth of a copy.
"""

from __future__ import annotations

import importlib
import resource
import time
from typing import Any

import torch
from torch import Tensor

from phasor.bench.peers import is_installed, transformers_model
from phasor.bench.study import Study, format_row
from phasor.config.schema import Config
from phasor.models.presets import preset
from phasor.nn.attention import SoftmaxAttentionConfig
from phasor.transformer import Transformer

SECONDS = 4.0
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative to the largest hidden state


class StreamSettings(Config):
    """A model, its windows, the chunks, and how many tokens a measurement reads (or SECONDS)."""

    vocab_size: int = 8192
    dim: int = 512
    hidden_dim: int = 1408
    num_layers: int = 8
    num_heads: int = 4
    windows: tuple[int, ...] = (1024, 4096)
    chunks: tuple[int, ...] = (1024, 4096, 16384, 65536)
    tokens: int = 1 << 23
    theirs_up_to: int = 16384  # the longest chunk for transformers, whose mask is of chunk by chunk and window

    @property
    def model(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("vocab_size", "dim", "hidden_dim", "num_layers", "num_heads")}


GPU = StreamSettings()
CPU = StreamSettings(
    vocab_size=256,
    dim=128,
    hidden_dim=352,
    num_layers=2,
    windows=(128, 512),
    chunks=(128, 512, 2048, 8192),
    tokens=16384,
    theirs_up_to=2048,
)
TINY = CPU.replace(dim=32, hidden_dim=48, windows=(8,), chunks=(8, 16), tokens=32)


@torch.inference_mode()
def run(study: Study) -> None:
    settings: StreamSettings = study.settings
    study.result |= {"sizes": settings.model, "dtype": study.machine.dtype_name, "limits": {}, "rows": []}
    for window in settings.windows:
        model = build(study, window)
        limit = study.result["limits"][window] = limits(study, model, window)
        rows = series(study, model, window)
        best = max(row["tokens/s"] for row in rows if row["who"] == "phasor")
        share = best * sum(1 / value for value in limit.values())
        study.say(f"limits: {format_row(limit)}; phasor reaches {share:.0%} of both one after the other")


def build(study: Study, window: int) -> Transformer:
    torch.manual_seed(0)
    config = preset("llama-2", **study.settings.model, attention=SoftmaxAttentionConfig(window=window))
    return Transformer(config).to(study.device, study.machine.dtype).eval()


class ChunkReader:
    """Chunks through phasor's cache; `with_loss` computes the loss of the next token too."""

    def __init__(self, model: Transformer, window: int, with_loss: bool = False) -> None:
        self.model, self.cache, self.with_loss = model, model.new_cache(1, window), with_loss

    def __call__(self, tokens: Tensor) -> Tensor:
        if self.with_loss:
            return self.model.loss(tokens, targets=tokens.roll(-1, 1), cache=self.cache).total
        states: Tensor = self.model(tokens, cache=self.cache, head=False)
        return states


class TransformersReader:
    """Chunks through transformers' cache, which keeps a window for each layer."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = importlib.import_module("transformers").DynamicCache(config=model.config)

    def __call__(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True).last_hidden_state
        return states


def mistral(model: Transformer) -> Any:
    """The same model in transformers, without its head."""
    theirs = transformers_model(model)
    if type(theirs).__name__ != "MistralForCausalLM":
        raise ValueError(f"a window makes a {type(theirs).__name__}, and not a Mistral, in transformers")
    return theirs.model


def series(study: Study, model: Transformer, window: int) -> list[dict[str, Any]]:
    settings: StreamSettings = study.settings
    theirs = mistral(model) if is_installed("transformers") else None
    check(study, model, theirs, window)
    rows: list[dict[str, Any]] = []
    for chunk in settings.chunks:
        readers: dict[str, Any] = {
            "phasor": ChunkReader(model, window),
            "phasor with loss": ChunkReader(model, window, with_loss=True),
        }
        if theirs is not None and chunk <= settings.theirs_up_to:
            readers["transformers"] = TransformersReader(theirs)
        for name, reader in readers.items():
            try:
                found = measure(study, reader, chunk)
            except torch.OutOfMemoryError:
                study.say(f"  {name}, chunks of {chunk}: does not fit")
                continue
            rows.append({"window": window, "chunk": chunk, "who": name, **found})
            study.add_row(rows[-1])
    return rows


def check(study: Study, model: Transformer, theirs: Any, window: int) -> None:
    """Chunks, and those of transformers, give the states of one forward over all tokens."""
    tokens = torch.randint(0, model.config.vocab_size, (1, 4 * window + 5), device=study.device)
    expected = model(tokens, head=False).float()
    readers: dict[str, Any] = {"phasor": ChunkReader(model, window)}
    if theirs is not None:
        readers["transformers"] = TransformersReader(theirs)
    for name, reader in readers.items():
        states = torch.cat([reader(x) for x in tokens.split(window + 3, dim=1)], dim=1).float()
        off = float((states - expected).abs().max() / expected.abs().max())
        study.check(f"{name} with a window of {window}", off, ALLOWED[study.machine.dtype])
        study.say(f"window {window}: {name} off by {off:.1e}")


def measure(study: Study, reader: Any, chunk: int) -> dict[str, float]:
    """Tokens per second of a stream that has filled its window, and the most memory it takes."""
    settings, wait = study.settings, study.machine.timer.wait
    tokens = torch.randint(0, settings.vocab_size, (1, chunk), device=study.device)
    for _ in range(3):
        reader(tokens)
    wait()
    if study.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begun, calls = time.perf_counter(), 0
    while calls < 2 or (calls * chunk < settings.tokens and time.perf_counter() - begun < SECONDS):
        reader(tokens)
        calls += 1
        if calls % 8 == 0:  # time is read of work that is done, and not of a queue
            wait()
    wait()
    rate = calls * chunk / (time.perf_counter() - begun)
    if study.on_gpu:
        return {"tokens/s": rate, "peak GiB": torch.cuda.max_memory_allocated() / 2**30}
    return {"tokens/s": rate, "peak GiB of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def limits(study: Study, model: Transformer, window: int) -> dict[str, float]:
    """The tokens per second of a token's multiplications, and of its layers' activations.

    A layer reads and writes at least: the normalized states before each half, queries, keys and values, the attention's
    result, both sums, and the feed-forward network's hidden states; each once.
    """
    s, machine = study.settings, study.machine
    assert model.decoder is not None
    weights = sum(weight.numel() for weight in model.decoder.parameters())
    moved = 2 * s.num_layers * (8 * s.dim + 3 * s.hidden_dim) * machine.dtype.itemsize
    attention = 4 * s.num_layers * window * s.dim
    return {
        "multiplications, tokens/s": machine.arithmetic / (2 * weights + attention),
        "activations, tokens/s": machine.bandwidth / moved,
    }

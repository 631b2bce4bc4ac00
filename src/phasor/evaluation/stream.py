"""`evaluate_stream`: the loss of a model on one sequence of any length, in one pass and constant memory."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasor.checkpoints.open_model import open_model
from phasor.checkpoints.swap_positions import swap_config
from phasor.config import ModelConfig
from phasor.config.schema import check_integer, quote
from phasor.config.text_files import path_of
from phasor.data.prefetch import Prefetcher
from phasor.evaluation.metrics.cross_entropy import perplexity
from phasor.evaluation.stream_folder import StreamFolder, model_fingerprint
from phasor.evaluation.token_source import TokenSource, open_tokens
from phasor.models.windows import window_config
from phasor.nn.heads import head_loss
from phasor.nn.mode import eval_mode
from phasor.transformer import Transformer

NUM_BUCKETS = 64  # of the curve: the tokens with 1, 2 to 3, 4 to 7, ... tokens before them
PREFETCH = 4  # chunks that are read before they are needed
IN_FLIGHT = 8  # chunks that a device may be behind
REPORT_SECONDS = 0.5
GPU_CHUNK, CPU_CHUNK = 65_536, 4096


@dataclass(frozen=True)
class StreamProgress:
    """How far a stream is: tokens read, about how many there are, their mean loss, and tokens per second."""

    tokens: int
    expected: int | None
    loss: float
    tokens_per_second: float


def evaluate_stream(
    model: str | Path | Transformer,
    stream: str | Path,
    *,
    chunk: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
    offset: int = 0,
    max_length: int | None = None,
    limit: int | None = None,
    token_dtype: str | None = None,
    checkpoint: str | int | None = None,
    part: str | None = None,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    save_seconds: float = 60.0,
    progress: Callable[[StreamProgress], None] | None = None,
) -> dict[str, Any]:
    """The loss of a model on a file of text or token ids (`open_tokens`), read as one sequence of any length.

    `model` is a run folder, a model folder of any format (or its `part`), or a model. The file is read once, through
    the model's cache, `chunk` tokens at a time; memory does not depend on its length, if every layer has a window.
    `window` gives one to the layers without (or with a longer one), and `sinks` keeps the first tokens visible behind
    it, at a capped distance, as in StreamingLLM. A model with layers without a window reads at most `max_length`
    tokens, its own by default.

    `offset` is the position of the first token, `limit` how many tokens are read. With `out` the state is saved to a
    folder about every `save_seconds`, and `resume` continues from there; on the CPU to the same bits as without a stop.

    The result has the mean `loss` in nats over all `tokens` but the first, which nothing predicts, and a `curve`: the
    loss of the tokens with 1, 2 to 3, 4 to 7, 8 to 15, ... tokens before them. Sums are in float64.

    >>> import tempfile
    >>> import numpy as np
    >>> from phasor import preset
    >>> config = preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=50)
    >>> model = Transformer(config)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.zeros(1000, "<u2").tofile(f"{folder}/ids.bin")
    ...     result = evaluate_stream(model, f"{folder}/ids.bin", window=8, sinks=2, chunk=64)
    >>> result["tokens"], len(result["curve"]), result["curve"][2]["first"], result["curve"][2]["last"]
    (1000, 10, 4, 7)
    """
    given = {"chunk": chunk, "limit": limit, "max_length": max_length, "window": window}
    least = {"limit": 2, "sinks": 0, "offset": 0}
    for name, value in {**given, "sinks": sinks, "offset": offset}.items():
        if value is not None:
            check_integer(name, value, least.get(name, 1), 1 << 62)
    if not isinstance(save_seconds, int | float) or not save_seconds >= 0:
        raise ValueError(f"save_seconds must be a number of seconds, not {quote(save_seconds)}")
    if resume and out is None:
        raise ValueError("resume needs out, the folder of the stream (--out)")
    folder = None if out is None else path_of(out)
    network, _ = open_model(model, device, dtype, checkpoint=checkpoint, part=part)
    check_decoder(network.config)
    config = window_config(network.config, window, sinks)
    if config != network.config:
        network = swap_config(network, config)
    source = open_tokens(stream, network, token_dtype=token_dtype, special=True)
    length = check_length(network, source, offset, max_length, limit)
    reader = StreamReader(network, source, chunk or default_chunk(network), offset, length, limit)
    settings = {
        "file": source.fingerprint() if folder is not None else None,
        "model": model_fingerprint(network) if folder is not None else None,
        "window": window,
        "sinks": sinks,
        "chunk": reader.chunk,
        "offset": offset,
        "limit": limit,
        "dtype": str(network.tokens.dtype).removeprefix("torch."),
        "token_dtype": token_dtype,
    }
    with ExitStack() as stack:
        saved = (
            None if folder is None else stack.enter_context(StreamFolder.open(folder, settings, reader.device, resume))
        )
        stack.enter_context(eval_mode(network))
        stack.enter_context(torch.inference_mode())
        if saved is not None:
            reader.restore(saved)
        reader.run(saved, float(save_seconds), progress or (lambda report: None))
        result = {
            "file": str(source.path),
            **reader.result(),
            "chunk": reader.chunk,
            "offset": offset,
            "windows": describe_windows(config),
            "device": str(reader.device),
            "dtype": settings["dtype"],
        }
        if saved is not None:
            saved.write_result(result)
    return result


class StreamReader:
    """Reads a source chunk by chunk through a model's cache and adds up the nats, on the device.

    The chunks begin at multiples of `chunk`, so that a stream that is resumed has the same ones.
    """

    def __init__(
        self, model: Transformer, source: TokenSource, chunk: int, offset: int, length: int, limit: int | None
    ) -> None:
        self.model, self.source, self.chunk, self.limit = model, source, chunk, limit
        self.device = model.tokens.weight.device
        self.cache = model.new_cache(1, length)
        self.cache.next_positions = offset
        self.tokens = self.began_at = 0  # read, without the last one, which has nothing to predict
        self.nats = torch.zeros(NUM_BUCKETS, dtype=torch.float64, device=self.device)
        self.seconds = 0.0

    def restore(self, folder: StreamFolder) -> None:
        """Continue from the state in a folder; a new one gets a first state."""
        state = folder.read()
        if state is None:
            folder.write(0, self.nats.tolist(), (0, 0), None)
        elif state.cache is not None:
            self.cache = folder.read_cache(state, self.model)
            self.tokens = self.began_at = state.tokens
            self.nats = torch.tensor(state.nats, dtype=torch.float64, device=self.device)
            self.source.add_mark(*state.mark)

    def run(self, folder: StreamFolder | None, save_seconds: float, report: Callable[[StreamProgress], None]) -> None:
        """Read to the end. The device is waited for only where the loss is reported or a state is saved."""
        began = reported = saved = time.monotonic()
        for tokens in self.chunks():
            self.step(tokens)
            now = time.monotonic()
            self.seconds = now - began
            if now - reported >= REPORT_SECONDS:
                report(self.progress())
                reported = now
            if folder is not None and now - saved >= save_seconds:
                self.save(folder)
                saved = time.monotonic()
        if folder is not None:
            self.save(folder)
        synchronize(self.device)
        self.seconds = time.monotonic() - began
        report(self.progress())

    def chunks(self) -> Iterator[Tensor]:
        """The tokens of each chunk on the device, with the first token of the next, made by a thread ahead of time."""
        prefetcher = Prefetcher(self._read, workers=1)
        waiting: deque[Any] = deque()
        index = -(-self.tokens // self.chunk)
        try:
            while True:
                prefetcher.request(range(index, index + PREFETCH))
                tokens = prefetcher.take(index)
                if len(tokens) < 2:
                    return
                yield tokens.to(self.device, non_blocking=True)[None]
                if self.device.type == "cuda":  # the device must not fall behind without end
                    waiting.append(torch.cuda.current_stream(self.device).record_event())
                    if len(waiting) > IN_FLIGHT:
                        waiting.popleft().synchronize()
                if len(tokens) <= self.chunk:
                    return
                index += 1
        finally:
            prefetcher.close(wait=True)

    def _read(self, index: int) -> Tensor:
        start, count = index * self.chunk, self.chunk + 1
        if self.limit is not None:
            count = min(count, max(0, self.limit - start))
        tokens = torch.from_numpy(self.source.read(start, count))
        return tokens.pin_memory() if self.device.type == "cuda" else tokens

    def step(self, tokens: Tensor) -> None:
        """Read a chunk `[1, n + 1]`: the nats of its last n tokens are added to those of their buckets."""
        assert self.model.head is not None
        hidden = self.model(tokens[:, :-1], cache=self.cache, head=False)
        count = hidden.shape[1]
        for bucket, start, stop in split_at_powers_of_two(self.tokens + 1, self.tokens + 1 + count):
            here = slice(start - self.tokens - 1, stop - self.tokens - 1)
            loss = head_loss(self.model.head, hidden[:, here], self.model.tokens.table, tokens[:, 1:][:, here])
            self.nats[bucket] += loss.cross_entropy.double() * (stop - start)
        self.tokens += count

    def save(self, folder: StreamFolder) -> None:
        folder.write(self.tokens, self.nats.tolist(), self.source.mark(self.tokens), self.cache)

    def progress(self) -> StreamProgress:
        loss = float(self.nats.sum()) / self.tokens
        expected = self.source.estimate_count()
        if self.limit is not None:
            expected = self.limit if expected is None else min(expected, self.limit)
        rate = (self.tokens - self.began_at) / max(self.seconds, 1e-9)
        return StreamProgress(self.tokens + 1, expected, loss, rate)

    def result(self) -> dict[str, Any]:
        """What the stream came to; times are those of this run, without what it resumed from."""
        nats = self.nats.tolist()
        curve = [
            {"first": start, "last": stop - 1, "tokens": stop - start, "loss": nats[bucket] / (stop - start)}
            for bucket, start, stop in split_at_powers_of_two(1, self.tokens + 1)
        ]
        loss = math.fsum(nats) / self.tokens
        return {
            "tokens": self.tokens + 1,
            "loss": loss,
            "perplexity": perplexity(loss),
            "curve": curve,
            "seconds": self.seconds,
            "tokens_per_second": (self.tokens - self.began_at) / max(self.seconds, 1e-9),
            "resumed_at": self.began_at or None,
            "cache_bytes": self.cache.nbytes,
            "peak_memory_bytes": peak_memory(self.device),
        }


def split_at_powers_of_two(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The range cut at powers of two: `(k, first, last + 1)` within `2^k` to `2^(k + 1) - 1`.

    >>> list(split_at_powers_of_two(3, 10))
    [(1, 3, 4), (2, 4, 8), (3, 8, 10)]
    """
    while start < stop:
        bucket = start.bit_length() - 1
        end = min(stop, 2 << bucket)
        yield bucket, start, end
        start = end


def check_decoder(config: ModelConfig) -> None:
    """Refuse a model that cannot read a stream."""
    if config.shape != "decoder":
        raise ValueError(f"a stream is read by a decoder, and this model is an {config.shape}")
    if not config.has_logits:
        raise ValueError(f"a loss needs logits, and this model's head is {config.head.kind!r}")


def check_length(
    model: Transformer, source: TokenSource, offset: int, max_length: int | None, limit: int | None
) -> int:
    """The length of the cache; a stream that the model cannot read to its end is refused before it is begun."""
    config = model.config
    if (count := len(source.read(0, 2))) < 2:
        raise ValueError(f"{source.path} has {count} tokens, and a loss needs 2: one that predicts the other")

    def is_longer(count: int) -> bool:
        return (limit is None or limit > count) and len(source.read(count, 1)) > 0

    def most_read() -> int:
        """As many tokens as are read, as far as that is known; the last one is only predicted."""
        return min((n for n in (source.count, limit) if n is not None), default=1 << 62) - 1

    assert model.decoder is not None
    for scheme in model.decoder.schemes_with_max_positions(model.tokens.weight):
        most = scheme.max_positions or 0
        if "input" not in scheme.acts_on:
            if is_longer(most + 1):
                raise ValueError(
                    f"the model's {scheme.kind} positions span at most {most:,} tokens, and {source.path} has more: "
                    "give every layer a window of at most half of that (--window)"
                )
        elif offset >= most or is_longer(most - offset + 1):
            raise ValueError(
                f"the model's {scheme.kind} positions are a table of {most:,}, and {source.path} goes on past its end"
                + (f" from the offset {offset:,} on" if offset else "")
            )
    attentions = [config.layer(i).attention for i in range(config.num_layers)]
    endless = max((a.sink_tokens + a.reach for a in attentions if a.reach is not None), default=0) + 1
    schemes = (config.input_position, *config.layer_positions())
    growing = [i for i, attention in enumerate(attentions) if attention.grows]
    if not growing and not any(scheme.depends_on_length for scheme in schemes):
        return min(endless, most_read())
    most = max_length or config.max_length
    if is_longer(most + 1):
        reads = f"it reads at most {most:,} tokens, and {source.path} has more"
        if growing:
            raise ValueError(
                f"layer {growing[0]} of the model has no window, so that {reads}: give every layer one (--window), or "
                "--max-length for a cache of all tokens"
            )
        raise ValueError(
            f"the model's frequencies depend on the length of the sequence, and {reads}: give --max-length to plan "
            "for more"
        )
    return most_read()


def default_chunk(model: Transformer) -> int:
    """Tokens of a chunk: enough to fill a device, and no more than half of what a decaying scheme spans."""
    size = GPU_CHUNK if model.tokens.weight.device.type == "cuda" else CPU_CHUNK
    spans = [scheme.max_positions for scheme in model.config.layer_positions() if "input" not in scheme.acts_on]
    return min([size, *(span // 2 for span in spans if span is not None)])


def describe_windows(config: ModelConfig) -> list[dict[str, Any]]:
    """The windows and sink tokens of the layers, each pair once."""
    attentions = [config.layer(i).attention for i in range(config.num_layers)]
    pairs = dict.fromkeys((attention.window, attention.sink_tokens) for attention in attentions)
    return [{"window": window, "sinks": sinks} for window, sinks in pairs]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that were in use: of the GPU, or of the process; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
        import sys
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024

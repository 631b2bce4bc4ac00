"""Many requests at once: the engine beside single requests, static batches and transformers' continuous batching.

Prompts, numbers of new tokens and arrivals are drawn with a seed. The engine has to give the tokens of `generate`
before anything is timed. Then requests arrive at a share of the rate that the engine reached, and the times to the
first token and between tokens are those of their callers.
"""

from __future__ import annotations

import gc
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from phasor.bench.chart import OURS
from phasor.bench.peers import is_installed, transformers_model
from phasor.bench.study import Study
from phasor.config.schema import Config
from phasor.generation import Generated, generate
from phasor.generation.engine import Engine
from phasor.generation.runners import STEP_RUNNERS, StepSpec
from phasor.models.presets import preset
from phasor.transformer import Transformer


class ServingSettings(Config):
    """Requests, how many at once, the ranges of their tokens, and arrivals at a share of the rate that was reached.

    `static` are sizes of batches that begin and end together, and `concurrency` how many the engine computes at once.
    `sequential` are how many requests are timed alone, and `of_peer` those of transformers. `prefill_chunk` tokens of
    prompts are read by the engine at a time.
    """

    requests: int = 256
    at_once: int = 256
    prompt: tuple[int, int] = (16, 1024)
    new: tuple[int, int] = (16, 512)
    static: tuple[int, ...] = (64, 128, 256)
    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    sequential: int = 8
    checked: int = 8
    prefill_chunk: int = 512
    share: float = 0.8
    seed: int = 0
    deterministic: bool = True
    peer: bool = True
    of_peer: int = 256

    def check(self) -> None:
        for name in ("prompt", "new"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name} is a range of tokens, from at least 1, not {low} to {high}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], not {self.share}")


GPU = ServingSettings(prefill_chunk=8192, concurrency=(16, 64))
CPU = ServingSettings(
    requests=32,
    at_once=16,
    prompt=(16, 96),
    new=(16, 64),
    static=(16,),
    concurrency=(1, 2, 4, 8),
    sequential=32,
    checked=2,
)
TINY = ServingSettings(
    requests=6,
    at_once=3,
    prompt=(2, 9),
    new=(2, 6),
    static=(3,),
    concurrency=(1, 2),
    sequential=2,
    checked=6,
    peer=False,
)


BY_CORE = "tokens_per_processor_second"  # what other programs on the processors change least


class Request(NamedTuple):
    """A prompt, and how many tokens follow it."""

    prompt: list[int]
    new: int


def run(study: Study) -> None:
    settings: ServingSettings = study.settings
    torch.manual_seed(settings.seed)
    sizes = study.machine.sizes.model if study.on_gpu else study.machine.sizes.cpu_model
    with study.device:
        model = Transformer(preset("llama-2", **sizes, max_length=settings.prompt[1] + settings.new[1])).eval()
    model = model.to(torch.bfloat16 if study.on_gpu else torch.float32)
    requests = draw_requests(settings, model.config.vocab_size)
    study.say(f"checking {settings.checked} requests against generate")
    check(study, model, requests)
    study.result |= {
        "shape": sizes,
        "threads": torch.get_num_threads(),
        "at_once": settings.at_once,
        "steps": STEP_RUNNERS.choose(StepSpec(model, settings.at_once)).name,
        "tokens in": sum(len(request.prompt) for request in requests),
        "tokens out": sum(request.new for request in requests),
    }
    some = requests[: settings.sequential]
    time_requests(study, "sequential", some, lambda: [alone(model, request) for request in some], warm=True)
    with new_engine(study, model, settings.at_once) as engine:
        if study.on_gpu:  # captures the graphs of one row
            one_after_the_other(engine, with_other_prompts(some, model.config.vocab_size))
        time_requests(study, "engine, one by one", some, partial(one_after_the_other, engine, some))
    for size in settings.static:
        time_requests(study, f"batches of {size}", requests, partial(static, model, requests, size), warm=True)
    for size in settings.concurrency:
        with new_engine(study, model, size) as engine:
            time_requests(study, f"engine, {size} at once", requests, partial(together, engine, requests))
    for deterministic in (False, True) if settings.deterministic else (False,):
        who = "engine, deterministic" if deterministic else "engine"
        with new_engine(study, model, settings.at_once, deterministic) as engine:
            rate = time_requests(study, who, requests, partial(together, engine, requests))
        study.add_row({"who": f"{who}, arrivals", **arrivals(study, model, requests, rate, deterministic)})
    if settings.peer and is_installed("transformers"):
        row: dict[str, Any] = {"who": "transformers, continuous batching"}
        with study.noting_failure(row):
            peer = transformers_model(model)
            row |= measure(
                study, requests[: settings.of_peer], lambda: by_transformers(peer, requests[: settings.of_peer])
            )
            row["requests"] = min(settings.of_peer, len(requests))
        study.add_row(row)


def draw_requests(settings: ServingSettings, vocab_size: int) -> list[Request]:
    """The requests of a seed.

    >>> [len(request.prompt) for request in draw_requests(TINY, 9)]
    [8, 4, 6, 7, 8, 4]
    """
    draw = random.Random(settings.seed)
    requests = []
    for _ in range(settings.requests):
        size, new = draw.randint(*settings.prompt), draw.randint(*settings.new)
        requests.append(Request([draw.randrange(1, vocab_size) for _ in range(size)], new))
    return requests


def check(study: Study, model: Transformer, requests: Sequence[Request]) -> None:
    """Whether the engine gives the tokens of `generate`: in float32, whose largest logits are not equal."""
    exact = model if model.tokens.dtype == torch.float32 else copy_in_float32(model)
    chosen = requests[: study.settings.checked]
    expected = [generate(exact, request.prompt, max_new_tokens=min(request.new, 32)) for request in chosen]
    short = [Request(request.prompt, min(request.new, 32)) for request in chosen]
    with new_engine(study, exact, study.settings.at_once) as engine:
        found = together(engine, short)
    if found != expected:
        raise ValueError("the engine does not give the tokens of generate: nothing is timed")


def copy_in_float32(model: Transformer) -> Transformer:
    with torch.device("meta"):
        exact = Transformer(model.config)
    exact.load_state_dict({name: x.float() for name, x in model.state_dict().items()}, assign=True)
    return exact.eval()


def alone(model: Transformer, request: Request) -> list[int]:
    tokens: list[int] = generate(model, request.prompt, max_new_tokens=request.new)
    return tokens


def static(model: Transformer, requests: Sequence[Request], size: int) -> None:
    """Batches as requests come, each as long as its longest."""
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        generate(model, [request.prompt for request in batch], max_new_tokens=max(request.new for request in batch))


def new_engine(study: Study, model: Transformer, at_once: int, deterministic: bool = False) -> Engine:
    """An engine; on a GPU one that has captured its graphs, by requests of the same sizes with other prompts."""
    settings: ServingSettings = study.settings
    gc.collect()  # the pages of another engine
    engine = Engine(model, max_rows=at_once, prefill_chunk=settings.prefill_chunk, deterministic=deterministic)
    if study.on_gpu:
        vocab_size = model.config.vocab_size
        together(engine, with_other_prompts(draw_requests(settings, vocab_size), vocab_size))
    return engine


def with_other_prompts(requests: Sequence[Request], vocab_size: int) -> list[Request]:
    """Requests of the same sizes, whose prompts begin otherwise, so that no page of theirs is shared.

    >>> with_other_prompts([Request([1, 8], new=3)], vocab_size=9)
    [Request(prompt=[2, 0], new=3)]
    """
    return [Request([(token + 1) % vocab_size for token in x.prompt], x.new) for x in requests]


def together(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    handles = [engine.submit(request.prompt, max_new_tokens=request.new) for request in requests]
    return [handle.result().tokens for handle in handles]


def one_after_the_other(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        together(engine, [request])


def by_transformers(model: Any, requests: Sequence[Request]) -> None:
    """transformers' continuous batching, each request with its own number of new tokens."""
    config = model.generation_config.__class__(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        for request in requests:
            manager.add_request(request.prompt, max_new_tokens=request.new)
        done = 0
        while done < len(requests):
            done += manager.get_result(timeout=1.0) is not None


def measure(study: Study, requests: Sequence[Request], call: Callable[[], object]) -> dict[str, float]:
    """Seconds of a call, those of processors, and the new tokens per second."""
    gc.collect()
    began, busy = time.perf_counter(), time.process_time()
    call()  # its tokens are on the host at the end
    took, busy = time.perf_counter() - began, time.process_time() - busy
    tokens = sum(request.new for request in requests)
    row = {"seconds": took, "processor_seconds": busy, "tokens_per_second": tokens / took}
    return row if study.on_gpu else row | {BY_CORE: tokens / busy}


def time_requests(
    study: Study, who: str, requests: Sequence[Request], call: Callable[[], object], warm: bool = False
) -> float:
    """A row of the result; requests per second. On a GPU a call that captures its graphs comes before, where asked."""
    if warm and study.on_gpu:
        call()
    row = measure(study, requests, call)
    study.add_row({"who": who, **row})
    return len(requests) / row["seconds"]


def arrivals(
    study: Study, model: Transformer, requests: Sequence[Request], rate: float, deterministic: bool
) -> dict[str, float]:
    """Times to the first token and between tokens, of requests that arrive one after the other at random."""
    settings: ServingSettings = study.settings
    draw, times = random.Random(settings.seed), [list[float]() for _ in requests]
    ended = threading.Semaphore(0)
    with new_engine(study, model, settings.at_once, deterministic) as engine:
        engine.start()
        began, at = time.perf_counter(), 0.0
        for request, own in zip(requests, times, strict=True):
            at += draw.expovariate(settings.share * rate)
            time.sleep(max(0.0, began + at - time.perf_counter()))
            own.append(time.perf_counter())

            def note(piece: Generated | None, own: list[float] = own) -> None:
                own.append(time.perf_counter()) if piece is not None else ended.release()

            engine.submit(request.prompt, max_new_tokens=request.new, on_piece=note)
        for _ in requests:
            ended.acquire()
        took = time.perf_counter() - began
    first = [own[1] - own[0] for own in times]
    between = [after - before for own in times for before, after in pairwise(own[1:])]
    found = {
        "requests_per_second": settings.share * rate,
        "tokens_per_second": sum(request.new for request in requests) / took,
    }
    for name, values in (("first_token_ms", first), ("between_tokens_ms", between)):
        found |= {f"{name}_p{share}": 1e3 * percentile(values, share) for share in (50, 99)}
    return found


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that this percentage of them do not exceed.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 50), percentile([], 99)
    (2.0, 0.0)
    """
    if not values:
        return 0.0
    return sorted(values)[max(0, -(-len(values) * share // 100) - 1)]


def draw(result: dict[str, Any], path: Path) -> None:
    """New tokens per second against the requests that are computed at once; the others as lines across."""
    from matplotlib.figure import Figure

    by_core = any(BY_CORE in row for row in result["rows"])
    key = BY_CORE if by_core else "tokens_per_second"
    rates = {row["who"]: row[key] for row in result["rows"] if key in row}
    at_once = {int(who.split()[1]): rate for who, rate in rates.items() if re.fullmatch(r"engine, \d+ at once", who)}
    at_once[result["at_once"]] = rates["engine"]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    panel = figure.subplots()
    sizes = sorted(at_once)
    panel.plot(sizes, [at_once[size] for size in sizes], marker="o", color=OURS, label="engine")
    if "engine, deterministic" in rates:
        panel.plot(
            sizes[-1:], [rates["engine, deterministic"]], "s", color=OURS, mfc="white", label="the same bits for each"
        )
    styles = ("--", "-.", ":", (0, (1, 1)), (0, (5, 1)))
    others = {who: rate for who, rate in rates.items() if not who.startswith("engine")}
    for (who, rate), style in zip(others.items(), itertools.cycle(styles)):
        panel.axhline(
            rate, color="#707070", linestyle=style, linewidth=1.2, label=who.replace("sequential", "one by one")
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.set_xlabel("requests computed at once")
    panel.set_ylabel("new tokens per second of a core" if by_core else "new tokens per second")
    panel.legend(frameon=False)
    panel.set_title(f"{result['device']}, torch {result['torch']}", fontsize=10)
    figure.savefig(path, dpi=130)

"""Greedy decoding on a GPU beside transformers' generate, and the limit that reading the weights sets.

Checked first: small models say the same tokens in float32 by steps on the device and by plain steps, and the logits of
the fused step are as near as those of plain steps to what the same weights, of bfloat16, int8 or int4, give in float32.
Nothing is timed otherwise.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from phasor.bench.checks import relative_error
from phasor.bench.peers import is_installed, transformers_model, transformers_tokens
from phasor.bench.study import Study, first_line, format_field
from phasor.config import EmbeddingConfig
from phasor.config.schema import Config, unknown
from phasor.generation import generate
from phasor.generation.runners import RETAINED, fused
from phasor.generation.runners.cuda_graph import StepBuffers
from phasor.kv_cache.static import StaticKVCache
from phasor.models.presets import preset
from phasor.nn.attention import SoftmaxAttentionConfig
from phasor.ops import dispatch
from phasor.quantization import WEIGHTS, quantize
from phasor.transformer import Transformer

SMALL = {"dim": 256, "hidden_dim": 704, "num_layers": 3, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 1000}
SKIPPED = ("variants", "eager", "transformers", "transformers-compiled")


class DecodeGPUSettings(Config):
    """Batches, the tokens of the prompts and the new ones, what is left out, and a profile of the kernels."""

    batch: tuple[int, ...] = (1, 64)
    prompt: int = 512
    new: int = 256
    skip: tuple[str, ...] = ("variants", "eager", "transformers")
    profile: bool = False
    checked_tokens: tuple[int, ...] = (1, 3, 40)  # rows of the check of tokens
    checked_logits: tuple[tuple[int, int], ...] = ((1, 130), (5, 900), (64, 130), (80, 130))  # rows and tokens held

    def check(self) -> None:
        for name in self.skip:
            if name not in SKIPPED:
                raise unknown("part that can be skipped", name, SKIPPED)


GPU = DecodeGPUSettings()
TINY = DecodeGPUSettings(batch=(2,), prompt=5, new=3, skip=SKIPPED, checked_tokens=(), checked_logits=((1, 6),))


def run(study: Study) -> None:
    settings: DecodeGPUSettings = study.settings
    check_tokens(study)
    apart = check_logits(study)
    free(study)
    model = build(study, **study.machine.sizes.model)
    speed, read = study.machine.bandwidth, bytes_read(model)
    less = {name: bytes_read(quantize(model, bits)) for name, bits in WEIGHTS.items()}
    del model
    study.say(
        f"a copy moves {speed / 1e12:.2f} TB/s: {read / 1e9:.2f} GB of weights can be read {speed / read:,.0f} times "
        f"a second, {', '.join(f'{b / 1e9:.2f} GB in {name} {speed / b:,.0f} times' for name, b in less.items())}"
    )
    study.result |= {
        "copy bytes/s": speed,
        "bytes of weights": read,
        "limit, tokens/s at batch 1": speed / read,
        "shape": study.machine.sizes.model,
        "prompt": settings.prompt,
        "new": settings.new,
    }
    for name, count in less.items():
        study.result |= {
            f"bytes of weights in {name}": count,
            f"limit in {name}, tokens/s at batch 1": speed / count,
            f"{name} against bfloat16, random weights": apart[name],
        }
    for batch in settings.batch:
        study.say(f"batch {batch}, prompt {settings.prompt}, {settings.new} new tokens")
        DecodeTimes(study, batch).run()
        if settings.profile:
            profile(study, batch)


def build(study: Study, dtype: torch.dtype | None = None, **fields: Any) -> Transformer:
    torch.manual_seed(0)
    with study.device:
        return Transformer(preset("llama-2", **fields)).to(dtype or study.machine.dtype).eval()


def random_prompts(batch: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = torch.randint(1, vocabulary, (batch, length), generator=generator).tolist()
    return prompts


def free(study: Study) -> None:
    RETAINED.clear()
    gc.collect()
    study.free()


def bytes_read(model: Transformer) -> int:
    """What a step reads of a model: everything but the table of tokens, of which it looks one up."""
    weights = itertools.chain(model.named_parameters(), model.named_buffers())
    return sum(w.nbytes for name, w in weights if name != "tokens.weight")


def check_tokens(study: Study) -> None:
    """Float32: the same tokens by steps on the device and by plain steps; ragged prompts, windows, stops."""
    window = SoftmaxAttentionConfig(window=16, sink_tokens=4)
    cases: dict[str, dict[str, Any]] = {
        "fused": {},
        "fused, window": {"attention": window},
        "fused, norm of heads": {"attention": SoftmaxAttentionConfig(qk_norm="head", bias=("q", "k", "v"))},
        "fused, int8": {},
        "fused, int8, tied": {"embedding": EmbeddingConfig()},
        "fused, int4": {},
        "fused, int4, tied": {"embedding": EmbeddingConfig()},
        "graph of plain steps": {"norm": "layernorm", "position": "alibi"},
    }
    for (name, changes), rows in itertools.product(cases.items(), study.settings.checked_tokens):
        model = build(study, torch.float32, **SMALL, init="fan-in", **changes)
        model = next((quantize(model, bits) for weights, bits in WEIGHTS.items() if weights in name), model)
        assert (fused.fused_step_why_not(model) is None) == name.startswith("fused"), fused.fused_step_why_not(model)
        prompts = [p[: 1 + (37 * i) % 90] for i, p in enumerate(random_prompts(rows, 90, 1000))]
        for stop in [None, tuple(range(0, 1000, 50))] if rows == 3 else [None]:
            options: dict[str, Any] = {"max_new_tokens": 40} | ({"stop": stop} if stop else {})
            with dispatch.force_path("reference"):
                expected = generate(model, prompts, **options)
            for _ in range(2):  # captured, then reused
                found = generate(model, prompts, **options)
                other = sum(a != b for a, b in zip(found, expected, strict=True)) / rows
                # A tie in the last bit may part one text of many.
                study.check(f"{name}, {rows} rows: the share of texts that are not those of plain steps", other, 0.05)
    study.say("tokens in float32 are those of plain steps")


def check_logits(study: Study) -> dict[str, dict[str, float]]:
    """At the real size, with weights in bfloat16, int8 and int4; and how far these are from bfloat16."""
    sizes = study.machine.sizes.model
    model = build(study, **{**sizes, "num_layers": min(4, sizes["num_layers"])})
    ids = torch.tensor(random_prompts(4, study.settings.prompt // 2, sizes["vocab_size"]), device=study.device)
    check_logits_of(study, model, "bfloat16")
    apart = {}
    for name, bits in WEIGHTS.items():
        small = quantize(model, bits)
        check_logits_of(study, small, name)
        with torch.inference_mode():
            log_p, log_q = (copy.deepcopy(m).float()(ids).log_softmax(-1) for m in (model, small))
        apart[name] = {
            "mean KL": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
            "same likeliest token": float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()),
        }
        study.say(format_field(f"{name} against bfloat16, random weights", apart[name]))
    return apart


@torch.inference_mode()
def check_logits_of(study: Study, model: Transformer, name: str) -> None:
    """The fused step's logits, and the plain step's, against those of the same weights in float32."""
    exact, count = copy.deepcopy(model).float(), min(10, study.settings.new)
    for batch, held in study.settings.checked_logits:
        ids = torch.tensor(random_prompts(batch, held + count, model.config.vocab_size), device=study.device)
        caches = [m.new_cache(batch, held + 64) for m in (model, model, exact)]
        for m, cache in zip((model, model, exact), caches, strict=True):
            m(ids[:, :held], cache=cache)
        buffers = StepBuffers(StaticKVCache(caches[0]))
        step, worst = fused.FusedStep(model, buffers), [0.0, 0.0]
        for at in range(held, held + count):
            buffers.tokens.copy_(ids[:, at])
            column = ids[:, at : at + 1]
            plain, expected = (m(column, cache=c)[:, 0] for m, c in zip((model, exact), caches[1:], strict=True))
            worst = [max(w, relative_error([x], [expected])) for w, x in zip(worst, (step(), plain), strict=True)]
        study.say(f"logits by {name} weights, {batch} rows: off by {worst[0]:.1e} fused, {worst[1]:.1e} plain")
        # On a CPU plain steps round the rows of a quantized product to 8 bits, and fused ones do not.
        study.check(f"the fused step with {name} weights", worst[0], max(1.3 * worst[1], 0.0 if study.on_gpu else 2e-2))


class DecodeTimes:
    """Tokens per second of phasor's variants and of transformers, at one batch size."""

    def __init__(self, study: Study, batch: int) -> None:
        self.study, self.batch, self.settings = study, batch, study.settings
        sizes = study.machine.sizes.model
        self.model = build(study, **sizes)
        self.prompts = random_prompts(batch, self.settings.prompt, sizes["vocab_size"])
        self.limit = study.machine.bandwidth / bytes_read(self.model)
        self.found: dict[str, Any] = {}
        study.result[f"batch {batch}"] = self.found

    def run(self) -> None:
        skip, ours = self.settings.skip, self.by_phasor(self.model)
        self.measure("phasor", ours)
        for weights, bits in WEIGHTS.items():
            small = quantize(self.model, bits)
            limit = self.study.machine.bandwidth / bytes_read(small)
            self.measure(f"phasor-{weights}", self.by_phasor(small), limit)
        if "variants" not in skip:
            with replace_attribute(fused, "supports_pdl", lambda device: False):
                self.measure("phasor, kernels one after the other", ours)
            with replace_attribute(fused, "fused_step_why_not", lambda *_: "for comparison"):
                self.measure("phasor, plain step as a graph", ours)
        if "eager" not in skip:
            with dispatch.force_path("reference"):
                self.measure("phasor, plain steps", ours)
        if not is_installed("transformers"):
            self.study.say("  transformers is not installed: it is left out")
        elif {"transformers", "transformers-compiled"} - set(skip):
            theirs = transformers_model(self.model)
            static: dict[str, Any] = {"cache_implementation": "static"}
            for name, options in (("transformers", dict[str, Any]()), ("transformers-compiled", static)):
                if name not in skip:
                    call = partial(transformers_tokens, theirs, self.prompts, **options)
                    self.measure(name.replace("-", ", "), call)

    def by_phasor(self, model: Transformer) -> Callable[[int], Any]:
        return lambda count: generate(model, self.prompts, max_new_tokens=count)

    def measure(self, name: str, call: Callable[[int], object], own_limit: float | None = None) -> None:
        """Medians: of all new tokens from the prompt on, and of the steps after the first alone."""
        new, timer = self.settings.new, self.study.machine.timer
        try:
            whole, first = (timer.wall(partial(call, count), warmups=1) for count in (new, 1))
        except Exception as error:
            self.study.say(f"  {name}: {first_line(error)}")
            return
        finally:
            free(self.study)
        step = (whole - first) / (new - 1)
        rate, by_step = self.batch * new / whole, self.batch / step
        self.found[name] = {"tokens/s": rate, "tokens/s after the prompt": by_step, "whole": whole, "step": step}
        part = f", {by_step / self.limit:.0%} of the limit of reading the weights" if self.batch == 1 else ""
        part += f", {by_step / own_limit:.0%} of its own" if self.batch == 1 and own_limit is not None else ""
        self.study.say(f"  {name}: {rate:,.0f} tokens/s, {by_step:,.0f} after the prompt{part}")
        self.study.save()


@contextmanager
def replace_attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """Another function in a module, for a comparison."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def profile(study: Study, batch: int) -> None:
    """Where the time of a step goes, by kernel."""
    sizes = study.machine.sizes.model
    model, prompts = build(study, **sizes), random_prompts(batch, study.settings.prompt, sizes["vocab_size"])
    generate(model, prompts, max_new_tokens=2)
    study.machine.timer.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        generate(model, prompts, max_new_tokens=33)
        study.machine.timer.wait()
    study.say(record.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=48))

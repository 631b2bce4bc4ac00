"""A Llama-shaped model and the same weights in other implementations: training steps and greedy decoding."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from phasor.bench.checks import relative_error
from phasor.bench.peers import is_installed, transformers_model, transformers_tokens, with_liger
from phasor.bench.reference_llama import ReferenceLlama
from phasor.bench.rope import rotary_table
from phasor.bench.timing import Timer, difference
from phasor.bench.workload import BenchmarkCase, Implementation, Machine, Workload
from phasor.config import EmbeddingConfig, NormalInitConfig
from phasor.config.recipe import OptimizerConfig
from phasor.data.batch import Batch
from phasor.generation import generate
from phasor.models.presets import preset
from phasor.training.graphs import StepGraphs
from phasor.training.optimizer import build_optimizer
from phasor.transformer import Transformer

LEARNING_RATE = 1e-5
CHECKED = 64  # tokens whose gradients are compared in float64
TRAIN_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # every layer rounds, and so does its backward pass
# How much less likely than the best a chosen token may be, in the logits' standard deviation: near ties go either way.
DECODE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}


class LlamaModels:
    """Models with the same weights, built on demand. The source of the weights stays in host memory.

    They are initialized as for training. `for_decoding` makes them larger than the token embedding, so that the next
    token depends on all tokens before it. Else the tied head would find the last token again, broken cache or not.
    """

    def __init__(self, machine: Machine, *, for_decoding: bool) -> None:
        self.machine, self.for_decoding = machine, for_decoding

    @cached_property
    def source(self) -> Transformer:
        torch.manual_seed(0)
        sizes = self.machine.sizes.model
        init = NormalInitConfig(std=sizes["dim"] ** -0.5 if self.for_decoding else 0.02, by_depth=self.for_decoding)
        with self.machine.device:
            model = Transformer(preset("llama-2", **sizes, embedding=EmbeddingConfig(tied=True), init=init))
        return model.to("cpu", self.machine.dtype)

    def ours(self) -> Transformer:
        return copy.deepcopy(self.source).to(self.machine.device)

    def reference(self, length: int, dtype: torch.dtype | None = None) -> ReferenceLlama:
        """The same in plain torch, with rotary tables in at least float32."""
        dtype = dtype or self.machine.dtype
        model = ReferenceLlama(self.source, length).to(self.machine.device, dtype)
        if dtype == torch.bfloat16:
            angles = rotary_table(torch.arange(length), self.source.config.head_dim)
            model.cos, model.sin = (x.to(self.machine.device, torch.float32) for x in angles)
        return model

    def theirs(self) -> Any:
        """The model as transformers loads it."""
        return transformers_model(self.source).to(self.machine.device)

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self.source.parameters())

    @property
    def title(self) -> str:
        size = self.parameters
        count = f"{size / 1e9:.2f} B" if size >= 1e8 else f"{size / 1e6:.2f} M"
        return f"Llama of {count} parameters, {self.machine.dtype_name}"


def backward(machine: Machine) -> Workload:
    """A forward to logits and a backward to all weights, in turn with transformers."""
    (rows, count), sizes = machine.sizes.backward, machine.sizes.model if machine.on_gpu else machine.sizes.cpu_model
    llamas = LlamaModels(replace(machine, sizes=replace(machine.sizes, model=sizes)), for_decoding=False)
    tokens = random_tokens(llamas.machine, rows, count)

    @functools.cache
    def reference() -> Tensor:
        exact = llamas.reference(count, torch.float32 if machine.on_gpu else torch.float64)
        with torch.no_grad():
            logits: Tensor = exact(tokens[:1])
        return logits

    def case(build: Callable[[], Any]) -> BenchmarkCase:
        model = build()

        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            out = model(tokens)
            logits: Tensor = out if isinstance(out, Tensor) else out.logits
            logits.float().logsumexp(-1).mean().backward()
            machine.timer.wait()
            return logits.detach()

        return BenchmarkCase(
            lambda: relative_error([step()[:1]], [reference()]), lambda timer: timer.wall(step), call=step
        )

    implementations: list[Implementation] = [("phasor", partial(case, llamas.ours))]
    if is_installed("transformers"):
        implementations.append(("transformers", partial(case, llamas.theirs)))
    return Workload(
        name="backward",
        title=f"forward and backward in turn, {rows} x {count} tokens: {llamas.title}",
        unit="ms",
        limit=training_flops(llamas, rows, count) / machine.arithmetic,
        limit_basis="the rate of one large matmul",
        tolerance=TRAIN_TOLERANCE[machine.dtype],
        implementations=implementations,
        alternate=True,
    )


def training_flops(llamas: LlamaModels, rows: int, count: int) -> int:
    """Of a forward and a backward: six per weight and token, and causal attention."""
    config, pairs = llamas.source.config, count * (count + 1) // 2
    attending = 3 * 4 * config.num_layers * config.num_heads * config.head_dim * pairs * rows
    return 6 * llamas.parameters * rows * count + attending


def training(machine: Machine, name: str) -> Workload:
    """An optimizer step: loss, gradients, AdamW."""
    llamas = LlamaModels(machine, for_decoding=False)
    rows, count = machine.sizes.train_long if name == "train-long" else machine.sizes.train
    tokens = random_tokens(machine, rows, count)
    return Workload(
        name=name,
        title=f"an optimizer step, {rows} x {count} tokens: {llamas.title}",
        unit="tokens/s",
        limit=training_flops(llamas, rows, count) / machine.arithmetic,
        limit_basis="the rate of one large matmul",
        tolerance=TRAIN_TOLERANCE[machine.dtype],
        implementations=training_implementations(machine, llamas, tokens),
        tokens=rows * count,
    )


Loss = Callable[[Tensor], Tensor]


def training_implementations(machine: Machine, llamas: LlamaModels, tokens: Tensor) -> list[Implementation]:
    short = tokens[:1, :CHECKED]
    count = tokens.shape[1]

    @functools.cache
    def reference_values() -> tuple[float, Tensor, float]:
        """Loss and token-embedding gradient on a few tokens in float64, and the loss on all tokens in float32."""
        exact = llamas.reference(count, torch.float64)
        loss = exact.loss(short)
        loss.backward()
        assert exact.tokens.grad is not None
        wide = llamas.reference(count, torch.float32)
        with torch.no_grad():
            whole = sum(float(wide.loss(row[None])) for row in tokens) / len(tokens)
        return float(loss.detach()), exact.tokens.grad.cpu(), whole

    def case(
        model: torch.nn.Module, table: Tensor, loss: Loss, optimizer: Any = None, graphs: bool = False
    ) -> BenchmarkCase:
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)

        def gradients(rows: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            found = loss(rows)
            found.backward()
            return found.detach()

        def optimizer_step(rows: Tensor) -> Tensor:
            found = gradients(rows)
            optimizer.step()
            return found

        compute, step = (capture_graph(f) if graphs else f for f in (gradients, optimizer_step))

        def check() -> float:
            exact, gradient, whole = reference_values()
            few = float(compute(short))
            assert table.grad is not None
            errors = [relative_error([table.grad.cpu()], [gradient]), abs(few / exact - 1)]
            return max(*errors, abs(float(compute(tokens)) / whole - 1))

        return BenchmarkCase(check, lambda timer: timer(lambda: step(tokens)))

    def ours(compiled: bool = False, graphs: bool = False) -> BenchmarkCase:
        model = llamas.ours().train()
        if compiled:
            model.compile(dynamic=False)
        optimizer = build_optimizer(model, OptimizerConfig(lr=LEARNING_RATE), graphs)
        table = model.tokens.weight
        return case(model, table, lambda rows: next_token_loss(model, rows), optimizer, graphs)

    def plain(compiled: bool) -> BenchmarkCase:
        model = llamas.reference(count)
        loss: Any = torch.compile(model.loss) if compiled else model.loss
        return case(model, model.tokens, loss)

    def theirs(change: Callable[[Any], Any] = lambda model: model) -> BenchmarkCase:
        model = change(llamas.theirs().train())
        return case(
            model,
            model.get_input_embeddings().weight,
            lambda rows: model(input_ids=rows, labels=rows, use_cache=False).loss,
        )

    implementations: list[Implementation] = [("phasor", ours)]
    if machine.on_gpu:
        implementations.append(("phasor, a CUDA graph", lambda: ours(graphs=True)))
    if machine.compiles:
        implementations.append(("phasor, compiled", lambda: ours(True, machine.on_gpu)))
    implementations.append(("plain torch", lambda: plain(False)))
    if machine.compiles:
        implementations.append(("plain torch, compiled", lambda: plain(True)))
    if is_installed("transformers"):
        implementations.append(("transformers", theirs))
        if machine.on_gpu and is_installed("liger_kernel"):
            implementations.append(("transformers with Liger", lambda: theirs(with_liger)))
    return implementations


def capture_graph(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of tokens as the trainer calls it: replayed from a CUDA graph after a first eager call."""
    graphs, seen = StepGraphs(lambda batch: function(batch.tokens)), set()

    def call(rows: Tensor) -> Tensor:
        batch = Batch(tokens=rows, targets=rows, weights=rows)
        if rows.shape not in seen:
            seen.add(rows.shape)
            graphs(batch)
        return graphs(batch)

    return call


def next_token_loss(model: Transformer, tokens: Tensor) -> Tensor:
    """The loss of rows in which every token predicts the next, the last one nothing."""
    weights = torch.ones(tokens.shape, device=tokens.device)
    weights[:, -1] = 0
    return model.loss(tokens, targets=tokens.roll(-1, 1), weights=weights).total


def decoding(machine: Machine, name: str) -> Workload:
    """New tokens after the prompts; the prefill is not in the time."""
    llamas = LlamaModels(machine, for_decoding=True)
    rows, length, new = machine.sizes.decode_batch if name == "decode-batch" else machine.sizes.decode
    config = llamas.source.config
    held = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (length + new // 2) * rows
    return Workload(
        name=name,
        title=f"greedy decoding, {rows} x {new} tokens after {length}: {llamas.title}",
        unit="tokens/s",
        limit=(new - 1) * (llamas.parameters + held) * machine.dtype.itemsize / machine.bandwidth,
        limit_basis="reading weights and KV cache once per step",
        tolerance=DECODE_TOLERANCE[machine.dtype],
        implementations=decoding_implementations(machine, llamas, rows, length, new),
        tokens=rows * (new - 1),
    )


def decoding_implementations(
    machine: Machine, llamas: LlamaModels, rows: int, length: int, new: int
) -> list[Implementation]:
    prompts = random_tokens(machine, rows, length)

    def case(make: Callable[[int], list[list[int]]]) -> BenchmarkCase:
        def check() -> float:
            written = make(new)
            if [len(row) for row in written] != [new] * rows:
                return float("inf")
            exact = llamas.reference(length + new, torch.float32 if machine.on_gpu else torch.float64)
            with torch.no_grad():
                return max(regret(exact, prompts[row], written[row]) for row in {0, rows - 1})

        def seconds(timer: Timer) -> float:
            return difference(partial(timer, warmups=1), longer=lambda: make(new), shorter=lambda: make(1))

        return BenchmarkCase(check, seconds)

    def ours(compile: bool) -> BenchmarkCase:
        model, listed = llamas.ours().eval(), prompts.tolist()
        return case(lambda count: generate(model, listed, max_new_tokens=count, compile=compile))

    def theirs(**options: Any) -> BenchmarkCase:
        model, listed = llamas.theirs(), prompts.tolist()
        return case(lambda count: transformers_tokens(model, listed, count, **options))

    implementations: list[Implementation] = [("phasor", lambda: ours(False))]
    if machine.compiles:
        implementations.append(("phasor, compiled", lambda: ours(True)))
    if is_installed("transformers"):
        implementations.append(("transformers", theirs))
        if machine.compiles and machine.on_gpu:
            implementations.append(("transformers, compiled", lambda: theirs(cache_implementation="static")))
    return implementations


def regret(exact: ReferenceLlama, prompt: Tensor, written: list[int]) -> float:
    """The largest logit gap between the best token and the chosen one, in the logits' standard deviation."""
    chosen = torch.tensor(written, device=prompt.device)
    logits = exact(torch.cat((prompt, chosen))[None])[0, len(prompt) - 1 : -1]
    below = logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0]
    return float((below / logits.std(-1)).max())


def random_tokens(machine: Machine, rows: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    size = machine.sizes.model["vocab_size"]
    return torch.randint(0, size, (rows, count), generator=generator).to(machine.device)


def llama_pair(sizes: dict[str, Any], **changes: Any) -> tuple[Transformer, Any]:
    """Our Llama in float32 on the CPU, and that of transformers with the same weights; `changes` are further fields."""
    torch.manual_seed(0)
    ours = Transformer(preset("llama-2", **sizes, **changes)).eval()
    return ours, transformers_model(ours)

"""Models of ten families beside those of transformers with the same weights: forward and backward, and decoding."""

from __future__ import annotations

import copy
import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from phasor.bench import FAMILIES
from phasor.bench.checks import relative_error
from phasor.bench.peers import quiet, transformers_tokens
from phasor.bench.sizes import FamilySizes
from phasor.bench.timing import (
    call_seconds,
    calls_within,
    device_seconds,
    difference,
    row_seconds,
    row_seconds_on_device,
)
from phasor.bench.workload import BenchmarkCase, Implementation, Machine, Workload
from phasor.checkpoints import load
from phasor.config import ExpertsConfig, ModelConfig
from phasor.config.generation import GenerationConfig
from phasor.config.parameters import parameters_of
from phasor.config.schema import unknown
from phasor.generation import generate
from phasor.nn.norm import at_least_float32
from phasor.parallel.flops import attention_flops
from phasor.transformer import Transformer

PROFILED = 9  # tokens whose kernels are counted: a profile of many takes long to read
ROW_SECONDS = 0.5  # of training steps in a row before a GPU is waited for
# Errors that are always allowed. Else as much as transformers' own in this dtype, twice: with experts, a token whose
# router is undecided takes another one. No factor allows more than the most.
TRAIN_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DECODE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # in the standard deviation of the logits
MOST = 1.0  # tokens by chance are about four standard deviations off


def family_fields(family: str, sizes: FamilySizes) -> tuple[str, dict[str, Any]]:
    """The class of a family in transformers, and the fields of its configuration."""
    dim, hidden, positions = sizes.dim, 2 * sizes.dim, 4096
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    common = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": dim,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
    }
    llama = special | common | {"intermediate_size": hidden, "num_key_value_heads": sizes.kv_heads}
    heads = {"head_dim": dim // sizes.heads}
    gemma = llama | heads | {"query_pre_attn_scalar": dim // sizes.heads, "sliding_window": sizes.window}
    experts = llama | {"num_experts_per_tok": 2, "output_router_logits": False}
    gpt = special | {"vocab_size": sizes.vocabulary, "n_layer": sizes.layers, "n_head": sizes.heads}
    bert = special | {"cls_token_id": 1, "sep_token_id": 2}
    if not sizes.modernbert_base:
        bert |= common | {"intermediate_size": hidden, "local_attention": sizes.window}
    stack = {"layers": sizes.layers // 2, "attention_heads": sizes.heads, "ffn_dim": hidden}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in stack.items()}
    marian: dict[str, Any] = (
        special | sides | {"vocab_size": sizes.vocabulary, "d_model": dim, "decoder_start_token_id": 0}
    )
    marian |= {"max_position_embeddings": positions, "forced_eos_token_id": None}
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaForCausalLM", llama),
        "gpt-2": (
            "GPT2LMHeadModel",
            gpt | {"n_embd": dim, "n_positions": positions},
        ),
        "gemma-2": ("Gemma2ForCausalLM", gemma),
        "gemma-3": ("Gemma3ForCausalLM", gemma),
        "bloom": ("BloomForCausalLM", gpt | {"hidden_size": dim}),
        "mixtral": ("MixtralForCausalLM", experts | {"num_local_experts": sizes.experts}),
        "qwen-3-moe": (
            "Qwen3MoeForCausalLM",
            experts | heads | {"num_experts": sizes.experts, "moe_intermediate_size": hidden},
        ),
        "gpt-oss": (
            "GptOssForCausalLM",
            experts | heads | {"num_local_experts": sizes.experts, "sliding_window": sizes.window},
        ),
        "modernbert": ("ModernBertForMaskedLM", bert),
        "marian": ("MarianMTModel", marian),
    }
    return found[family]


def family_pair(family: str, sizes: FamilySizes, device: torch.device, dtype: torch.dtype) -> tuple[Transformer, Any]:
    """Our model of a family, as loaded from what transformers saved, and that of transformers; without dropout.

    All weights but those of tokens and positions are larger than usual, so that the next token depends on all tokens
    before it: a tied head would find the last token again otherwise.
    """
    transformers: Any = importlib.import_module("transformers")
    name, fields = family_fields(family, sizes)
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    with device:
        theirs = cls(cls.config_class(**fields))
    tables = {id(module.weight) for module in theirs.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.dim() > 1 and id(weight) not in tables:
                weight *= sizes.dim**-0.5 / 0.02
    theirs = cast_weights(theirs, dtype).eval()
    with tempfile.TemporaryDirectory() as folder, quiet():
        theirs.save_pretrained(folder)
        ours = load(folder, device=str(device), dtype=dtype).eval()
    return ours, theirs


def cast_weights(model: Any, dtype: torch.dtype) -> Any:
    """The model in another dtype, its rotary frequencies as they are: in bfloat16 they would be others."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """The logits of a model of either library; an encoder-decoder reads the tokens, and writes them one place later."""
    if isinstance(model, Transformer):
        written = [tokens.roll(1, 1)] if model.config.shape == "encoder-decoder" else []
        logits: Tensor = model(tokens, *written)
    else:
        options: dict[str, Any] = {"use_cache": False} if model.can_generate() else {}
        if model.config.is_encoder_decoder:
            options["decoder_input_ids"] = tokens.roll(1, 1)
        logits = model(input_ids=tokens, **options).logits
    return logits


class FamilyModels:
    """The models of a family, built on demand: ours, that of transformers, and that in a higher precision."""

    def __init__(self, family: str, machine: Machine) -> None:
        self.family, self.machine, self.sizes = family, machine, machine.sizes.families

    @cached_property
    def pair(self) -> tuple[Transformer, Any]:
        return family_pair(self.family, self.sizes, self.machine.device, self.machine.dtype)

    @cached_property
    def reference(self) -> Any:
        dtype = torch.float32 if self.machine.on_gpu else torch.float64
        model = cast_weights(copy.deepcopy(self.pair[1]), dtype)
        model.config._experts_implementation = "eager"  # torch's grouped products are not for every dtype
        return model

    @property
    def vocabulary(self) -> int:
        return int(self.pair[0].config.vocab_size)

    @property
    def seq2seq(self) -> bool:
        return self.pair[0].config.shape == "encoder-decoder"

    @property
    def title(self) -> str:
        size = sum(weight.numel() for weight in self.pair[0].parameters())
        return f"{self.family} of {size / 1e6:,.2f} M parameters, {self.machine.dtype_name}"

    def random_tokens(self, rows: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, self.vocabulary, (rows, count), generator=generator).to(self.machine.device)

    def implementations(self, case: Callable[[Any], BenchmarkCase]) -> list[Implementation]:
        ours, theirs = self.pair
        return [("phasor", partial(case, ours)), ("transformers", partial(case, theirs))]

    def tolerance(self, error: Callable[[Any], float], floors: dict[torch.dtype, float]) -> float:
        return min(MOST, max(floors[self.machine.dtype], 2 * error(self.pair[1])))


def check_families(families: Sequence[str]) -> None:
    """Raise ValueError for an unknown family."""
    for name in families:
        if name not in FAMILIES:
            raise unknown("family", name, dict.fromkeys(FAMILIES))


def workloads(machine: Machine, families: Sequence[str] = ()) -> Iterator[Workload]:
    """The workloads of one family after the other; of all where none is named."""
    for family in families or FAMILIES:
        models = FamilyModels(family, machine)
        for rows, count in machine.sizes.families.train:
            yield training(models, rows, count)
        if family != "modernbert":
            for rows in machine.sizes.families.decode:
                yield decoding(models, rows)


def training(models: FamilyModels, rows: int, count: int) -> Workload:
    """A forward to logits and a backward to all weights, step after step."""
    machine, config = models.machine, models.pair[0].config
    tokens = models.random_tokens(rows, count)
    counted = parameters_of(config)
    operations = 6 * (counted.in_blocks + counted.in_head) + 3 * attention_flops(config, count)

    def gradients(model: Any, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The logits of the last row, and the gradient of the token table, which depends on those of all layers."""
        model.zero_grad(set_to_none=True)
        for batch in batches:
            logits = logits_of(model, batch)
            (at_least_float32(logits).logsumexp(-1).sum() / tokens.numel()).backward()
        table: Any = model.tokens.weight if isinstance(model, Transformer) else model.get_input_embeddings().weight
        found = logits.detach()[-1], table.grad
        model.zero_grad(set_to_none=True)
        return found

    exact = gradients(models.reference, tokens.split(1))  # row by row, so that it takes little memory

    def error(model: Any) -> float:
        return max(relative_error([a], [b]) for a, b in zip(gradients(model, [tokens]), exact, strict=True))

    def case(model: Any, compiled: bool = False) -> BenchmarkCase:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            torch.compiler.cudagraph_mark_step_begin()
            logits = logits_of(model, tokens)
            logits.backward(torch.ones_like(logits))

        def cold_compile() -> float:
            from torch._inductor.utils import fresh_cache

            with fresh_cache():
                return call_seconds(step)

        def calls() -> int:
            return calls_within(ROW_SECONDS, step, warmups=5)

        return BenchmarkCase(
            check=lambda: error(model),
            seconds=lambda timer: row_seconds(step, calls()) if machine.on_gpu else timer.wall(step),
            device_seconds=lambda: row_seconds_on_device(step, calls()),
            compile_seconds=cold_compile if compiled else None,
        )

    def compiled_case(mode: str) -> BenchmarkCase:
        model = copy.deepcopy(models.pair[0])
        model.compile(dynamic=False, mode=mode)
        return case(model, compiled=True)

    implementations = models.implementations(case)
    if machine.on_gpu or machine.compiles:
        implementations.insert(-1, ("phasor, compiled", partial(compiled_case, "default")))
    if machine.on_gpu:
        implementations.insert(-1, ("phasor, CUDA graphs", partial(compiled_case, "reduce-overhead")))
    part = f"{rows} x {count:,} tokens"
    return Workload(
        name="families",
        title=f"forward and backward, {part}: {models.title}",
        unit="ms",
        limit=operations * tokens.numel() / machine.arithmetic,
        limit_basis="the rate of one large matmul",
        tolerance=models.tolerance(error, TRAIN_TOLERANCE),
        implementations=implementations,
        family=models.family,
        part=part,
    )


def decoding(models: FamilyModels, rows: int) -> Workload:
    """The step of a new token in greedy decoding; the prefill is not in the time."""
    machine, length, new = models.machine, models.sizes.prompt, models.sizes.new
    prompts = models.random_tokens(rows, length)
    listed = prompts.tolist()

    def write(model: Any, count: int) -> list[list[int]]:
        if isinstance(model, Transformer):
            options = GenerationConfig(max_new_tokens=count, stop=())
            written: list[list[int]] = generate(model, listed, options, start=0 if models.seq2seq else None)
            return written
        return transformers_tokens(model, listed, count)

    def regret(row: int, written: list[int]) -> float:
        """The mean logit gap between the best token and the chosen one, in the logits' standard deviation."""
        chosen = torch.tensor(written, device=machine.device)
        prompt = prompts[row]
        if models.seq2seq:
            before = torch.cat((prompt.new_zeros(1), chosen[:-1]))
            logits = models.reference(input_ids=prompt[None], decoder_input_ids=before[None]).logits[0]
        else:
            logits = models.reference(input_ids=torch.cat((prompt, chosen))[None]).logits[0, length - 1 : -1]
        below = logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0]
        return float((below / logits.std(-1)).mean())

    def error(model: Any) -> float:
        written = write(model, new)
        if [len(row) for row in written] != [new] * rows:
            return float("inf")
        with torch.no_grad():
            return max(regret(row, written[row]) for row in {0, rows - 1})

    def case(model: Any) -> BenchmarkCase:
        def per_step(measure: Callable[[Callable[[], object]], float], count: int) -> float:
            longer, shorter = partial(write, model, count), partial(write, model, 1)
            return difference(measure, longer, shorter) / (count - 1)

        return BenchmarkCase(
            check=lambda: error(model),
            seconds=lambda timer: per_step(partial(timer.wall, warmups=1), new),
            device_seconds=lambda: per_step(device_seconds, min(new, PROFILED)),
        )

    return Workload(
        name="families",
        title=f"a step of greedy decoding, {rows} x {new} tokens after {length}: {models.title}",
        unit="ms",
        limit=decode_bytes(models.pair[0], rows, length + new // 2) / machine.bandwidth,
        limit_basis="reading weights, of the experts that are used, and KV cache once per step",
        tolerance=models.tolerance(error, DECODE_TOLERANCE),
        implementations=models.implementations(case),
        family=models.family,
        part=f"decode, batch {rows}",
    )


def decode_bytes(model: Transformer, rows: int, length: int) -> float:
    """Bytes that a decoding step has to read: weights once, of experts those that that many rows choose, and the cache.

    >>> from phasor.models.presets import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> decode_bytes(model, 1, 0) == 4 * (2 * (12 * 32**2 + 13 * 32) + 50 * 32 + 2 * 32)
    True
    """
    config = model.config
    read = 0.0
    for name, weight in model.named_parameters():
        once = name.startswith(("encoder.", "source_tokens.", "decoder.positions.")) or ".cross.kv." in name
        if not once and (name != "tokens.weight" or config.embedding.tied):
            read += weight.nbytes * used_share(weight, experts_of(config, name), rows)
    for index in range(config.depth("decoder")):
        attention = config.layer(index).attention
        per_key = attention.cached_elements(config) * next(model.parameters()).element_size()
        read += rows * per_key * min(length, attention.window or length)
        read += rows * per_key * length if config.shape == "encoder-decoder" else 0
    return read


def experts_of(config: ModelConfig, name: str) -> ExpertsConfig | None:
    """The experts of the decoder's layer that a weight belongs to; None where that has none, or it is of no layer."""
    inside = name.removeprefix("decoder.blocks.")
    return None if inside == name else config.layer(int(inside.partition(".")[0])).feedforward.experts


def used_share(weight: Tensor, experts: ExpertsConfig | None, rows: int) -> float:
    """The share of a weight that rows use, where each chooses experts by chance."""
    if experts is None or weight.dim() < 3:
        return 1.0
    return 1 - (1 - experts.top_k / experts.num_experts) ** rows

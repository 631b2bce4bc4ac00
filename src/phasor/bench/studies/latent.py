"""Latent attention: the attention of a decoding step, whole decoding steps, and training, each beside its limit.

The shapes are those of DeepSeek V2 Lite with few layers and random weights. Attention is compared with float64 before
it is timed. Training is one layer's attention in every way that torch and phasor have for keys that are wider than
values, and that layer of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phasor.bench.attention import gradient_errors
from phasor.bench.checks import relative_error
from phasor.bench.decode_steps import decode_step_row
from phasor.bench.peers import is_installed, transformers_model, transformers_tokens
from phasor.bench.study import Study
from phasor.config import ModelConfig
from phasor.config.schema import Config
from phasor.nn.record import Record
from phasor.nn.sequence import sequence_info
from phasor.ops.attention import ATTENTION, Mask, ScoreMod, attention, attention_ref, takes_narrow_values
from phasor.ops.attention.flash import flash_attention
from phasor.transformer import Transformer

# Relative to the norm, of outputs and of gradients: roundings of 8 bits, or of float32.
TOLERANCE = {torch.bfloat16: (1e-2, 4e-2), torch.float32: (1e-4, 1e-3)}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
BACKENDS |= {"memory-efficient": SDPBackend.EFFICIENT_ATTENTION}


class LatentSettings(Config):
    """Rows and tokens of caches, heads of the attention alone, layers of the whole step, and the rows of training.

    `heads` are those of DeepSeek V2 Lite and of V3. `new` tokens are decoded by transformers, none with 0.
    """

    batches: tuple[int, ...] = (1, 16)
    contexts: tuple[int, ...] = (8192, 32768)
    heads: tuple[int, ...] = (16, 128)
    layers: int = 4
    dim: int = 2048
    hidden_dim: int = 10944
    expert_dim: int = 1408
    experts: int = 64
    vocab_size: int = 102400
    rope_dim: int = 64
    nope_dim: int = 128
    kv_rank: int = 512
    train_batch: int = 4
    train_tokens: int = 2048
    checked: int = 333
    new: int = 9


GPU = LatentSettings()
SMALL: dict[str, Any] = {"layers": 2, "dim": 64, "hidden_dim": 96, "expert_dim": 32, "experts": 8, "vocab_size": 99}
SMALL |= {"rope_dim": 8, "nope_dim": 16, "kv_rank": 48, "train_batch": 1, "new": 3}
CPU = LatentSettings(batches=(1,), contexts=(512,), heads=(4,), train_tokens=128, checked=57, **SMALL)
TINY = CPU.replace(batches=(2,), contexts=(40,), train_tokens=19, checked=11)


def run(study: Study) -> None:
    settings: LatentSettings = study.settings
    study.result |= {"copy bytes/s": study.machine.bandwidth, "rows": []}
    for heads in settings.heads:
        for batch in settings.batches:
            for context in settings.contexts:
                attention_row(study, heads, batch, context)
    model = build(study, settings.layers)
    for batch in settings.batches:
        row: dict[str, Any] = {"what": "decoding step"}
        with study.noting_failure(row):
            row |= decode_step_row(study, model, batch, settings.contexts[0])
        study.add_row(row)
        transformers_step(study, model, batch, row)
    del model
    train_rows(study)
    layer_rows(study)


def build(study: Study, layers: int) -> Transformer:
    """A model as DeepSeek V2 Lite: the first layer dense, the others with experts of which two are shared."""
    s: LatentSettings = study.settings
    experts = {"num_experts": s.experts, "top_k": min(6, s.experts), "hidden_dim": s.expert_dim, "normalize": False}
    network = {"activation": "swiglu", "experts": experts | {"shared_dim": 2 * s.expert_dim, "group_score": "max"}}
    config = ModelConfig.from_dict(
        {
            "vocab_size": s.vocab_size,
            "dim": s.dim,
            "num_layers": layers,
            "num_heads": s.heads[0],
            "head_dim": s.rope_dim + s.nope_dim,
            "hidden_dim": s.hidden_dim,
            "norm": {"kind": "rmsnorm", "eps": 1e-6},
            "position": {"kind": "rotary", "pairing": "adjacent", "rotary_dim": s.rope_dim},
            "attention": {
                "kind": "latent",
                "rope_dim": s.rope_dim,
                "value_dim": s.nope_dim,
                "kv_rank": s.kv_rank,
            },
            "feedforward": network,
            "layers": [{"feedforward": {"activation": "swiglu"} if i == 0 else network} for i in range(layers)],
            "embedding": {"tied": False},
            "max_length": 163840,
        }
    )
    torch.manual_seed(0)
    with study.device:
        return Transformer(config).to(study.machine.dtype).eval()


@torch.inference_mode()
def attention_row(study: Study, heads: int, batch: int, context: int) -> None:
    """The attention of one query per row over latent vectors, of which a cache has room for a quarter more."""
    s: LatentSettings = study.settings
    row: dict[str, Any] = {"what": "attention", "heads": heads, "batch": batch, "context": context}
    with study.noting_failure(row):
        width = s.rope_dim + s.kv_rank
        kept = study.machine.random(batch, context * 5 // 4, 1, width)
        q, v = study.machine.random(batch, 1, heads, width, seed=1), kept[..., s.rope_dim :]
        last = torch.full((batch, 1), context - 1, device=study.device)
        args = Mask(causal=True, query_index=last), ScoreMod(scale=(s.rope_dim + s.nope_dim) ** -0.5)
        held = kept[:1, :context].double()
        exact, _ = attention_ref(q[:1].double(), held, held[..., s.rope_dim :], Mask(), args[1])
        row["path"] = ATTENTION.explain(q, kept, v, *args)[0]
        row["error"] = relative_error([attention(q, kept, v, *args)[:1]], [exact])
        study.check("attention to latent vectors", row["error"], TOLERANCE[study.machine.dtype][0])
        row["ms"] = study.machine.timer.graph_ms(lambda: attention(q, kept, v, *args))
        row["of limit"] = 1e3 * kept[:, :context].nbytes / study.machine.bandwidth / row["ms"]
    study.add_row(row)


def transformers_step(study: Study, model: Transformer, batch: int, ours: dict[str, Any]) -> None:
    """A step of transformers' greedy decoding after as long a prompt: the time of all new tokens but the first."""
    s: LatentSettings = study.settings
    if not s.new or not is_installed("transformers"):
        return
    row: dict[str, Any] = {"what": "decoding step", "runner": "transformers", "batch": batch, "context": s.contexts[0]}
    with study.noting_failure(row):
        theirs = transformers_model(model)
        prompts = torch.randint(1, s.vocab_size, (batch, s.contexts[0])).tolist()
        timer = study.machine.timer
        whole, first = (timer.wall(partial(transformers_tokens, theirs, prompts, n), warmups=1) for n in (s.new, 1))
        row["step_ms"] = 1e3 * (whole - first) / (s.new - 1)
        if "step_ms" in ours:
            row["times ours"] = row["step_ms"] / ours["step_ms"]
    study.add_row(row)


def ways(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Causal attention with keys that are wider than values, with and without zeros up to the width of keys."""
    scale, value_dim = q.shape[-1] ** -0.5, v.shape[-1]
    how = Mask(causal=True), ScoreMod(scale=scale)

    def pad_values() -> Tensor:
        return F.pad(v, (0, q.shape[-1] - value_dim))

    def by_torch(pad: bool, backend: SDPBackend | None) -> Tensor:
        values = pad_values() if pad else v
        queries, keys, values = (x.transpose(1, 2) for x in (q, k, values))
        with sdpa_kernel([*BACKENDS.values(), SDPBackend.MATH] if backend is None else [backend]):
            y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
        return y.transpose(1, 2)[..., :value_dim]

    def by_phasor() -> Tensor:
        return attention(q, k, v if takes_narrow_values(q, k, v, *how) else pad_values(), *how)[..., :value_dim]

    yield "phasor, as the layer calls it", by_phasor
    for pad in (True, False):
        yield f"torch's choice{', padded' if pad else ''}", partial(by_torch, pad, None)
        if q.is_cuda:
            for name, backend in BACKENDS.items():
                yield f"{name}{', padded' if pad else ''}", partial(by_torch, pad, backend)
    if q.is_cuda:
        yield "phasor's Triton kernel, padded", lambda: flash_attention(q, k, pad_values(), *how)[..., :value_dim]


def train_rows(study: Study) -> None:
    """Attention alone, forward and with gradients, at the widths of training; the check is of fewer tokens."""
    s: LatentSettings = study.settings
    shapes = [(s.heads[0], s.rope_dim + s.nope_dim)] * 2 + [(s.heads[0], s.nope_dim)]
    small, large = (
        [study.machine.random(rows, tokens, *shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        for rows, tokens in ((1, s.checked), (s.train_batch, s.train_tokens))
    )
    exact = [x.detach().double().requires_grad_() for x in small]
    scores = ScoreMod(scale=shapes[0][1] ** -0.5)
    timer, direction = study.machine.timer, study.machine.random(*large[2].shape, seed=9)
    for (name, checked), (_, call) in zip(ways(*small), ways(*large), strict=True):
        row: dict[str, Any] = {"what": "training attention", "way": name, "tokens": s.train_batch * s.train_tokens}
        with study.noting_failure(row):
            expected, _ = attention_ref(exact[0], exact[1], exact[2], Mask(causal=True), scores)
            errors = gradient_errors(checked(), small, expected, exact)
            for error, tolerance in zip(errors, TOLERANCE[study.machine.dtype], strict=True):
                study.check(name, error, tolerance)
            with torch.no_grad():
                row["forward_ms"] = timer.back_to_back_ms(call)
            row["both_ms"] = timer.back_to_back_ms(partial(both, call, large, direction))
        study.add_row(row)


def both(call: Callable[[], Tensor], inputs: list[Tensor], direction: Tensor) -> object:
    return torch.autograd.grad(call(), inputs, direction)


def layer_rows(study: Study) -> None:
    """One layer's latent attention with its projections, forward and with gradients, beside that of transformers."""
    s: LatentSettings = study.settings
    model, direction = build(study, 2), study.machine.random(s.train_batch, s.train_tokens, s.dim, seed=2)
    x = study.machine.random(s.train_batch, s.train_tokens, s.dim).requires_grad_()
    peers: dict[str, Callable[[], tuple[Any, Callable[[], Tensor]]]] = {"phasor": partial(our_attention, model, x)}
    if is_installed("transformers"):
        peers["transformers"] = partial(their_attention, model, x)
    expected = peers["phasor"]()[1]().detach()
    for name, prepare in peers.items():
        row: dict[str, Any] = {"what": "training layer", "who": name, "tokens": s.train_batch * s.train_tokens}
        with study.noting_failure(row):
            module, call = prepare()
            row["difference"] = relative_error([call()], [expected])
            study.check(f"the layer of {name}", row["difference"], 2 * TOLERANCE[study.machine.dtype][0])
            with torch.no_grad():
                row["forward_ms"] = study.machine.timer.back_to_back_ms(call)
            learned = [x, *module.parameters()]
            row["both_ms"] = study.machine.timer.back_to_back_ms(partial(both, call, learned, direction))
        study.add_row(row)


def our_attention(model: Transformer, x: Tensor) -> tuple[Any, Callable[[], Tensor]]:
    """The attention of the first layer, with positions prepared as in a forward."""
    stack: Any = model.decoder
    seq = sequence_info(x.shape[0], x.shape[1], x.device)
    ctx = stack._self_attention_contexts(x, seq, None, None, [Record()] * len(stack.layers))[0]
    module = stack.blocks[0].attention
    return module, partial(module, x, ctx)


def their_attention(model: Transformer, x: Tensor) -> tuple[Any, Callable[[], Tensor]]:
    """The attention of the first layer as transformers has it, with its positions."""
    inner = transformers_model(model).model
    module = inner.layers[0].self_attn
    positions = inner.rotary_emb(x.detach(), torch.arange(x.shape[1], device=x.device)[None])
    return module, lambda: module(hidden_states=x, position_embeddings=positions, attention_mask=None)[0]

"""Other libraries that are timed beside phasor, each where it is installed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phasor.checkpoints import save
from phasor.transformer import Transformer


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def require(package: str, workload: str) -> None:
    """Raise ValueError where a package that a workload cannot do without is not installed."""
    if not is_installed(package):
        raise ValueError(f"the workload {workload} needs the package {package}: pip install {package}")


def liger(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.{module}"), name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers while it loads."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    showed = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if showed:
            logging.enable_progress_bar()


def transformers_model(model: Transformer) -> Any:
    """The model as transformers loads it: the same weights, dtype and device."""
    table = model.tokens.weight
    with tempfile.TemporaryDirectory() as folder, quiet():
        save(model, folder, format="hf")
        cls = importlib.import_module("transformers").AutoModelForCausalLM
        return cls.from_pretrained(folder, dtype=table.dtype, attn_implementation="sdpa").to(table.device).eval()


def transformers_tokens(model: Any, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
    """`count` new tokens per prompt by transformers' greedy decoding; shorter prompts are padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=model.device)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )
    return out[:, 1 if model.config.is_encoder_decoder else width :].tolist()


@contextlib.contextmanager
def compiling_in_parallel() -> Iterator[None]:
    """Triton kernels that choose one of many configurations compile those at the same time, and time each briefly.

    One after the other, the hundreds of configurations of some libraries take minutes.
    """
    triton: Any = importlib.import_module("triton") if is_installed("triton") and torch.cuda.is_available() else None
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        yield
        return
    autotuner, do_bench = triton.runtime.autotuner.Autotuner, importlib.import_module("triton.testing").do_bench
    run = autotuner.run

    def compile_and_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.cache and len(self.configs) > 1:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            self._do_bench = functools.partial(do_bench, warmup=5, rep=25)
            # What does not compile is left out when it is timed.
            with contextlib.suppress(Exception), ThreadPoolExecutor() as pool, mode(pool, ignore_errors=True):
                for config in self.prune_configs(kwargs):
                    self.fn.run(*args, **kwargs | config.all_kwargs() | {"warmup": True})
        return run(self, *args, **kwargs)

    autotuner.run = compile_and_run
    try:
        yield
    finally:
        autotuner.run = run


def with_liger(model: Any) -> Any:
    """A transformers model with Liger's kernels; what Liger patches for all models is restored."""
    llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    before = dict(vars(llama))
    liger("transformers", "apply_liger_kernel_to_llama")(model=model)
    rotate = llama.apply_rotary_pos_emb
    vars(llama).update(before)
    forward = model.forward

    def forward_with_liger(*args: Any, **fields: Any) -> Any:
        llama.apply_rotary_pos_emb = rotate
        try:
            return forward(*args, **fields)
        finally:
            llama.apply_rotary_pos_emb = before["apply_rotary_pos_emb"]

    model.forward = forward_with_liger
    return model


def sdpa(q: Tensor, k: Tensor, v: Tensor, *backends: SDPBackend, mask: Tensor | None = None) -> Tensor:
    """torch's SDPA of `[B, T, H, D]`, causal without a mask; by one of these backends where some are named."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(list(backends)) if backends else contextlib.nullcontext():
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return y.transpose(1, 2)


def flex_attention(
    inputs: Sequence[Tensor],
    visible: Callable[..., Tensor],
    score_mod: Callable[..., Tensor] | None = None,
    *,
    mask_heads: int | None = None,
    compile_mask: bool = False,
) -> Callable[[], Tensor]:
    """FlexAttention of `[1, T, H, D]` with a mask over (b, h, i, j), compiled on a GPU; `mask_heads` if heads differ.

    A compiled mask needs no memory of queries by keys, and takes minutes to compile.
    """
    from torch.nn.attention import flex_attention as flex

    tokens, device = inputs[0].shape[1], inputs[0].device
    on_gpu = device.type == "cuda"
    blocks = flex.create_block_mask(
        visible, None, mask_heads, tokens, tokens, device=str(device), _compile=compile_mask and on_gpu
    )
    attend: Any = torch.compile(flex.flex_attention, dynamic=False) if on_gpu else flex.flex_attention

    def call() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs)
        y: Tensor = attend(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=True)
        return y.transpose(1, 2)

    return call

"""CTranslate2 as a peer: greedy decoding of a Llama of transformers, in separate processes.

In one process with torch, CTranslate2's OpenMP calls bind to torch's library, and compiled steps are slower after them.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch


def save_model(theirs: Any, folder: str) -> None:
    """Write a Llama of transformers as CTranslate2 reads it."""
    specs: Any = importlib.import_module("ctranslate2.specs")
    config = theirs.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    spec = specs.TransformerDecoderModelSpec.from_config(
        config.num_hidden_layers,
        heads,
        activation=importlib.import_module("ctranslate2.specs.common_spec").Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=10000.0,
        num_heads_kv=None if kv_heads == heads else kv_heads,
    )
    state = {name: x.detach().float() for name, x in theirs.state_dict().items()}

    def join(*names: str) -> Any:
        return torch.cat([state[name] for name in names]).numpy()

    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = join("model.embed_tokens.weight")
    decoder.layer_norm.gamma = join("model.norm.weight")
    decoder.projection.weight = join("lm_head.weight")
    for i, layer in enumerate(decoder.layer):
        prefix = f"model.layers.{i}."
        layer.self_attention.layer_norm.gamma = join(f"{prefix}input_layernorm.weight")
        layer.self_attention.linear[0].weight = join(*(f"{prefix}self_attn.{x}_proj.weight" for x in "qkv"))
        layer.self_attention.linear[1].weight = join(f"{prefix}self_attn.o_proj.weight")
        layer.ffn.layer_norm.gamma = join(f"{prefix}post_attention_layernorm.weight")
        layer.ffn.linear_0.weight = join(f"{prefix}mlp.gate_proj.weight")
        layer.ffn.linear_0_noact.weight = join(f"{prefix}mlp.up_proj.weight")
        layer.ffn.linear_1.weight = join(f"{prefix}mlp.down_proj.weight")
    words = [str(i) for i in range(config.vocab_size)]
    spec.register_vocabulary(words)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = words[0]
    spec.config.layer_norm_epsilon = config.rms_norm_eps
    spec.validate()
    spec.optimize()
    spec.save(folder)


def serve(pipe: Any, kind: str, folder: str, prompts: list[list[int]], tokens: int, threads: int) -> None:
    """Decode greedily each time the pipe asks for it."""
    ctranslate2: Any = importlib.import_module("ctranslate2")
    generator = ctranslate2.Generator(folder, compute_type=kind, intra_threads=threads)
    words = [[str(i) for i in prompt] for prompt in prompts]
    with contextlib.suppress(EOFError):  # at the end
        while pipe.recv():
            found = generator.generate_batch(
                words, max_length=tokens, min_length=tokens, include_prompt_in_result=False, beam_size=1
            )
            pipe.send([one.sequences_ids[0] for one in found])


def calls(theirs: Any, prompts: list[list[int]], tokens: int) -> dict[str, Callable[[], object]]:
    """Greedy decoding from the same weights, in float32 and in int8."""
    folder = tempfile.mkdtemp()
    save_model(theirs, folder)
    context = multiprocessing.get_context("spawn")

    def start(kind: str) -> Callable[[], object]:
        here, there = context.Pipe()
        args = there, kind, folder, prompts, tokens, torch.get_num_threads()
        context.Process(target=serve, args=args, daemon=True).start()

        def call() -> object:
            here.send(True)
            return here.recv()

        return call

    return {f"CTranslate2, {kind}": start(kind) for kind in ("float32", "int8")}

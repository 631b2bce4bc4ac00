"""How many rows and pages an engine has, and how much of prompts it reads at a time, where nobody says so."""

from __future__ import annotations

import os

import torch

from phasor.transformer import Transformer

SHARE_OF_GPU, SHARE_OF_HOST = 0.8, 0.25  # of free memory, and of all memory


def default_pages(model: Transformer, max_rows: int, page_size: int, tokens: int | None = None) -> int:
    """Pages for as many rows as there may be, or as many as fit into the memory, and one that is never written.

    Rows have as many tokens as the model's `max_length`, or as many as are given: then at least one row has room.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50, max_length=64))
    >>> default_pages(model, max_rows=2, page_size=16), default_pages(model, max_rows=3, page_size=16, tokens=17)
    (9, 7)
    """
    config = model.config
    each = -(-(tokens or config.max_length) // page_size)
    like = torch.zeros((), dtype=model.tokens.dtype)
    per_token = sum(
        torch.Size(kept.shape).numel() * (like if kept.dtype is None else like.to(getattr(torch, kept.dtype))).itemsize
        for layer in range(config.num_layers)
        for kept in config.cached_per_token(layer).values()
    )
    room = int(memory_for_pages(model.tokens.weight.device) // max(1, per_token * page_size))
    return max(2 if tokens is None else each, min(max_rows * each, room)) + 1


def default_rows(device: torch.device) -> int:
    """How many rows are computed at once: on a GPU, whose steps are bound by reading the weights, many.

    >>> default_rows(torch.device("cpu"))
    16
    """
    return 256 if device.type == "cuda" else 16


def default_chunk(device: torch.device) -> int:
    """Tokens of prompts that are read at a time: as many as keep a device busy while the host prepares the next.

    >>> default_chunk(torch.device("cpu"))
    512
    """
    return 8192 if device.type == "cuda" else 512


def memory_for_pages(device: torch.device) -> float:
    """The bytes that pages may take on a device."""
    if device.type == "cuda":
        return SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]
    return SHARE_OF_HOST * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

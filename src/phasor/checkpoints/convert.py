"""Convert a model folder to another format, with a check against transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phasor.checkpoints.folder import CONFIG, read_json, replacing_folder
from phasor.checkpoints.hf import family_of
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.load import is_hf, load
from phasor.checkpoints.save import FORMATS
from phasor.checkpoints.tensors import Progress
from phasor.config import Extension, PositionConfig
from phasor.config.schema import unknown
from phasor.config.text_files import path_of
from phasor.transformer import Transformer

TOLERANCE = 1e-4  # of the logits' standard deviation: float32 sums through a deep model leave less


@dataclass(frozen=True)
class Comparison:
    """phasor's logits compared with those of transformers, on random tokens, both in float32."""

    tokens: int
    largest: float  # the largest difference
    size: float  # the logits' standard deviation


def convert(
    source: str | Path,
    destination: str | Path,
    format: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    position: PositionConfig | str | Mapping[str, Any] | None = None,
    extension: Extension | str | Mapping[str, Any] | None = None,
    check: bool = False,
    strict: bool = False,
    progress: Callable[[str], Progress] | None = None,
) -> Comparison | None:
    """Write a model folder in another format: a Hugging Face one as phasor's, phasor's as a Hugging Face one.

    `format` overrides that. With `check`, nothing is written unless `transformers` computes the same logits from the
    Hugging Face folder of the two. `strict` refuses a config.json with fields that have no effect.
    `progress("reading")` and `progress("writing")` give the progress callbacks.

    >>> import tempfile
    >>> from phasor import preset, save
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, f"{folder}/mine")
    ...     convert(f"{folder}/mine", f"{folder}/theirs", check=True).largest < 1e-5
    True
    """
    source = resolve_folder(source)
    theirs = is_hf(source)
    format = ("phasor" if theirs else "hf") if format is None else format
    if not isinstance(format, str) or format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if check and format != "hf" and (not theirs or position is not None or extension is not None):
        raise ValueError("nothing to check against: neither folder is a Hugging Face one with the same positions")
    if path_of(destination).resolve() == source.resolve():
        raise ValueError(f"{source} cannot be converted onto itself: name another folder")
    bar = progress or (lambda what: lambda done, total: None)
    model = load(source, dtype=dtype, position=position, extension=extension, strict=strict, progress=bar("reading"))
    with replacing_folder(destination) as staged:
        FORMATS[format](model, staged, bar("writing"))
        return compare(model, staged if format == "hf" else source) if check else None


def compare(model: Transformer, folder: Path, tokens: int = 32, seed: int = 0) -> Comparison:
    """Compare a model's logits with those `transformers` computes from a Hugging Face folder; raises if they differ."""
    try:
        import transformers
    except ImportError:
        raise ValueError("a check needs the package transformers: pip install transformers") from None
    config, generator = model.config, torch.Generator().manual_seed(seed)
    family = family_of(read_json(folder / CONFIG), folder / CONFIG)
    cls = getattr(transformers, family.architecture(config))
    theirs = cls.from_pretrained(folder, dtype=torch.float32).eval()
    names = ["input_ids"]
    sizes = [config.vocab_size]
    if config.shape == "encoder-decoder":
        names, sizes = ["input_ids", "decoder_input_ids"], [config.embedding.source_vocab_size or sizes[0], *sizes]
    inputs = [torch.randint(0, size, (2, tokens), generator=generator) for size in sizes]
    pad = model.special.pad
    if pad is not None:  # transformers masks or zeroes it
        inputs = [x.masked_fill(x == pad, 0 if pad else 1) for x in inputs]
    with torch.no_grad():
        out = theirs(**dict(zip(names, inputs, strict=True)))
        expected = next(out[n] for n in ("logits", "last_hidden_state") if n in out)
        ours = model if model.tokens.weight.dtype == torch.float32 else copy.deepcopy(model).float()
        ours.eval()
        found = ours.encode(*inputs).hidden if config.head.kind == "pooled" else ours(*inputs)
    largest, size = float((found - expected).abs().max()), float(expected.std())
    if not largest <= TOLERANCE * max(size, 1.0):
        raise ValueError(
            f"transformers computes other logits of {folder}: the largest difference is {largest:.2g}, "
            f"where their standard deviation is {size:.2g}; nothing is written"
        )
    return Comparison(2 * tokens, largest, size)

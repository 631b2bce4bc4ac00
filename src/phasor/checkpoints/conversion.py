"""Model folders in and out, whatever family they are of."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phasor.checkpoints.folder import CONFIG, path_of, read_json, replaced
from phasor.checkpoints.hf import family_of, load_hf, read_hf_config, save_hf
from phasor.checkpoints.hub import resolved
from phasor.checkpoints.native import load_native, read_native_config, save_native
from phasor.checkpoints.swap import swap_positions
from phasor.checkpoints.tensors import Progress
from phasor.config import Extension, ModelConfig, PositionConfig
from phasor.config.schema import quote, unknown
from phasor.quantization import is_quantized
from phasor.transformer import Transformer

TOLERANCE = 1e-4  # of the logits' spread: float32 sums through a deep model leave less
FORMATS = {"phasor": save_native, "hf": save_hf}


def save(model: Transformer, folder: str | Path, format: str = "phasor", *, progress: Progress | None = None) -> None:
    """Write a model's folder; one that is there already is replaced whole, or left as it was if anything fails.

    The format "hf" writes what `transformers` loads, as a family that computes the same; where there is none, the
    error says what keeps it from being one.

    >>> import tempfile
    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50)).eval()
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder, format="hf")
    ...     torch.equal(load(folder)(tokens), model(tokens))
    True
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if not isinstance(model, Transformer):
        raise ValueError(f"only a phasor.Transformer can be saved, not {quote(model)}")
    if is_quantized(model):
        raise ValueError(
            "a model with weights in int8 is not saved: save the one it was made of, and quantize when loaded"
        )
    with replaced(folder) as staged:
        FORMATS[format](model, staged, progress)


def load(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    position: PositionConfig | str | Mapping[str, Any] | None = None,
    extension: Extension | str | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Transformer:
    """Read a model folder, phasor's own or a Hugging Face one: the model in evaluation mode, in the file's type.

    `dtype` asks for another type, `position` and `extension` for other positions than it was saved with
    (`extension="none"` for none); weights stay where they still mean something, and `model.fresh` lists what is new.

    >>> import tempfile
    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder)
    ...     load(folder, dtype=torch.bfloat16).tokens.weight.dtype
    torch.bfloat16
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point type such as torch.bfloat16, not {quote(dtype)}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {device!s} cannot be used: {str(error).splitlines()[0]}") from None
    folder = resolved(folder)
    with no_collection():
        model = (load_hf if is_hf(folder) else load_native)(folder, device, dtype, progress)
    if position is None and extension is None:
        return model
    return swap_positions(model, position, extension)


@dataclass(frozen=True)
class Comparison:
    """Our logits beside those of transformers, on random tokens, both in float32."""

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
    progress: Callable[[str], Progress] | None = None,
) -> Comparison | None:
    """Write a model folder in another format: a Hugging Face one as phasor's, phasor's as a Hugging Face one.

    `format` says otherwise. With `check`, nothing is written unless `transformers` computes the same logits of the
    Hugging Face folder among the two. `progress` is asked for a bar by what is being done.

    >>> import tempfile
    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, f"{folder}/mine")
    ...     convert(f"{folder}/mine", f"{folder}/theirs", check=True).largest < 1e-5
    True
    """
    source = resolved(source)
    theirs = is_hf(source)
    format = format or ("phasor" if theirs else "hf")
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if check and format != "hf" and (not theirs or position is not None or extension is not None):
        raise ValueError(
            "there is nothing of transformers' to check against: neither folder is a Hugging Face one of it"
        )
    if path_of(destination).resolve() == source.resolve():
        raise ValueError(f"{source} cannot be converted onto itself: name another folder")
    bar = progress or (lambda what: lambda done, total: None)
    model = load(source, dtype=dtype, position=position, extension=extension, progress=bar("reading"))
    with replaced(destination) as staged:
        FORMATS[format](model, staged, bar("writing"))
        return compare(model, staged if format == "hf" else source) if check else None


def compare(model: Transformer, folder: Path, tokens: int = 32, seed: int = 0) -> Comparison:
    """A model's logits beside those `transformers` computes from a Hugging Face folder; raises where they differ."""
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
    if pad is not None:  # no token like others
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
            f"where they spread by {size:.2g}; nothing is written"
        )
    return Comparison(2 * tokens, largest, size)


@contextmanager
def no_collection() -> Iterator[None]:
    """Loading makes no garbage, and looking for some among all that is imported takes as long as a small model."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_config(folder: str | Path) -> ModelConfig:
    """The model configuration of a folder, whatever family it is of."""
    folder = resolved(folder)
    return read_hf_config(folder) if is_hf(folder) else read_native_config(folder)


def is_hf(folder: Path) -> bool:
    """Whether a folder is a Hugging Face one."""
    return "model_type" in read_json(folder / CONFIG)

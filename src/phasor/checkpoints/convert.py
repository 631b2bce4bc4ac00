"""Convert a model folder to another format, with a check against transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from phasor.checkpoints.compare import Comparison, compare
from phasor.checkpoints.folder import PEFT_CONFIG, model_folder
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.load import is_hf, load
from phasor.checkpoints.save import FORMATS, check_savable, save_adapter
from phasor.checkpoints.stored_adapters import stored_adapter
from phasor.config import Extension, PositionConfig
from phasor.config.schema import quote, unknown
from phasor.config.text_files import path_of
from phasor.progress import Progress
from phasor.quantization import quantize


def convert(
    source: str | Path,
    destination: str | Path,
    format: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    position: PositionConfig | str | Mapping[str, Any] | None = None,
    extension: Extension | str | Mapping[str, Any] | None = None,
    check: bool | int = False,
    part: str | None = None,
    strict: bool = False,
    bits: int | str | None = None,
    progress: Callable[[str], Progress] | None = None,
) -> Comparison | None:
    """Write a model folder in another format: a Hugging Face one as phasor's, phasor's as a Hugging Face one.

    The folder of an adapter is written in PEFT's format, and one of PEFT's in phasor's.

    `format` overrides that. With `check`, nothing is written unless `transformers` computes the same logits from the
    Hugging Face folder of the two: on short texts, and on one that goes past windows and the trained length as far as
    that is affordable, or as long as `check` says. `part` takes a part of it
    alone ("text"). `strict` refuses a config.json with fields that have no effect.
    `bits` quantizes the large weights to 8 or 4 bits or to "nf4", in the format "phasor".
    `progress("reading")` and `progress("writing")` give the progress callbacks.

    >>> import tempfile
    >>> from phasor import Transformer, preset, save
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, f"{folder}/mine")
    ...     convert(f"{folder}/mine", f"{folder}/theirs", check=True).largest < 1e-5
    True
    """
    source = resolve_folder(source)
    if stored_adapter(source, verify=False) is not None:
        others = {"dtype": dtype, "position": position, "extension": extension, "part": part, "bits": bits}
        others |= {"check": check or None, "strict": strict or None}
        if given := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"{source} is an adapter, which is converted as it is: leave {given[0]} out, or merge it")
        peft = (source / PEFT_CONFIG).is_file()
        save_adapter(load(source), destination, format or ("phasor" if peft else "peft"))
        return None
    theirs = is_hf(source)
    format = ("phasor" if theirs or bits is not None else "hf") if format is None else format
    if not isinstance(format, str) or format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if check is not False and bits is not None:
        raise ValueError("quantized weights are not those that transformers would compute with: leave check out")
    if check is not False and part is not None and format != "hf":
        raise ValueError("a part can be checked when it is written in the format hf")
    if check is not False and format != "hf" and (not theirs or position is not None or extension is not None):
        raise ValueError("nothing to check against: neither folder is a Hugging Face one with the same positions")
    if path_of(destination).resolve() == source.resolve():
        raise ValueError(f"{source} cannot be converted onto itself: name another folder")
    if not isinstance(check, bool) and (not isinstance(check, int) or check < 1):
        raise ValueError(f"check must be true, false or a number of tokens, not {quote(check)}")
    bar = progress or (lambda what: lambda done, total: None)
    model = load(
        source, dtype=dtype, position=position, extension=extension, part=part, strict=strict, progress=bar("reading")
    )
    model = model if bits is None else quantize(model, bits)
    check_savable(model, format)
    with model_folder(destination).replace() as staged:
        FORMATS[format](model, staged, bar("writing"))
        if check is False:
            return None
        return compare(model, staged if format == "hf" else source, None if check is True else check)

"""phasor's own model folders: config.json, model.safetensors, generation_config.json, tokenizer.json."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from phasor.config import ModelConfig
from phasor.config.generation import SpecialTokens
from phasor.config.schema import shown
from phasor.model import Transformer

CONFIG, WEIGHTS, SPECIAL, TOKENIZER = "config.json", "model.safetensors", "generation_config.json", "tokenizer.json"
SPECIAL_NAMES = {  # our names and those of the file, which are the field's own
    "stop": "eos_token_id",
    "start": "decoder_start_token_id",
    "forced_first": "forced_bos_token_id",
    "bos": "bos_token_id",
    "pad": "pad_token_id",
}


def save(model: Transformer, folder: str | Path, format: str = "phasor") -> None:
    """Write a model's folder; one that is there already is replaced whole, or left as it was if anything fails.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64)).eval()
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder)
    ...     torch.equal(load(folder)(tokens), model(tokens))
    True
    """
    if format != "phasor":
        raise ValueError(f"unknown format {format!r}; known: phasor")
    folder = Path(folder).resolve()  # what a link points to is replaced, and not the link
    if folder.exists() and not replaceable(folder):
        raise ValueError(f"{folder} exists and is not a model folder: it is left alone")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".part", dir=folder.parent))
    try:
        (staged / CONFIG).write_text(model.config.to_json(), encoding="utf-8")
        special = {theirs: value_of(model.special, ours) for ours, theirs in SPECIAL_NAMES.items()}
        (staged / SPECIAL).write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
        if model.tokenizer is not None:
            (staged / TOKENIZER).write_text(model.tokenizer.to_str(), encoding="utf-8")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, staged / WEIGHTS, {"format": "pt"})
        staged.chmod(0o755)
        swap(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def load(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Transformer:
    """Read a model folder: the model in evaluation mode, in the file's type unless another is asked for.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=50, max_length=64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder)
    ...     load(folder, dtype=torch.bfloat16).tokens.weight.dtype
    torch.bfloat16
    """
    folder = Path(folder)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point type such as torch.bfloat16, not {shown(dtype)}")
    config = read_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    tensors = read_tensors(folder / WEIGHTS, device)
    check_tensors({name: tuple(x.shape) for name, x in model.state_dict().items()}, tensors, folder / WEIGHTS)
    if dtype is not None:
        tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    model.load_state_dict(tensors, assign=True)
    model.special = read_special(folder / SPECIAL)
    if (folder / TOKENIZER).is_file():
        model.tokenizer = read_tokenizer(folder / TOKENIZER)
    return model.requires_grad_(True).eval()


def replaceable(folder: Path) -> bool:
    """Whether a folder is a model's and holds nothing else, or is empty."""
    if not folder.is_dir():
        return False
    names = {file.name for file in folder.iterdir()}
    return not names or ({CONFIG, WEIGHTS} <= names <= {CONFIG, WEIGHTS, SPECIAL, TOKENIZER})


def swap(staged: Path, folder: Path) -> None:
    """Put a finished folder in place by renaming; the one that was there goes only afterwards."""
    if not folder.exists():
        os.replace(staged, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".old", dir=folder.parent))
    try:
        os.replace(folder, old)
    except OSError:
        old.rmdir()
        raise
    try:
        os.replace(staged, folder)
    except OSError:
        os.replace(old, folder)
        raise
    shutil.rmtree(old)


def value_of(special: SpecialTokens, name: str) -> Any:
    value = getattr(special, name)
    return list(value) if isinstance(value, tuple) else value


def read_config(folder: Path) -> ModelConfig:
    """The model configuration of a folder."""
    file = folder / CONFIG
    data = read_json(file)
    if "model_type" in data:
        raise ValueError(
            f"{file} is of the family {data['model_type']!r}, and phasor reads only its own folders so far"
        )
    try:
        return ModelConfig.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def read_special(file: Path) -> SpecialTokens:
    """The special tokens a folder names; none where it has no such file."""
    if not file.is_file():
        return SpecialTokens()
    data = read_json(file)
    found = {ours: data[theirs] for ours, theirs in SPECIAL_NAMES.items() if data.get(theirs) is not None}
    if isinstance(found.get("stop"), int):
        found["stop"] = [found["stop"]]
    try:
        return SpecialTokens(**found)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return data


def read_tensors(file: Path, device: torch.device | str) -> dict[str, torch.Tensor]:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {device!s} cannot be used: {str(error).splitlines()[0]}") from None
    try:
        with safe_open(file, framework="pt", device=str(device)) as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from None


def read_tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file} is not a tokenizer: {error}") from None


def check_tensors(expected: dict[str, tuple[int, ...]], found: dict[str, torch.Tensor], file: Path) -> None:
    """One error that lists every missing, extra and misshapen tensor."""
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is not the model's" for name in found if name not in expected]
    wrong += [
        f"{name} has the shape {list(found[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    if wrong:
        raise ValueError(f"{file} does not fit its configuration: {'; '.join(wrong)}")

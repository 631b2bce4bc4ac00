"""The folder of a stream: how far it was read, so that a run that was killed continues."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from phasor.artifacts import LOCK, ArtifactFolder
from phasor.config.schema import quote
from phasor.kv_cache.dynamic import KVCache
from phasor.transformer import Transformer

STATE, RESULT, FORMAT = "state.json", "result.json", 2
CACHES = "cache-*.safetensors"
NAMES = (STATE, RESULT, CACHES)
NAMED = {  # settings as a user gives them, those first that explain why a later one differs
    "window": "--window",
    "sinks": "--sinks",
    "chunk": "--chunk",
    "offset": "--offset",
    "limit": "--limit",
    "dtype": "--dtype",
    "token_dtype": "--token-dtype",
    "file": "the file",
    "model": "the model",
}


@dataclass(frozen=True)
class StreamState:
    """How far a stream was read: its tokens, the nats of every bucket, a place in the file, and the cache's file."""

    tokens: int
    nats: list[float]
    mark: tuple[int, int]
    cache: str | None = None
    sha256: str | None = None  # of that file


class StreamFolder:
    """A folder with the state of one stream. `settings` are what may not change while it is read.

    A state is two files, the cache's and `state.json`, which names it and is written last.
    """

    def __init__(self, path: Path, settings: dict[str, Any], device: torch.device) -> None:
        self.path, self.settings, self.device = path, settings, device

    @classmethod
    @contextmanager
    def open(cls, path: Path, settings: dict[str, Any], device: torch.device, resume: bool) -> Iterator[StreamFolder]:
        """The folder, locked: a new one, or with `resume` that of a stream with these settings."""
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file, and --out takes a folder")
        exists = (path / STATE).is_file()
        if resume and not exists:
            raise ValueError(f"{path} holds no stream to resume")
        if exists and not resume:
            raise ValueError(f"{path} holds a stream already: resume it (--resume), or give another folder")
        artifact = ArtifactFolder(path)
        own = {path / LOCK, *artifact.leftovers(*NAMES)}
        if path.is_dir() and not exists and not own.issuperset(path.iterdir()):
            raise ValueError(f"{path} is not empty, and holds no stream: give a new folder")
        path.mkdir(parents=True, exist_ok=True)
        with artifact.lock(f"another process reads the stream of {path}"):
            artifact.remove_leftovers(*NAMES)
            yield cls(path, settings, device)

    def read(self) -> StreamState | None:
        """The state that was saved; None in a new folder. Other settings than it has are refused.

        A warning says that a stream goes on on another kind of device, which rounds differently.
        """
        file = self.path / STATE
        saved = ArtifactFolder(self.path).read_checksummed(STATE)
        if saved is None:
            return None
        try:
            if saved["format"] != FORMAT:
                raise ValueError(f"its format is {quote(saved['format'])}, and this version of phasor reads {FORMAT}")
            settings, device, state = saved["settings"], saved["device"], StreamState(**saved["state"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is not the state of a stream: {error}") from None
        for name, what in NAMED.items():
            before, now = settings.get(name), self.settings[name]
            if before != now:
                if name in ("file", "model"):
                    raise ValueError(f"{what} has changed since the stream in {self.path} was begun")
                begun = f"without {what}" if before is None else f"with {what} {before}"
                resumed = f"without {what}" if now is None else f"with {now}"
                raise ValueError(f"the stream in {self.path} was begun {begun}, and cannot be resumed {resumed}")
        if device != self.device.type:
            warnings.warn(
                f"the stream in {self.path} was begun on {device} and is continued on {self.device.type}: the loss "
                "will not be the same to the last bit",
                stacklevel=3,
            )
        return state

    def read_cache(self, state: StreamState, model: Transformer) -> KVCache:
        """The cache of a state, on the model's device."""
        assert state.cache is not None
        file = self.path / state.cache
        if not file.is_file() or sha256(file) != state.sha256:
            raise ValueError(f"{file} is missing or not as it was written, so that the stream cannot be resumed")
        cache = KVCache.load(file)
        if cache.config != model.config or cache.counts != [state.tokens]:
            raise ValueError(f"{file} is not the cache of this model after {state.tokens} tokens")
        return cache.to(model.tokens.weight.device)

    def write(self, tokens: int, nats: list[float], mark: tuple[int, int], cache: KVCache | None) -> None:
        """Write a state; the one before it is removed when this one is complete."""
        name = digest = None
        if cache is not None:
            name = f"cache-{tokens}.safetensors"
            cache.save(self.path / name)
            digest = sha256(self.path / name)
        state = asdict(StreamState(tokens, nats, mark, name, digest))
        content = {"format": FORMAT, "settings": self.settings, "device": self.device.type, "state": state}
        ArtifactFolder(self.path).write_checksummed(STATE, content)
        for file in self.path.glob(CACHES):
            if file.name != name:
                file.unlink()

    def write_result(self, result: dict[str, Any]) -> None:
        """Write what the stream came to."""
        ArtifactFolder(self.path).write_text(RESULT, json.dumps(result, indent=2) + "\n")


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def model_fingerprint(model: Transformer) -> str:
    """The SHA-256 of a model's configuration, tokenizer and weights.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=50))
    >>> before = model_fingerprint(model)
    >>> _ = model.tokens.weight.data[0, 0].add_(1)
    >>> before == model_fingerprint(model)
    False
    """
    digest = hashlib.sha256(model.config.to_json().encode())
    digest.update(b"" if model.tokenizer is None else model.tokenizer.to_str().encode())
    for name, x in model.state_dict().items():
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

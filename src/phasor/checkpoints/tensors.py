"""The safetensors files of a folder: read one tensor at a time, memory-mapped; written in shards of a bounded size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phasor.checkpoints.folder import CONFIG, INDEX, PICKLES, SPECIAL, TOKENIZER_FILES, WEIGHTS, index_of, write_json
from phasor.config.schema import name_some
from phasor.config.text_files import open_regular
from phasor.files import safetensors_errors
from phasor.manifest import Manifest
from phasor.progress import Progress

SHARD_BYTES = 4 << 30
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Tensors:
    """The tensors of a folder's safetensors files, one file or many with an index, or of one file of it.

    Tensors are read on demand and stay memory-mapped until they are copied.
    """

    def __init__(self, folder: Path, file: str | None = None) -> None:
        self.folder, self.opened = folder, ExitStack()
        self.file_of: dict[str, Path] = {}
        self.name_in_file: dict[str, str] = {}  # of tensors that have another name here
        self.handles: dict[Path, Any] = {}
        self.mapped: dict[Path, tuple[torch.UntypedStorage, dict[str, tuple[int, int]]]] = {}
        try:
            for path in safetensors_files(folder) if file is None else [folder / file]:
                self._open(path)
        except BaseException:
            self.opened.close()
            raise
        if file is None:
            self._check_index()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()

    def _open(self, file: Path) -> None:
        for name in self._handle(file).keys():  # noqa: SIM118
            if name in self.file_of:
                raise ValueError(f"{name} stands in {self.file_of[name].name} and again in {file}")
            self.file_of[name] = file

    def include(self, folder: Path, prefix: str) -> list[str]:
        """Add the tensors of another folder, under names with a prefix, which are returned."""
        added = []
        for file in safetensors_files(folder):
            for name in self._handle(file).keys():  # noqa: SIM118
                added.append(prefix + name)
                self.file_of[prefix + name], self.name_in_file[prefix + name] = file, name
        return added

    def _handle(self, file: Path) -> Any:
        """A file, mapped."""
        if file not in self.handles:
            with open_regular(file, str(file)):  # safetensors calls everything that it cannot open missing
                pass
            try:
                self.handles[file] = self.opened.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read as safetensors: {error}") from None
        return self.handles[file]

    def release(self) -> None:
        """Unmap all files, so that what was read of them takes no memory; tensors in use keep theirs."""
        self.opened.close()
        self.handles.clear()
        self.mapped.clear()

    def _check_index(self) -> None:
        index = self.folder / INDEX
        if not index.is_file() or (self.folder / WEIGHTS).is_file():
            return
        listed = index_of(index)
        wrong = [f"{n} is not in {f}" for n, f in listed.items() if self.file_of.get(n, Path()).name != f]
        if wrong:
            self.opened.close()
            raise ValueError(f"{index} does not fit its files: {name_some(wrong, separator='; ')}")

    @property
    def names(self) -> list[str]:
        return list(self.file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype as safetensors names it: F32, BF16, I8, ..."""
        return self._slice(name).get_dtype()

    def _slice(self, name: str) -> Any:
        return self._handle(self.file_of[name]).get_slice(self.name_in_file.get(name, name))

    def get(self, name: str) -> Tensor:
        """A tensor, mapped from its file."""
        try:
            return self._handle(self.file_of[name]).get_tensor(self.name_in_file.get(name, name))
        except SafetensorError as error:
            raise ValueError(f"{self.file_of[name]}: {name} cannot be read: {error}") from None

    def get_adjacent(self, names: list[str]) -> Tensor | None:
        """Tensors that are adjacent in one file, as one memory-mapped vector; None where they are not."""
        if len(names) == 1:
            return self.get(names[0]).flatten()
        files, types = {self.file_of[name] for name in names}, {self.dtype(name) for name in names}
        if len(files) > 1 or len(types) > 1:
            return None
        (file,), (kind,) = files, types
        if file not in self.mapped:
            mapped = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
            self.mapped[file] = mapped.untyped_storage(), byte_ranges(file)
        storage, ranges = self.mapped[file]
        found = [ranges[name] for name in names]
        if any(before[1] != after[0] for before, after in pairwise(found)):
            return None
        return torch.empty(0, dtype=TYPES[kind], device="cpu").set_(storage[found[0][0] : found[-1][1]])

    def is_empty_bias(self, name: str) -> bool:
        """Whether a tensor is a bias that says nothing where the model has none."""
        return False

    def largest_size(self) -> int:
        """The largest size of any tensor along any dimension."""
        return max((size for name in self.names for size in self.shape(name)), default=0)

    def main_dtype(self, ignored: Collection[str] = ()) -> torch.dtype:
        """The floating-point dtype of most elements, those of some tensors ignored."""
        counts: dict[str, int] = {}
        for name in set(self.names) - set(ignored):
            kind = self.dtype(name)
            counts[kind] = counts.get(kind, 0) + torch.Size(self.shape(name)).numel()
        floating = {kind: count for kind, count in counts.items() if kind in TYPES}
        return TYPES[max(floating, key=lambda kind: floating[kind])] if floating else torch.float32


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; pickles are refused, since reading one runs what is in it."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return [folder / name for name in dict.fromkeys(index_of(folder / INDEX).values())]
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} holds {pickles[0]}, a pickle, which phasor does not open: reading one runs code that is in it. "
            "If you trust it, load it with transformers or sentence-transformers and save it with save_pretrained, "
            "which writes safetensors"
        )
    raise ValueError(f"{folder} has no {WEIGHTS} and no {INDEX}")


def fingerprint_model(folder: Path) -> str:
    """A hash of the files that make a model: by the manifest of its folder, or where that has none by reading them."""
    manifest = Manifest.read(folder)
    if manifest is None:
        names = {CONFIG, SPECIAL, *TOKENIZER_FILES, *(file.name for file in safetensors_files(folder))}
        manifest = Manifest.compute(folder, "model", names)
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()


def fingerprint_weights(folder: Path) -> str:
    """A hash of the weights of a model and their configuration alone: what an adapter depends on."""
    names = {CONFIG, *(file.name for file in safetensors_files(folder))}
    manifest = Manifest.read(folder)
    listed = None if manifest is None else {name: manifest.files[name] for name in names & manifest.files.keys()}
    files = Manifest.compute(folder, "model", names).files if listed is None or listed.keys() != names else listed
    entries = sorted((name, files[name].sha256) for name in names)
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def byte_ranges(file: Path) -> dict[str, tuple[int, int]]:
    """The byte range of each tensor in a safetensors file, from the header at its beginning."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        table = json.loads(opened.read(length))
    first = 8 + length
    return {
        name: (first + entry["data_offsets"][0], first + entry["data_offsets"][1])
        for name, entry in table.items()
        if name != "__metadata__"
    }


def write_tensors(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    total: int,
    progress: Progress | None = None,
    most: int = SHARD_BYTES,
) -> None:
    """Write tensors into one file, or into several with an index where they are more than `most` bytes."""
    shards: list[dict[str, None]] = []
    held: dict[str, Tensor] = {}
    done = size = 0

    def flush() -> None:
        with safetensors_errors():
            save_file(held, folder / f"part-{len(shards)}", {"format": "pt"})
        shards.append(dict.fromkeys(held))
        held.clear()

    for name, tensor in tensors:
        taken = tensor.numel() * tensor.element_size()
        if held and size + taken > most:
            flush()
            size = 0
        held[name] = tensor.detach().cpu().contiguous()
        size, done = size + taken, done + taken
        if progress is not None:
            progress(done, total)
    flush()
    for i, name in enumerate(file_names(len(shards))):
        (folder / f"part-{i}").rename(folder / name)
    write_index(folder, shards, done)


def file_names(count: int) -> list[str]:
    """The names of a model's files.

    >>> file_names(1), file_names(2)
    (['model.safetensors'], ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
    """
    return [WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_index(folder: Path, shards: Sequence[Iterable[str]], total: int) -> None:
    """Write which file each tensor is in, where there are several."""
    if len(shards) > 1:
        pairs = zip(shards, file_names(len(shards)), strict=True)
        weight_map = {name: file for shard, file in pairs for name in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is made when it is written, such as one that several processes hold parts of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_sources(file: Path, sources: Iterable[TensorSource]) -> None:
    """Write a safetensors file one tensor at a time, in the order that safetensors itself writes them.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> source = TensorSource("weight", torch.float32, (2, 3), lambda: torch.ones(2, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_sources(Path(folder, "a.safetensors"), [source])
    ...     load_file(Path(folder, "a.safetensors"))["weight"].shape
    torch.Size([2, 3])
    """
    ordered = file_order(sources)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for source in ordered:
        start, end = end, end + source.nbytes
        names = {dtype: name for name, dtype in TYPES.items()} | {torch.int32: "I32"}
        header[source.name] = {
            "dtype": names[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for source in ordered:
            tensor = source.make().detach().cpu().contiguous()
            if tensor.numel():
                stream.write(tensor.flatten().view(torch.uint8).numpy().data)


def write_model_sources(folder: Path, sources: Sequence[TensorSource]) -> None:
    """Write the files of a model as `write_tensors` does, one tensor at a time."""
    shards = shard_sources(sources)
    for name, shard in zip(file_names(len(shards)), shards, strict=True):
        write_sources(folder / name, shard)
    names = [[source.name for source in shard] for shard in shards]
    write_index(folder, names, sum(source.nbytes for source in sources))


def shard_sources(sources: Sequence[TensorSource], most: int = SHARD_BYTES) -> list[list[TensorSource]]:
    """The tensors of each file of a model, in the order in which they are written."""
    shards: list[list[TensorSource]] = [[]]
    size = 0
    for source in sources:
        if shards[-1] and size + source.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(source)
        size += source.nbytes
    return [file_order(shard) for shard in shards]


def file_order(sources: Iterable[TensorSource]) -> list[TensorSource]:
    """Tensors as a safetensors file has them: the widest elements first, then by name."""
    return sorted(sources, key=lambda source: (-source.dtype.itemsize, source.name))

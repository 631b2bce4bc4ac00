"""Fetch files of a repository on the Hugging Face hub into the hub's cache, by `huggingface_hub`.

A file is fetched under a temporary name beside the cache's other files, where a later call continues it, and takes its
place only when its hash is the one that the hub states.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from phasor.checkpoints.folder import INDEX
from phasor.checkpoints.hub import Files, HubName, hub_cache
from phasor.checkpoints.hub_errors import endpoint, hub_errors, quiet_logging
from phasor.checkpoints.hub_listing import Listing, RemoteFile, choose_files, list_files, list_shards
from phasor.distribution import __version__
from phasor.files import atomic_write
from phasor.progress import Progress, shown_progress

SMALL = 1 << 20  # bytes below which fetching is over before a bar says anything
UNITS = ("bytes", "kB", "MB", "GB", "TB")


def download(hub: HubName, files: Files, progress: Progress | None = None) -> Path:
    """The snapshot of a repository with the files that are needed; those that the cache lacks are fetched."""
    with quiet_logging(), hub_errors(hub):
        listing = list_files(hub, endpoint())
        snapshot = hub.entry / "snapshots" / listing.commit
        wanted = choose_files(hub, listing, files)
        if INDEX in wanted:
            fetch(hub, listing, [INDEX], None)
            wanted += list_shards(hub, listing, snapshot / INDEX)
        fetch(hub, listing, wanted, progress)
        write_reference(hub, listing.commit)
    return snapshot


def fetch(hub: HubName, listing: Listing, names: Iterable[str], progress: Progress | None) -> None:
    """Fetch those files that the snapshot lacks."""
    snapshot = hub.entry / "snapshots" / listing.commit
    missing = [name for name in names if not (snapshot / name).exists()]
    total = sum(listing.files[name].size for name in missing)
    if not missing:
        return
    begun = sum(partial_size(hub, listing.files[name]) for name in missing)
    check_space(hub, total - begun)
    show = shown_progress.get()
    if progress is None and show is not None and total >= SMALL:
        progress = show(f"fetching {hub}, {format_size(total)}")
    meter = count_bytes(total, progress)
    for name in missing:
        fetch_blob(hub, listing, name, meter)
        link_blob(hub, listing, name)


def fetch_blob(hub: HubName, listing: Listing, name: str, meter: type[Any]) -> None:
    """Fetch a file to where the cache has it, named by its hash; what is there of it already is continued."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import (  # type: ignore[attr-defined,unused-ignore]
        WeakFileLock,
        build_hf_headers,
    )

    file = listing.files[name]
    blob, partial = place_of(hub, file)
    locks = hub_cache() / ".locks" / hub.entry.name
    for folder in (blob.parent, locks):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(locks / f"{file.hash}.lock"):  # as huggingface_hub locks it
        if blob.exists():
            meter(initial=file.size)
            return
        if partial_size(hub, file) > file.size:
            partial.unlink()
        url = hf_hub_url(hub.name, name, revision=listing.commit, endpoint=endpoint())
        headers = build_hf_headers(library_name="phasor", library_version=__version__)
        with partial.open("ab") as out:
            size = out.tell()
            if size == file.size:
                meter(initial=size)
            http_get(url, out, resume_size=size, headers=headers, expected_size=file.size, tqdm_class=meter)
        check_hash(hub, name, partial, file)
        partial.replace(blob)


def link_blob(hub: HubName, listing: Listing, name: str) -> None:
    """Have the snapshot hold a file that has been fetched, as `huggingface_hub` does it."""
    from huggingface_hub import hf_hub_download

    placed = hf_hub_download(
        hub.name,
        name,
        revision=listing.commit,
        cache_dir=hub_cache(),
        endpoint=endpoint(),
        library_name="phasor",
        library_version=__version__,
    )
    blob, _ = place_of(hub, listing.files[name])
    if not blob.exists() or not os.path.samefile(placed, blob):  # by another name of the hash, or moved without links
        check_hash(hub, name, Path(placed), listing.files[name])


def place_of(hub: HubName, file: RemoteFile) -> tuple[Path, Path]:
    """Where the cache has a file, and where it is while it is being fetched."""
    blob = hub.entry / "blobs" / file.hash
    return blob, blob.with_name(f"{file.hash}.phasor.incomplete")


def partial_size(hub: HubName, file: RemoteFile) -> int:
    """The bytes of a file that an interrupted call has fetched."""
    _, partial = place_of(hub, file)
    return partial.stat().st_size if partial.exists() else 0


def check_hash(hub: HubName, name: str, path: Path, file: RemoteFile) -> None:
    """Refuse, and delete, a file that is not what the hub states."""
    algorithm = "sha256" if len(file.hash) == 64 else "sha1"
    found = hashlib.new(algorithm, b"" if algorithm == "sha256" else b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as opened:
        while block := opened.read(1 << 22):
            found.update(block)
    if found.hexdigest() != file.hash:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise ValueError(
            f"{name} of {hub} did not arrive as it is on the hub: its {algorithm.upper()} is not {file.hash}; "
            "it was deleted: fetch it again"
        )


def count_bytes(total: int, progress: Progress | None) -> type[Any]:
    """A class for `huggingface_hub` to use in place of tqdm's bars, whose instances add up what files have fetched."""
    done = 0

    class Meter:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            self.update(initial)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, size: float | None = 1) -> None:
            nonlocal done
            done += int(size or 0)
            if progress is not None and size:
                progress(done, total)

    return Meter


def write_reference(hub: HubName, commit: str) -> None:
    """Note which commit a branch or tag stands for, so that it is found where the hub cannot be asked."""
    reference = hub.entry / "refs" / hub.revision
    if hub.revision != commit and not (reference.is_file() and reference.read_text() == commit):
        reference.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(reference, unique=True) as staged:
            staged.write_text(commit)


def check_space(hub: HubName, needed: int) -> None:
    """Refuse what the disk of the cache cannot hold."""
    place = next(path for path in (hub_cache(), *hub_cache().absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"{hub} needs {format_size(needed)}, and the disk of {hub_cache()} has {format_size(free)}: make room, or "
            "name another folder by HF_HUB_CACHE"
        )


def format_size(size: int) -> str:
    """
    >>> format_size(999), format_size(1_503_300_328)
    ('999 bytes', '1.5 GB')
    """
    exponent = min(len(f"{size}") - 1, 3 * len(UNITS) - 1) // 3
    return f"{size / 1000**exponent:.{0 if exponent == 0 else 1}f} {UNITS[exponent]}"

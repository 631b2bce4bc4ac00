"""What a repository on the Hugging Face hub holds, and which of its files phasor reads."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from phasor.checkpoints.folder import (
    ADAPTER_FILES,
    CONFIG,
    INDEX,
    MODULE_FILE,
    PICKLES,
    QUANTIZATION,
    SENTENCE_FILES,
    SPECIAL,
    TEMPLATES,
    TOKENIZER_FILES,
    WEIGHTS,
    index_of,
)
from phasor.checkpoints.hub import COMMIT, Files, HubName
from phasor.config.schema import name_some, quote
from phasor.distribution import __version__
from phasor.manifest import MANIFEST

HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SETTINGS = re.compile(rf"{CONFIG}|{QUANTIZATION}|{MANIFEST}|{'|'.join(SENTENCE_FILES)}|\d+_\w+/{CONFIG}")
TEXT = re.compile(rf"{'|'.join(map(re.escape, (CONFIG, SPECIAL, *TOKENIZER_FILES)))}|{TEMPLATES}/[\w.-]+\.jinja")


class RemoteFile(NamedTuple):
    """A file on the hub: its bytes, and the SHA-256 of a large one or the hash that git has of a small one."""

    size: int
    hash: str


class Listing(NamedTuple):
    """The commit that a revision stands for, and its files."""

    commit: str
    files: dict[str, RemoteFile]


@functools.lru_cache
def list_files(hub: HubName, endpoint: str) -> Listing:
    """What a revision holds. The hub is asked once per process, which so sees one commit of a branch."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT

    api = HfApi(endpoint, library_name="phasor", library_version=__version__)
    info = api.model_info(hub.name, revision=hub.revision, files_metadata=True, timeout=HF_HUB_ETAG_TIMEOUT)
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise ValueError(f"{endpoint} names no commit for {hub}, but {quote(info.sha)}: it is no Hugging Face hub")
    found = {}
    for file in info.siblings or ():
        stated = file.blob_id if file.lfs is None else file.lfs.sha256
        if file.size is not None and stated is not None and HASH.fullmatch(stated):
            found[file.rfilename] = RemoteFile(file.size, stated)
    return Listing(info.sha, found)


def choose_files(hub: HubName, listing: Listing, files: Files) -> list[str]:
    """The names of the files that are needed, weights last; of weights in several files the index alone.

    What is not on these lists, as pickles, code and other formats of the same weights, is not fetched.
    """
    if CONFIG not in listing.files:
        return adapter_files(hub, listing)
    kinds = {"config": (SETTINGS,), "tokenizer": (TEXT,), "model": (SETTINGS, TEXT, MODULE_FILE)}[files]
    names = [name for name in listing.files if any(kind.fullmatch(name) for kind in kinds)]
    if files != "model":
        return names
    weights = next((name for name in (WEIGHTS, INDEX) if name in listing.files), None)
    if weights is None:
        raise ValueError(f"{hub} has no weights that phasor reads: {describe_weights(listing)}")
    return [*names, weights]


def adapter_files(hub: HubName, listing: Listing) -> list[str]:
    """The files of a repository that holds an adapter, with its tokenizer: all are small."""
    pair = next((pair for pair in ADAPTER_FILES if pair[0] in listing.files), None)
    if pair is None:
        raise ValueError(f"{hub} is not a model that phasor reads: the repository has no {CONFIG}")
    if pair[1] not in listing.files:
        raise ValueError(f"{hub} is an adapter without weights that phasor reads: the repository has no {pair[1]}")
    return [name for name in listing.files if TEXT.fullmatch(name) or name == MANIFEST] + list(pair)


def describe_weights(listing: Listing) -> str:
    """What a repository has in place of weights in safetensors."""
    found = [name for name in listing.files if any(Path(name).match(pattern) for pattern in PICKLES)]
    if found:
        return f"it holds pickles ({name_some(found, 3)}), which run code when they are read, and no {WEIGHTS}"
    return f"it has neither {WEIGHTS} nor {INDEX}"


def list_shards(hub: HubName, listing: Listing, index: Path) -> list[str]:
    """The files that an index names, all of which the repository has to have."""
    shards = list(dict.fromkeys(index_of(index).values()))
    missing = [name for name in shards if name not in listing.files]
    if missing:
        raise ValueError(f"{hub} is incomplete: its {INDEX} names {name_some(missing, 3)}, which the repository lacks")
    return shards

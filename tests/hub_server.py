"""A server of the Hugging Face hub's interface on this machine, whose faults tests choose."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

BLOCK = 1 << 18  # bytes that a slow server sends at a time


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    """Files by their paths, the same in all of its revisions; those of weights are in the storage of large files."""

    files: dict[str, bytes]
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    revisions: tuple[str, ...] = ("main",)
    older: dict[str, Repository] = field(default_factory=dict)  # by commit, of which files are listed and not sent

    @classmethod
    def of_folder(cls, folder: Path) -> Repository:
        paths = (path for path in folder.rglob("*") if path.is_file())
        return cls({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})

    def is_large(self, name: str) -> bool:
        return name.endswith((".safetensors", ".bin"))

    def hash_of(self, name: str) -> str:
        data = self.files[name]
        return hashlib.sha256(data).hexdigest() if self.is_large(name) else git_hash(data)


@dataclass
class HubServer:
    """The repositories of a hub, its faults, and the requests that it was sent as (method, path, range)."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)  # names of repositories that have another name now
    gated: set[str] = field(default_factory=set)
    refused: dict[str, int] = field(default_factory=dict)  # status of the answers about a repository
    altered: dict[str, bytes] = field(default_factory=dict)  # what is sent in place of a file
    cuts: dict[str, list[int]] = field(default_factory=dict)  # bytes after which connections for a file break
    pause: float = 0.0  # seconds after each block of a large file
    token: str | None = None  # with which gated repositories can be read
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def add(self, name: str, folder: Path) -> Repository:
        self.repositories[name] = Repository.of_folder(folder)
        return self.repositories[name]

    def fetched(self, method: str = "GET") -> list[str]:
        """The files that were sent, in order."""
        resolved = [path for way, path, _ in self.requests if way == method and "/resolve/" in path]
        return [path.partition("/resolve/")[2].partition("/")[2] for path in resolved]

    def ranges(self) -> list[str]:
        return [range_ for method, _, range_ in self.requests if method == "GET" and range_ is not None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/storage/"):
            _, _, name, file = path.split("/", 3)
            self.send_file(name.replace("--", "/"), file)
        elif path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self.describe(name, revision)
        else:
            name, _, rest = path.removeprefix("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self.resolve(name, revision, file)

    def refuse(self, status: int, code: str | None, commit: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def find(self, name: str, revision: str) -> Repository | None:
        """The repository, or None after an answer that refuses it."""
        hub = self.server.hub
        if name in hub.moved:
            self.send_response(307)
            self.send_header("Location", self.path.replace(name, hub.moved[name], 1))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if name in hub.refused:
            return self.refuse(hub.refused[name], None)
        if name not in hub.repositories:
            return self.refuse(401 if "Authorization" not in self.headers else 404, "RepoNotFound")
        if name in hub.gated and (hub.token is None or self.headers.get("Authorization") != f"Bearer {hub.token}"):
            return self.refuse(401, "GatedRepo")
        found = hub.repositories[name]
        found = found.older.get(revision, found)
        if revision not in (*found.revisions, found.commit):
            return self.refuse(404, "RevisionNotFound")
        return found

    def describe(self, name: str, revision: str) -> None:
        found = self.find(name, revision)
        if found is None:
            return
        siblings = []
        for file, data in found.files.items():
            one = {"rfilename": file, "size": len(data), "blobId": git_hash(data)}
            if found.is_large(file):
                one["lfs"] = {"sha256": found.hash_of(file), "size": len(data), "pointerSize": 134}
            siblings.append(one)
        body = json.dumps({"_id": "1", "id": name, "modelId": name, "sha": found.commit, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def resolve(self, name: str, revision: str, file: str) -> None:
        found = self.find(name, revision)
        if found is None:
            return
        if file not in found.files:
            return self.refuse(404, "EntryNotFound", found.commit)
        if not found.is_large(file):
            return self.send_file(name, file)
        self.send_response(302)  # to a storage on another host
        host = self.server.hub.address.replace("127.0.0.1", "localhost")
        self.send_header("Location", f"{host}/storage/{name.replace('/', '--')}/{file}")
        self.send_header("X-Repo-Commit", found.commit)
        self.send_header("X-Linked-Etag", f'"{found.hash_of(file)}"')
        self.send_header("X-Linked-Size", str(len(found.files[file])))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_file(self, name: str, file: str) -> None:
        hub, found = self.server.hub, self.server.hub.repositories[name]
        data, start = hub.altered.get(file, found.files[file]), 0
        if (given := self.headers.get("Range")) is not None:
            start = int(given.removeprefix("bytes=").partition("-")[0])
        if start and start >= len(data):
            return self.refuse(416, None)
        self.send_response(206 if given is not None else 200)
        self.send_header("ETag", f'"{found.hash_of(file)}"')
        self.send_header("X-Repo-Commit", found.commit)
        self.send_header("Content-Length", str(len(data) - start))
        if given is not None:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = hub.cuts.get(file)
        end = min(len(data), cuts.pop(0)) if cuts else len(data)
        step = BLOCK if hub.pause else len(data)
        try:
            for at in range(start, end, step):
                self.wfile.write(data[at : min(at + step, end)])
                self.wfile.flush()
                time.sleep(hub.pause if found.is_large(file) else 0)
        except OSError:  # the client has gone
            self.close_connection = True
        if end < len(data):
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer


@contextmanager
def serve() -> Iterator[HubServer]:
    """A hub without repositories at an address of this machine, for as long as it is used."""
    with _Server(("127.0.0.1", 0), Handler) as server:
        server.hub = HubServer(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.hub
        server.shutdown()

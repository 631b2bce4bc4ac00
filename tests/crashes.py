"""A disk that loses power: what it holds after each operation, of what was flushed to it and of what was not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from phasor import files

Tree = dict[str, Any]  # the entries of a folder: the bytes of a file, the tree of a folder, the target of a link
CHANGES = ("replace", "rename", "mkdir", "unlink", "rmdir", "remove")


class CrashRecorder:
    """Runs some code and keeps, for each moment between its operations on files, what a crash there would leave.

    A file holds what it held when it was last flushed, or nothing if it never was. The names in a folder are either
    those of the moment, or those of the last flush of the folder: file systems may write names early, or late.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, bytes] = {}  # what is on the disk, by inode
        self.folders: dict[int, dict[str, int]] = {}
        self.links: dict[int, str] = {}
        self.states: list[Tree] = []
        for path in [root, *root.rglob("*")]:  # what is there at the beginning is on the disk
            self.flush(path)

    def flush(self, path: Path) -> None:
        number = path.lstat().st_ino
        if path.is_symlink():
            self.links[number] = os.readlink(path)
        elif path.is_dir():
            self.folders[number] = {entry.name: entry.lstat().st_ino for entry in path.iterdir()}
        else:
            self.files[number] = path.read_bytes()

    def forget_deleted(self) -> None:
        """A number that no file has any more may be given to another one."""
        there = {path.lstat().st_ino for path in [self.root, *self.root.rglob("*")]}
        for known in (self.files, self.folders):
            for number in [n for n in known if n not in there and not self.is_on_disk(n)]:
                del known[number]

    def is_on_disk(self, number: int) -> bool:
        return any(number in names.values() for names in self.folders.values())

    def now(self, folder: Path) -> Tree:
        """A crash after which names are those of this moment."""
        found: Tree = {}
        for path in folder.iterdir():
            if path.is_symlink():
                found[path.name] = os.readlink(path)
            elif path.is_dir():
                found[path.name] = self.now(path)
            else:
                found[path.name] = self.files.get(path.lstat().st_ino, b"")
        return found

    def flushed(self, number: int) -> Tree:
        """A crash after which names are those of the last flush of their folder."""
        found: Tree = {}
        for name, inside in self.folders.get(number, {}).items():
            if inside in self.links:
                found[name] = self.links[inside]
            else:
                found[name] = self.flushed(inside) if inside in self.folders else self.files.get(inside, b"")
        return found

    def record(self) -> None:
        for state in (self.now(self.root), self.flushed(self.root.stat().st_ino)):
            if state not in self.states[-8:]:
                self.states.append(state)

    def run(self, code: Callable[[], Any]) -> list[Tree]:
        def recording(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **options: Any) -> Any:
                self.record()
                result = original(*given, **options)
                self.forget_deleted()
                self.record()
                return result

            return call

        def fsync(path: Path) -> None:
            self.record()
            original_fsync(path)
            self.flush(path)
            self.record()

        original_fsync = files.fsync
        with mock.patch.object(files, "fsync", fsync), mock.patch.object(files, "exchange", recording(files.exchange)):
            patches = [mock.patch.object(os, name, recording(getattr(os, name))) for name in CHANGES]
            for patch in patches:
                patch.start()
            try:
                code()
            finally:
                for patch in patches:
                    patch.stop()
        self.states.append(self.flushed(self.root.stat().st_ino))  # the last: all that is promised is on the disk
        return self.states


def write_tree(tree: Tree, place: Path) -> Iterator[str]:
    """A state of the disk as real files; the names at its top."""
    for name, content in tree.items():
        if isinstance(content, dict):
            (place / name).mkdir()
            list(write_tree(content, place / name))
        elif isinstance(content, str):
            (place / name).symlink_to(content)
        else:
            (place / name).write_bytes(content)
        yield name

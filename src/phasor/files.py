"""Files and folders that are written whole or not at all.

What is written goes to a hidden name beside its place, ending in `.part`, and is renamed when it is complete. A kill at
any moment leaves the old file or the new one, and at most such a hidden name, which the next writer removes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART, OLD = ".part", ".old"


@contextmanager
def atomic_write(file: Path, *, unique: bool = False) -> Iterator[Path]:
    """A hidden path to write to, which takes the file's place at the end, and vanishes if anything fails.

    `unique` gives each process a path of its own, for files that several may write at once.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "notes.txt")) as staged:
    ...         _ = staged.write_text("all of it")
    ...     Path(folder, "notes.txt").read_text(), os.listdir(folder)
    ('all of it', ['notes.txt'])
    """
    staged = file.with_name(f".{file.name}-{os.getpid()}{PART}" if unique else f".{file.name}{PART}")
    try:
        yield staged
        os.replace(staged, file)
    finally:
        staged.unlink(missing_ok=True)


def staging_folder(folder: Path) -> Path:
    """A new hidden folder beside another, to write what `replace_folder` puts in its place."""
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=PART, dir=folder.parent))


def replace_folder(staged: Path, folder: Path) -> None:
    """Put a finished folder in place by renaming it; the one that was there is deleted only afterward."""
    if not folder.exists():
        os.replace(staged, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=OLD, dir=folder.parent))
    try:
        os.replace(folder, old)
        os.replace(staged, folder)
    except BaseException:  # an interruption between the two, too
        if folder.exists():
            remove_folder(old)
        else:
            os.replace(old, folder)
        raise
    remove_folder(old)


def replace_link(link: Path, target: Path) -> None:
    """Have a symbolic link point to a folder, in place of what it pointed to."""
    with atomic_write(link) as staged:
        staged.unlink(missing_ok=True)
        staged.symlink_to(target.resolve(), target_is_directory=True)


def move_folder(folder: Path, place: Path) -> None:
    """Rename a folder; what has that name already is deleted first."""
    shutil.rmtree(place, ignore_errors=True)
    os.replace(folder, place)


def remove_folder(folder: Path) -> None:
    """Delete a folder as far as that can be done; an interruption does not leave it half deleted."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

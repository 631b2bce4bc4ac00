"""Files that are written whole or not at all, and what `ArtifactFolder` does the same for folders with.

What is written goes to a hidden name beside its place, ending in `.part`. When it is complete it is flushed to the
disk and takes its place in one step. A kill or a loss of power at any moment leaves the old file or the new one, and at
most such a hidden name, which the next writer removes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART, OLD = ".part", ".old"
TOKEN = "[0-9a-f]" * 12  # in hidden names
AT_FDCWD, EXCHANGE = -100, 2  # of renameat2 on Linux; the second of renamex_np on macOS too
CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


@contextmanager
def atomic_write(file: Path, *, unique: bool = False) -> Iterator[Path]:
    """A hidden path to write to, which takes the file's place at the end, and vanishes if anything fails.

    `unique` gives it a name that nothing has yet, for files that several processes may write at once. Otherwise the
    next writer of the file takes the same name again.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "notes.txt")) as staged:
    ...         _ = staged.write_text("all of it")
    ...     Path(folder, "notes.txt").read_text(), os.listdir(folder)
    ('all of it', ['notes.txt'])
    """
    staged = hidden_name(file, PART, secrets.token_hex(6) if unique else "0" * 12)
    staged.unlink(missing_ok=True)
    try:
        staged.touch()
        mode = staged.stat().st_mode
        yield staged
        if not staged.is_symlink():
            staged.chmod(mode)  # some libraries write files that nobody else may read
            fsync(staged)
        os.replace(staged, file)
        fsync(file.parent)
    except OSError as error:
        name_file(error, file)
        raise
    finally:
        staged.unlink(missing_ok=True)


def replace_folder(staged: Path, folder: Path) -> None:
    """Put a finished folder in place in one step; the one that was there, or the link, is deleted only afterward."""
    set_modes(staged)
    fsync_tree(staged)
    if not os.path.lexists(folder):
        os.replace(staged, folder)
        fsync(folder.parent)
        return
    if exchange(staged, folder):
        fsync(folder.parent)
        remove(staged)
        return
    old = hidden_name(folder, OLD)
    try:
        os.replace(folder, old)
        os.replace(staged, folder)
    except BaseException:  # an interruption between the two, too
        if os.path.lexists(folder):
            remove(old)
        else:
            os.replace(old, folder)
        raise
    fsync(folder.parent)
    remove(old)


def exchange(first: Path, second: Path) -> bool:
    """Swap what has two names, in one step; False where the system cannot do that."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError, TypeError):  # the last on Windows
        return False
    names = os.fsencode(first), os.fsencode(second)
    if hasattr(libc, "renameat2"):
        failed = libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], EXCHANGE)
    elif hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(*names, EXCHANGE)
    else:
        return False
    code = ctypes.get_errno() if failed else 0
    if code and code not in CANNOT_EXCHANGE:
        raise OSError(code, os.strerror(code), str(second))
    return not failed


def hidden_name(path: Path, suffix: str, token: str | None = None) -> Path:
    """A name beside a path that nothing has yet, or that with a token."""
    return path.with_name(f".{path.name}-{token or secrets.token_hex(6)}{suffix}")


def replace_link(link: Path, target: Path) -> None:
    """Have a symbolic link point to a folder, in place of what it pointed to."""
    with atomic_write(link) as staged:
        staged.unlink(missing_ok=True)
        staged.symlink_to(target.resolve(), target_is_directory=True)


def remove(path: Path) -> None:
    """Delete a file, a link (and not its target) or a folder, of which an interruption leaves no half."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def name_file(error: OSError, path: Path) -> None:
    """Give an error of the file system that names no file, as that of a full disk, the name of what was written."""
    if error.errno is not None and error.filename is None:
        error.filename = str(path)


@contextmanager
def safetensors_errors() -> Iterator[None]:
    """Give what `safetensors` raises where a file cannot be written as the error of the file system that it was."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        found = re.search(r"(\w[^:]*) \(os error (\d+)\)", str(error))
        code, reason = (errno.EIO, str(error)) if found is None else (int(found[2]), found[1])
        raise OSError(code, reason) from None


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Give the errors of the file system as a sentence that names what cannot be written."""
    try:
        yield
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {error.strerror or error}") from error


def fsync(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what cannot be flushed, such as a folder of some network file systems
            raise
    finally:
        os.close(handle)


def set_modes(folder: Path) -> None:
    """Give the files in a new folder the modes that the umask gave the folder: some libraries write private ones."""
    mode = folder.stat().st_mode & 0o666
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            if not path.is_symlink():
                path.chmod(mode)


def fsync_tree(folder: Path) -> None:
    """The same for a folder with everything in it."""
    for place, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(place, name) for name in names), Path(place)):
            if not path.is_symlink():
                fsync(path)


@contextmanager
def lock_folder(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a folder; the lock ends with the process, however that ends. Without `wait`, an error unless it is locked.

    Where there are no locks nothing is known to be unused, so that not waiting is an error there too.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        if os.name != "nt" or not wait:  # there a folder cannot be opened
            raise
        yield
        return
    try:
        if not lock(handle, wait=wait) and not wait:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(folder))
        yield
    finally:
        os.close(handle)


def lock(handle: int, *, wait: bool = False) -> bool:
    """Lock an open file until it is closed, or its process ends; False where the system or its disk has no locks.

    Without `wait`, a `BlockingIOError` where another process holds the lock.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     lock(file.fileno())
    True
    """
    try:
        import fcntl
    except ImportError:
        return lock_byte(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def lock_byte(handle: int) -> bool:
    """The lock of systems without `fcntl`: Windows locks a byte of a file."""
    try:
        from msvcrt import LK_NBLCK, locking  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return False
    try:
        locking(handle, LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
    return True

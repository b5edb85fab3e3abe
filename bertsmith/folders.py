"""Files and folders that are written atomically, and locked while a process writes them."""

from __future__ import annotations

import errno
import hashlib
import inspect
import os
import platform
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from bertsmith.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

DISK_ERRORS = {"ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS"}
LOCK_TIMEOUT = 2.0  # seconds: a process that was killed, or its workers, may still be exiting
P = ParamSpec("P")
R = TypeVar("R")
_held: dict[tuple[Path, int], int] = {}  # the open lock files of this process by output and thread


@contextmanager
def locked(path: str | Path, option: str = "--out") -> Iterator[None]:
    """Lock an output while a command writes it; a second process gets an error that names the first.

    The lock is one of the operating system, on `.NAME.lock` beside the output: it ends with its process, and a file
    that was left behind does not lock the output. Incomplete files of a killed process are removed. Standard output,
    URLs and file systems without locks are not locked.
    """
    key = _local(path), threading.get_ident()
    missing = [folder for folder in key[0].parents if not folder.exists()]
    lock = key[0].with_name(f".{key[0].name}.lock") if key[0].name else key[0]
    handle = None if key in _held else _take(lock, key[0], f"{option} {path}")
    if handle is None:
        with naming(path):
            yield
        return
    _held[key] = handle
    try:
        _remove_partial(key[0])
        with naming(path):
            yield
    finally:
        with suppress(OSError):  # before it is released: a process that has opened this file opens it again
            lock.unlink()
        os.close(_held.pop(key))
        for folder in missing:
            with suppress(OSError):  # not empty: it holds the output
                folder.rmdir()


def writes(argument: str = "out", option: str = "--out") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that it holds the lock on the output that this argument names."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def locking(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            with locked(given.arguments[argument], option):
                return function(*args, **kwargs)

        return locking

    return decorate


def _local(path: str | Path) -> Path:
    """The path of an output with links resolved; an empty one for standard output and URLs."""
    text = str(path).removeprefix("file://")
    return Path() if text == "-" or "://" in text else Path(os.path.realpath(text))


def _take(lock: Path, path: Path, shown: str) -> int | None:
    """Open and lock a file; None if it cannot be locked."""
    if fcntl is None or not path.name or (path.exists() and not path.is_file() and not path.is_dir()):
        return None
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # a read-only place: writing will raise the error
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
                with suppress(OSError):  # a full disk
                    os.ftruncate(handle, 0)
                    os.write(handle, _this_process().encode(errors="replace"))
                return handle
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(handle, 1000, 0).decode(errors="replace") or "another process"
                os.close(handle)
                raise UserError(
                    f"{shown} is being written by {holder}; wait until it ends, or choose another"
                ) from None
            time.sleep(0.05)
        except OSError:  # no locks here
            os.close(handle)
            return None
        os.close(handle)


def _this_process() -> str:
    """A description of this process, for the error of another one."""
    name = Path(sys.argv[0]).name
    command = shlex.join(["bertsmith" if name == "__main__.py" else name, *sys.argv[1:]])
    return f"process {os.getpid()} on {platform.node()} ({command[:300]})"


def _remove_partial(path: Path) -> None:
    """Remove incomplete files that a killed process left, beside an output and directly inside it."""
    beside = path.parent.glob(".*.partial") if path.parent.is_dir() else ()
    left = [p for p in beside if re.fullmatch(rf"\.{re.escape(path.name)}\.\d+\.partial", p.name)]
    left += [p for p in path.glob(".*.partial") if re.fullmatch(r"\..+\.\d+\.partial", p.name)] if path.is_dir() else []
    for file in left:
        shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink(missing_ok=True)


def _release_in_child() -> None:
    """Release the locks in a forked worker: if the main process is killed, the worker must not keep them."""
    for handle in _held.values():
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the path of the output to the error of a full or failing disk: writing to an open file does not name it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and errno.errorcode.get(error.errno or 0) in DISK_ERRORS:
            error.filename = str(path)
        raise
    except UserError:
        raise
    except Exception as error:  # safetensors and tokenizers have their own errors, with the system's number in the text
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


@contextmanager
def new_folder(path: str | Path, option: str = "--out") -> Iterator[Path]:
    """A folder with a temporary name that is synced and renamed to `path` when the block ends without an error."""
    path = Path(path)
    refuse_existing(path, option=option)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.parent / f".{path.name}.{os.getpid()}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        with naming(path):
            yield work
            for file in work.rglob("*"):
                if file.is_file():
                    sync(file)
            sync(work)
            if path.exists():
                path.rmdir()  # an empty one; others were refused
            work.rename(path)
            sync(path.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """A file with a temporary name that replaces `path` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        with naming(path):
            yield work
            sync(work)
            work.replace(path)
            sync(path.parent)
    finally:
        work.unlink(missing_ok=True)


def refuse_existing(path: Path, hint: str = "", option: str = "--out") -> None:
    """Refuse to overwrite a folder that is not empty; `option` is its name on the command line."""
    if path.is_file():
        raise UserError(f"{option} {path} is a file; give a folder")
    if path.is_dir() and any(path.iterdir()):
        hint = hint or f"choose another {option} or remove it"
        raise UserError(f"{option} {path} is there already and not empty; {hint}")


def regular_file(path: str | Path) -> Path:
    """The path of a file that can be read to its end; a folder, a pipe or a device is refused."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"no such file: {path}")
    if not path.is_file():
        raise UserError(f"{path} is not a regular file")
    return path


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_hash(path: str | Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Files and folders that are there whole or not at all, and that one process at a time writes."""

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
PATIENCE = 2.0  # seconds: a process that was killed, or the workers of one, may still be on their way out
P = ParamSpec("P")
R = TypeVar("R")
_held: dict[tuple[Path, int], int] = {}  # the open lock files of this process by output and thread


@contextmanager
def locked(path: str | Path, option: str = "--out") -> Iterator[None]:
    """Lock an output while a command writes it; a second process is refused and told who has it.

    The lock is the system's, on `.NAME.lock` beside the output, so it ends with its process, and a file that was left
    behind locks nothing. Half-written files that a killed process left are removed. Standard output, URLs and file
    systems without locks have none.
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
        _sweep(key[0])
        with naming(path):
            yield
    finally:
        with suppress(OSError):  # before it is released: a process that has opened this file looks again
            lock.unlink()
        os.close(_held.pop(key))
        for folder in missing:
            with suppress(OSError):  # what was written is there
                folder.rmdir()


def writes(argument: str = "out", option: str = "--out") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that holds the lock on the output that this argument of it names."""

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
    """The output's one name on this machine, whatever links lead to it; an empty one where it is elsewhere."""
    text = str(path).removeprefix("file://")
    return Path() if text == "-" or "://" in text else Path(os.path.realpath(text))


def _take(lock: Path, path: Path, shown: str) -> int | None:
    """Open and lock a file; None where nothing can be locked."""
    if fcntl is None or not path.name or (path.exists() and not path.is_file() and not path.is_dir()):
        return None
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # a read-only place: whoever writes there will say so
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
                with suppress(OSError):  # a full disk
                    os.ftruncate(handle, 0)
                    os.write(handle, _who().encode(errors="replace"))
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


def _who() -> str:
    """This process, as another one reads of it."""
    name = Path(sys.argv[0]).name
    command = shlex.join(["bertsmith" if name == "__main__.py" else name, *sys.argv[1:]])
    return f"process {os.getpid()} on {platform.node()} ({command[:300]})"


def _sweep(path: Path) -> None:
    """Remove half-written files of an output that a killed process left, beside it and directly inside it."""
    beside = path.parent.glob(".*.partial") if path.parent.is_dir() else ()
    left = [p for p in beside if re.fullmatch(rf"\.{re.escape(path.name)}\.\d+\.partial", p.name)]
    left += [p for p in path.glob(".*.partial") if re.fullmatch(r"\..+\.\d+\.partial", p.name)] if path.is_dir() else []
    for file in left:
        shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink(missing_ok=True)


def _forget() -> None:
    """A forked worker holds no lock: when the process that has it is killed, the worker must not keep it."""
    for handle in _held.values():
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name the output in the error of a full or failing disk: a write to an open file does not say which it was."""
    try:
        yield
    except OSError as error:
        if error.filename is None and errno.errorcode.get(error.errno or 0) in DISK_ERRORS:
            error.filename = str(path)
        raise
    except UserError:
        raise
    except Exception as error:  # safetensors and tokenizers have errors of their own, with the system's number in words
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


@contextmanager
def new_folder(path: str | Path, option: str = "--out") -> Iterator[Path]:
    """A folder under a temporary name that takes its own name, synced to disk, when the block ends without an error."""
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
                path.rmdir()  # an empty one; anything else was refused
            work.rename(path)
            sync(path.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """A file under a temporary name that replaces `path` when the block ends without an error."""
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
    """Never write over what is there; `option` is what the command line calls the folder."""
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
    """Make sure that a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_hash(path: str | Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

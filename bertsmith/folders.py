"""Folders that are there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bertsmith.errors import UserError


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

"""A folder at a path or a URL whose files are written completely or not at all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from bertsmith.folders import new_file

SEAL = ".sha256"


@dataclass(frozen=True)
class Store:
    """Files by name; those that are not local are accessed through `fsspec`."""

    url: str

    @cached_property
    def _place(self) -> tuple[Any, str]:
        return fsspec.core.url_to_fs(self.url)

    @property
    def local(self) -> Path | None:
        """The folder if it is local, else None."""
        system, root = self._place
        return Path(root) if isinstance(system, LocalFileSystem) else None

    def names(self) -> list[str]:
        """The names of the files in the folder, without partial files of a process that was killed."""
        system, root = self._place
        if not system.isdir(root):
            return []
        found = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in system.ls(root, detail=False))
        return sorted(name for name in found if not name.endswith(".partial"))

    def exists(self, name: str) -> bool:
        system, root = self._place
        return bool(system.exists(f"{root}/{name}"))

    def read(self, name: str) -> bytes:
        system, root = self._place
        return bytes(system.cat_file(f"{root}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically; remote file systems make a file visible only when it is complete."""
        if self.local is not None:
            with new_file(self.local / name) as work:
                work.write_bytes(data)
        else:
            system, root = self._place
            system.makedirs(root, exist_ok=True)
            system.pipe_file(f"{root}/{name}", data)

    def write_sealed(self, name: str, data: bytes) -> None:
        """Write a file, then a file with its checksum."""
        self.write(name, data)
        self.write(name + SEAL, hashlib.sha256(data).hexdigest().encode())

    def read_sealed(self, name: str) -> bytes | None:
        """Read what `write_sealed` wrote; None if it is missing or does not match its checksum."""
        if not self.exists(name) or not self.exists(name + SEAL):
            return None
        data = self.read(name)
        return data if hashlib.sha256(data).hexdigest().encode() == self.read(name + SEAL) else None

    def delete(self, name: str) -> None:
        system, root = self._place
        if system.exists(f"{root}/{name}"):
            system.rm(f"{root}/{name}", recursive=True)

    def sweep(self) -> None:
        """Remove the partial files of a killed process."""
        for left in self.local.glob(".*.partial") if self.local is not None else ():
            left.unlink()

    def remove(self) -> None:
        """Remove the whole folder."""
        system, root = self._place
        if system.exists(root):
            system.rm(root, recursive=True)

"""A journal of predictions: JSON lines with a checksum after every window of rows, for runs that are resumed.

A resumed run continues after the last complete window whose checksum is right. The windows decide which texts share a
batch, so the predictions are the same to the bit as those of a run that was never stopped.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from bertsmith.folders import new_file
from bertsmith.progress import say

LINES, SUMS = "answers.jsonl", "checksums.txt"


class Journal:
    """The open journal in a partial folder; it has the `write` and `flush` of a text file."""

    def __init__(self, folder: Path) -> None:
        """Open the journal behind its last valid window; `windows` is the number of valid windows."""
        self.folder, self.windows, self.size, self.digest = folder, 0, 0, hashlib.sha256()
        listed = self._verify() if (folder / SUMS).exists() and (folder / LINES).exists() else []
        if len(listed) > self.windows:
            say(f"note: {folder / LINES} is damaged after byte {self.size:,}; the rows after it are predicted again")
        (folder / LINES).touch()
        os.truncate(folder / LINES, self.size)
        with new_file(folder / SUMS) as work:
            work.write_text("".join(f"{line}\n" for line in listed[: self.windows]), encoding="ascii")
        self.lines, self.sums = (folder / LINES).open("ab"), (folder / SUMS).open("a", encoding="ascii")

    def _verify(self) -> list[str]:
        """Compare the windows with their checksums up to the first that differs; return all checksums."""
        listed = (self.folder / SUMS).read_text(encoding="ascii", errors="replace").splitlines()
        with (self.folder / LINES).open("rb") as file:
            for line in listed:
                size, _, expected = line.partition(" ")
                if not size.isdecimal() or int(size) < self.size:
                    break
                digest = self.digest.copy()
                digest.update(file.read(int(size) - self.size))
                if digest.hexdigest() != expected:
                    break
                self.windows, self.size, self.digest = self.windows + 1, int(size), digest
        return listed

    def write(self, text: str) -> None:
        """Append a line."""
        data = text.encode()
        self.lines.write(data)
        self.digest.update(data)
        self.size += len(data)

    def flush(self) -> None:
        """End a window: write its lines and its checksum."""
        self.lines.flush()
        self.sums.write(f"{self.size} {self.digest.hexdigest()}\n")
        self.sums.flush()

    def close(self) -> None:
        """Close the files."""
        self.lines.close()
        self.sums.close()

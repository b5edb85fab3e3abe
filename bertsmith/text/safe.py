"""Text that every library and file format accepts: without NUL characters and without lone surrogates.

Both come from JSON escapes, from command-line arguments that are not UTF-8, and from UTF-16 that is read as another
encoding. Each is replaced by one character, so character offsets stay those of the input; tokenizers drop U+FFFD just
as they drop NUL, so the tokens stay the same, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bertsmith.progress import say

REPLACEMENT = "\ufffd"
_UNSAFE = re.compile("[\0\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def safe_text(text: str) -> str:
    """Replace every NUL and every lone surrogate by U+FFFD."""
    if text.isascii() and "\0" not in text:
        return text
    return _UNSAFE.sub(REPLACEMENT, text)


def valid_text(text: str) -> str:
    """Replace every lone surrogate by U+FFFD; a NUL is left, since a byte-level vocabulary has an entry for it."""
    return text if text.isascii() else _SURROGATE.sub(REPLACEMENT, text)


@dataclass
class SafeTexts:
    """Makes texts safe, counts the replaced characters, and remembers the place of the first one."""

    replaced: int = 0
    first: str = ""

    def text(self, text: str, place: str = "") -> str:
        """Make one text safe; `place` names its source for the note."""
        safe = safe_text(text)
        if safe != text:
            self.first = self.first or place
            self.replaced += len(_UNSAFE.findall(text))
        return safe

    def value(self, value: Any, place: str = "") -> Any:
        """Make all strings of a JSON value safe."""
        if isinstance(value, str):
            return self.text(value, place)
        if isinstance(value, dict):
            return {self.value(name, place): self.value(entry, place) for name, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.value(entry, place) for entry in value)
        return value

    def say(self) -> None:
        """Print a note if any character was replaced."""
        if self.replaced:
            count = f"{self.replaced:,} character{'s'[: self.replaced != 1]}"
            where = f", the first in {self.first}" if self.first else ""
            say(f"note: replaced {count} that are not valid in text (NUL, lone surrogates) by U+FFFD{where}")


def safe_argument(text: str | None) -> str | None:
    """Make a command-line argument safe, and print a note if that changed it."""
    if text is None:
        return None
    safe = SafeTexts()
    text = safe.text(text, "the command line")
    safe.say()
    return text

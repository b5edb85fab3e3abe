"""Text that every library and every file takes: without NUL characters and without half surrogate pairs.

Both get in through JSON escapes, through arguments of the command line that are not UTF-8, and through UTF-16 that is
read as something else. A replaced character keeps its place, so character offsets stay those of the input; tokenizers
drop U+FFFD just as they drop NUL, so the tokens stay the same, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bertsmith.progress import say

REPLACEMENT = "\ufffd"
_UNSAFE = re.compile("[\0\ud800-\udfff]")


def safe_text(text: str) -> str:
    """The text with U+FFFD in the place of every NUL and every lone surrogate."""
    if text.isascii() and "\0" not in text:
        return text
    return _UNSAFE.sub(REPLACEMENT, text)


@dataclass
class SafeTexts:
    """Makes texts safe, counts the characters that were replaced, and remembers where the first one stood."""

    replaced: int = 0
    first: str = ""

    def text(self, text: str, place: str = "") -> str:
        """One safe text; `place` is where it stands, for the note."""
        safe = safe_text(text)
        if safe != text:
            self.first = self.first or place
            self.replaced += len(_UNSAFE.findall(text))
        return safe

    def value(self, value: Any, place: str = "") -> Any:
        """A value as JSON has them, with all its texts made safe."""
        if isinstance(value, str):
            return self.text(value, place)
        if isinstance(value, dict):
            return {self.value(name, place): self.value(entry, place) for name, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.value(entry, place) for entry in value)
        return value

    def say(self) -> None:
        """A note where anything was replaced."""
        if self.replaced:
            count = f"{self.replaced:,} character{'s'[: self.replaced != 1]}"
            where = f", the first in {self.first}" if self.first else ""
            say(f"note: replaced {count} that no text may hold (NUL, half a surrogate pair) by U+FFFD{where}")


def safe_argument(text: str | None) -> str | None:
    """A text of the command line made safe, with a note where that changed it."""
    if text is None:
        return None
    safe = SafeTexts()
    text = safe.text(text, "the command line")
    safe.say()
    return text

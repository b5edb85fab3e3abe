"""Errors with messages for the person who can fix them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

VERY_CLOSE = 0.75  # of difflib's ratio


class UserError(ValueError):
    """A mistake in the user's input: the message names the value, its place and the fix.

    The command line prints only the message and exits with code 2; any other exception is a bug.
    """


class BadRow(UserError):
    """A row that cannot be used, in a file whose other rows can."""


class NotFinite(UserError):
    """Scores or vectors with NaN or infinity in them."""


class Diverged(UserError):
    """A run that has diverged: with other settings it may succeed."""


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` if one of the allowed names is close, else an empty text.

    A name that contains the given one as a whole word comes first (`steps`: `train.steps`). For dotted names in the
    same section the last parts are compared. Names that begin with another letter have to be very close.
    """
    names = list(allowed)
    section, _, last = name.rpartition(".")
    by_part = {each.removeprefix(f"{section}."): each for each in names}
    words = [e for e in names if name.lower() in {*re.split(r"[^a-z0-9]+", e.lower()), *e.lower().split(".")}]
    close = [
        each
        for each in difflib.get_close_matches(last, by_part, n=3, cutoff=0.6)
        if each[:1] == last[:1] or difflib.SequenceMatcher(None, last, each).ratio() >= VERY_CLOSE
    ]
    close = [by_part[each] for each in close] or difflib.get_close_matches(name, names, n=1, cutoff=VERY_CLOSE)
    found = sorted(words, key=len) or close
    return f"; did you mean {found[0]!r}?" if found else ""


def nearest_or_all(name: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` if one of the allowed names is close, else `; one of:` and all of them."""
    names = list(allowed)
    return suggestion(name, names) or f"; one of: {', '.join(names)}"


class Interrupted(Exception):
    """A run was asked to stop, and was saved. `code` is the program's exit status, `advice` says how to resume."""

    advice = "The same command with --resume goes on"

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __str__(self) -> str:
        return f"{self.args[0]}. {self.advice}"

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, int, str]]:
        return Interrupted, (self.args[0], self.code, self.advice)  # pickled when it comes from another process

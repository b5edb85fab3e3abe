"""Errors that speak to the person who can fix them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave is wrong: the message names the value, its place and the fix.

    The command line prints the message alone and exits with code 2; any other exception is a bug of ours.
    """


class BadRow(UserError):
    """A row that cannot be used, while the others of its file can be."""


class Diverged(UserError):
    """A run whose losses stay bad: with other settings it may do well."""


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` where one of the allowed names is close, else nothing."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class Interrupted(Exception):
    """A run was asked to stop, and was saved. `code` is the program's exit status, `advice` says how to resume."""

    def __init__(self, message: str, code: int, advice: str = "The same command with --resume goes on") -> None:
        super().__init__(message)
        self.code, self.advice = code, advice

    def __str__(self) -> str:
        return f"{self.args[0]}. {self.advice}"

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, int, str]]:
        return Interrupted, (self.args[0], self.code, self.advice)  # it may come from another process

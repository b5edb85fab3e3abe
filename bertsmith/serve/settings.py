"""The settings of the server and their checks."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError

KEY_VARIABLE = "BERTSMITH_API_KEY"
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # where several processes keep their counters
LOCAL = ("127.0.0.1", "localhost", "::1")
DRAIN_SECONDS = 60  # in which a server that ends answers what it has accepted
LEAST_KEY = 8  # characters


@dataclass(frozen=True)
class ServeConfig:
    """How requests are batched and limited.

    A batch holds at most `max_batch_tokens` tokens, and its first text waits at most `wait_ms` milliseconds for others.
    At most `queue_tokens` tokens wait; a request that finds no room is refused. `max_body_bytes` and `max_texts` limit
    one request, `max_held_bytes` the bodies of all requests that are not answered yet, and `body_seconds` the time in
    which a body has to arrive. At most `engines` batches are computed at a time, which share `threads` threads.
    """

    max_batch_tokens: int = 2048
    wait_ms: float = 2.0
    queue_tokens: int = 131_072
    max_body_bytes: int = 4 * 2**20
    max_held_bytes: int = 64 * 2**20
    max_texts: int = 2048
    max_numbers: int = 2**22  # of the vectors in one response
    body_seconds: float = 20.0
    engines: int = 1
    threads: int | None = None  # None: those of PyTorch
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--max-batch-tokens", self.max_batch_tokens, 1),
            ("--wait-ms", self.wait_ms, 0),
            ("--queue", self.queue_tokens, 1),
            ("--max-body-mb", self.max_body_bytes, 1),
            ("--max-texts", self.max_texts, 1),
        ):
            if not value >= least:
                raise UserError(f"{option} {value} must be at least {least}")

    @property
    def max_characters(self) -> int:
        """The characters of one request's texts: more could not be encoded in the tokens of the queue."""
        return 4 * self.queue_tokens

    def accepts(self, key: bytes) -> bool:
        """Return whether a key is one of the server's, in a time that does not depend on the key."""
        found = False
        for known in self.api_keys:
            found |= hmac.compare_digest(key, known.encode())
        return found


def characters(texts: Any) -> int:
    """Return the number of characters in all texts of a value, which `max_characters` limits."""
    if isinstance(texts, str):
        return len(texts)
    if isinstance(texts, (int, float)):
        return 0
    return sum(map(characters, texts.values() if isinstance(texts, dict) else texts))


def read_keys(path: str | Path | None) -> tuple[str, ...]:
    """Return the API keys in a file, one per line, or the one in the environment; none: every request is served."""
    if not path:
        given = os.environ.get(KEY_VARIABLE, "").strip()
        return (_checked(given, KEY_VARIABLE),) if given else ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"--api-key-file {path} is not a text file; write one key per line") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise UserError(f"--api-key-file {path} holds no key; write one key per line")
    return tuple(_checked(key, f"--api-key-file {path}") for key in keys)


def _checked(key: str, source: str) -> str:
    """Return a key that a header can carry and nobody guesses; the messages never show it."""
    if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"{source}: a key has at least {LEAST_KEY} ASCII characters and no spaces")
    return key

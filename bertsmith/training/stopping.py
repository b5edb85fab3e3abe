"""Ctrl-C and SIGTERM: the step ends, the run is saved, and the program says how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from bertsmith.progress import say

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Request:
    """The signal that asked the run to stop; 0 while nobody has."""

    signal: int = 0


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Notes a first signal instead of dying of it; a second one has its usual effect."""
    request = Request()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield request
        return
    usual = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        restore()
        say(f"{signal.Signals(number).name}: saving after this step; once more stops at once, without saving")

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()

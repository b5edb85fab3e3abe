"""Ctrl-C and SIGTERM: the step is finished, the run is saved, and a message says how to resume it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from bertsmith.progress import console

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO = 1.0  # seconds: a cluster signals the launcher and its processes, and the launcher signals the processes again


@dataclass
class Request:
    """The signal that asked the run to stop, 0 if there was none, and its time."""

    signal: int = 0
    at: float = 0.0


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Record the first signal instead of exiting; one that comes a second later or more has its usual effect."""
    request = Request()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield request
        return
    usual = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        if not request.signal:
            request.signal, request.at = number, time.monotonic()
            if not console.quiet:  # not through the console, whose output the signal may have interrupted
                name = signal.Signals(number).name
                text = f"{name}: saving after this step; once more stops at once, without saving\n"
                os.write(2, text.encode())
        elif time.monotonic() - request.at >= ECHO:
            restore()
            signal.raise_signal(number)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
